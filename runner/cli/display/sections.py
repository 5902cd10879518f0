"""Parts of the output of `plait runs` and `plait show`."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Sequence

from plait.persistence.records import TaskRecord
from plait.runner.cli.display.text import cells, coloured, columns, first_cells, visible
from plait.runner.cli.exits import output, print_line, write
from plait.runner.cli.lookup import WaitingQuestion
from plait.runner.cli.options import StorePlace
from plait.runner.domain.question import answers_of

_PIECE = 1 << 16  # characters
_LEAST_ROOM = 16  # columns


def _terminal_width() -> int | None:
    """Return the number of columns if standard output is a terminal; None otherwise."""
    return shutil.get_terminal_size().columns if output().isatty() else None


def wrapped(line: str, indent: int) -> list[str]:
    """Return `line` in lines that fit a terminal, the further ones with `indent` spaces; `line` alone elsewhere."""
    width = _terminal_width()
    if width is None or cells(line) <= width:
        return [line]
    rest = textwrap.wrap(line, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
    return rest or [line]


def print_section(head: str, text: str, *, is_code: bool = False) -> None:
    """Print text under a heading, piece by piece: a result may have hundreds of megabytes. On a terminal, lines of
    prose are broken between words; lines of code are not.
    """
    fitted = visible if is_code else _fitted
    print_line(f"\n-- {head} --")
    end = len(text.removesuffix("\n"))
    start = 0
    while end - start > _PIECE:
        cut = start + _PIECE
        cut += text[cut - 1] == "\r"  # keep \r\n together
        write(output(), fitted(text[start:cut]))
        start = cut
    print_line(fitted(text[start:]).removesuffix("\n"))


def _fitted(text: str) -> str:
    """Return `text` as `visible` does, on a terminal with line breaks between words; further lines keep the indent."""
    lines = visible(text).split("\n")
    return "\n".join(part for line in lines for part in wrapped(line, len(line) - len(line.lstrip(" "))))


def print_answers(task: TaskRecord) -> None:
    """Print the answers to the questions of a task, each with its source."""
    for answered in answers_of(task.answers):
        print_section(f"answered by {answered.by}", f"{answered.question}\n{answered.text}")


def print_question(task: TaskRecord, waiting: Sequence[WaitingQuestion], path: StorePlace) -> None:
    """Print the question of a task with the details in `waiting`; empty means that the store already has the answer."""
    if task.question is None:
        return
    print_section("question", task.question)
    for one in waiting:
        for what, line in one.facts():
            print_line(f"{what:<9} {line}")
        print_line(f"{'answer':<9} {one.answer_command(path)}")
    if not waiting:
        print_line("the answer is stored; the run has not yet received it")


def print_table(
    rows: Sequence[Sequence[str]],
    status_column: int,
    statuses: Sequence[str | None],
    right: frozenset[int] = frozenset(),
) -> None:
    """Print rows in columns; the first row is the heading. `status_column` is coloured, the columns in `right` hold
    numbers. On a terminal the last column is cut so that no line wraps, unless little of the column would remain.
    """
    table = columns(rows, right)
    width = _terminal_width()
    room = 0 if width is None else width - sum(map(cells, table[0][:-1])) - 2 * (len(table[0]) - 1)
    for row, status in zip(table, statuses, strict=True):
        if room >= _LEAST_ROOM:
            row[-1] = row[-1].rstrip() if cells(row[-1].rstrip()) <= room else first_cells(row[-1], room)
        if status is not None:
            row[status_column] = coloured(row[status_column], status, sys.stdout)
        print_line("  ".join(row).rstrip())
