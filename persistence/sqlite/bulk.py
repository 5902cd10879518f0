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
from typing import TYPE_CHECKING, Any, Final

from plait.persistence.sqlite import statements as sql

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator

Row = tuple[Any, ...]
NO_TEXT: Final = 0
NO_NUMBER: Final = ""
_INLINE_BYTES: Final = 64 * 1024
_SHORT: Final = _INLINE_BYTES // 4  # characters: UTF-8 takes four bytes for one at most


def execute_bulk(connection: sqlite3.Connection, bulk: sql.Bulk, values: list[Any]) -> Iterator[sqlite3.Cursor]:
    """`values`: those of all rows, one row after the other."""
    filling = (None, *repeat(0, bulk.width - 1))
    for start in range(0, len(values), sql.SIZES[-1] * bulk.width):
        part = values[start : start + sql.SIZES[-1] * bulk.width]
        count = len(part) // bulk.width
        size = sql.SIZES[bisect_left(sql.SIZES, count)]
        part += filling * (size - count)
        yield connection.execute(sql.bulk_sql(bulk, size), part)


class BatchRows:
    """What a batch adds and changes. Statements run in a fixed order, whatever the order in which rows were given: so
    what is changed twice is given once, as it is in the end.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._blobs: set[bytes] = set()
        self._waiting: dict[sql.Bulk, list[Any]] = {bulk: [] for bulk in sql.IN_ORDER}
        self._sessions: dict[int, tuple[str | None, bool | None]] = {}
        self._tasks: dict[int, tuple[str | None, int, str | int | None]] = {}

    def add(self, bulk: sql.Bulk, row: Row) -> None:
        self._waiting[bulk].extend(row)

    def set_session(self, start: int, session_id: str | None = None, *, confirmed: bool | None = None) -> None:
        """What is known of a start's session; None leaves what is stored."""
        before = self._sessions.get(start, (None, None))
        kept = before[0] if session_id is None else session_id
        self._sessions[start] = kept, before[1] if confirmed is None else confirmed

    def set_task(self, task: int, set_to: str | None, *, crashed: bool = False, answers: str | int | None = 0) -> None:
        """What is set of a task beside its attempts. `answers`: 0 leaves those that are stored."""
        _, crashes, kept = self._tasks.get(task, (None, 0, 0))
        self._tasks[task] = set_to, crashes + crashed, kept if answers == 0 else answers

    def blobs(self, *texts: str | None) -> tuple[bytes | None, ...] | None:
        """The keys of those of the texts that are large, as `blob` gives them; None where not one is."""
        for text in texts:
            if text is not None and len(text) > _SHORT:
                keys = tuple(map(self.blob, texts))
                return keys if any(keys) else None
        return None

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

    def write(self) -> None:
        for start, session in self._sessions.items():
            self.add(sql.SET_SESSIONS, (start, *session))
        for task, row in self._tasks.items():
            self.add(sql.SET_TASKS, (task, *row))
        for bulk, values in self._waiting.items():
            if values:
                for _ in execute_bulk(self._connection, bulk, values):
                    pass
