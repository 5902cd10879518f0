"""The output of turns, read again with the same readers; and that of turns on other hosts, kept here to be read.

<turn>/NUMBER/stdout     the output of a call
<turn>/placed.jsonl      the output of a turn on another host, one output a line, with its time
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from typing import Any, cast

from plait.backends.agents.agent_errors import safe_line
from plait.backends.agents.agent_protocol import Reader
from plait.backends.agents.output_lines import OutputLine, read_line
from plait.backends.backend_protocol import ConversationRequest, Output
from plait.backends.json_fields import at, text
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Lines
from plait.backends.process.private_files import private_folder
from plait.json_form import JsonValue, value
from plait.safe_text import parse_json
from plait.usage import NO_USAGE, Usage

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


def reread(reader: Reader, folder: Path) -> None:
    """Pass all existing output of a child to `reader`."""

    def on_line(line: bytes) -> bool:
        outputs_of(read_line(line), reader.read)
        return False

    try:
        with (folder / "stdout").open("rb", buffering=0) as output:
            lines = Lines(output.read, on_line)
            while lines.pump():
                pass
            lines.flush()
    except OSError:
        return


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
        read = [UnreportedCall(folder, make(folder), folder == calls[-1]) for folder in reversed(calls)]
        for call in read:
            reread(call.reader, call.folder)
        if read[0].reader.is_final:
            break
        unreported += read
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
_KINDS = frozenset({"text", "tool", "waiting", "notice"})


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
        if output.kind not in _KINDS or (turn := self._turn()) is None:
            return
        line: dict[str, Any] = {
            "timestamp": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z",
            "kind": output.kind,
            "text": output.text,
        }
        if output.usage is not NO_USAGE:
            line["usage"] = {name: part for name, part in asdict(output.usage).items() if part}
        with suppress(OSError):
            private_folder(turn)
            with (turn / PLACED).open(self._mode) as file:
                file.write(dumps(line).encode() + b"\n")
            self._mode = "ab"


class PlacedOutputReader:
    """Reads the lines back. Never raises on any input."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Return the output in a line."""
        kind, used = text(event, "kind"), at(event, "usage")
        if kind not in _KINDS:
            return ()
        usage = NO_USAGE
        if isinstance(used, dict):
            with suppress(TypeError):
                usage = Usage(**cast("dict[str, Any]", used))
        return (Output(cast("Any", kind), text(event, "text"), usage),)
