"""Sessions of agents: the lock of the writer and the cost so far, kept beside the turns; does a session hold a prompt.

Two processes in one session do harm: one agent silently drops a branch of the conversation, another never ends. The
process that runs a turn therefore holds a lock on a file, and its child inherits the descriptor: the lock lasts while
either process lives, even if the other was killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio

from plait.backends.json_fields import at, tables, text
from plait.backends.process.files_and_locks import is_locked, lock_file, private_folder, replace_file
from plait.errors import BackendError, ErrorKind
from plait.json_form import as_json, from_json
from plait.usage import Usage

_LOOK = 0.2  # seconds between two tries for a lock


class SessionInUse(BackendError):  # noqa: N818
    """Another process is writing to the session."""

    def __init__(self, holder: str) -> None:
        super().__init__(ErrorKind.TRANSIENT, f"{holder}; wait until its turn is over, or end that process")
        self.holder = holder


@contextmanager
def _writing(path: Path) -> Generator[None]:
    """Raise BackendError (transient) in place of an OSError: there may be room again at the next attempt."""
    try:
        yield
    except OSError as error:
        message = f"the session cannot be locked, because {path} cannot be written: {error.strerror or error}"
        raise BackendError(ErrorKind.TRANSIENT, message) from error


class Sessions:
    """The sessions of one kind of agent. The files are in `folder`, created for the current user only."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder = folder
        self._kind = kind

    @asynccontextmanager
    async def writing(self, session_id: str, patience: float, on_wait: Callable[[str], None]) -> AsyncGenerator[int]:
        """Lock the session for writing, and yield the descriptor that the child has to inherit.

        If another process holds the lock, `on_wait` is called with a description of the holder. Raises SessionInUse
        after `patience` seconds, and BackendError (transient) if the file cannot be written, as on a full disk.
        """
        path = self._path(session_id, "lock")
        with _writing(path):
            private_folder(self._folder)
            descriptor = lock_file(path)
        until = anyio.current_time() + patience
        waits = False
        while descriptor is None:
            with _writing(path):
                who = path.read_bytes()[:32].decode("ascii", "replace").strip()
            holder = f"session {session_id} is in use" + (f" by process {who} or its agent" if who else "")
            if anyio.current_time() >= until:
                raise SessionInUse(holder)
            if not waits:
                on_wait(holder)
                waits = True
            await anyio.sleep(_LOOK)
            with _writing(path):
                descriptor = lock_file(path)
        try:
            with _writing(path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def spent(self, session_id: str) -> Usage | None:
        """Return the cost of the session so far, as counted by its program; None if unknown."""
        return _read(self._path(session_id, "json"))

    def note_spent(self, session_id: str, total: Usage) -> None:
        """Record `total` as the cost of the session so far.

        Does not raise if the folder is not writable: only the next turn's usage is then wrong.
        """
        with suppress(OSError):
            private_folder(self._folder)
        _write(self._path(session_id, "json"), total)

    def _path(self, session_id: str, what: str) -> Path:
        return self._folder / f"{self._kind}-{_name(session_id)}.{what}"


def _name(session_id: str) -> str:
    return hashlib.sha256(session_id.encode("utf-8", "replace")).hexdigest()[:32]


_OPEN = re.compile(r"(.*)\?(asks-[0-9a-f]{16}|spent-\d+\.\d+-of-\d+\.\d+)", re.DOTALL)


def marked(session_id: str, question: str) -> str:
    """Return the session id, extended by the id of an open question, so that the answer can be matched to it.

    The id is `asks-ACTION`, or `spent-DOLLARS-of-DOLLARS`.
    """
    return f"{session_id}?{question}"


def unmarked(session_id: str | None) -> tuple[str | None, str]:
    """Return the plain session id, and the id of the open question; empty without one."""
    match = _OPEN.fullmatch(session_id or "")
    return (match[1], match[2]) if match else (session_id, "")


_SESSION_FILE = re.compile(r"(?P<session>.+-(?P<name>[0-9a-f]{32}))\.(lock|json|[0-9]+\.new)")


def remove_sessions_except(session_ids: Iterable[str], folder: Path, idle: float) -> list[OSError]:
    """Remove from `folder` the data of all sessions except those of `session_ids`, and return the errors met.

    A session is kept while its lock is held, and until `idle` seconds after the last write.
    """
    names = {_name(unmarked(session_id)[0] or "") for session_id in session_ids}
    files: dict[str, list[Path]] = {}
    for path in folder.iterdir():
        match = _SESSION_FILE.fullmatch(path.name)
        if match is not None and match["name"] not in names:
            files.setdefault(match["session"], []).append(path)
    failures: list[OSError] = []
    for session, paths in files.items():
        try:
            if time.time() - max(path.lstat().st_mtime for path in paths) > idle and not is_locked(
                folder / f"{session}.lock"
            ):
                for path in paths:
                    path.unlink(missing_ok=True)
        except FileNotFoundError:  # another process removes the files
            continue
        except OSError as error:
            failures.append(error)
    return failures


def first_before(folder: Path, before: Usage) -> Usage:
    """Return the cost of the session before the call with its files in `folder`.

    The cost is `before`, unless a process that was killed before storing the outcome already counted the call: then the
    cost recorded at the first count is returned.
    """
    path = folder / "before.json"
    recorded = _read(path)
    if recorded is None:
        _write(path, before)
    return before if recorded is None else recorded


def _read(path: Path) -> Usage | None:
    try:
        return from_json(Usage, json.loads(path.read_bytes()))
    except (OSError, ValueError):
        return None


def _write(path: Path, usage: Usage) -> None:
    with suppress(OSError):
        replace_file(path, json.dumps(as_json(usage)))


def digest(prompt: str) -> str:
    """Return the digest by which a prompt is recognised later."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def holds(path: Path, wanted: str) -> bool:
    """Return whether a user message in the file, one JSON object per line, has the digest `wanted`. Never raises."""
    try:
        with path.open("rb") as lines:
            return any(b'"user"' in line and wanted in map(digest, _user_texts(line)) for line in lines)
    except OSError:
        return False


def _user_texts(line: bytes) -> list[str]:
    """Return the user's texts in a line of a session file of Claude Code (`message`) or Codex (`payload`)."""
    try:
        entry: Any = json.loads(line)
    except ValueError:
        return []
    message = at(entry, "message") or at(entry, "payload")
    if text(message, "role") != "user":
        return []
    return [text(message, "content"), *(text(block, "text") for block in tables(message, "content"))]
