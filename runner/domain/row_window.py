"""A file of rows that a run reads as it goes: each row becomes a few tasks, which leave memory once they are done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from plait.json_form import JsonValue, value
from plait.task import Task

ROWS_AT_ONCE = 1_000
"""The rows that are stored as tasks in one transaction."""


@value
class RowsFile:
    """A file of rows, as it was when the run was made."""

    path: str
    """The absolute path."""
    sha256: str
    """The digest of the contents, in hexadecimal."""
    size: int
    """In bytes."""
    mtime_ns: int
    """The time of the last change, in nanoseconds since 1970."""
    width: int = 1
    """The number of tasks of each row."""
    first: int = 0
    """The position of the first row: the plan's tasks that are of no row stand before it."""
    behind: Sequence[str] = ()
    """The tasks before the first row that wait until all rows are done."""


def tasks_of_row(first: Sequence[Task], number: int, item: JsonValue) -> list[Task]:
    """Return the tasks for `item`, the row with the `number`, like those of the `first` row."""
    ids = {task.id: f"{task.id.rpartition('.')[0]}.{number}" for task in first}
    return [
        replace(
            task,
            id=ids[task.id],
            item=item,
            depends_on=tuple(ids.get(name, name) for name in task.depends_on),
            continues=None if task.continues is None else ids[task.continues],
            aliases={
                alias: ids.get(names, names) if isinstance(names, str) else [ids.get(name, name) for name in names]
                for alias, names in task.aliases.items()
            },
        )
        for task in first
    ]
