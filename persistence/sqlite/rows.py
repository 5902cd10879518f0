"""The rows of a batch, gathered by the statement that writes them.

What a value costs depends on its type. The sqlite3 module looks for an adapter for every None, bool and bytes, which
takes five times as long (0.3 microseconds) as handing an int on. So where a value is mostly missing, its row has one of
another type in its place, `NO_TEXT` or `NO_NUMBER`, of which the statement makes NULL. And rows are kept as one list of
values for each statement: a tuple for each row would be a thousand objects more for the collector of garbage.
"""

from __future__ import annotations

from bisect import bisect_left
from hashlib import sha256
from itertools import repeat
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Any, Final

from persistence.sqlite import statements as sql

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

    from persistence.changes import NewTask

Row = tuple[Any, ...]


class Refused(Exception):  # noqa: N818
    """A guarded statement changed fewer rows than it was given."""


NO_TEXT: Final = 0
NO_NUMBER: Final = ""


def _execute(connection: sqlite3.Connection, run_id: str, bulk: sql.Bulk, values: list[Any]) -> None:
    for count, cursor in _executed(connection, run_id, bulk, values):
        if cursor.rowcount != count:
            raise Refused


def _executed(
    connection: sqlite3.Connection, run_id: str, bulk: sql.Bulk, values: list[Any]
) -> Iterator[tuple[int, sqlite3.Cursor]]:
    """`values`: those of all rows, one row after the other. Gives the number of rows of each statement."""
    filling = (None, *repeat(0, bulk.width - 1))
    for start in range(0, len(values), sql.SIZES[-1] * bulk.width):
        part = values[start : start + sql.SIZES[-1] * bulk.width]
        count = len(part) // bulk.width
        size = sql.SIZES[bisect_left(sql.SIZES, count)]
        part += filling * (size - count)
        part.append(run_id)
        yield count, connection.execute(sql.bulk_sql(bulk, size), part)


_INLINE_BYTES: Final = 64 * 1024
_SHORT: Final = _INLINE_BYTES // 4  # characters: UTF-8 takes four bytes for one at most
_RANKS: Final = {bulk: rank for rank, bulk in enumerate(sql.IN_ORDER)}


class Rows:
    """The rows that wait to be written, by statement."""

    def __init__(self, connection: sqlite3.Connection, run_id: str) -> None:
        self._connection = connection
        self.run_id = run_id
        self._blobs: set[bytes] = set()
        self._reached: dict[str, int] = {}
        self._waiting: dict[sql.Bulk, list[Any]] = {bulk: [] for bulk in sql.IN_ORDER}
        self._tasks: int | None = None
        self._added: set[str] = set()

    def add(self, bulk: sql.Bulk, row: Row) -> None:
        self._waiting[bulk].extend(row)

    def change(self, bulk: sql.Bulk, task_id: str, row: Row) -> None:
        """Like `add`, for statements whose order counts within a task."""
        rank = _RANKS[bulk]
        if rank <= self._reached.get(task_id, -1):
            self.flush()
        self._reached[task_id] = rank
        self._waiting[bulk].extend(row)

    def add_tasks(self, tasks: Sequence[NewTask], added_by: str | None = None) -> None:
        """New tasks, behind those that the run has. What they depend on was checked."""
        first: int | None = self._tasks
        if first is None:
            first = int(self._connection.execute(sql.NEXT_POSITION, (self.run_id,)).fetchone()[0])
        by = NO_TEXT if added_by is None else added_by
        for position, task in enumerate(tasks, first):
            edges = f"[{', '.join(map(encode_basestring, task.depends_on))}]"  # JSON, in a third of json's time
            backend = NO_TEXT if task.backend is None else task.backend
            row = (task.task_id, position, backend, by, edges, task.prompt, task.spec)
            self._waiting[sql.ADD_TASKS].extend(row)
            self._added.add(task.task_id)
        self._tasks = first + len(tasks)

    def known(self, task_ids: Sequence[str]) -> set[str]:
        """Those of the tasks that the run has, those of the batch so far included."""
        known = self._added.intersection(task_ids)
        wanted = [task_id for task_id in task_ids if task_id not in known]
        found = _executed(self._connection, self.run_id, sql.KNOWN_TASKS, wanted)
        return known.union(task_id for _, cursor in found for (task_id,) in cursor.fetchall())

    def blob(self, text: str | None) -> bytes | None:
        """If the text is large, the key of the blob that it becomes; None where it is to stand in its row."""
        if text is None or len(text) <= _SHORT:
            return None
        encoded = text.encode()
        if len(encoded) <= _INLINE_BYTES:
            return None
        key = sha256(encoded).digest()
        if key not in self._blobs:
            self._connection.execute(sql.ADD_BLOB, (key, len(encoded), text))
            self._blobs.add(key)
        return key

    def flush(self) -> None:
        self._reached.clear()
        for bulk, values in self._waiting.items():
            if values:
                _execute(self._connection, self.run_id, bulk, values)
                values.clear()
