"""The rows of a batch, gathered by statement.

Theory: the cost of binding a value depends on the type. The sqlite3 module searches an adapter for every None, bool and
bytes, five times as slow (0.3 microseconds) as an int. A value that is usually missing is therefore bound as a value of
another type, `NO_TEXT` or `NO_NUMBER`, and the statement turns the substitute into NULL. The rows of a statement are
one flat list of values, because a tuple for each row would be a thousand more objects for the garbage collector.
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
_SHORT: Final = _INLINE_BYTES // 4  # characters of at most four bytes each in UTF-8


def execute_bulk(connection: sqlite3.Connection, bulk: sql.Bulk, values: list[Any]) -> Iterator[sqlite3.Cursor]:
    """Execute the statement over `values`, the values of all rows in one list. Yield a cursor for each execution."""
    filling = (None, *repeat(0, bulk.width - 1))
    for start in range(0, len(values), sql.SIZES[-1] * bulk.width):
        part = values[start : start + sql.SIZES[-1] * bulk.width]
        count = len(part) // bulk.width
        size = sql.SIZES[bisect_left(sql.SIZES, count)]
        part += filling * (size - count)
        yield connection.execute(sql.bulk_sql(bulk, size), part)


class BatchRows:
    """The rows that a batch adds and changes.

    Statements run in a fixed order, whatever the order of the calls. A row that changes twice is therefore written
    once, with its last values.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._blobs: set[bytes] = set()
        self._waiting: dict[sql.Bulk, list[Any]] = {bulk: [] for bulk in sql.IN_ORDER}
        self._sessions: dict[int, tuple[str | None, bool | None]] = {}
        self._tasks: dict[int, tuple[str | None, int, str | int | None]] = {}

    def add(self, bulk: sql.Bulk, row: Row) -> None:
        """Gather a row of the statement."""
        self._waiting[bulk].extend(row)

    def set_session(self, start: int, session_id: str | None = None, *, confirmed: bool | None = None) -> None:
        """Set the session of a start; None keeps the stored value."""
        before = self._sessions.get(start, (None, None))
        kept = before[0] if session_id is None else session_id
        self._sessions[start] = kept, before[1] if confirmed is None else confirmed

    def set_task(self, task: int, set_to: str | None, *, crashed: bool = False, answers: str | int | None = 0) -> None:
        """Set the values of a task that do not follow from attempts. `answers` 0 keeps the stored answers."""
        _, crashes, kept = self._tasks.get(task, (None, 0, 0))
        self._tasks[task] = set_to, crashes + crashed, kept if answers == 0 else answers

    def blobs(self, *texts: str | None) -> tuple[bytes | None, ...] | None:
        """Return the key of `blob` for each text, or None if no text is large."""
        for text in texts:
            if text is not None and len(text) > _SHORT:
                keys = tuple(map(self.blob, texts))
                return keys if any(keys) else None
        return None

    def blob(self, text: str | None) -> bytes | None:
        """Store a large text as a blob and return the key. Return None for a text that belongs into its row."""
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
        """Execute the statements over the gathered rows."""
        for start, session in self._sessions.items():
            self.add(sql.SET_SESSIONS, (start, *session))
        for task, row in self._tasks.items():
            self.add(sql.SET_TASKS, (task, *row))
        for bulk, values in self._waiting.items():
            if values:
                for _ in execute_bulk(self._connection, bulk, values):
                    pass
