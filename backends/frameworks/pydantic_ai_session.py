"""Histories of conversations in files, one for each session, with the tool calls that a stored message cannot hold.

A file is rewritten after every step of a turn and replaced as a whole, so that it always holds a consistent history. An
attempt after a crash goes on from the file; a turn that was not finished is left out by any other turn.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plait.backends.process.private_files import private_folder
from plait.json_form import JsonValue, value


@value
class History:
    """The messages of a session, in pydantic-ai's form, and the state of its last turn."""

    messages: Sequence[Any] = ()
    turn: int = 0
    """The index of the last turn's first message."""
    counted: int = 0
    """The number of messages whose usage was reported, by a failed attempt, before the turn has ended."""
    answer: tuple[str, JsonValue] | None = None
    """The text and the data of the answer to the last turn; None while the turn goes on."""

    @property
    def finished(self) -> Sequence[Any]:
        """The messages of the finished turns."""
        return self.messages if self.answer is not None else self.messages[: self.turn]


class Sessions:
    """The sessions of a store. The files are in `folder`, made for the current user only. The methods block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, session_id: str) -> History | None:
        """Return the history of a session; None if there is none, or if the file cannot be read."""
        from pydantic_ai import ModelMessagesTypeAdapter  # noqa: PLC0415

        try:
            kept = json.loads(self._path(session_id).read_bytes())
            messages = ModelMessagesTypeAdapter.validate_python(kept["messages"])
            answer = None if kept["answer"] is None else (str(kept["answer"][0]), kept["answer"][1])
            return History(messages, int(kept["turn"]), int(kept["counted"]), answer)
        except (OSError, ValueError, TypeError, LookupError):
            return None

    def save(self, session_id: str, history: History) -> None:
        """Write the history of a session, durably. Raises OSError, or ValueError if JSON cannot hold a message.

        No file is left then.
        """
        from pydantic_ai import ModelMessagesTypeAdapter  # noqa: PLC0415

        state = {"turn": history.turn, "counted": history.counted, "answer": history.answer}
        path = self._path(session_id)
        new = path.with_suffix(f".{os.getpid()}.new")
        try:
            said = ModelMessagesTypeAdapter.dump_json(list(history.messages))
            data = json.dumps(state).encode()[:-1] + b', "messages": ' + said + b"}"
            private_folder(self._folder)
            _write(new, data)
            new.replace(path)
        except (OSError, ValueError):
            # A history without the newest turn would be taken for the whole; the stored text is better.
            path.unlink(missing_ok=True)
            raise

    def _path(self, session_id: str) -> Path:
        # The form of name that `plait gc` knows: see agents/session_locks.py.
        name = hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()[:32]
        return self._folder / f"pydantic-ai-{name}.json"


def _write(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(descriptor)
