"""Read the output files of earlier turns again, with the same readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plait.backends.agents.agent_errors import safe_line
from plait.backends.agents.agent_protocol import Reader
from plait.backends.agents.output_lines import OutputLine, read_line
from plait.backends.backend_protocol import Output
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Lines
from plait.json_form import JsonValue, value

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
        found = [UnreportedCall(folder, make(folder), folder == calls[-1]) for folder in reversed(calls)]
        for one in found:
            reread(one.reader, one.folder)
        if found[0].reader.is_final:
            break
        unreported += found
    return unreported


def earlier(turn: Path) -> Iterator[Path]:
    """Yield the folders of the attempts before the attempt in folder `turn`, the last attempt first."""
    own = int(turn.name) if turn.name.isdigit() else 0
    yield from reversed([folder for folder in _numbered(turn.parent) if int(folder.name) < own])


def _numbered(folder: Path) -> list[Path]:
    try:
        found = [entry for entry in folder.iterdir() if entry.name.isdigit()]
    except OSError:
        return []
    return sorted(found, key=lambda entry: int(entry.name))
