"""Parts of the output of several commands: fields, sections, tables, findings."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from itertools import pairwise

from plait.persistence.findings import Finding
from plait.runner.cli.command_exits import output, print_line, write
from plait.runner.cli.terminal_output import as_line, cells, coloured, columns, first_cells, visible
from plait.runner.cli.waiting_questions import answering_command, question_facts
from plait.runner.client.store_place import StorePlace
from plait.runner.views.view_models import QuestionView, TaskView

_PIECE = 1 << 16  # characters
_LEAST_ROOM = 16  # columns
_GAP = "  "
_INDENT = "  "


def _terminal_width() -> int | None:
    """Return the number of columns if standard output is a terminal; None otherwise."""
    return shutil.get_terminal_size().columns if output().isatty() else None


def print_field(name: str, value: str) -> None:
    """Print a value behind its name; on a terminal, further lines begin below the value."""
    for line in _wrapped(f"{name:<9} {value}", 10):
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
    """Print text under a heading, piece by piece: a result may have hundreds of megabytes. On a terminal, lines of
    prose are broken between words; lines of code are not.
    """
    fitted = visible if is_code else _fitted
    print_line("\n" + "\n".join(_wrapped(f"-- {head} --", 3)))
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
    return "\n".join(part for line in lines for part in _wrapped(line, len(line) - len(line.lstrip(" "))))


def print_answers(task: TaskView) -> None:
    """Print the answers to the questions of a task, each with its source."""
    for answered in task.answers:
        print_section(f"answered by {answered.by}", f"{answered.question}\n{answered.text}")


def print_question(task: TaskView, waiting: Sequence[QuestionView], path: StorePlace) -> None:
    """Print the question of a task with the details in `waiting`; empty means that the store already has the answer."""
    if task.question is None:
        return
    print_section("question", task.question)
    for one in waiting:
        for what, line in question_facts(one.asks):
            print_line(f"{what:<9} {line}")
        print_line(f"{'answer':<9} {answering_command(one, path)}")
    if not waiting:
        print_line("the answer is stored; the run has not yet received it")


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
            row[status_column] = coloured(row[status_column], status, sys.stdout)
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


def findings_json(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """Return the findings of `plait doctor` for JSON."""
    return [
        {"check": one.check, "verdict": one.fitness.value, "found": one.found, "advice": one.advice} for one in findings
    ]


def print_findings(findings: Sequence[Finding]) -> None:
    """Print the findings of `plait doctor`, a line each."""
    rows = columns((one.fitness.value, one.check) for one in findings)
    for one, (verdict, check) in zip(findings, rows, strict=True):
        advice = f"; {as_line(one.advice)}" if one.advice else ""
        print_line(f"{verdict}  {check}  {as_line(one.found)}{advice}")
