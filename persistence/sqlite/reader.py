"""Read records, by plain functions on the database's thread that return whole results, never a cursor."""

from __future__ import annotations

import gc
import json
import sqlite3
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from plait.persistence.errors import StoreError
from plait.persistence.event_log import start_detail
from plait.persistence.records import (
    NOTHING_SPENT,
    AttemptRecord,
    EventKind,
    EventRecord,
    MessageRecord,
    NoteRecord,
    Owner,
    RunRecord,
    Spent,
    TaskRecord,
)
from plait.persistence.rules import Claim, RunHead
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.checksum import message_checksum, result_checksum
from plait.persistence.sqlite.task_cache import ids_of
from plait.persistence.sqlite.transaction import decode_lossy, transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

Row = tuple[Any, ...]
_RESULT = 2
"""The part of the view `messages` that has the checksum of a result."""
_EVENT_KINDS: Mapping[str, EventKind] = {kind.value: kind for kind in EventKind}
"""By the stored words. A look-up is several times as fast as a call of the class."""
P = ParamSpec("P")
T = TypeVar("T")


def read(
    connection: sqlite3.Connection,
    function: Callable[Concatenate[sqlite3.Connection, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Return the result of `function`.

    If the file holds bytes that are no UTF-8, run `function` again with a lossy decoder. The checksum then shows the
    damaged record, and the other records can still be read.
    """
    try:
        return function(connection, *args, **kwargs)
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    connection.text_factory = decode_lossy
    try:
        return function(connection, *args, **kwargs)
    finally:
        connection.text_factory = str


def read_head(connection: sqlite3.Connection, run_id: str, *, settings: bool) -> tuple[int, RunHead] | None:
    """Return the number and the head of the run, or None if there is no such run.

    Without `settings` the settings of the head are empty: all inputs are part of the settings, up to many megabytes.
    """
    row = connection.execute(sql.GET_HEAD, (run_id,)).fetchone()
    if row is None:
        return None
    return row[0], _head(row[1:], _settings(connection, run_id) if settings else "")


def _settings(connection: sqlite3.Connection, run_id: str) -> str:
    (found,) = connection.execute(sql.GET_SETTINGS, (run_id,)).fetchone()
    if not found:
        raise StoreError(f"the stored settings of run {run_id!r} are missing; restore a copy")
    return str(found)


def _head(row: Row, settings: str) -> RunHead:
    name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims = row[:9]
    policy_state, policy_seq, *owner = row[9:]
    return RunHead(
        name=name,
        settings=settings,
        created_at=created_at,
        status=status,
        started_at=started_at,
        ended_at=ended_at,
        error=error,
        last_seq=last_seq,
        owner=None if owner[0] is None else Owner(*owner),
        lease_expires_at=lease_expires_at,
        claims=tuple(Claim(seq, owner_id) for seq, owner_id in json.loads(claims)),
        policy_state=policy_state,
        policy_seq=policy_seq,
    )


def get_run(connection: sqlite3.Connection, run_id: str) -> RunRecord | None:
    with transaction(connection):
        found = read_head(connection, run_id, settings=True)
        return None if found is None else _run(connection, run_id, found[1])


def list_runs(connection: sqlite3.Connection, limit: int) -> tuple[RunRecord, ...]:
    with transaction(connection):
        rows: list[Row] = connection.execute(sql.LIST_RUNS, (max(0, limit),)).fetchall()
        return tuple(_run(connection, row[0], _head(row[1:], "")) for row in rows)


def _run(connection: sqlite3.Connection, run_id: str, head: RunHead) -> RunRecord:
    counts: dict[str, int] = dict(connection.execute(sql.COUNT_TASKS, (run_id,)).fetchall())
    input_tokens, output_tokens, cost_usd = connection.execute(sql.SUM_USAGE, (run_id,)).fetchone()
    spent = Spent(input_tokens or 0, output_tokens or 0, cost_usd)
    return head.record(run_id, counts, spent)


def list_tasks(connection: sqlite3.Connection, run_id: str) -> tuple[TaskRecord, ...]:
    # Row by row: a list of all rows would double the number of objects for the garbage collector.
    with _paused_collector():
        return tuple(_task(run_id, row) for row in connection.execute(sql.LIST_TASKS, (run_id,)))


@contextmanager
def _paused_collector() -> Generator[None]:
    """Pause the garbage collector. All objects of the block are kept, and collections took a quarter of the time of a
    resume of 10,000 tasks.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _edges(task_id: str, edges: str) -> tuple[str, ...]:
    if edges == "[]":
        return ()
    try:
        return tuple(json.loads(edges))
    except (ValueError, TypeError) as error:
        raise StoreError(f"the stored dependencies of task {task_id!r} are damaged: {error}; restore a copy") from error


def _task(run_id: str, row: Row) -> TaskRecord:
    task_id, position, prompt, backend, spec, status, attempt, text, data, checksum = row[:10]
    error_kind, error, session_id, input_tokens, output_tokens, cost_usd, duration_s, started_at, ended_at = row[10:19]
    crashes, session_confirmed, question, asked, answers, added_by, model, edges = row[19:]
    damaged = _is_damaged(run_id, task_id, status, text, data, checksum)
    if damaged:
        text = data = None
    # By position: keyword arguments take a third longer over 10,000 tasks.
    return TaskRecord(
        task_id,
        position,
        prompt,
        _edges(task_id, edges),
        backend,
        spec,
        status,
        attempt,
        text,
        data,
        error_kind,
        error,
        session_id,
        Spent(input_tokens or 0, output_tokens or 0, cost_usd, model) if attempt else NOTHING_SPENT,
        duration_s,
        started_at,
        ended_at,
        damaged,
        crashes,
        session_confirmed == 1,
        question,
        asked,
        answers,
        added_by,
    )


def _is_damaged(*stored: Any) -> bool:
    run_id, task_id, status, text, data, checksum = stored
    # A text with a lost blob reads as None, which does not fit the checksum.
    if status != "completed":
        return any(value is not None for value in (text, data, checksum))
    return text is None or checksum != result_checksum(run_id, task_id, text, data)


def list_attempts(connection: sqlite3.Connection, run_id: str, task_id: str | None) -> tuple[AttemptRecord, ...]:
    if task_id is None:
        rows = connection.execute(sql.LIST_ATTEMPTS, (run_id,)).fetchall()
    else:
        rows = connection.execute(sql.LIST_TASK_ATTEMPTS, (run_id, task_id)).fetchall()
    return tuple(_attempt(row) for row in rows)


def _attempt(row: Row) -> AttemptRecord:
    task_id, attempt, status, backend, session_id, started_at, ended_at, error_kind, error, *spent, duration_s = row
    ended = ended_at, error_kind, error, Spent(*spent), duration_s
    return AttemptRecord(task_id, attempt, status, backend, session_id, started_at, *ended)


def list_messages(connection: sqlite3.Connection, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
    rows: list[Row] = connection.execute(sql.LIST_MESSAGES, (run_id, task_id)).fetchall()
    return tuple(_message(run_id, task_id, position, row) for position, row in enumerate(rows))


def _message(run_id: str, task_id: str, position: int, row: Row) -> MessageRecord:
    attempt, role, content, part, input_tokens, output_tokens, at, checksum = row
    if content is None:
        damaged = True
    elif part == _RESULT:
        damaged = checksum != result_checksum(run_id, task_id, content, None)
    else:
        damaged = checksum != message_checksum(run_id, task_id, role, content)
    shown: str = content or "" if not damaged else ""
    return MessageRecord(task_id, position, attempt, role, shown, input_tokens, output_tokens, at, damaged)


def list_events(connection: sqlite3.Connection, run_id: str, after: int, limit: int) -> tuple[EventRecord, ...]:
    with transaction(connection):
        found = connection.execute(sql.LAST_SEQ, (run_id,)).fetchone()
        if found is None or after >= found[1]:  # the usual answer for a listener that polls
            return ()
        ids = ids_of(found[0])
        ids["first"] += max(0, after) + 1
        page = {"run_id": run_id, "after": after, "limit": max(0, limit), **ids}
        rows: list[Row] = connection.execute(sql.LIST_EVENTS, page).fetchall()
        return tuple(_event(row) for row in rows)


def _event(row: Row) -> EventRecord:
    seq, at, kind, task_id, attempt, detail, started_by = row
    known = _EVENT_KINDS.get(kind)
    if known is None:
        raise StoreError(f"the stored kind of event {seq} is damaged: {kind!r}; restore a copy")
    return EventRecord(seq, at, known, task_id, attempt, detail if started_by is None else start_detail(started_by))


def list_notes(connection: sqlite3.Connection, run_id: str, after: int) -> tuple[NoteRecord, ...]:
    return tuple(NoteRecord(*row) for row in connection.execute(sql.LIST_NOTES, (run_id, after)).fetchall())
