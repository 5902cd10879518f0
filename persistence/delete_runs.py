"""Delete runs without a trace, and measure the size of each run."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from plait.errors import Conflict
from plait.persistence.sqlite_file import transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TEXTS: Final = {
    "runs": ("settings error policy_state", "settings_sha256"),
    "tasks": ("prompt spec question asked answers", "prompt_sha256"),
    "attempts": ("prompt text data error traceback", "prompt_sha256 text_sha256"),
    "messages": ("content", "content_sha256"),
    "notes": ("body", ""),
}
"""The columns of each table with texts, and those with keys of `texts`."""
_KEYS: Final = [(table, key) for table, (_, keys) in _TEXTS.items() for key in keys.split()]

GET_OWNERSHIP: Final = """SELECT run_id, status = 'completed' OR status = 'failed' OR status = 'cancelled', status,
    owner_pid, owner_host FROM runs WHERE run_id = ?"""
DELETE_RUN: Final = tuple(
    f"DELETE FROM {table} WHERE run_id = ?" for table in ("notes", "events", "messages", "attempts", "tasks", "runs")
)
DELETE_UNUSED_TEXTS: Final = "DELETE FROM texts WHERE sha256 IN (SELECT sha256 FROM texts" + (
    "".join(f" EXCEPT SELECT {key} FROM {table} WHERE {key} IS NOT NULL" for table, key in _KEYS) + ")"
)


@dataclass(frozen=True, slots=True)
class Purged:
    """The effect of `SQLiteStore.purge` or `PostgresStore.purge`."""

    run_ids: tuple[str, ...]
    """The deleted runs, without unknown ids."""
    freed_bytes: int
    """The reduction of the file's size; 0 for a server."""
    remains: str | None = None
    """None if no byte of the deleted runs is left in the store. Else one line with the reason.

    Another purge, with the same ids or with none, removes the rest.
    """


def reason_to_keep(run_id: str, has_ended: bool, status: str, owner_pid: int | None, owner_host: str | None) -> str:
    """Return why the run with the row of GET_OWNERSHIP may not be deleted; empty if it may."""
    if not has_ended:
        return f"run {run_id!r} is {status}: resume or cancel it first"
    if owner_host is not None:
        return f"run {run_id!r} is in use by process {owner_pid} on {owner_host}: stop that first"
    return ""


def sizes_by_run(size: Callable[[str], str]) -> str:
    """Return the query for the bytes of text by run id. `size` is the bytes of a text in the dialect."""
    parts: list[str] = []
    for table, (columns, _) in _TEXTS.items():
        total = " + ".join(f"coalesce({size(column)}, 0)" for column in columns.split())
        parts.append(f"SELECT run_id, {total} AS bytes FROM {table}")
    keys = " UNION ".join(f"SELECT run_id, {key} AS sha256 FROM {table}" for table, key in _KEYS)
    parts.append(f"SELECT k.run_id, {size('x.content')} FROM ({keys}) AS k JOIN texts AS x ON x.sha256 = k.sha256")
    return f"SELECT run_id, sum(bytes) FROM ({' UNION ALL '.join(parts)}) AS s GROUP BY run_id"


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
        found = [connection.execute(GET_OWNERSHIP, (run_id,)).fetchone() for run_id in dict.fromkeys(run_ids)]
        stored = [row for row in found if row is not None]
        refused = [reason for row in stored if (reason := reason_to_keep(*row))]
        if refused:
            raise Conflict(f"nothing was deleted: {'; '.join(refused)}")
        for run_id, *_ in stored:
            for statement in DELETE_RUN:
                connection.execute(statement, (run_id,))
        connection.execute(DELETE_UNUSED_TEXTS)
    return tuple(row[0] for row in stored)


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
        return dict(connection.execute(sizes_by_run("length(CAST({} AS BLOB))".format)).fetchall())
