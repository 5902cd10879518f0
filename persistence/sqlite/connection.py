"""Open the database file: created atomically, checked before any change, and configured the same way every time.

Theory: two rules. Only SQLite opens an existing database, because the POSIX locks of a file vanish when the process
closes *any* descriptor of the file, and another process may then delete a live WAL. A new file gets its name only when
complete: the file is made under another name and linked, so an empty file under the name is always an accident.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import sqlite3
import stat
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Final, Literal

from plait.persistence.errors import StoreUnusable
from plait.persistence.failpoints import reached
from plait.persistence.sqlite.schema import DATABASE_FORMAT, SCHEMA, create_tables, expected_schema
from plait.persistence.sqlite.statements import CHECK_REFERENCES
from plait.persistence.sqlite.transaction import decode_lossy
from plait.persistence.sqlite.wal import is_checkpointed, repair_advice, wal_path
from plait.persistence.sqlite.wal_frames import DOUBT, LogState, damaged_log, restore_log, state_of_log

_LOG: Final = logging.getLogger(__name__)
Mode = Literal["create", "existing", "read"]

APPLICATION_ID: Final = 0x706C6174  # "plat"
BUSY_TIMEOUT_S: Final = 5.0
OLDEST_SQLITE: Final = (3, 37, 0)  # STRICT tables

_ABANDONED_S: Final = 3600.0
"""Seconds after which an unfinished file is abandoned; making a file takes milliseconds."""

_HINTS: Final = {
    sqlite3.SQLITE_BUSY: "another process has locked it; try again",
    sqlite3.SQLITE_FULL: "check the disk",
    sqlite3.SQLITE_IOERR: "check the disk",
}

_SMALL: Final = 64 << 20
"""The bytes of a file that is also checked before it is only read, which takes 0.1 s at most."""
_PAGE_SIZE: Final = "PRAGMA page_size = 8192"
"""For new files. Rows of one to four thousand bytes waste space in pages of 4,096 bytes, because a row that does not
fit moves to the next page. Pages above 8,192 bytes save no more space, and each commit writes more.
"""
_DURABLE: Final = "PRAGMA synchronous = FULL"
_SETTINGS: Final = (
    "PRAGMA foreign_keys = ON",
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA cache_size = -32768",
    "PRAGMA wal_autocheckpoint = 1000",
    "PRAGMA journal_size_limit = 67108864",
)


def open_database(path: Path, mode: Mode, *, look_for_damage: bool = True) -> sqlite3.Connection:
    """Return a configured connection. Raises StoreUnusable, and then has changed nothing that existed.

    With `look_for_damage` the log, the tables, every page and the references between rows are checked. In mode "read"
    they are checked if file and log are small, so that a large file opens at once.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreUnusable(f"SQLite {sqlite3.sqlite_version} is too old for {path}: 3.37 or later is needed")
    try:
        if mode == "create" and not _exists(path):
            _create(path)
        _check_file(path)
        if mode != "read" and not os.access(path, os.W_OK):
            raise StoreUnusable(f"{path} may not be written; change its permissions, or only read its runs")
        if mode != "read":
            _remove_abandoned(path)
            _inspect(path, "ro", thoroughly=look_for_damage)
            return _open_for_writing(path)
        access = _access_for_reading(path)
        _inspect(path, access, thoroughly=look_for_damage and size_of(path) <= _SMALL)
        return _connect(path, access)
    except sqlite3.Error as error:
        hint = _HINTS.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "check its permissions and its file system")
        raise StoreUnusable(f"{path} cannot be opened: {error}; {hint}") from error
    except OSError as error:
        raise StoreUnusable(f"{path} cannot be used: {error.strerror}; choose another place for the store") from error


def _exists(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:
        return False
    return True


def _check_file(path: Path) -> None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreUnusable(f"{path} does not exist; check the path, or run something first") from None
    if not stat.S_ISREG(found.st_mode):
        raise StoreUnusable(f"{path} is not a file; name a database file inside it instead")
    if found.st_size == 0:
        raise StoreUnusable(f"{path} is empty, so it is not a store; remove it, or choose another path")


_Access = Literal["ro", "rw", "ro&immutable=1"]


def _access_for_reading(path: Path) -> _Access:
    """Return how `path` can be read.

    A reader locks files beside the database, which have to exist or to be created. If neither is possible, the database
    is read without locks, which is safe as long as no process writes.
    """
    try:
        with closing(_connect(path, "ro")) as connection:
            connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:  # any other error occurs again in the caller, and is reported there
        locks_fail = error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
        if locks_fail and not os.access(path.parent, os.W_OK) and is_checkpointed(path):
            return "ro&immutable=1"
    return "ro"


def _connect(path: Path, access: _Access) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode={access}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=256,
    )


def _inspect(path: Path, access: _Access, *, thoroughly: bool) -> None:
    """Raise StoreUnusable if the file is foreign, has another format, or is damaged.

    Reads through a read-only connection, which never checkpoints the WAL of a foreign database.
    """
    try:
        with closing(_connect(path, access)) as connection:
            connection.text_factory = decode_lossy  # the report on a damaged page may quote bytes of the page
            (application_id,) = connection.execute("PRAGMA application_id").fetchone()
            version: int = connection.execute("PRAGMA user_version").fetchone()[0]
            if application_id != APPLICATION_ID or version < 1:
                raise StoreUnusable(f"{path} belongs to another program; choose another path")
            if version != DATABASE_FORMAT:
                raise _of_another_format(path, version)
            check_journal(path, connection)
            if thoroughly:
                _check_log(path)
                check_tables(path, connection)
                _check_pages(path, connection)
                check_references(path, connection)
    except UnicodeDecodeError as error:  # a message of SQLite quotes the damaged page
        raise _damaged(path, "bytes that are no text where text has to be") from error
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in {sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT}:
            raise _damaged(path, str(error)) from error
        raise


def _of_another_format(path: Path, version: int) -> StoreUnusable:
    reads = f"this plait reads format {DATABASE_FORMAT} only"
    if version > DATABASE_FORMAT:
        return StoreUnusable(f"{path} was made by a newer plait (database format {version}); {reads}. Upgrade plait")
    return StoreUnusable(
        f"{path} was made by a development version of plait (database format {version}); {reads}. "
        f"Start a new file, e.g. --store NEW.db"
    )


def size_of(path: Path) -> int:
    """Return the bytes of the database and of the log."""
    sizes = 0
    for file in (path, wal_path(path)):
        with suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


def _check_log(path: Path) -> None:
    state = state_of_log(wal_path(path))
    if state is LogState.DAMAGED:
        raise StoreUnusable(f"{damaged_log(path)}; {restore_log(path)}")
    if state is LogState.IN_DOUBT:
        _LOG.warning("%s: %s; look at the run that was written last", path, DOUBT)


def check_journal(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StoreUnusable if the header of the file hides the log."""
    (journal,) = connection.execute("PRAGMA journal_mode").fetchone()
    if journal != "wal" and not is_checkpointed(path):
        raise _damaged(path, "the header of the file names no log, but there is a log")


def check_tables(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StoreUnusable if the definition of a table, an index or a view is not that of `schema.sql`."""
    found = set(connection.execute(SCHEMA).fetchall())
    changed = sorted(name for _, name, *_ in expected_schema() - found)
    if changed:
        raise _damaged(path, f"the definition of {', '.join(changed)} has changed")


def check_references(path: Path, connection: sqlite3.Connection) -> None:
    """Raise StoreUnusable if a row belongs to no run or attempt. A missing blob, and a missing row with the texts of a
    copy, are reported by their readers.
    """
    for statement in CHECK_REFERENCES:
        for table, _, parent, _ in connection.execute(statement):
            if parent not in {"blobs", table}:
                raise _damaged(path, f"a row of {table} has lost its row in {parent}")


def _check_pages(path: Path, connection: sqlite3.Connection) -> None:
    # Not quick_check: equally slow, and blind to an index with missing rows.
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    if verdict != "ok":
        raise _damaged(path, str(verdict).strip().replace("\n", "; "))


def _damaged(path: Path, reason: str) -> StoreUnusable:
    return StoreUnusable(
        f"{path} is not a database or is damaged ({reason}); {repair_advice(path)}, or choose another path"
    )


def _open_for_writing(path: Path) -> sqlite3.Connection:
    connection = _connect(path, "rw")
    try:
        _use_wal(path, connection)
        connection.execute(_DURABLE)
        for setting in _SETTINGS:
            connection.execute(setting).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def _use_wal(path: Path, connection: sqlite3.Connection) -> None:
    (journal,) = connection.execute("PRAGMA journal_mode = WAL").fetchone()
    if journal != "wal":
        raise StoreUnusable(f"{path} is on a file system without shared memory (WAL); put the store on a local disk")


OWN_FOLDER = ".plait"
"""The name of the folders that plait makes for itself. Git ignores such a folder."""


def _make_folder(folder: Path) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.is_dir()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
        one.chmod(0o700)  # a umask may remove even the owner's rights
        _sync_names(one.parent)
    if missing and folder.name == OWN_FOLDER:
        with suppress(OSError):  # only saves a line in the user's own .gitignore
            descriptor = os.open(folder / ".gitignore", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            try:
                os.write(descriptor, b"*\n")
            finally:
                os.close(descriptor)


def _sync_names(folder: Path) -> None:
    """Make the names in `folder` survive a power loss. SQLite syncs the contents of files, but not our names."""
    with suppress(OSError):  # some file systems cannot sync a folder
        descriptor = os.open(folder, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create(path: Path) -> None:
    _make_folder(path.parent)
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    descriptor = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.close(descriptor)
    try:
        # SQLite gives the WAL and the index of the WAL the mode of the database, whatever the umask.
        fresh.chmod(0o600)
        with closing(_connect(fresh, "rw")) as connection:
            connection.execute(_PAGE_SIZE)
            connection.execute(_DURABLE)
            create_tables(connection)
            _use_wal(fresh, connection)
        reached("file.before_link")
        with suppress(FileExistsError):  # another process was faster, and made an equal file
            os.link(fresh, path)
        _sync_names(path.parent)
        reached("file.after_link")
    finally:
        fresh.unlink(missing_ok=True)


def unfinished_files(path: Path) -> list[Path]:
    """Return the unfinished files beside `path`: from processes that create the store now, or that died meanwhile."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.new(-journal|-wal|-shm)?")
    return sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name))


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError):  # abandoned files only waste space
        for one in unfinished_files(path):
            if time.time() - one.stat().st_mtime > _ABANDONED_S:
                one.unlink(missing_ok=True)
