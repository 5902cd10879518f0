"""Read records. Reads of several statements see one state of the database: REPEATABLE READ, read only."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from plait.persistence.postgres.connection import escaped

from plait.persistence.errors import StoreError
from plait.persistence.old_tables.checksum import damaged, row_checksum
from plait.persistence.old_tables.decode import (
    COUNTED,
    attempt_record,
    completion_event,
    event_record,
    message_record,
    note_record,
    paused_collector,
    placed_end_messages,
    placed_message,
    run_head,
    start_event,
    task_record,
    whole_settings,
)
from plait.persistence.old_tables.task_cache import ids_of
from plait.persistence.postgres import statements as sql
from plait.persistence.records import EventKind, RunRecord
from plait.persistence.rules import RunHead
from plait.usage import NO_USAGE

if TYPE_CHECKING:
    from plait.persistence.postgres.connection import Connection

    from plait.persistence.records import AttemptRecord, EventRecord, MessageRecord, NoteRecord, TaskRecord
    from plait.usage import Usage

_MOST = (1 << 63) - 1


def _one_state(connection: Connection) -> Any:
    return connection.transaction(isolation="repeatable_read", readonly=True)


async def read_head(
    connection: Connection, run_id: str, *, settings: bool, lock: bool = False
) -> tuple[int, RunHead, Usage] | None:
    """Return the number and the head of the run with the usage of all attempts, or None if there is no such run.

    `lock` keeps others from writing to the run until the transaction ends. Raises StoreError if the row is damaged.
    """
    row = await connection.fetchrow(sql.LOCK_HEAD if lock else sql.GET_HEAD, run_id)
    if row is None:
        return None
    return run_head(tuple(row)[:-1], await _settings(connection, run_id) if settings else "")


async def _settings(connection: Connection, run_id: str) -> str:
    number, settings, checksum = await connection.fetchrow(sql.GET_SETTINGS, run_id)
    pieces = () if settings else await connection.fetch(sql.LIST_PIECES, number)
    return whole_settings(run_id, settings, checksum, pieces)


async def get_run(connection: Connection, run_id: str) -> RunRecord | None:
    async with _one_state(connection):
        row = await connection.fetchrow(sql.GET_HEAD, run_id)
        if row is None:
            return None
        settings = await _settings(connection, run_id)
        counts = await _counts(connection, [run_id])
    return _run(tuple(row), settings, counts.get(run_id, {}))


async def _counts(connection: Connection, run_ids: list[str]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for run_id, status, count in await connection.fetch(sql.COUNT_TASKS, list(map(escaped, run_ids))):
        counts.setdefault(run_id, {})[status] = count
    return counts


def _run(row: tuple[Any, ...], settings: str, counts: dict[str, int]) -> RunRecord:
    """Return the run with the row `row` of GET_HEAD. Raises StoreError if the row is damaged."""
    *stored, lease_has_expired = row
    _, head, usage = run_head(tuple(stored), settings)
    if not COUNTED.issuperset(counts):
        raise damaged(row[1], "the status of a task")
    return head.record(row[1], counts, usage, lease_has_expired=lease_has_expired)


async def list_runs(connection: Connection, limit: int) -> tuple[RunRecord, ...]:
    return await _list(connection, sql.LIST_RUNS, limit)


async def list_claimable(connection: Connection, limit: int) -> tuple[RunRecord, ...]:
    return tuple(run for run in await _list(connection, sql.LIST_CLAIMABLE, limit) if not run.damaged)


async def _list(connection: Connection, statement: str, limit: int) -> tuple[RunRecord, ...]:
    async with _one_state(connection):
        rows = [tuple(row) for row in await connection.fetch(statement, min(max(0, limit), _MOST))]
        counts = await _counts(connection, [row[1] for row in rows])
    return tuple(_listed(row, counts.get(row[1], {})) for row in rows)


def _listed(row: tuple[Any, ...], counts: dict[str, int]) -> RunRecord:
    """Return the run, without settings; marked as damaged if the row does not fit its checksum."""
    try:
        return _run(row, "", counts)
    except StoreError as error:
        head = RunHead(name="", settings="", created_at="", status="failed", error=str(error))
        return replace(head.record(str(row[1]), {}, NO_USAGE), damaged=True)


async def list_tasks(connection: Connection, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
    rows = await connection.fetch(sql.LIST_TASKS, run_id, task_id)
    if not rows:
        return ()
    first: int = rows[0][0]
    if task_id is None:
        first = first >> 32 << 32
    with paused_collector():
        return tuple(task_record(run_id, task, tuple(row)) for task, row in enumerate(rows, first))


async def list_attempts(connection: Connection, run_id: str, task_id: str | None) -> tuple[AttemptRecord, ...]:
    rows = await connection.fetch(sql.LIST_ATTEMPTS, run_id, task_id)
    return tuple(attempt_record(run_id, tuple(row)) for row in rows)


async def list_messages(connection: Connection, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
    async with _one_state(connection):
        messages = [placed_message(tuple(row)) for row in await connection.fetch(sql.LIST_MESSAGES, run_id, task_id)]
        for row in await connection.fetch(sql.LIST_END_MESSAGES, run_id, task_id):
            messages += placed_end_messages(run_id, task_id, tuple(row))
    messages.sort(key=attrgetter("place"))
    return tuple(message_record(task_id, position, message) for position, message in enumerate(messages))


async def list_events(
    connection: Connection, run_id: str, after: int, limit: int, kind: EventKind | None = None
) -> tuple[EventRecord, ...]:
    found = await connection.fetchrow(sql.LAST_SEQ, run_id)
    if found is None or after >= found[1] or limit <= 0:  # the usual answer for a listener that polls
        return ()
    ids, limit = ids_of(found[0]), min(limit, _MOST)
    after = max(0, after)
    page = ids["first"] + after + 1, ids["last"], limit
    async with _one_state(connection):
        rows = await connection.fetch(sql.LIST_OTHER_EVENTS, run_id, after, kind, limit)
        events = [event_record(tuple(row)) for row in rows]
        if kind in {None, EventKind.TASK_STARTED}:
            events += [start_event(run_id, tuple(row)) for row in await connection.fetch(sql.LIST_STARTS, *page)]
        if kind in {None, EventKind.TASK_COMPLETED}:
            rows = await connection.fetch(sql.LIST_COMPLETIONS, *page)
            events += [completion_event(run_id, tuple(row)) for row in rows]
    events.sort(key=attrgetter("seq"))
    return tuple(events[:limit])


async def list_notes(connection: Connection, run_id: str, after: int) -> tuple[NoteRecord, ...]:
    return tuple(note_record(tuple(row)) for row in await connection.fetch(sql.LIST_NOTES, run_id, after))


async def silence(connection: Connection, run_id: str) -> float:
    """See `PostgresStore.silence`."""
    found: float | None = await connection.fetchval(sql.SILENCE, run_id)
    return found or 0.0


async def session_ids(connection: Connection) -> set[str]:
    """Return the backends' session ids of all tasks in all runs."""
    found: set[str] = set()
    for *row, checksum in await connection.fetch(sql.LIST_SESSIONS):
        run_id, task_id, session_id, _ = row
        if checksum != row_checksum(*row):
            raise damaged(run_id, f"a session of task {task_id!r}")
        found.add(session_id)
    return found
