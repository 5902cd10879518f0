"""Show the work of an agent from the files of a turn: while the agent works, or later, in any process.

Only the files are needed: `child.json` names the agent and thereby the reader of its output.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from plait.backends.agents.agent_catalog import ACP, ACP_BACKEND, agent
from plait.backends.agents.agent_protocol import Reader
from plait.backends.agents.agent_transcript import PLACED, PlacedOutputReader, exchanges, outputs_of
from plait.backends.agents.output_lines import read_line
from plait.backends.backend_protocol import Output
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Lines
from plait.json_form import JsonValue, value
from plait.safe_text import clean_text

if TYPE_CHECKING:
    from plait.backends.agents.cli_agent import AgentBackend

_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


@value
class Seen:
    """An output with its time."""

    output: Output
    at: str | None
    """Time of the output in UTC and ISO 8601; None if the agent does not report a time."""
    since: str | None
    """Last time reported before the output; None if none was reported."""


class TurnWatch:
    """Watches a turn by its folder, which need not exist yet.

    Output of an unknown kind of agent is shown line by line, as text. Memory is bounded, regardless of the amount of
    output. The watch has to be closed.
    """

    def __init__(self, turn: Path) -> None:
        self._turn = turn
        self._calls = 0
        self._call: _CallWatch | None = None
        self._seen: deque[Seen] = deque()

    @property
    def is_alive(self) -> bool:
        """Whether the agent is working on the turn."""
        calls = exchanges(self._turn)
        manifest = read_manifest(calls[-1]) if calls else None
        return manifest is not None and manifest.is_alive

    def peek(self) -> Seen | None:
        """Return the next output; None if there is none at present."""
        while not self._seen and self._read():
            pass
        return self._seen[0] if self._seen else None

    def take(self) -> Seen:
        """Return the next output and advance. Raises IndexError if there is none at present."""
        self.peek()
        return self._seen.popleft()

    def finish(self) -> None:
        """Treat the output as complete: an unterminated last line is read too."""
        if self._call is not None:
            self._call.finish()

    def close(self) -> None:
        """Close the files."""
        if self._call is not None:
            self._call.close()

    def _read(self) -> bool:
        """Read a piece. Return False if nothing is left to read at present."""
        if self._call is not None and self._call.pump():
            return True
        calls = exchanges(self._turn)
        if not calls and self._call is None and (self._turn / PLACED).exists():  # the turn runs on another host
            self._call = _CallWatch(self._turn / PLACED, PlacedOutputReader().read, self._seen)
            return True
        if len(calls) <= self._calls:
            return False
        if self._call is not None:  # another call was made, so the current call is over
            self._call.finish()
            self._call.close()
        folder = calls[self._calls]
        reader = _reader_for(folder)
        self._call = _CallWatch(folder / "stdout", None if reader is None else reader.read, self._seen)
        self._calls += 1
        return True


class _CallWatch:
    """Reads the output of one call of the agent's command, and appends the outputs to `seen`.

    `read` returns the outputs in an event; None for output of an unknown kind.
    """

    def __init__(
        self, path: Path, read: Callable[[Mapping[str, JsonValue]], Sequence[Output]] | None, seen: deque[Seen]
    ) -> None:
        self._path = path
        self._outputs_in = read
        self._seen = seen
        self._file: BinaryIO | None = None
        self._lines = Lines(self._more, self._on_line)
        self._since: str | None = None

    def pump(self) -> bool:
        """Read a piece. Return whether a piece was available."""
        return self._lines.pump() > 0

    def finish(self) -> None:
        while self.pump():
            pass
        self._lines.flush()
        if self._lines.skipped:
            self._show(Output("notice", f"output lines skipped as too long: {self._lines.skipped}"), None)
            self._lines.skipped = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _more(self, size: int) -> bytes:
        if self._file is None:
            with suppress(OSError):  # the file does not exist yet, or was removed
                self._file = self._path.open("rb", buffering=0)
        return (self._file.read(size) or b"") if self._file is not None else b""

    def _on_line(self, line: bytes) -> bool:
        if self._outputs_in is None:
            self._show(Output("text", clean_text(line.decode("utf-8", "replace")) + "\n"), None)
            return False
        output_line = read_line(line)
        at = next(filter(None, map(_time_of, output_line.events)), None)
        self._since = at or self._since
        for output in outputs_of(output_line, self._outputs_in):
            self._show(output, at)
        return False

    def _show(self, output: Output, at: str | None) -> None:
        self._seen.append(Seen(output, at, self._since))


def _time_of(event: Mapping[str, JsonValue]) -> str | None:
    time = event.get("timestamp")
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        return None
    try:
        datetime.fromisoformat(time)
    except ValueError:
        return None
    return time


def _reader_for(folder: Path) -> Reader | None:
    """Return the reader for the output of the call in `folder`; None if the agent is unknown."""
    manifest = read_manifest(folder)
    kind = "" if manifest is None else manifest.note.get("kind", "")
    entry = agent(kind)
    place = ACP_BACKEND if kind == ACP else "" if entry is None else entry.backend
    if not place:
        return None
    module, _, name = place.partition(":")
    backend: type[AgentBackend] = getattr(import_module(f"{__package__}.{module}"), name)
    return backend.transcript_reader(folder)
