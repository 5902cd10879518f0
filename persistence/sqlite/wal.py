"""The write-ahead log (WAL) beside a database file, and whether the log belongs to the file.

SQLite finds a log by name alone. After a crash, a copy of the database that is restored beside the old log gets the
latest pages of the old database.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final

from plait.persistence.sqlite.transaction import decode_lossy

_PATIENCE: Final = "PRAGMA busy_timeout = 5000"
"""The value of `connection.BUSY_TIMEOUT_S`, in milliseconds."""


def wal_path(path: Path) -> Path:
    """Return the path of the log of the database. Links are followed, as SQLite does."""
    real = path.resolve()
    return real.with_name(f"{real.name}-wal")


def is_checkpointed(path: Path) -> bool:
    """Return whether the log is empty or missing: no process has the database open for writing then."""
    try:
        return wal_path(path).stat().st_size == 0
    except FileNotFoundError:
        return True


def has_wal(path: Path) -> bool:
    """Return whether the database at the real path `path` has a log. An open database always has a log."""
    return os.path.exists(f"{path}-wal")  # noqa: PTH110 - runs before each write, in a third of the time


def recreate_wal(connection: sqlite3.Connection) -> None:
    """Create the log again after another program has removed the log of an open database.

    Writes to the removed log would be lost with its last process. The contents of the removed log are moved into the
    database first. The new log has to wait while other processes have the database open, and use the removed log.
    """
    connection.execute("PRAGMA busy_timeout = 0").fetchall()  # each write tries again
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
    """Return advice for the damaged database at `path`. Changes nothing."""
    if is_checkpointed(path) or not _is_whole_alone(path):
        return "restore a copy"
    log = wal_path(path)
    return (
        f"the file alone is whole, the file with {log.name} is not: if the file is a restored copy, the log belongs to "
        f"the file before, so end its users and remove {log.name} and {log.name[: -len('wal')]}shm; else restore a copy"
    )


def _is_whole_alone(path: Path) -> bool:
    try:
        # Immutable: SQLite then ignores the log and takes no locks.
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as connection:
            connection.text_factory = decode_lossy
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    except (sqlite3.Error, UnicodeDecodeError):
        return False
    return bool(verdict == "ok")
