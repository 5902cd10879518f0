"""Read records, by plain functions on the database's thread that return whole results, never a cursor."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from plait.persistence.errors import StoreError
from plait.persistence.old_tables.checksum import WRONG_TYPES, damaged
from plait.persistence.old_tables.decode import (
    COUNTED,
    attempt_record,
    completion_event,
    event_record,
    message_record,
    note_record,
    of_wrong_type,
    paused_collector,
    placed_end_messages,
    placed_message,
    run_head,
    start_event,
    task_record,
    whole_settings,
)
from plait.persistence.old_tables.task_cache import ids_of
from plait.persistence.records import (
    AttemptRecord,
    EventKind,
    EventRecord,
    MessageRecord,
    NoteRecord,
    RunRecord,
    TaskRecord,
)
from plait.persistence.rules import RunHead, lease_has_expired
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.transaction import decode_lossy, transaction
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from collections.abc import Callable

Row = tuple[Any, ...]
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
    except WRONG_TYPES as error:
        raise of_wrong_type(error) from error
    connection.text_factory = decode_lossy
    try:
        return function(connection, *args, **kwargs)
    except WRONG_TYPES as error:
        raise of_wrong_type(error) from error
    finally:
        connection.text_factory = str


def read_head(connection: sqlite3.Connection, run_id: str, *, settings: bool) -> tuple[int, RunHead, Usage] | None:
    """Return the number and the head of the run with the usage of all attempts, or None if there is no such run.

    Without `settings` the settings of the head are empty: all inputs are part of the settings, up to many megabytes.
    Raises StoreError if the row is damaged.
    """
    row = connection.execute(sql.GET_HEAD, (run_id,)).fetchone()
    if row is None:
        return None
    return run_head(row, _settings(connection, run_id) if settings else "")


def _settings(connection: sqlite3.Connection, run_id: str) -> str:
    number, settings, checksum = connection.execute(sql.GET_SETTINGS, (run_id,)).fetchone()
    pieces = () if settings else connection.execute(sql.LIST_PIECES, (number,))
    return whole_settings(run_id, settings, checksum, pieces)


def get_run(connection: sqlite3.Connection, run_id: str) -> RunRecord | None:
    with transaction(connection):
        found = read_head(connection, run_id, settings=True)
        return None if found is None else _run(connection, run_id, *found[1:])


def list_runs(connection: sqlite3.Connection, limit: int) -> tuple[RunRecord, ...]:
    with transaction(connection):
        rows: list[Row] = connection.execute(sql.LIST_RUNS, (max(0, limit),)).fetchall()
        return tuple(_listed(connection, row) for row in rows)


def list_claimable(connection: sqlite3.Connection, limit: int) -> tuple[RunRecord, ...]:
    with transaction(connection):
        rows: list[Row] = connection.execute(sql.LIST_CLAIMABLE, (time.time(), max(0, limit))).fetchall()
        return tuple(run for run in (_listed(connection, row) for row in rows) if not run.damaged)


def _listed(connection: sqlite3.Connection, row: Row) -> RunRecord:
    """Return the run, without settings; marked as damaged if the row does not fit its checksum."""
    try:
        return _run(connection, row[1], *run_head(row, "")[1:])
    except StoreError as error:
        head = RunHead(name="", settings="", created_at="", status="failed", error=str(error))
        return replace(head.record(str(row[1]), {}, NO_USAGE), damaged=True)


def _run(connection: sqlite3.Connection, run_id: str, head: RunHead, usage: Usage) -> RunRecord:
    counts: dict[str, int] = dict(connection.execute(sql.COUNT_TASKS, (run_id,)).fetchall())
    if not COUNTED.issuperset(counts):  # rows are counted without their checksums
        raise damaged(run_id, "the status of a task")
    # All processes that share the file have the clock of one host.
    return head.record(run_id, counts, usage, lease_has_expired=lease_has_expired(head, time.time()))


def list_tasks(connection: sqlite3.Connection, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
    # Row by row: a list of all rows would double the number of objects for the garbage collector.
    with transaction(connection), paused_collector():
        if task_id is None:
            found = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
        else:
            found = connection.execute(sql.GET_TASK, (run_id, task_id)).fetchone()
        if found is None:
            return ()
        ids = ids_of(found[0]) if task_id is None else {"first": found[0], "last": found[0]}
        return _tasks(connection, run_id, ids, -1)


def page_of_tasks(connection: sqlite3.Connection, run_id: str, position: int, limit: int) -> tuple[TaskRecord, ...]:
    """Return at most `limit` tasks of the run from the position on."""
    with transaction(connection):
        found = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
        if found is None:
            return ()
        ids = ids_of(found[0])
        return _tasks(connection, run_id, {**ids, "first": ids["first"] + position}, limit)


def _tasks(connection: sqlite3.Connection, run_id: str, ids: dict[str, int], limit: int) -> tuple[TaskRecord, ...]:
    numbered = enumerate(connection.execute(sql.LIST_TASKS, {**ids, "limit": limit}), ids["first"])
    return tuple(task_record(run_id, task, row) for task, row in numbered)


def list_attempts(connection: sqlite3.Connection, run_id: str, task_id: str | None) -> tuple[AttemptRecord, ...]:
    with transaction(connection):
        if task_id is None:
            found = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
            rows = [] if found is None else connection.execute(sql.LIST_ATTEMPTS, ids_of(found[0])).fetchall()
        else:
            found = connection.execute(sql.GET_TASK, (run_id, task_id)).fetchone()
            rows = [] if found is None else connection.execute(sql.LIST_TASK_ATTEMPTS, {"task": found[0]}).fetchall()
        return tuple(attempt_record(run_id, row) for row in rows)


def list_messages(connection: sqlite3.Connection, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
    with transaction(connection):
        found = connection.execute(sql.GET_TASK, (run_id, task_id)).fetchone()
        if found is None:
            return ()
        task = {"task": found[0]}
        messages = [placed_message(row) for row in connection.execute(sql.LIST_MESSAGES, task)]
        for row in connection.execute(sql.LIST_END_MESSAGES, task):
            messages += placed_end_messages(run_id, task_id, row)
    messages.sort(key=attrgetter("place"))
    return tuple(message_record(task_id, position, message) for position, message in enumerate(messages))


def list_events(
    connection: sqlite3.Connection, run_id: str, after: int, limit: int, kind: EventKind | None = None
) -> tuple[EventRecord, ...]:
    with transaction(connection):
        found = connection.execute(sql.LAST_SEQ, (run_id,)).fetchone()
        if found is None or after >= found[1]:  # the usual answer for a listener that polls
            return ()
        ids = ids_of(found[0])
        ids["first"] += max(0, after) + 1
        page = {"run_id": run_id, "after": after, "limit": max(0, limit), "kind": kind, **ids}
        events = [event_record(row) for row in connection.execute(sql.LIST_OTHER_EVENTS, page)]
        if kind in {None, EventKind.TASK_STARTED}:
            events += [start_event(run_id, row) for row in connection.execute(sql.LIST_STARTS, page)]
        if kind in {None, EventKind.TASK_COMPLETED}:
            events += [completion_event(run_id, row) for row in connection.execute(sql.LIST_COMPLETIONS, page)]
    events.sort(key=attrgetter("seq"))
    return tuple(events[: max(0, limit)])


def list_notes(connection: sqlite3.Connection, run_id: str, after: int) -> tuple[NoteRecord, ...]:
    return tuple(note_record(row) for row in connection.execute(sql.LIST_NOTES, (run_id, after)).fetchall())
