"""The write-ahead log (WAL) beside a database file, and whether the log belongs to the file.

SQLite finds a log by name alone. After a crash, a copy of the database that is restored beside the old log gets the
latest pages of the old database.
"""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from plait.persistence.errors import StoreBusy, StoreError
from plait.persistence.sqlite.transaction import decode_lossy

if TYPE_CHECKING:
    from collections.abc import Generator

_PATIENCE: Final = "PRAGMA busy_timeout = 5000"
"""The value of `connection.BUSY_TIMEOUT_S`, in milliseconds."""
_HEADER_BYTES: Final = 32
_MAGIC: Final = (b"\x37\x7f\x06\x82", b"\x37\x7f\x06\x83")
"""The first bytes of a log."""


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


class LogWatch:
    """Notices before and after each write that another program removed or cut the log of an open database.

    Theory: SQLite never looks at the length of the log, so the next frames would be written behind a hole, and each
    later commit would be lost with the process. SQLite itself shortens a log only after moving its contents into the
    database: to no byte (a checkpoint), or while writing the first frames after a new header. So a shorter log that
    begins with the old header was cut. A log without a byte was cut too if its contents are still needed.

    Reading the log drops no lock: SQLite locks the database file and the index of the log, never the log.
    """

    def __init__(self, path: Path) -> None:
        """Watch the log of the database at the real path `path`, which is open."""
        self._database = path
        self._log_path = f"{path}-wal"
        self._descriptor = -1
        self._inode = 0
        self._size = 0
        self._header = b""
        self._cut = ""
        self._last_user: sqlite3.Connection | None = None
        self._look()

    def check(self, connection: sqlite3.Connection) -> None:
        """Raise StoreError if the log was cut, at each call. A removed log is created again."""
        if self._cut:
            raise StoreError(self._cut)
        try:
            size = os.stat(self._log_path).st_size  # noqa: PTH116 - runs before each write, in half of the time
        except OSError:
            recreate_wal(connection)
            return
        if size < self._size:
            self._examine(connection, size)

    def note_write(self) -> None:
        """Remember the log after a write. Raises StoreError if the log was cut during the write.

        A log without a byte is examined before the next write: a write without changes leaves such a log, and so does a
        checkpoint of another process.
        """
        size, header = self._size, self._header
        if not self._look():
            return
        if self._size == 0:
            self._size = max(size, 1)
        elif self._header[:4] not in _MAGIC or (self._size < size and self._read_header() == header):
            raise self._refuse(size, self._size)

    def close(self) -> None:
        """Forget the log. Called once the connection of the writer is closed."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        if self._last_user is not None:
            self._last_user.close()

    def _look(self) -> bool:
        """Read the header and the size of the log. Return whether the log can be read.

        The order matters, because other processes begin the log anew at any time: a size read before the header might
        be that of the log before.
        """
        try:
            found = os.stat(self._log_path)  # noqa: PTH116
            if found.st_ino != self._inode or self._descriptor < 0:
                self._open(found.st_ino)
            self._header = self._read_header()
            self._size = os.fstat(self._descriptor).st_size if self._header else 0
        except OSError:  # removed, which the next check notices, or no descriptor is left
            return False
        return True

    def _read_header(self) -> bytes:
        return os.pread(self._descriptor, _HEADER_BYTES, 0)

    def _open(self, inode: int) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        self._descriptor, self._inode = os.open(self._log_path, os.O_RDONLY), inode

    def _examine(self, connection: sqlite3.Connection, size: int) -> None:
        """Raise StoreError unless SQLite has shortened the log to `size`."""
        before, header = self._size, self._header
        if size == 0:
            self._check_needless(connection, before)
            self._look()
        elif self._look() and self._header == header != b"":
            raise self._refuse(before, size)

    def _check_needless(self, connection: sqlite3.Connection, before: int) -> None:
        """Raise StoreError if SQLite needs the contents of the log, which has no byte."""
        try:
            with _without_patience(connection):
                busy, frames, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_IOERR_SHORT_READ:
                raise
            raise self._refuse(before, 0) from error
        if busy and frames > 0 and is_checkpointed(self._database):
            raise StoreBusy(
                f"another program has emptied {self._log_path}; nothing is lost, and writing goes on when no other "
                f"process reads {self._database}"
            )

    def _refuse(self, before: int, size: int) -> StoreError:
        self._cut = (
            f"another program has cut {self._log_path} from {before:,} to {size:,} bytes: the latest writes are lost, "
            f"and nothing more is written; end all processes that use the store, then resume the run"
        )
        # The last connection to close would move a part of a transaction into the database. A connection that only
        # reads cannot, so it has to be the last.
        self._last_user = sqlite3.connect(f"{self._database.as_uri()}?mode=ro", uri=True, check_same_thread=False)
        with suppress(sqlite3.Error):
            self._last_user.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return StoreError(self._cut)


@contextmanager
def _without_patience(connection: sqlite3.Connection) -> Generator[None]:
    """Wait for no other process, because each write tries again."""
    connection.execute("PRAGMA busy_timeout = 0").fetchall()
    try:
        yield
    finally:
        connection.execute(_PATIENCE).fetchall()


def recreate_wal(connection: sqlite3.Connection) -> None:
    """Create the log again after another program has removed the log of an open database.

    Writes to the removed log would be lost with its last process. The contents of the removed log are moved into the
    database first. The new log has to wait while other processes have the database open, and use the removed log.
    """
    try:
        with _without_patience(connection):
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            connection.execute("PRAGMA journal_mode = DELETE").fetchall()
            connection.execute("PRAGMA journal_mode = WAL").fetchall()
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise


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
