"""What earlier turns have left in their files: read again, with the same readers."""

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

_TOLD = "told"
"""A file beside a turn's output: how it failed, and what that cost, was told to the runner."""


def mark_told(folder: Path) -> None:
    """The runner is told how the call failed and what it cost: nobody has to count it again."""
    with suppress(OSError):
        (folder / _TOLD).touch(mode=0o600)


def exchanges(turn: Path) -> list[Path]:
    """The folders of the calls that one turn has made, in order; most make one."""
    return [folder for folder in _numbered(turn) if read_manifest(folder) is not None]


def parsed(line: bytes) -> Mapping[str, JsonValue] | str:
    """What a line of output is: an event, or text; "" for an empty one."""
    text = line.decode("utf-8", "replace").strip()
    try:
        event: JsonValue = parse_json(text) if text.startswith("{") else None
    except ValueError:
        event = None
    return event if isinstance(event, dict) else text


def feed(reader: Reader, told: Mapping[str, JsonValue] | str) -> Sequence[Output]:
    """Have `reader` read a line of output; what it shows."""
    if not isinstance(told, str):
        return reader.read(told)
    if told:
        reader.note(told)
    return ()


def reread(reader: Reader, folder: Path) -> None:
    """Have `reader` read all of a child's output that is there."""

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
class Unheard:
    """A call of an attempt that was cut, so that nobody was told what it cost. `is_cut`: that one itself."""

    folder: Path
    reader: Reader
    is_cut: bool


def cut_before(turn: Path, make: Callable[[Path], Reader]) -> list[Unheard]:
    """The calls of the attempts just before that of the folder `turn` that were cut, the last one first."""
    unheard: list[Unheard] = []
    for attempt in earlier(turn):
        calls = exchanges(attempt)
        if not calls or (calls[-1] / _TOLD).exists():
            break
        found = [Unheard(folder, make(folder), folder == calls[-1]) for folder in reversed(calls)]
        for one in found:
            reread(one.reader, one.folder)
        if found[0].reader.is_final:
            break
        unheard += found
    return unheard


def earlier(turn: Path) -> Iterator[Path]:
    """The folders of the attempts before that of the folder `turn`, the last one first."""
    own = int(turn.name) if turn.name.isdigit() else 0
    yield from reversed([folder for folder in _numbered(turn.parent) if int(folder.name) < own])


def _numbered(folder: Path) -> list[Path]:
    try:
        found = [entry for entry in folder.iterdir() if entry.name.isdigit()]
    except OSError:
        return []
    return sorted(found, key=lambda entry: int(entry.name))
