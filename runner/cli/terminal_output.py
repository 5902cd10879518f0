"""Text for people: escaped for a terminal, and numbers in readable units.

The answer of a model may hold an escape sequence that sets the title of the window or reads the input back, or a bidi
override that disguises a command. Characters that act on a terminal are shown as escapes.
"""

from __future__ import annotations

import os
import re
import shlex
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import IO

import click

from plait.statuses import RunStatus, TaskStatus

# C0 except newline and tab, DEL, C1, and lone surrogates, which no encoding has.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
# Bidi controls, zero-width characters, line and paragraph separators, tags, and other characters without a shape.
_INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_ACTS = re.compile(f"[{_CONTROLS}]")
_MISLEADS = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")


_DAYS_FROM = 48  # hours


def visible(text: str) -> str:
    """Return `text` for a terminal: characters that act, hide or reorder are escapes such as `\\x1b` or `\\u202e`."""
    return _MISLEADS.sub(_escape, text.replace("\r\n", "\n"))


def without_controls(text: str) -> str:
    """Return `text` for a file or a pipe: control characters escaped; joiners and bidi marks stay, as many scripts need
    both.
    """
    return _ACTS.sub(_escape, text.replace("\r\n", "\n"))


def as_line(text: str, width: int = 0) -> str:
    """Return `text` as `visible` does, in one line, cut to `width` characters unless `width` is 0."""
    line = visible(" ".join(text.split()))
    return line if not width or len(line) <= width else line[: max(width - 1, 0)] + "…"


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def cells(text: str) -> int:
    """Return the number of terminal columns that `text`, escaped by `visible`, fills."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def last_cells(line: str, width: int) -> str:
    """Return the end of `line` that fits into `width` columns of a terminal, behind an ellipsis if text is cut off."""
    if cells(line) <= width:
        return line
    start, left = len(line), width - 1
    while start and left >= (needed := cells(line[start - 1])):
        start, left = start - 1, left - needed
    return f"…{line[start:]}"


def first_cells(line: str, width: int) -> str:
    """Return the beginning of `line` that fits into `width` columns of a terminal, with an ellipsis if text is cut
    off.
    """
    if cells(line) <= width:
        return line
    end, left = 0, width - 1
    while end < len(line) and left >= (needed := cells(line[end])):
        end, left = end + 1, left - needed
    return f"{line[:end].rstrip()}…"


def columns(rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> list[list[str]]:
    """Return `rows` with each cell padded to the width of its column, on the left for the columns in `right`."""
    table = [list(row) for row in rows]
    widths = [max(map(cells, column)) for column in zip(*table, strict=True)]
    return [[_padded(cell, widths[i], i in right) for i, cell in enumerate(row)] for row in table]


def _padded(cell: str, width: int, right: bool) -> str:
    space = " " * (width - cells(cell))
    return space + cell if right else cell + space


def seconds(value: float | None) -> str:
    """Format a duration: `0.03s`, `1.2s`, `2m05s`, `3h07m`, `6d05h`; empty for None."""
    if value is None:
        return ""
    if value < 59.95:
        return f"{value:.2f}s" if value < 0.1 else f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    hours = minutes // 60
    if hours >= _DAYS_FROM:
        return f"{hours // 24}d{hours % 24:02d}h"
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{hours}h{minutes % 60:02d}m"


def age(value: float) -> str:
    """Format seconds in one unit, rounded down: `5s`, `3m`, `2h`, `4d`."""
    for limit, size, unit in ((60, 1, "s"), (3600, 60, "m"), (48 * 3600, 3600, "h")):
        if value < limit:
            return f"{max(int(value // size), 0)}{unit}"
    return f"{int(value // 86400)}d"


def tokens(into: int, out: int) -> str:
    """Format tokens in and out: `310+42`; empty if both are 0."""
    return f"{into:,}+{out:,}" if into or out else ""


def size(value: int) -> str:
    """Format bytes in a readable unit: `512 B`, `3.4 kB`, `12 MB`."""
    if value < 1000:
        return f"{value} B"
    shown = float(value)
    for unit in ("kB", "MB", "GB", "TB"):
        shown /= 1000
        if shown < 999.5 or unit == "TB":
            break
    return f"{shown:.1f} {unit}" if shown < 10 else f"{shown:,.0f} {unit}"


def counted(number: int, word: str) -> str:
    """Format a number with its noun: `1 task`, `2 tasks`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def command(*words: str) -> str:
    """Return a shell command line, quoted, for copying."""
    return " ".join(shlex.quote(visible(word)) for word in words)


COLOURS: Mapping[str, str] = {
    TaskStatus.RUNNING: "cyan",
    TaskStatus.WAITING_INPUT: "magenta",
    TaskStatus.COMPLETED: "green",
    TaskStatus.FAILED: "red",
    TaskStatus.SKIPPED: "yellow",
    RunStatus.INTERRUPTED: "yellow",
    RunStatus.CANCELLED: "yellow",
}


def coloured(text: str, status: str, stream: IO[str]) -> str:
    """Return `text` in the colour of `status` if `stream` is a terminal."""
    colour = COLOURS.get(status)
    if colour is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return click.style(text, fg=colour)
