"""The write-ahead log beside a database file, and whether it belongs to the file at all.

SQLite does not know: it knows a log by its name alone. Whoever puts a copy of the database back after a crash, and
leaves the log of the crash where it is, has SQLite lay the latest pages of the old file over the copy.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from plait.persistence.sqlite.transaction import decode_lossy

_PATIENCE: Final = "PRAGMA busy_timeout = 5000"
"""As connections are opened with: opening.BUSY_TIMEOUT_S."""


def wal_path(path: Path) -> Path:
    """Where the log of the database at `path` lies: links are followed, as SQLite does."""
    real = path.resolve()
    return real.with_name(f"{real.name}-wal")


def is_checkpointed(path: Path) -> bool:
    """Whether all that was written is in the database itself: then nobody has it open for writing."""
    try:
        return wal_path(path).stat().st_size == 0
    except FileNotFoundError:
        return True


def has_wal(path: Path) -> bool:
    """Whether the database at `path`, a real path, has a log, as it has while it is open for writing."""
    return os.path.exists(f"{path}-wal")  # noqa: PTH110 - asked before each write, in a third of the time


def recreate_wal(connection: sqlite3.Connection) -> None:
    """For a log that somebody removed under the connection, with which all that goes into it would be lost as soon as
    its processes die: what it holds goes into the database, and there is one by its name again. The latter has to wait
    while others have the database open, who go on with the one that has no name.
    """
    connection.execute("PRAGMA busy_timeout = 0").fetchall()  # with each write it is tried again
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        connection.execute("PRAGMA journal_mode = DELETE").fetchall()
        connection.execute("PRAGMA journal_mode = WAL").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
    finally:
        connection.execute(_PATIENCE).fetchall()


def repair_advice(path: Path) -> str:
    """What to do about the damaged database at `path`, which is only looked at."""
    if is_checkpointed(path) or not _is_whole_alone(path):
        return "restore a copy"
    log = wal_path(path)
    return (
        f"the file alone is whole, with {log.name} it is not: if it is a copy that was put back, that log is of the "
        f"file before, so end what uses it and remove {log.name} and {log.name[: -len('wal')]}shm; else restore a copy"
    )


def _is_whole_alone(path: Path) -> bool:
    try:
        # Immutable: SQLite then neither looks for a log nor takes locks.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = decode_lossy
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except (sqlite3.Error, UnicodeDecodeError):
        return False
    return bool(verdict == "ok")
