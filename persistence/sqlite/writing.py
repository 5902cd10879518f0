"""One batch, one transaction, as one plain function on the database's thread.

Theory: the changes are turned into rows and gathered by statement, and each statement then runs over all of its rows at
once. That reorders the changes, which is harmless between different tasks; for one and the same task the order counts,
so a change that would come too early in the fixed order of statements has what is gathered written first. Each row
given has to change one stored row; if one does not, the whole batch is rolled back and replayed one change at a time,
only to find out which of them is to be named in the error.
"""

from __future__ import annotations

import json
import sqlite3
from bisect import bisect_left
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any, Final

from persistence import rules
from persistence.boundaries import reached
from persistence.changes import (
    RunCreated,
    SessionOpened,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TurnAppended,
)
from persistence.errors import Conflict
from persistence.sqlite import statements as sql
from persistence.sqlite.checksum import message_checksum, result_checksum
from persistence.sqlite.reading import read_head
from persistence.sqlite.transaction import transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persistence.changes import Batch, Change
    from persistence.rules import RunHead

    Writer = Callable[[sqlite3.Connection, str, int, Sequence[Change]], None]

Row = tuple[Any, ...]


class _Refused(Exception):  # noqa: N818
    """A guarded statement changed fewer rows than it was given."""


def write_batch(connection: sqlite3.Connection, batch: Batch) -> None:
    """Apply what is not applied yet, all or nothing. Raises Fenced, Conflict, or what sqlite3 raises."""
    try:
        with transaction(connection, "BEGIN IMMEDIATE"):
            reached("txn.begun")
            _apply(connection, batch, _write_groups)
            reached("txn.before_commit")
        reached("txn.after_commit")
    except (_Refused, sqlite3.IntegrityError) as error:
        raise _diagnosed(connection, batch) from error
    except (UnicodeEncodeError, OverflowError, ValueError, sqlite3.DataError) as error:
        raise Conflict(f"run {batch.run_id!r}: a value of the batch cannot be stored: {error}") from error


def _apply(connection: sqlite3.Connection, batch: Batch, write: Writer) -> None:
    run_id = batch.run_id
    before = read_head(connection, run_id)
    skipped = rules.first_unapplied(batch, before)
    changes = batch.changes[skipped:]
    if not changes:
        return
    head = before
    if head is None:
        head = rules.new_head(changes[0], run_id)
        connection.execute(sql.ADD_RUN, (run_id, head.name, head.settings, head.created_at))
    first_seq = batch.first_seq + skipped
    for seq, change in enumerate(changes, first_seq):
        if type(change) not in _ROWS or isinstance(change, RunCreated):
            head = rules.advance(head, change, seq, run_id)
    write(connection, run_id, first_seq, changes)
    if head is before:
        connection.execute(sql.SET_LAST_SEQ, (batch.last_seq, run_id))
    else:
        _set_head(connection, run_id, head, batch.last_seq)


def _set_head(connection: sqlite3.Connection, run_id: str, head: RunHead, last_seq: int) -> None:
    claims = json.dumps([[claim.seq, claim.owner_id] for claim in head.claims])
    owner = head.owner
    owned_by: Row = (None,) * 6
    if owner is not None:
        owned_by = (owner.owner_id, owner.host, owner.boot_id, owner.pid, owner.process_started, owner.claimed_at)
    state = (head.status, head.started_at, head.ended_at, head.error, last_seq, head.epoch, head.lease_expires_at)
    connection.execute(sql.SET_HEAD, (*state, claims, *owned_by, run_id))


def _write_groups(connection: sqlite3.Connection, run_id: str, first_seq: int, changes: Sequence[Change]) -> None:
    rows = _Rows(connection, run_id)
    for seq, change in enumerate(changes, first_seq):
        kind = type(change)
        add_rows = _ROWS.get(kind)
        if add_rows is not None:
            add_rows(rows, seq, change)
        if kind not in _IN_ATTEMPTS:
            event = rules.event_of(change)
            if event is not None:
                rows.add(sql.ADD_EVENTS, (run_id, seq, *event))
    rows.flush()


def _write_singly(connection: sqlite3.Connection, run_id: str, first_seq: int, changes: Sequence[Change]) -> None:
    for seq, change in enumerate(changes, first_seq):
        try:
            _write_groups(connection, run_id, seq, (change,))
        except (_Refused, sqlite3.IntegrityError) as error:
            task_id = getattr(change, "task_id", None)
            found = connection.execute(sql.GET_TASK_STATUS, (run_id, task_id)).fetchone()
            raise rules.refusal(run_id, change, found) from error


def _diagnosed(connection: sqlite3.Connection, batch: Batch) -> Conflict:
    try:
        with transaction(connection, "BEGIN IMMEDIATE"):
            _apply(connection, batch, _write_singly)
            raise Conflict(f"run {batch.run_id!r}: changes {batch.first_seq} to {batch.last_seq} exclude one another")
    except Conflict as conflict:
        return conflict


def _execute(connection: sqlite3.Connection, bulk: sql.Bulk, rows: list[Row]) -> None:
    largest = sql.SIZES[-1]
    for start in range(0, len(rows), largest):
        part = rows[start : start + largest]
        size = sql.SIZES[bisect_left(sql.SIZES, len(part))]
        values = tuple(chain(chain.from_iterable(part), repeat(None, (size - len(part)) * bulk.width)))
        if connection.execute(sql.bulk_sql(bulk, size), values).rowcount != len(part):
            raise _Refused


_RANKS: Final = {bulk: rank for rank, bulk in enumerate(sql.IN_ORDER)}


class _Rows:
    """The rows that wait to be written, by statement."""

    def __init__(self, connection: sqlite3.Connection, run_id: str) -> None:
        self._connection = connection
        self.run_id = run_id
        self._reached: dict[str, int] = {}
        self._waiting: dict[sql.Bulk, list[Row]] = {bulk: [] for bulk in sql.IN_ORDER}

    def add(self, bulk: sql.Bulk, row: Row) -> None:
        self._waiting[bulk].append(row)

    def change(self, bulk: sql.Bulk, task_id: str, row: Row) -> None:
        """Like `add`, for statements whose order counts within a task."""
        rank = _RANKS[bulk]
        if rank <= self._reached.get(task_id, -1):
            self.flush()
        self._reached[task_id] = rank
        self._waiting[bulk].append(row)

    def flush(self) -> None:
        self._reached.clear()
        for bulk, rows in self._waiting.items():
            if rows:
                _execute(self._connection, bulk, rows)
                rows.clear()


def _created(rows: _Rows, _seq: int, change: RunCreated) -> None:
    run_id = rows.run_id
    for position, task in enumerate(change.tasks):
        rows.add(sql.ADD_TASKS, (run_id, task.task_id, position, task.backend, task.prompt, task.spec))
        for place, upstream in enumerate(task.depends_on):
            rows.add(sql.ADD_DEPENDENCIES, (run_id, task.task_id, place, upstream))


def _reopened(rows: _Rows, _seq: int, change: TaskReopened) -> None:
    rows.change(sql.REOPEN_TASKS, change.task_id, (rows.run_id, change.task_id))


def _cancelled(rows: _Rows, seq: int, change: TaskCancelled) -> None:
    rows.change(sql.CANCEL_TASKS, change.task_id, (rows.run_id, change.task_id, change.at, seq))


def _started(rows: _Rows, seq: int, change: TaskStarted) -> None:
    run_id, task_id, attempt, session_id = rows.run_id, change.task_id, change.attempt, change.session_id
    rows.change(sql.START_TASKS, task_id, (run_id, task_id, attempt, change.backend, session_id, change.at, seq))
    if session_id is not None:
        rows.add(sql.ADD_SESSIONS, (run_id, task_id, session_id, attempt, change.at))


def _session(rows: _Rows, _seq: int, change: SessionOpened) -> None:
    run_id, task_id, attempt, session_id = rows.run_id, change.task_id, change.attempt, change.session_id
    rows.change(sql.SET_SESSIONS, task_id, (run_id, task_id, attempt, session_id))
    rows.add(sql.ADD_SESSIONS, (run_id, task_id, session_id, attempt, change.at))


def _turn(rows: _Rows, seq: int, change: TurnAppended) -> None:
    run_id, task_id, role, content = rows.run_id, change.task_id, change.role, change.content
    checksum = message_checksum(run_id, task_id, role, content)
    tokens = change.input_tokens, change.output_tokens
    rows.add(sql.ADD_MESSAGES, (run_id, task_id, seq, change.attempt, role, change.at, *tokens, content, checksum))


def _completed(rows: _Rows, seq: int, change: TaskCompleted) -> None:
    run_id, task_id, text, data = rows.run_id, change.task_id, change.text, change.data
    usage = change.input_tokens, change.output_tokens, change.cost_usd, change.duration_s
    result = text, data, result_checksum(run_id, task_id, text, data)
    row = (run_id, task_id, change.attempt, change.at, seq, *usage, *result)
    rows.change(sql.COMPLETE_TASKS, task_id, row)


def _failed(rows: _Rows, seq: int, change: TaskFailed) -> None:
    rules.check_failed(rows.run_id, change)
    ended = (change.status, change.status, change.error_kind, change.error, change.duration_s)
    _end(rows, seq, change, (*ended, change.input_tokens, change.output_tokens, change.cost_usd))


def _retried(rows: _Rows, seq: int, change: TaskRetried) -> None:
    ended = ("pending", "retried", change.error_kind, change.error, change.duration_s)
    _end(rows, seq, change, (*ended, change.input_tokens, change.output_tokens, change.cost_usd))


def _interrupted(rows: _Rows, seq: int, change: TaskInterrupted) -> None:
    _end(rows, seq, change, ("pending", "interrupted", None, change.reason, None, 0, 0, None))


def _end(rows: _Rows, seq: int, change: TaskFailed | TaskRetried | TaskInterrupted, ended: Row) -> None:
    """`ended`: the statuses of the task and of its attempt, the error's kind, the error, the seconds it took, and
    the usage."""
    row = (rows.run_id, change.task_id, change.attempt, change.at, seq, *ended)
    rows.change(sql.END_TASKS, change.task_id, row)


_ROWS: Final[dict[type, Callable[..., None]]] = {
    RunCreated: _created,
    TaskReopened: _reopened,
    TaskStarted: _started,
    SessionOpened: _session,
    TurnAppended: _turn,
    TaskCompleted: _completed,
    TaskFailed: _failed,
    TaskRetried: _retried,
    TaskInterrupted: _interrupted,
    TaskCancelled: _cancelled,
}
"""What writes each change to a task."""
_IN_ATTEMPTS: Final = frozenset({TaskStarted, TaskCompleted})
"""Changes whose event is read from the attempt itself."""
