"""What earlier turns have left in their files: read again, with the same readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from backends.lines import Lines
from backends.process import read_known
from backends.protocol import JsonValue, Output
from backends.text import parse_json

from .program import Reader

TOLD = "told"
"""A file beside a turn's output: how it failed, and what that cost, was told to the runner."""


def exchanges(turn: Path) -> list[Path]:
    """The folders of the calls that one turn has made, in order; most make one."""
    return [folder for folder in _numbered(turn) if read_known(folder) is not None]


def feed(reader: Reader, line: bytes) -> Sequence[Output]:
    """Have `reader` read a line of output; what it shows."""
    text = line.decode("utf-8", "replace").strip()
    if not text:
        return ()
    try:
        event: JsonValue = parse_json(text) if text.startswith("{") else None
    except ValueError:
        event = None
    if isinstance(event, dict):
        return reader.read(event)
    reader.note(text)
    return ()


def reread(reader: Reader, folder: Path) -> None:
    """Have `reader` read all of a child's output that is there."""

    def on_line(line: bytes) -> bool:
        feed(reader, line)
        return False

    try:
        with (folder / "stdout").open("rb", buffering=0) as output:
            lines = Lines(output.read, on_line)
            while lines.pump():
                pass
            lines.flush()
    except OSError:
        return


def cut_before(turn: Path, make: Callable[[], Reader]) -> list[Reader]:
    """The attempts just before that of the folder `turn` that were cut, so that nobody was told what they cost; the
    last one first.
    """
    cut: list[Reader] = []
    for attempt in earlier(turn):
        calls = exchanges(attempt)
        if not calls or (calls[-1] / TOLD).exists():
            break
        reader = make()
        reread(reader, calls[-1])
        if reader.is_final:
            break
        cut.append(reader)
    return cut


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
