"""What an agent shows of its work in the files of a turn: read while it works, or long after, by anybody.

Nothing but the files is needed: `child.json` says which agent it is, and so who understands its output.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from plait.backends.agents.catalog import ACP, ACP_READER, agent
from plait.backends.agents.protocol import Call, Reader
from plait.backends.agents.transcript import exchanges, feed, parsed
from plait.backends.process.lines import Lines
from plait.backends.process.manifest import read_manifest
from plait.backends.protocol import JsonValue, Output
from plait.backends.text import clean_text
from plait.backends.values import value

if TYPE_CHECKING:
    from plait.backends.agents.backend import CliBackend

_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


@value
class Seen:
    """An output, and when it was, in UTC and ISO 8601. `at` is None where the agent does not say; then `since` is the
    last time that it did say, before that, if it ever did.
    """

    output: Output
    at: str | None
    since: str | None


class TurnWatch:
    """Watches a turn by its folder, which need not be there yet. What a kind of agent prints that is not known is shown
    line by line, as text. Takes bounded memory, however much there is to read. Close it.
    """

    def __init__(self, turn: Path) -> None:
        self._turn = turn
        self._calls = 0
        self._call: _CallWatch | None = None
        self._seen: deque[Seen] = deque()

    @property
    def is_alive(self) -> bool:
        """Whether the agent works on the turn now."""
        calls = exchanges(self._turn)
        known = read_manifest(calls[-1]) if calls else None
        return known is not None and known.is_alive

    def peek(self) -> Seen | None:
        """What comes next; None where there is nothing now."""
        while not self._seen and self._read():
            pass
        return self._seen[0] if self._seen else None

    def take(self) -> Seen:
        """The same, and go on to the next one. IndexError where there is nothing."""
        self.peek()
        return self._seen.popleft()

    def finish(self) -> None:
        """Nothing more is written: what stands behind the last line's end counts as well."""
        if self._call is not None:
            self._call.finish()

    def close(self) -> None:
        """Let go of the files."""
        if self._call is not None:
            self._call.close()

    def _read(self) -> bool:
        """Read a piece. False where there is nothing more now."""
        if self._call is not None and self._call.pump():
            return True
        calls = exchanges(self._turn)
        if len(calls) <= self._calls:
            return False
        if self._call is not None:  # another call was made, so this one is over
            self._call.finish()
            self._call.close()
        self._call = _CallWatch(calls[self._calls], self._seen)
        self._calls += 1
        return True


class _CallWatch:
    """One call of the agent's command; what it shows goes into `seen`."""

    def __init__(self, folder: Path, seen: deque[Seen]) -> None:
        self._path = folder / "stdout"
        self._reader = _reader_for(folder)
        self._seen = seen
        self._file: BinaryIO | None = None
        self._lines = Lines(self._more, self._on_line)
        self._since: str | None = None

    def pump(self) -> bool:
        """Read a piece; whether there was one."""
        return self._lines.pump() > 0

    def finish(self) -> None:
        while self.pump():
            pass
        self._lines.flush()
        if self._lines.skipped:
            self._show(Output("notice", f"{self._lines.skipped} lines of its output are too long to be read"), None)
            self._lines.skipped = 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _more(self, size: int) -> bytes:
        if self._file is None:
            with suppress(OSError):  # it is not there yet, or not any more
                self._file = self._path.open("rb", buffering=0)
        return (self._file.read(size) or b"") if self._file is not None else b""

    def _on_line(self, line: bytes) -> bool:
        told = parsed(line)
        if self._reader is None:
            self._show(Output("text", clean_text(line.decode("utf-8", "replace")) + "\n"), None)
            return False
        at = None if isinstance(told, str) else _time_of(told)
        self._since = at or self._since
        for output in feed(self._reader, told):
            self._show(output, at)
        return False

    def _show(self, output: Output, at: str | None) -> None:
        self._seen.append(Seen(output, at, self._since))


def _time_of(event: Mapping[str, JsonValue]) -> str | None:
    told = event.get("timestamp")
    if not isinstance(told, str) or not _TIME.fullmatch(told):
        return None
    try:
        datetime.fromisoformat(told)
    except ValueError:
        return None
    return told


def _reader_for(folder: Path) -> Reader | None:
    """Who understands the output of the call in `folder`; None where nobody does."""
    known = read_manifest(folder)
    kind = "" if known is None else known.note.get("kind", "")
    if kind == ACP:
        reader: Reader = _class(ACP_READER)(folder)
        return reader
    found = agent(kind)
    if found is None or not found.backend:
        return None
    backend: type[CliBackend] = _class(found.backend)
    return backend().reader(Call(folder))


def _class(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), attribute)
