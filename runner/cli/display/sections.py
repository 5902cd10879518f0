"""Parts of the output of `plait runs` and `plait show`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from plait.persistence.records import TaskRecord
from plait.runner.cli.display.text import coloured, columns, visible
from plait.runner.cli.exits import output, print_line, write
from plait.runner.cli.lookup import WaitingTask
from plait.runner.cli.options import StorePlace
from plait.runner.domain.question import answers_of

_PIECE = 1 << 20  # characters


def print_section(head: str, text: str) -> None:
    """Print text under a heading, piece by piece: a result may have hundreds of megabytes."""
    print_line(f"\n-- {head} --")
    end = len(text.removesuffix("\n"))
    start = 0
    while end - start > _PIECE:
        cut = start + _PIECE
        cut += text[cut - 1] == "\r"  # keep \r\n together
        write(output(), visible(text[start:cut]))
        start = cut
    print_line(visible(text[start:]).removesuffix("\n"))


def print_answers(task: TaskRecord) -> None:
    """Print the answers to the questions of a task, each with its source."""
    for answered in answers_of(task.answers):
        print_section(f"answered by {answered.by}", f"{answered.question}\n{answered.text}")


def print_question(task: TaskRecord, waiting: Sequence[WaitingTask], path: StorePlace) -> None:
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
    numbers.
    """
    for row, status in zip(columns(rows, right), statuses, strict=True):
        if status is not None:
            row[status_column] = coloured(row[status_column], status, sys.stdout)
        print_line("  ".join(row).rstrip())
