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

from plait.persistence.records import Spent
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.checksum import WRONG_TYPES, damaged, end_checksum, start_checksum, task_checksum

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator

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

    def __init__(self, connection: sqlite3.Connection, run_id: str) -> None:
        self._connection = connection
        self._run_id = run_id
        self._blobs: set[bytes] = set()
        self._waiting: dict[sql.Bulk, list[Any]] = {bulk: [] for bulk in sql.IN_ORDER}
        self._sessions: dict[int, tuple[str | None, bool | None]] = {}
        self._tasks: dict[int, tuple[str | None, int, str | int | None]] = {}
        self._finished: dict[int, tuple[Row, Row]] = {}

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

    def finish(self, ended: Row, result: Row) -> None:
        """End an attempt that ended with a question. `ended` is an end; usage is added to the stored usage."""
        self._finished[ended[0]] = ended, result

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
        for bulk in sql.IN_ORDER:
            # Rows that change are read after their addition, perhaps by this batch, and their checksums are renewed.
            if bulk is sql.FINISH_ENDS and self._finished:
                self._renew_ends()
            elif bulk is sql.SET_SESSIONS and self._sessions:
                self._renew_starts()
            elif bulk is sql.SET_TASKS and self._tasks:
                self._renew_tasks()
            values = self._waiting[bulk]
            if values:
                for _ in execute_bulk(self._connection, bulk, values):
                    pass

    def _renew_starts(self) -> None:
        for row in self._found(sql.FIND_STARTS, self._sessions):
            self._require_fit(start_checksum, row, "the start of an attempt")
            start, task, attempt, backend, session_id, confirmed, at, _ = row
            new_id, now_confirmed = self._sessions[start]
            session_id = session_id if new_id is None else new_id
            confirmed = confirmed if now_confirmed is None else int(now_confirmed)
            checksum = start_checksum(start, task, attempt, backend, session_id, confirmed, at)
            self.add(sql.SET_SESSIONS, (start, session_id, confirmed, checksum))

    def _renew_tasks(self) -> None:
        for row in self._found(sql.FIND_GIVEN_TASKS, self._tasks):
            task, task_id, _, crashes, stored, backend, added_by, edges, spec, prompt, _ = row
            self._require_fit(task_checksum, row, f"task {task_id!r}")
            set_to, crashed, answered = self._tasks[task]
            crashes += crashed
            answers = stored if isinstance(answered, int) else answered
            given = backend, added_by, edges, spec, prompt
            checksum = task_checksum(task, task_id, set_to, crashes, answers, *given)
            self.add(sql.SET_TASKS, (task, set_to, crashes, answers, checksum))

    def _renew_ends(self) -> None:
        for row in self._found(sql.FIND_ENDS, self._finished):
            self._require_fit(end_checksum, row, "the end of an attempt")
            ended, result = self._finished[row[0]]
            new = _finished(row, ended)
            self.add(sql.FINISH_ENDS, (*new[:-2], end_checksum(*new), *result))

    def _require_fit(self, checksum: Callable[..., int], row: Row, what: str) -> None:
        """Raise StoreError unless the stored row, with the checksum behind, fits the checksum."""
        try:
            fits = row[-1] == checksum(*row[:-1])
        except WRONG_TYPES:
            fits = False
        if not fits:
            raise damaged(self._run_id, what)

    def _found(self, bulk: sql.Bulk, ids: Iterable[int]) -> list[Row]:
        """Return the stored rows with these ids."""
        return [row for cursor in execute_bulk(self._connection, bulk, list(ids)) for row in cursor.fetchall()]


def _finished(stored: Row, ended: Row) -> Row:
    """Return the columns of an end that follows a question: usage is added, and the question is answered."""
    took, more_took = stored[11], ended[11]
    took = more_took if took is None else took if more_took is None else took + more_took
    spent = spent_in(stored) + spent_in(ended)
    return (*ended[:4], *usage_columns(spent, took), *ended[13:], None, None)


def usage_columns(spent: Spent, took: float | None) -> Row:
    """Return the values of the columns of `ends` from `input_tokens` to `model`."""
    cost = spent.cost_usd, took, spent.model
    parts = spent.cache_read_tokens, spent.cache_write_tokens, spent.reasoning_tokens, int(spent.cost_is_partial)
    return (spent.input_tokens, spent.output_tokens, *parts, *cost)


def spent_in(end: Row) -> Spent:
    """Return the usage in a row of `ends`."""
    tokens_in, tokens_out, cache_read, cache_write, reasoning, is_partial, cost, _, model = end[4:13]
    return Spent(tokens_in, tokens_out, cost, model, cache_read, cache_write, reasoning, is_partial == 1)
