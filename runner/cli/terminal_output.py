"""Text for people: escaped for a terminal, in columns and fields; and files written whole.

The answer of a model may hold an escape sequence that sets the title of the window or reads the input back, or a bidi
override that disguises a command. Characters that act on a terminal are shown as escapes.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TextIO

import click

from plait.errors import InvalidRequest, PlaitError
from plait.statuses import RunStatus, TaskStatus

if TYPE_CHECKING:
    from plait.runner.engine.run_options import StorePlace

# C0 except newline and tab, DEL, C1, and lone surrogates, which no encoding has.
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
# Bidi controls, zero-width characters, line and paragraph separators, tags, and other characters without a shape.
_INVISIBLE = (
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    "\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
_ACTS = re.compile(f"[{_CONTROLS}]")
_MISLEADS = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")


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


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
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
    for row in table:
        for i, cell in enumerate(row):
            space = " " * (widths[i] - cells(cell))
            row[i] = space + cell if i in right else cell + space
    return table


def command(*words: str) -> str:
    """Return a shell command line, quoted, for copying."""
    return " ".join(shlex.quote(visible(word)) for word in words)


def command_line(store_path: StorePlace | None, *words: str) -> str:
    """Return the command line for `words` on the same store, for copying."""
    from plait.runner.engine.run_options import DEFAULT_STORE, STORE_VARIABLE  # noqa: PLC0415 - slow to import
    from plait.safe_text import masked_address  # noqa: PLC0415 - as above

    stated = masked_address(os.environ.get(STORE_VARIABLE) or str(DEFAULT_STORE))
    store = () if store_path is None or str(store_path) == stated else ("--store", str(store_path))
    return command(_program_name(), *words, *store)


def print_next(place: StorePlace | None, *words: str) -> None:
    """Print a command line that a person may want next, behind its name, on standard error."""
    print_note(f"  {words[0]:<9} {command_line(place, *words)}")


def _program_name() -> str:
    """Return the name of this command; its path if a shell would not find the name, as after `make demo`."""
    called = Path(sys.argv[0])
    if called.name == "plait" and shutil.which("plait") is None:
        with suppress(FileNotFoundError):  # the working directory has been removed
            return os.path.relpath(called)
        return str(called)
    return "plait"


COLOURS: Mapping[str, str] = {
    TaskStatus.RUNNING: "cyan",
    TaskStatus.WAITING_INPUT: "magenta",
    TaskStatus.COMPLETED: "green",
    TaskStatus.FAILED: "red",
    TaskStatus.SKIPPED: "yellow",
    RunStatus.INTERRUPTED: "yellow",
    RunStatus.PARKED: "blue",
    RunStatus.CANCELLED: "yellow",
}


def coloured(text: str, status: str, stream: IO[str] | None = None) -> str:
    """Return `text` in the colour of `status` if `stream`, or standard output, is a terminal."""
    colour, stream = COLOURS.get(status), stream or output()
    if colour is None or not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return click.style(text, fg=colour)


STDOUT: ContextVar[TextIO | None] = ContextVar("STDOUT", default=None)
"""Standard output at the start of the command. Where functions and modules of a user run, `print` writes to standard
error, so that standard output holds only the output of plait.
"""
_READER_GONE = frozenset({errno.EPIPE, errno.EIO})  # the latter after a terminal has closed


class OutputLost(PlaitError):  # noqa: N818 - reads as what it is
    """Standard output cannot be written, as on a full disk."""

    word = "store_failed"
    exit_code = 3


def print_note(text: str = "") -> None:
    """Print a line for the person on standard error."""
    write(sys.stderr, visible(text) + "\n")


def print_line(text: str) -> bool:
    """Print a line on standard output. Return False if the reader has closed its end."""
    return write(output(), text + "\n")


def output() -> TextIO:
    """Return standard output, also where `print` writes to standard error."""
    return STDOUT.get() or sys.stdout


def write(stream: IO[str], text: str) -> bool:
    """Write and flush. Return False if the reader has closed its end (`| head`, a closed terminal); later writes are
    discarded. Raises OutputLost if writing fails for another reason, such as a full disk.
    """
    try:
        stream.write(text)
        stream.flush()
        return True
    except OSError as error:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
        if error.errno not in _READER_GONE:
            raise OutputLost(
                f"standard output cannot be written: {error.strerror}; send it to another place"
            ) from error
        return False


def print_json(value: Any) -> None:
    """Print a value of JSON and views on standard output, in ASCII, so that no character acts on a terminal. Printed in
    pieces: a view becomes JSON when its turn comes, and a large run is not held twice.
    """
    from plait.runner.views.view_models import view_json  # noqa: PLC0415 - slow to import, and help prints no view

    pieces = json.JSONEncoder(indent=2, default=view_json).iterencode(value)
    while batch := list(islice(pieces, _PIECES)):
        write(output(), "".join(batch).replace("\x7f", "\\u007f"))
    print_line("")


_PIECES = 4096
"""Pieces of JSON that are written at once."""
_LEAST_ROOM = 16  # columns
_GAP = "  "
_INDENT = "  "


def _terminal_width() -> int | None:
    """Return the number of columns if standard output is a terminal; None otherwise."""
    return shutil.get_terminal_size().columns if output().isatty() else None


def print_field(name: str, value: str | None) -> None:
    """Print a value, if any, in one line behind its name; on a terminal, further lines begin below the value."""
    for line in _wrapped(f"{name:<9} {as_line(value)}", 10) if value else ():
        print_line(line)


def _wrapped(line: str, indent: int) -> list[str]:
    """Return `line` in lines that fit a terminal, the further ones with `indent` spaces; `line` alone elsewhere."""
    width = _terminal_width()
    if width is None or cells(line) <= width:
        return [line]
    lines, taken = [""], 0
    for word in re.findall(r"\s*\S+", line.rstrip()):  # without an end that is tried at each of its spaces
        if taken and taken + cells(word) > width:
            lines.append(" " * indent + word.lstrip())
            taken = indent + cells(word.lstrip())
        else:
            lines[-1] += word
            taken += cells(word)
    return lines


def print_section(head: str, text: str, *, is_code: bool = False) -> None:
    """Print text under a heading. On a terminal, lines of prose are broken between words; lines of code are not."""
    print_line("\n" + "\n".join(_wrapped(f"-- {head} --", 3)))
    print_line((visible if is_code else _fitted)(text).removesuffix("\n"))


def _fitted(text: str) -> str:
    """Return `text` as `visible` does, on a terminal with line breaks between words; further lines keep the indent."""
    lines = visible(text).split("\n")
    return "\n".join(part for line in lines for part in _wrapped(line, len(line) - len(line.lstrip(" "))))


def print_table(
    rows: Sequence[Sequence[str]],
    status_column: int,
    statuses: Sequence[str | None],
    right: frozenset[int] = frozenset(),
) -> None:
    """Print rows in columns; the first row is the heading. `status_column` is coloured, the columns in `right` hold
    numbers. On a terminal, columns that do not fit continue in a further line, indented, and the last column is cut.
    """
    table = columns(rows, right)
    widths = [cells(cell) for cell in table[0]]
    width = _terminal_width()
    starts = [0] if width is None else _line_starts(widths, width)
    for row, status in zip(table, statuses, strict=True):
        if width is not None:
            taken = sum(widths[starts[-1] : -1]) + len(_GAP) * (len(widths) - 1 - starts[-1])
            row[-1] = first_cells(row[-1].rstrip(), width - taken - (len(_INDENT) if starts[-1] else 0))
        if status is not None:
            row[status_column] = coloured(row[status_column], status)
        for start, end in pairwise((*starts, len(row))):
            line = _GAP.join(row[start:end]).rstrip()
            if line or not start:
                print_line(f"{_INDENT}{line}" if start else line)


def _line_starts(widths: Sequence[int], width: int) -> list[int]:
    """Return the first column of each line of a table that fits into `width` columns of a terminal."""
    starts, end = [0], -len(_GAP)
    for column, needed in enumerate(widths):
        least = min(needed, _LEAST_ROOM) if column == len(widths) - 1 else needed
        if column and end + len(_GAP) + least > width:
            starts.append(column)
            end = len(_INDENT) - len(_GAP)
        end += len(_GAP) + needed
    return starts


_OPEN, _PRIVATE = 0o666, 0o600


def write_file(path: Path, text: str, *, private: bool) -> None:
    """Write `text` to `path` as `file_to_write` does."""
    with file_to_write(path, private=private) as file:
        file.write(text)


@contextmanager
def file_to_write(path: Path, *, private: bool) -> Generator[TextIO]:
    """Write `path` in the block, whole or not at all, also through a crash. A `private` file is readable by its owner
    only, under any umask. An existing file is replaced. Raises InvalidRequest.
    """
    target = path.resolve()  # a symbolic link stays, and its target is replaced
    fresh = target.with_name(f".{target.name}.{os.urandom(8).hex()}.new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE if private else _OPEN)
        with open(descriptor, "w", encoding="utf-8") as file:  # noqa: PTH123 - the mode holds from the first byte
            if private:
                fresh.chmod(_PRIVATE)  # the umask may have removed the rights of the owner
            yield file
            file.flush()
            os.fsync(descriptor)
        fresh.replace(target)
        _sync_folder(target.parent)
    except OSError as error:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
        raise InvalidRequest(f"cannot write {path}: {error.strerror}") from error
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _sync_folder(folder: Path) -> None:
    """Make the new name survive a power loss, if the file system can sync folders."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
