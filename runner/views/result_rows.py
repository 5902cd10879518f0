"""The tasks of a run as the rows of a table: for a spreadsheet, or for a program."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from plait.runner.domain.dag import group_of, part_number
from plait.runner.views.view_models import TaskView, usage_fields
from plait.usage import NO_USAGE

_FIELDS = (
    *("task_id", "group", "status", "item", "text", "data", "error_kind", "error", "attempts", "backend", "model"),
    *usage_fields(NO_USAGE),
    *("duration_s", "session_id", "started_at", "ended_at"),
)
"""The columns, in their order."""
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
_FORMULA = ("=", "+", "@", "\t")
"""Beginnings of a cell that a spreadsheet takes for a formula. A minus is the beginning of a Markdown list."""


def result_rows(tasks: Iterable[TaskView]) -> list[dict[str, Any]]:
    """Return a row for each task, in the order of the plan, with the parts of a `for_each` in the order of their
    numbers and in the place of their whole.
    """
    rows = [(task, _row(task)) for task in tasks]
    first: dict[str, int] = {}
    for task, row in rows:
        first.setdefault(row["group"] or task.task_id, task.position)
    parted = {row["group"] for _, row in rows if row["group"] is not None}
    whole = [(task, row) for task, row in rows if task.task_id not in parted]
    whole.sort(key=lambda one: (first[one[1]["group"] or one[0].task_id], part_number(one[0].task_id)))
    return [row for _, row in whole]


def export_rows(tasks: Iterable[TaskView]) -> list[dict[str, Any]]:
    """Return a row for each task, in their order."""
    return [*map(_row, tasks)]


def _row(task: TaskView) -> dict[str, Any]:
    item = task.spec.get("item")
    special = {
        "group": group_of(task.task_id, item),
        "status": task.status.value,
        "item": item,
        "duration_s": None if task.duration_s is None else round(task.duration_s, 3),
    }
    return {name: special[name] if name in special else getattr(task, name) for name in _FIELDS}


def as_json_lines(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the rows as JSON Lines, in ASCII."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_csv(rows: Sequence[Mapping[str, Any]], *, raw: bool = False) -> str:
    """Return the rows as CSV with a heading. Each field of an object in `item` or `data` has a column, `item.name`.

    A cell that a spreadsheet would take for a formula begins with an apostrophe, because the text comes from models;
    with `raw`, no cell is changed.
    """
    names = columns(rows)
    return csv_heading(names, raw=raw) + csv_lines(rows, names, raw=raw)


def columns(rows: Sequence[Mapping[str, Any]], before: Sequence[str] = ()) -> list[str]:
    """Return the names of the columns of the rows in CSV, and of those whose columns are `before`."""
    if not rows:
        return list(before)
    names = dict.fromkeys([*before, *(name for row in rows for name in _flat(row))])
    return list(dict.fromkeys(name for group in rows[0] for name in names if name.partition(".")[0] == group))


def csv_heading(names: Sequence[str], *, raw: bool) -> str:
    """Return the first line of CSV."""
    return csv_lines([dict(zip(names, names, strict=True))], names, raw=raw)


def csv_lines(rows: Iterable[Mapping[str, Any]], names: Sequence[str], *, raw: bool) -> str:
    """Return a line of CSV for each row, with the columns `names`."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\r\n")
    writer.writerows([_text(row.get(name), raw) for name in names] for row in map(_flat, rows))
    return file.getvalue()


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row with the fields of objects as columns of their own."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict):
            inner = cast("Mapping[str, Any]", value)
            flat.update({f"{name}.{key}": inner[key] for key in inner})
        else:
            flat[name] = value
    return flat


def _text(value: object, raw: bool) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    # A spreadsheet removes line breaks before it looks for a formula.
    is_formula = text.lstrip("\r\n").startswith(_FORMULA) and not _NUMBER.fullmatch(text)
    return f"'{text}" if is_formula and not raw else text
