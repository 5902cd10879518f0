"""Read the output files of earlier turns again, with the same readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from plait.backends.agents.protocol import Reader
from plait.backends.process.lines import Lines
from plait.backends.process.manifest import read_manifest
from plait.backends.protocol import JsonValue, Output
from plait.backends.text import parse_json
from plait.backends.values import value

_REPORTED = "reported"
"""File beside a call's output. Its existence means: the call's failure and cost were reported to the runner."""


def mark_reported(folder: Path) -> None:
    """Mark the call's failure and cost as reported to the runner: no later attempt counts the cost again."""
    with suppress(OSError):
        (folder / _REPORTED).touch(mode=0o600)


def exchanges(turn: Path) -> list[Path]:
    """Return the folders of a turn's calls, in order. Most turns make one call."""
    return [folder for folder in _numbered(turn) if read_manifest(folder) is not None]


def parsed(line: bytes) -> Mapping[str, JsonValue] | str:
    """Return a line of output as an event (JSON object) or as text; "" for an empty line."""
    text = line.decode("utf-8", "replace").strip()
    try:
        event: JsonValue = parse_json(text) if text.startswith("{") else None
    except ValueError:
        event = None
    return event if isinstance(event, dict) else text


def feed(reader: Reader, told: Mapping[str, JsonValue] | str) -> Sequence[Output]:
    """Pass a line of output to `reader`, and return the outputs in the line."""
    if not isinstance(told, str):
        return reader.read(told)
    if told:
        reader.note(told)
    return ()


def reread(reader: Reader, folder: Path) -> None:
    """Pass all existing output of a child to `reader`."""

    def on_line(line: bytes) -> bool:
        feed(reader, parsed(line))
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
