"""The output of turns, read again with the same readers: by a later attempt, or shown to a person (`TurnWatch`).

<turn>/NUMBER/stdout     the output of a call; `child.json` beside it names the agent
<turn>/placed.jsonl      the output of a turn on another host, one output a line, with its time
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from json import dumps
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from plait.backends.agents.agent_catalog import backend_class
from plait.backends.agents.agent_output import OutputLine, Reader, read_line, safe_line
from plait.backends.backend_protocol import ConversationRequest, Output
from plait.backends.json_fields import at
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Lines
from plait.backends.process.files_and_locks import private_folder
from plait.json_form import JsonValue, as_json, from_json, value
from plait.safe_text import clean_text, parse_json

R = TypeVar("R", bound=Reader)
_REPORTED = "reported"
"""File beside a call's output. Its existence means: the call's failure and cost were reported to the runner."""


def mark_reported(folder: Path) -> None:
    """Mark the call's failure and cost as reported to the runner: no later attempt counts the cost again."""
    with suppress(OSError):
        (folder / _REPORTED).touch(mode=0o600)


def exchanges(turn: Path) -> list[Path]:
    """Return the folders of a turn's calls, in order. Most turns make one call."""
    return [folder for folder in _numbered(turn) if read_manifest(folder) is not None]


def outputs_of(line: OutputLine, read: Callable[[Mapping[str, JsonValue]], Sequence[Output]]) -> Sequence[Output]:
    """Return the outputs in a line, whose events are passed to `read`."""
    if line.is_unread_event:
        return [Output("notice", f"not read, though it looks like an event: {safe_line(line.words)}"[:140])]
    return [output for event in line.events for output in read(event)]


def reread(reader: R, folder: Path) -> R:
    """Pass all existing output of a child to `reader`, and return the reader."""

    def on_line(line: bytes) -> bool:
        outputs_of(read_line(line), reader.read)
        return False

    with suppress(OSError), (folder / "stdout").open("rb", buffering=0) as output:
        lines = Lines(output.read, on_line)
        while lines.pump():
            pass
        lines.flush()
    return reader


@value
class UnreportedCall:
    """A call of an interrupted attempt, whose cost was never reported."""

    folder: Path
    reader: Reader
    is_cut: bool
    """Whether the call itself was interrupted."""


def cut_before(turn: Path, make: Callable[[Path], Reader]) -> list[UnreportedCall]:
    """Return the calls of the interrupted attempts just before the attempt in folder `turn`, the last call first."""
    unreported: list[UnreportedCall] = []
    for attempt in earlier(turn):
        calls = exchanges(attempt)
        if not calls or (calls[-1] / _REPORTED).exists():
            break
        cut = [UnreportedCall(one, reread(make(one), one), one == calls[-1]) for one in reversed(calls)]
        if cut[0].reader.is_final:
            break
        unreported += cut
    return unreported


def earlier(turn: Path) -> Iterator[Path]:
    """Yield the folders of the attempts before the attempt in folder `turn`, the last attempt first."""
    own = int(turn.name) if turn.name.isdigit() else 0
    yield from reversed([folder for folder in _numbered(turn.parent) if int(folder.name) < own])


def noted_before(request: ConversationRequest, turn: Path, name: str) -> JsonValue:
    """Return what the interrupted or adopted turn that this turn goes on with noted as `name`; None if nothing."""
    attempts: Sequence[Path] = ()
    if request.attaches:
        attempts = [turn]
    elif request.resumes_interrupted:
        attempts = list(earlier(turn))[:1]
    for call in (call for attempt in attempts for call in exchanges(attempt)):
        manifest = read_manifest(call)
        if manifest is not None and name in manifest.note:
            with suppress(ValueError):
                return parse_json(manifest.note[name])
    return None


def _numbered(folder: Path) -> list[Path]:
    try:
        entries = [entry for entry in folder.iterdir() if entry.name.isdigit()]
    except OSError:
        return []
    return sorted(entries, key=lambda entry: int(entry.name))


PLACED = "placed.jsonl"


class PlacedOutput:
    """Writes the outputs of one turn on another host. An output that cannot be written is left out: the attempt matters
    more. `turn` returns the folder of the turn; None if the store keeps no files.

    The host sends all output again when a turn is followed anew. The file is then written from its beginning; the lines
    have the same lengths as before, so a reader in another process continues at the same place.
    """

    def __init__(self, turn: Callable[[], Path | None]) -> None:
        self._turn = turn
        self._mode = "wb"

    def restart(self) -> None:
        """Begin the file anew with the next output."""
        self._mode = "wb"

    def write(self, output: Output) -> None:
        """Append an output."""
        if output.kind == "node" or (turn := self._turn()) is None:
            return
        line = {"timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z", "output": as_json(output)}
        with suppress(OSError):
            private_folder(turn)
            with (turn / PLACED).open(self._mode) as file:
                file.write(dumps(line).encode() + b"\n")
            self._mode = "ab"


def placed_output(event: Mapping[str, JsonValue]) -> Sequence[Output]:
    """Return the output in a line that `PlacedOutput` wrote. Never raises on any input."""
    with suppress(ValueError):
        return (from_json(Output, at(event, "output")),)
    return ()


_TIME = re.compile(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?Z")


@value
class TimedOutput:
    """An output with its time."""

    output: Output
    at: str | None
    """Time of the output in UTC and ISO 8601; None if the agent does not report a time."""
    since: str | None
    """Last time reported before the output; None if none was reported."""


class TurnWatch:
    """Shows a turn from its files, while the agent works or later, in any process. The folder need not exist yet.

    Output of an unknown kind of agent is shown line by line, as text. Memory is bounded, regardless of the amount of
    output. The watch has to be closed.
    """

    def __init__(self, turn: Path) -> None:
        self._turn = turn
        self._calls = 0
        self._streams: list[Lines] = []
        """The output of the current call; for an unknown kind, standard error as well."""
        self._files: dict[Path, BinaryIO] = {}
        self._outputs_in: Callable[[Mapping[str, JsonValue]], Sequence[Output]] | None = None
        """Returns the outputs in an event; None for output of an unknown kind."""
        self._since: str | None = None
        self._outputs: deque[TimedOutput] = deque()

    @property
    def is_alive(self) -> bool:
        """Whether the agent is working on the turn."""
        calls = exchanges(self._turn)
        manifest = read_manifest(calls[-1]) if calls else None
        return manifest is not None and manifest.is_alive

    def peek(self) -> TimedOutput | None:
        """Return the next output; None if there is none at present."""
        while not self._outputs and self._read():
            pass
        return self._outputs[0] if self._outputs else None

    def take(self) -> TimedOutput:
        """Return the next output and advance. Raises IndexError if there is none at present."""
        self.peek()
        return self._outputs.popleft()

    def finish(self) -> None:
        """Treat the output as complete: an unterminated last line is read too."""
        for lines in self._streams:
            while lines.pump():
                pass
            lines.flush()
            if lines.skipped:
                self._show(Output("notice", f"output lines skipped as too long: {lines.skipped}"), None)
                lines.skipped = 0

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _read(self) -> bool:
        """Read a piece. Return False if nothing is left to read at present."""
        if sum(lines.pump() for lines in self._streams):
            return True
        calls = exchanges(self._turn)
        if not calls and not self._streams and (self._turn / PLACED).exists():  # the turn runs on another host
            self._outputs_in = placed_output
            self._follow(self._turn / PLACED)
            return True
        if len(calls) <= self._calls:
            return False
        self.finish()  # another call was made, so the current call is over
        self.close()
        folder = calls[self._calls]
        manifest = read_manifest(folder)
        backend = None if manifest is None else backend_class(manifest.note.get("kind", ""))
        reader = None if backend is None else cast("Reader", backend.transcript_reader(folder))
        self._calls += 1
        self._outputs_in, self._since = None if reader is None else reader.read, None
        self._follow(folder / "stdout", *([folder / "stderr"] if reader is None else []))
        return True

    def _follow(self, *paths: Path) -> None:
        self._streams = [Lines(partial(self._more, path), self._on_line) for path in paths]

    def _more(self, path: Path, size: int) -> bytes:
        if path not in self._files:
            with suppress(OSError):  # the file does not exist yet, or was removed
                self._files[path] = path.open("rb", buffering=0)
        return (self._files[path].read(size) or b"") if path in self._files else b""

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
        self._outputs.append(TimedOutput(output, at, self._since))


def _time_of(event: Mapping[str, JsonValue]) -> str | None:
    time = event.get("timestamp")
    if not isinstance(time, str) or not _TIME.fullmatch(time):
        return None
    try:
        datetime.fromisoformat(time)
    except ValueError:
        return None
    return time
