"""Statements over the rows of a batch."""

from __future__ import annotations

from bisect import bisect_left
from itertools import repeat
from typing import TYPE_CHECKING, Any, Final

from plait.persistence.old_tables import kinds
from plait.persistence.old_tables.originals import Originals, named_attempts, named_runs
from plait.persistence.old_tables.task_cache import TaskCache, ids_of
from plait.persistence.sqlite import statements as sql

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Iterator, Sequence

    from plait.persistence.changes import Change
    from plait.persistence.old_tables.rows import BatchRows, Row

_FIND: Final = {
    kinds.FINISH_ENDS: sql.FIND_ENDS,
    kinds.SET_SESSIONS: sql.FIND_STARTS,
    kinds.SET_TASKS: sql.FIND_GIVEN_TASKS,
}
_HAND_OVER: Final = {kinds.SET_PROMPTS: sql.HAND_OVER_TASKS, kinds.DISCARD_RESULTS: sql.HAND_OVER_ANSWERS}
"""The statement that moves the texts of a row to a copy before the row changes, by the kind of the change."""


def execute_bulk(connection: sqlite3.Connection, bulk: sql.Bulk, values: list[Any]) -> Iterator[sqlite3.Cursor]:
    """Execute the statement over `values`, the values of all rows in one list. Yield a cursor for each execution."""
    filling = (None, *repeat(0, bulk.width - 1))
    for start in range(0, len(values), sql.SIZES[-1] * bulk.width):
        part = values[start : start + sql.SIZES[-1] * bulk.width]
        count = len(part) // bulk.width
        size = sql.SIZES[bisect_left(sql.SIZES, count)]
        part += filling * (size - count)
        yield connection.execute(sql.bulk_sql(bulk, size), part)


def read_originals(connection: sqlite3.Connection, changes: Sequence[Change]) -> Originals:
    """Return the stored rows to which the rows of the changes may refer."""
    originals = Originals()
    for run_id in named_runs(changes):
        originals.add_tasks(run_id, connection.execute(sql.LIST_ORIGINAL_TASKS, (run_id,)))
    attempts = named_attempts(changes)
    originals.add_answers(_found(connection, sql.FIND_ORIGINAL_ANSWERS, [value for one in attempts for value in one]))
    return originals


def write_rows(connection: sqlite3.Connection, rows: BatchRows) -> None:
    """Execute the statements over the gathered rows."""
    to_renew = rows.to_renew()
    for kind in kinds.IN_ORDER:
        if kind in to_renew:
            rows.renew(kind, _found(connection, _FIND[kind], to_renew[kind]))
        values = rows.waiting[kind]
        if values and kind in _HAND_OVER:
            for row in values[:: sql.BY_KIND[kind].width]:
                connection.execute(_HAND_OVER[kind], {"first": row, "last": row})
        if values:
            for _ in execute_bulk(connection, sql.BY_KIND[kind], values):
                pass


def _found(connection: sqlite3.Connection, bulk: sql.Bulk, ids: list[Any]) -> list[Row]:
    """Return the stored rows with these ids."""
    return [row for cursor in execute_bulk(connection, bulk, ids) for row in cursor.fetchall()]


class StoredTasks(TaskCache):
    """The task cache of a run in SQLite."""

    def __init__(self, connection: sqlite3.Connection, run_id: str, number: int) -> None:
        super().__init__(connection, run_id, number)
        self._database = connection

    def read_tasks(self, task_ids: set[str]) -> Iterable[tuple[str, int, str, int, int | None]]:
        values = [value for task_id in task_ids for value in (self.run_id, task_id)]
        return _found(self._database, sql.FIND_TASKS, values)

    def read_next_task(self) -> int:
        first: int = self._database.execute(sql.NEXT_TASK, ids_of(self.number)).fetchone()[0]
        return first
