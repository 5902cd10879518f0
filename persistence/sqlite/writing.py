"""One batch, one transaction, as one plain function on the database's thread.

Theory: the changes are turned into rows and gathered by statement, and each statement then runs over all of its rows at
once. That reorders the changes, which is harmless between different tasks; for one and the same task the order counts,
so a change that would come too early in the fixed order of statements closes the gathered group first. Every guarded
statement has to change one stored row for each row given; if one does not, the whole batch is rolled back and replayed
one change at a time, only to find out which of them is to be named in the error.
"""

from __future__ import annotations

import json
import sqlite3
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

from persistence import rules
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
            _apply(connection, batch, _write_groups)
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
    rows = _new_rows()
    events = rows[sql.ADD_EVENTS]
    reached: dict[str, int] = {}
    for seq, change in enumerate(changes, first_seq):
        kind = type(change)
        rank = _RANKS.get(kind)
        if rank is not None:
            task_id = cast("TaskStarted", change).task_id  # every change with a rank has one
            if rank <= reached.get(task_id, 0):
                _flush(connection, rows)
                reached.clear()
            reached[task_id] = rank
        add_rows = _ROWS.get(kind)
        if add_rows is not None:
            add_rows(rows, run_id, seq, change)
        event = rules.event_of(change)
        if event is not None:
            events.append((run_id, seq, *event))
    _flush(connection, rows)


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


def _flush(connection: sqlite3.Connection, rows: dict[sql.Bulk, list[Row]]) -> None:
    for bulk, waiting in rows.items():
        if waiting:
            changed = _execute(connection, bulk, waiting)
            if bulk.exact and changed != len(waiting):
                raise _Refused
            waiting.clear()


def _execute(connection: sqlite3.Connection, bulk: sql.Bulk, rows: list[Row]) -> int:
    changed = done = 0
    for size in sql.CHUNKS:
        while len(rows) - done >= size:
            values = tuple(chain.from_iterable(rows[done : done + size]))
            changed += connection.execute(sql.bulk_sql(bulk, size), values).rowcount
            done += size
    return changed


Rows = dict[sql.Bulk, list[Row]]


def _new_rows() -> Rows:
    return {bulk: [] for bulk in sql.IN_ORDER}


def _created(rows: Rows, run_id: str, _seq: int, change: RunCreated) -> None:
    for position, task in enumerate(change.tasks):
        rows[sql.ADD_TASKS].append((run_id, task.task_id, position, task.backend, task.prompt, task.spec))
        for place, upstream in enumerate(task.depends_on):
            rows[sql.ADD_DEPENDENCIES].append((run_id, task.task_id, place, upstream))


def _reopened(rows: Rows, run_id: str, _seq: int, change: TaskReopened) -> None:
    rows[sql.REOPEN_TASKS].append((run_id, change.task_id))


def _started(rows: Rows, run_id: str, seq: int, change: TaskStarted) -> None:
    task_id, attempt, session_id = change.task_id, change.attempt, change.session_id
    rows[sql.START_TASKS].append((run_id, task_id, attempt))
    rows[sql.ADD_ATTEMPTS].append((run_id, task_id, attempt, seq, change.at, change.backend, session_id, "running"))
    if session_id is not None:
        rows[sql.ADD_SESSIONS].append((run_id, task_id, session_id, attempt, change.at))


def _session(rows: Rows, run_id: str, _seq: int, change: SessionOpened) -> None:
    rows[sql.ADD_SESSIONS].append((run_id, change.task_id, change.session_id, change.attempt, change.at))
    rows[sql.SET_SESSIONS].append((run_id, change.task_id, change.attempt, change.session_id))


def _turn(rows: Rows, run_id: str, seq: int, change: TurnAppended) -> None:
    task_id, role, content = change.task_id, change.role, change.content
    checksum = message_checksum(run_id, task_id, role, content)
    tokens = change.input_tokens, change.output_tokens
    rows[sql.ADD_MESSAGES].append((run_id, task_id, seq, change.attempt, role, change.at, *tokens, content, checksum))


def _completed(rows: Rows, run_id: str, _seq: int, change: TaskCompleted) -> None:
    key = run_id, change.task_id, change.attempt
    checksum = result_checksum(run_id, change.task_id, change.text, change.data)
    usage = change.input_tokens, change.output_tokens, change.cost_usd, change.duration_s
    rows[sql.COMPLETE_TASKS].append((*key, change.text, change.data, checksum))
    rows[sql.END_ATTEMPTS].append((*key, "completed", change.at, None, None, *usage))


def _failed(rows: Rows, run_id: str, _seq: int, change: TaskFailed) -> None:
    rules.check_failed(run_id, change)
    key, error = (run_id, change.task_id, change.attempt), (change.error_kind, change.error)
    rows[sql.END_TASKS].append((*key, change.status))
    rows[sql.END_ATTEMPTS].append((*key, change.status, change.at, *error, 0, 0, None, change.duration_s))


def _retried(rows: Rows, run_id: str, _seq: int, change: TaskRetried) -> None:
    key, error = (run_id, change.task_id, change.attempt), (change.error_kind, change.error)
    rows[sql.END_TASKS].append((*key, "pending"))
    rows[sql.END_ATTEMPTS].append((*key, "retried", change.at, *error, 0, 0, None, change.duration_s))


def _interrupted(rows: Rows, run_id: str, _seq: int, change: TaskInterrupted) -> None:
    key = run_id, change.task_id, change.attempt
    rows[sql.END_TASKS].append((*key, "pending"))
    rows[sql.END_ATTEMPTS].append((*key, "interrupted", change.at, None, change.reason, 0, 0, None, None))


def _cancelled(rows: Rows, run_id: str, _seq: int, change: TaskCancelled) -> None:
    rows[sql.CANCEL_TASKS].append((run_id, change.task_id))
    rows[sql.CANCEL_ATTEMPTS].append((run_id, change.task_id, change.at))


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
"""The rows that each change to a task makes; a turn's place is its own number, so it has no rank below."""

_OUTCOME = 4
_RANKS: Final[dict[type, int]] = {
    TaskReopened: 1,
    TaskStarted: 2,
    SessionOpened: 3,
    TaskCompleted: _OUTCOME,
    TaskFailed: _OUTCOME,
    TaskRetried: _OUTCOME,
    TaskInterrupted: _OUTCOME,
    TaskCancelled: _OUTCOME,
}
"""Where a change's statements stand in `statements.IN_ORDER`, for changes whose order counts within a task."""
