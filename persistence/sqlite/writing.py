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
from typing import TYPE_CHECKING, Final

from persistence import history, rules
from persistence.boundaries import reached
from persistence.changes import (
    RunCreated,
    SessionOpened,
    TaskAnswered,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TasksAdded,
    TaskStarted,
    TaskWaiting,
    TurnAppended,
)
from persistence.errors import Conflict
from persistence.sqlite import statements as sql
from persistence.sqlite.checksum import message_checksum, result_checksum
from persistence.sqlite.reading import read_head
from persistence.sqlite.rows import NO_NUMBER, NO_TEXT, Refused, Row, Rows
from persistence.sqlite.transaction import transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from persistence.batch import Batch
    from persistence.changes import Change
    from persistence.notes import Note
    from persistence.rules import RunHead

    Writer = Callable[[sqlite3.Connection, str, int, Sequence[Change]], None]


def write_batch(connection: sqlite3.Connection, batch: Batch) -> None:
    """Apply what is not applied yet, all or nothing. Raises Fenced, Conflict, or what sqlite3 raises."""
    try:
        with transaction(connection, "BEGIN IMMEDIATE"):
            reached("txn.begun")
            _apply(connection, batch, _write_groups)
            reached("txn.before_commit")
        reached("txn.after_commit")
    except (Refused, sqlite3.IntegrityError) as error:
        raise _diagnosed(connection, batch) from error
    except UnicodeDecodeError:  # SQLite quotes a damaged page: not the batch's fault
        raise
    except (UnicodeEncodeError, OverflowError, ValueError, sqlite3.DataError) as error:
        raise Conflict(f"run {batch.run_id!r}: a value of the batch cannot be stored: {error}") from error


def send_note(connection: sqlite3.Connection, run_id: str, note: Note) -> None:
    """Add `note` to the run's inbox. Raises Conflict, or what sqlite3 raises."""
    row = (note.kind, note.at, note.task_id, note.body, run_id)
    try:
        with transaction(connection, "BEGIN IMMEDIATE"):
            added = connection.execute(sql.ADD_NOTE, row).rowcount
    except UnicodeDecodeError:
        raise
    except (UnicodeEncodeError, sqlite3.DataError, sqlite3.IntegrityError) as error:
        raise Conflict(f"run {run_id!r}: the note cannot be stored: {error}") from error
    if not added:
        raise Conflict(f"run {run_id!r} is not in the store, so nobody can be sent a note about it")


def _apply(connection: sqlite3.Connection, batch: Batch, write: Writer) -> None:
    run_id = batch.run_id
    before = read_head(connection, run_id, settings=any(isinstance(one, RunCreated) for one in batch.changes[:1]))
    skipped = rules.first_unapplied(batch, before)
    changes = batch.changes[skipped:]
    if not changes:
        return
    head = before
    if head is None:
        head = rules.new_head(changes[0], run_id)
        key = Rows(connection, run_id).blob(head.settings)
        kept = head.settings if key is None else ""
        connection.execute(sql.ADD_RUN, (run_id, head.name, kept, key, head.created_at))
    first_seq = batch.first_seq + skipped
    if not _OF_TASKS.issuperset(map(type, changes)):
        for seq, change in enumerate(changes, first_seq):
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
    policy = head.policy_state, head.policy_seq
    connection.execute(sql.SET_HEAD, (*state, claims, *policy, *owned_by, run_id))


def _write_groups(connection: sqlite3.Connection, run_id: str, first_seq: int, changes: Sequence[Change]) -> None:
    rows = Rows(connection, run_id)
    for seq, change in enumerate(changes, first_seq):
        kind = type(change)
        add_rows = _ROWS.get(kind)
        if add_rows is not None:
            add_rows(rows, seq, change)
        if kind not in _WITHOUT_EVENT:
            event = history.event_of(change)
            if event is not None:
                rows.add(sql.ADD_EVENTS, (seq, *event))
    rows.flush()


def _write_singly(connection: sqlite3.Connection, run_id: str, first_seq: int, changes: Sequence[Change]) -> None:
    for seq, change in enumerate(changes, first_seq):
        try:
            _write_groups(connection, run_id, seq, (change,))
        except (Refused, sqlite3.IntegrityError) as error:
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


def _created(rows: Rows, _seq: int, change: RunCreated) -> None:
    known = {task.task_id for task in change.tasks}
    if not all(known.issuperset(task.depends_on) for task in change.tasks):
        raise Refused
    rows.add_tasks(change.tasks)


def _tasks_added(rows: Rows, _seq: int, change: TasksAdded) -> None:
    rules.check_added(rows.run_id, change, rows.known(rules.mentioned(change)))
    rows.add_tasks(change.tasks, change.added_by)


def _reopened(rows: Rows, _seq: int, change: TaskReopened) -> None:
    was = "completed" if change.damaged else "failed"
    rows.change(sql.REQUEUE_TASKS, change.task_id, (change.task_id, was, None))


def _answered(rows: Rows, _seq: int, change: TaskAnswered) -> None:
    rows.change(sql.REQUEUE_TASKS, change.task_id, (change.task_id, "waiting_input", change.answers))


def _cancelled(rows: Rows, seq: int, change: TaskCancelled) -> None:
    usage = change.input_tokens, change.output_tokens, change.cost_usd, change.model
    rows.change(sql.CANCEL_TASKS, change.task_id, (change.task_id, change.at, seq, *usage))


def _started(rows: Rows, seq: int, change: TaskStarted) -> None:
    task_id, attempt, session_id = change.task_id, change.attempt, change.session_id
    session = NO_TEXT if session_id is None else session_id
    row = (task_id, attempt, change.backend, session, int(change.confirmed), change.at, seq)
    rows.change(sql.START_TASKS, task_id, row)
    if session_id is not None:
        rows.add(sql.ADD_SESSIONS, (task_id, session_id, attempt, change.at))


def _session(rows: Rows, _seq: int, change: SessionOpened) -> None:
    task_id, attempt, session_id = change.task_id, change.attempt, change.session_id
    rows.change(sql.SET_SESSIONS, task_id, (task_id, attempt, session_id))
    rows.add(sql.ADD_SESSIONS, (task_id, session_id, attempt, change.at))


def _turn(rows: Rows, seq: int, change: TurnAppended) -> None:
    task_id, role, content = change.task_id, change.role, change.content
    checksum = bytearray(message_checksum(rows.run_id, task_id, role, content))
    blob = rows.blob(content)
    bulk, kept = (sql.ADD_MESSAGES, content) if blob is None else (sql.ADD_LARGE_MESSAGES, blob)
    input_tokens, output_tokens = change.input_tokens, change.output_tokens
    said = (task_id, seq, change.attempt, role, change.at, input_tokens, output_tokens, checksum, kept)
    rows.add(bulk, said)


def _completed(rows: Rows, seq: int, change: TaskCompleted) -> None:
    task_id, text, data, cost = change.task_id, change.text, change.data, change.cost_usd
    usage = change.input_tokens, change.output_tokens, NO_NUMBER if cost is None else cost, change.duration_s
    checksum = bytearray(result_checksum(rows.run_id, task_id, text, data))
    text_sha256, data_sha256 = rows.blob(text), rows.blob(data)
    own_data = NO_TEXT if data is None or data_sha256 is not None else data
    own_text = text if text_sha256 is None else None
    model = NO_TEXT if change.model is None else change.model
    row = (task_id, change.attempt, change.at, seq, *usage, own_text, own_data, checksum, model)
    rows.change(sql.COMPLETE_TASKS, task_id, row)
    if text_sha256 is not None or data_sha256 is not None:
        rows.change(sql.LINK_RESULTS, task_id, (task_id, text_sha256, data_sha256))


def _failed(rows: Rows, seq: int, change: TaskFailed) -> None:
    rules.check_failed(rows.run_id, change)
    ended = (change.status, change.status, change.error_kind, change.error, change.duration_s)
    _end(rows, seq, change, (*ended, change.input_tokens, change.output_tokens, change.cost_usd))


def _retried(rows: Rows, seq: int, change: TaskRetried) -> None:
    ended = ("pending", "retried", change.error_kind, change.error, change.duration_s)
    usage = change.input_tokens, change.output_tokens, change.cost_usd
    _end(rows, seq, change, (*ended, *usage), (None, None, False, change.goes_on))


def _interrupted(rows: Rows, seq: int, change: TaskInterrupted) -> None:
    ended = ("pending", "interrupted", None, change.reason, None, *_NO_USAGE)
    _end(rows, seq, change, ended, (None, None, change.crashed, None))


def _waiting(rows: Rows, seq: int, change: TaskWaiting) -> None:
    ended = ("waiting_input", "interrupted" if change.asked is None else "asked", None, None, change.duration_s)
    usage = change.input_tokens, change.output_tokens, change.cost_usd
    _end(rows, seq, change, (*ended, *usage), (change.question, change.asked, change.crashed, None))


_NO_USAGE: Final = (0, 0, None)


def _end(
    rows: Rows,
    seq: int,
    change: TaskFailed | TaskRetried | TaskInterrupted | TaskWaiting,
    ended: Row,
    left: Row = (None, None, False, None),
) -> None:
    """`ended`: the statuses of the task and of its attempt, the error's kind, the error, the seconds it took, and
    the usage. `left`: the question that a person is asked, more about it, whether the owner died, and whether the
    attempt's session is confirmed, where this says so.
    """
    model = None if isinstance(change, TaskInterrupted) else change.model
    row = (change.task_id, change.attempt, change.at, seq, *ended, *left, model)
    rows.change(sql.END_TASKS, change.task_id, row)


_ROWS: Final[dict[type, Callable[..., None]]] = {
    RunCreated: _created,
    TasksAdded: _tasks_added,
    TaskReopened: _reopened,
    TaskStarted: _started,
    SessionOpened: _session,
    TurnAppended: _turn,
    TaskCompleted: _completed,
    TaskFailed: _failed,
    TaskRetried: _retried,
    TaskInterrupted: _interrupted,
    TaskWaiting: _waiting,
    TaskAnswered: _answered,
    TaskCancelled: _cancelled,
}
"""What writes each change to a task."""
_OF_TASKS: Final = _ROWS.keys() - {RunCreated}
"""Changes that leave the run's head as it is."""
_WITHOUT_EVENT: Final = frozenset({TaskStarted, TaskCompleted, TurnAppended})
"""Changes whose event is read from the attempt itself, and those that leave none."""
