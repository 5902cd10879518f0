"""Delete runs without a trace in the file, and measure the size of each run."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from plait.persistence.delete_runs import Purged
from plait.persistence.errors import Conflict
from plait.persistence.old_tables.checksum import damaged, row_checksum
from plait.persistence.old_tables.task_cache import ids_of
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.transaction import transaction

if TYPE_CHECKING:
    from collections.abc import Sequence


_IN_THE_WAY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})


def purge(connection: sqlite3.Connection, run_ids: Sequence[str]) -> Purged:
    """See `SQLiteStore.purge`."""
    connection.execute("PRAGMA secure_delete = ON").fetchall()
    before = _bytes(connection)
    deleted = _delete(connection, run_ids)
    remains = _wipe(connection)
    return Purged(deleted, max(0, before - _bytes(connection)), remains)


def _delete(connection: sqlite3.Connection, run_ids: Sequence[str]) -> tuple[str, ...]:
    with transaction(connection, "BEGIN IMMEDIATE"):
        found = {run_id: connection.execute(sql.GET_OWNERSHIP, (run_id,)).fetchone() for run_id in run_ids}
        stored = {run_id: row for run_id, row in found.items() if row is not None}
        refused = [reason for run_id, row in stored.items() if (reason := _reason_to_keep(run_id, *row))]
        if refused:
            raise Conflict(f"nothing was deleted: {'; '.join(refused)}")
        for run_id in stored:
            (number,) = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
            for statement in sql.DELETE_RUN:
                connection.execute(statement, {"run_id": run_id, "run": number, **ids_of(number)})
        connection.execute(sql.DELETE_UNUSED_BLOBS)
    return tuple(stored)


def _reason_to_keep(
    run_id: str, has_ended: int, status: str, owner_pid: int | None, owner_host: str | None
) -> str | None:
    if not has_ended:
        return f"run {run_id!r} is {status}: resume or cancel it first"
    if owner_host is not None:
        return f"run {run_id!r} is in use by process {owner_pid} on {owner_host}: stop that first"
    return None


def _wipe(connection: sqlite3.Connection) -> str | None:
    """Remove deleted bytes from the file and from the WAL. Return the reason if the removal has to wait, else None.

    Secure deletion alone is not enough: rows that were overwritten or moved earlier may have left bytes in used pages.
    VACUUM writes every page anew, and the checkpoint empties the WAL.
    """
    try:
        connection.execute("VACUUM")
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in _IN_THE_WAY:
            raise
        return f"the runs are deleted, but the file could not be written anew ({error}); purge again later"
    if busy:
        return "the runs are deleted, but another process is still reading the old pages; purge again later"
    return None


def _bytes(connection: sqlite3.Connection) -> int:
    pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
    page_size: int = connection.execute("PRAGMA page_size").fetchone()[0]
    return pages * page_size


def run_sizes(connection: sqlite3.Connection) -> dict[str, int]:
    """See `SQLiteStore.run_sizes`."""
    with transaction(connection):
        return dict(connection.execute(sql.RUN_SIZES).fetchall())


def session_ids(connection: sqlite3.Connection) -> set[str]:
    """See `SQLiteStore.session_ids`."""
    found: set[str] = set()
    for *row, checksum in connection.execute(sql.LIST_SESSIONS).fetchall():
        run_id, task_id, session_id, _ = row
        if checksum != row_checksum(*row):
            raise damaged(run_id, f"a session of task {task_id!r}")
        found.add(session_id)
    return found
