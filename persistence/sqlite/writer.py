"""Write one batch in one transaction, as one plain function on the database's thread.

Theory: the task cache of the run holds the status of each task. A change that is not allowed from the status is
refused; any other change updates the cache and becomes rows. The rows are gathered by statement, and each statement
runs once over all of its rows. The tables always allow a change that the cache allows, because a write by another
process between two batches of the owner shows in the head of the run. On any error the transaction is rolled back and
the cache is dropped.
"""

from __future__ import annotations

import sqlite3
import struct
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.persistence import rules
from plait.persistence.changes import RunCreated, RunReleased
from plait.persistence.errors import Conflict
from plait.persistence.failpoints import reached
from plait.persistence.old_tables.apply import OF_TASKS, ChangeApplier
from plait.persistence.old_tables.checksum import content_checksum, message_checksum
from plait.persistence.old_tables.pieces import cut_settings
from plait.persistence.old_tables.rows import BatchRows, run_columns
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.bulk import StoredTasks, read_originals, write_rows
from plait.persistence.sqlite.reader import read_head
from plait.persistence.sqlite.transaction import transaction
from plait.usage import NO_USAGE

if TYPE_CHECKING:
    from plait.persistence.changes import Batch, Change
    from plait.persistence.records import Note
    from plait.persistence.rules import RunHead
    from plait.usage import Usage

TaskCaches = dict[str, StoredTasks]
"""The task caches of the runs that are being written, by run id."""


def write_batch(connection: sqlite3.Connection, batch: Batch, caches: TaskCaches) -> None:
    """Apply the changes that are not applied yet, all or nothing. Raises Fenced, Conflict, or an error of sqlite3."""
    cache = caches.pop(batch.run_id, None)
    try:
        with transaction(connection, "BEGIN IMMEDIATE"):
            reached("txn.begun")
            cache = _apply(connection, batch, cache)
            reached("txn.before_commit")
        reached("txn.after_commit")
    except UnicodeDecodeError:  # a message of SQLite quotes a damaged page: the batch is not the cause
        raise
    except (
        UnicodeEncodeError,
        OverflowError,
        ValueError,
        struct.error,
        sqlite3.DataError,
        sqlite3.IntegrityError,
    ) as error:
        raise Conflict(f"run {batch.run_id!r}: a value of the batch cannot be stored: {error}") from error
    if cache is not None and not isinstance(batch.changes[-1], RunReleased):
        caches[batch.run_id] = cache


def send_note(connection: sqlite3.Connection, run_id: str, note: Note) -> None:
    """Add the note to the run's inbox. Raises Conflict, or an error of sqlite3."""
    try:
        with transaction(connection, "BEGIN IMMEDIATE"):
            is_known = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone() is not None
            if is_known:
                (number,) = connection.execute(sql.NEXT_NOTE, (run_id,)).fetchone()
                row = run_id, number, note.kind, note.at, note.task_id
                connection.execute(sql.ADD_NOTE, (*row, note.body, message_checksum(row, note.body)))
    except UnicodeDecodeError:
        raise
    except (UnicodeEncodeError, sqlite3.DataError, sqlite3.IntegrityError) as error:
        raise Conflict(f"run {run_id!r}: the note cannot be stored: {error}") from error
    if not is_known:
        raise Conflict(f"run {run_id!r} is not in the store, so no note can be sent to its owner")


def _apply(connection: sqlite3.Connection, batch: Batch, cache: StoredTasks | None) -> StoredTasks | None:
    run_id = batch.run_id
    found = read_head(connection, run_id, settings=any(isinstance(one, RunCreated) for one in batch.changes[:1]))
    before = None if found is None else found[1]
    skipped = rules.count_applied(batch, before)
    changes = batch.changes[skipped:]
    if not changes:
        return None
    rows = BatchRows(run_id)
    if found is None:
        number, head = _new_run(connection, run_id, changes[0])
        usage = NO_USAGE
    else:
        number, head, usage = found
    if cache is None or not cache.is_current(connection, number, head):
        cache = StoredTasks(connection, run_id, number)
    first_seq = batch.first_seq + skipped
    if not OF_TASKS.issuperset(map(type, changes)):
        for seq, change in enumerate(changes, first_seq):
            head = rules.advance_head(head, change, seq, run_id)
    cache.begin_batch(changes)
    applier = ChangeApplier(run_id, cache, rows, read_originals(connection, changes))
    applier.apply(first_seq, changes)
    for key, (size, text) in rows.blobs_by_key.items():
        connection.execute(sql.ADD_BLOB, (key, size, text))
    write_rows(connection, rows)
    usage += applier.usage
    _set_head(connection, (number, run_id), replace(head, last_seq=batch.last_seq), usage, changed=head is not before)
    cache.mark_written(head, batch.last_seq)
    return cache


def _new_run(connection: sqlite3.Connection, run_id: str, change: Change) -> tuple[int, RunHead]:
    head = rules.new_head(change)
    pieces = cut_settings(head.settings)
    kept = "" if pieces else head.settings
    checksum = content_checksum(run_id, head.settings)
    connection.execute(sql.ADD_RUN, (run_id, head.name, kept, checksum, head.created_at))
    (number,) = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
    for position, (key, size, piece) in enumerate(pieces):
        connection.execute(sql.ADD_BLOB, (key, size, piece))
        connection.execute(sql.ADD_PIECE, (number, position, key))
    return number, head


def _set_head(
    connection: sqlite3.Connection, run: tuple[int, str], head: RunHead, usage: Usage, *, changed: bool
) -> None:
    """Update the row of the run, which has a new checksum after each batch. Unless `changed`, only the number of the
    last change and the usage differ.
    """
    columns = run_columns(*run, head, usage)
    if changed:
        connection.execute(sql.SET_HEAD, (*columns, head.epoch, run[0]))
    else:
        connection.execute(sql.SET_LAST_SEQ, (head.last_seq, *columns[9:16], columns[-1], run[0]))
