"""The database file: created atomically, checked before any change, and configured the same way every time.

Theory: two rules. Only SQLite opens an existing database, because the POSIX locks of a file vanish when the process
closes *any* descriptor of the file, and another process may then delete a live WAL. A new file gets its name only when
complete: the file is made under another name and linked, so an empty file under the name is always an accident.
"""

from __future__ import annotations

import os
import re
import secrets
import sqlite3
import stat
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from plait.errors import StoreUnusable
from plait.failpoints import reached
from plait.persistence.tables import FORMAT, Mode, schema

if TYPE_CHECKING:
    from collections.abc import Generator

APPLICATION_ID: Final = 0x706C6174  # "plat"
BUSY_TIMEOUT_S: Final = 5.0
_MARKS: Final = (f"PRAGMA application_id = {APPLICATION_ID}", f"PRAGMA user_version = {FORMAT}")
OLDEST_SQLITE: Final = (3, 37, 0)  # STRICT tables

_WORDS: Final = {
    "text": "TEXT",
    "int": "INTEGER",
    "float": "REAL",
    "bytes": "BLOB",
    "table": " STRICT",
    "keyed": " STRICT, WITHOUT ROWID",
    "serial": "INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT",
}
_ABANDONED_S: Final = 3600.0
"""Seconds after which an unfinished file is abandoned; making a file takes milliseconds."""
_SMALL: Final = 64 << 20
"""The bytes of a file that is also checked before it is only read, which takes 0.1 s at most."""
_DURABLE: Final = "PRAGMA synchronous = FULL"
_SETTINGS: Final = (
    "PRAGMA trusted_schema = OFF",
    "PRAGMA cell_size_check = ON",
    "PRAGMA mmap_size = 0",
    "PRAGMA cache_size = -32768",
    "PRAGMA wal_autocheckpoint = 1000",
    "PRAGMA journal_size_limit = 67108864",
)
DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_Access: TypeAlias = Literal["ro", "rw", "ro&immutable=1"]


@contextmanager
def transaction(
    connection: sqlite3.Connection, begin: Literal["BEGIN", "BEGIN IMMEDIATE"] = "BEGIN IMMEDIATE"
) -> Generator[None]:
    """Commit at the end, and roll back at any error.

    SQLite rolls back by itself on a full disk and on an I/O error, so the state of the connection decides.
    """
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
        raise


def error_code(error: BaseException) -> int:
    """Return the primary code of an error of SQLite; SQLITE_OK for other errors."""
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)) & 0xFF


def decode_lossy(raw: bytes) -> str:
    """Decode text that may be damaged. A text factory of sqlite3."""
    return raw.decode(errors="replace")


def open_memory() -> sqlite3.Connection:
    """Return a private database in memory, with its tables."""
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    _create_tables(connection)
    return connection


def open_database(path: Path, mode: Mode, *, look_for_damage: bool = True) -> sqlite3.Connection:
    """Return a configured connection. Raises StoreUnusable, and then has changed nothing that existed.

    With `look_for_damage` the tables and every page are checked; in mode "read" only if file and log are small, so that
    a large file opens at once.
    """
    if sqlite3.sqlite_version_info < OLDEST_SQLITE:
        raise StoreUnusable(f"SQLite {sqlite3.sqlite_version} is too old for {path}: 3.37 or later is needed")
    try:
        if mode == "create" and not path.exists():
            _create(path)
        _check_file(path)
        if mode != "read" and not os.access(path, os.W_OK):
            raise StoreUnusable(f"{path} may not be written; change its permissions, or only read its runs")
        if mode != "read":
            _remove_abandoned(path)
            _inspect(path, "ro", thoroughly=look_for_damage)
            return _open_for_writing(path)
        access = _access_for_reading(path)
        _inspect(path, access, thoroughly=look_for_damage and path.stat().st_size + wal_size(path) <= _SMALL)
        return _connect(path, access)
    except sqlite3.Error as error:
        is_locked = error_code(error) == sqlite3.SQLITE_BUSY
        hint = "another process has locked it; try again" if is_locked else "check its permissions and the disk"
        raise StoreUnusable(f"{path} cannot be opened: {error}; {hint}") from error
    except OSError as error:
        raise StoreUnusable(f"{path} cannot be used: {error.strerror}; choose another place for the store") from error


def _check_file(path: Path) -> None:
    try:
        file_stat = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise StoreUnusable(f"{path} does not exist; check the path, or run something first") from None
    if not stat.S_ISREG(file_stat.st_mode):
        raise StoreUnusable(f"{path} is not a file; name a database file inside it instead")
    if file_stat.st_size == 0:
        raise StoreUnusable(f"{path} is empty, so it is not a store; remove it, or choose another path")


def wal_path(path: Path) -> Path:
    """Return the path of the log of the database. Links are followed, as SQLite does."""
    real = path.resolve()
    return real.with_name(f"{real.name}-wal")


def wal_size(path: Path) -> int:
    """Return the bytes of the log; 0 if it is empty or missing: no process has the database open for writing then."""
    try:
        return wal_path(path).stat().st_size
    except FileNotFoundError:
        return 0


def _access_for_reading(path: Path) -> _Access:
    """Return how `path` can be read.

    A reader locks files beside the database, which have to exist or to be created. If neither is possible, the database
    is read without locks, which is safe as long as no process writes.
    """
    try:
        with closing(_connect(path, "ro")) as connection:
            connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:  # any other error occurs again in the caller, and is reported there
        locks_fail = error_code(error) in {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY}
        if locks_fail and not os.access(path.parent, os.W_OK) and not wal_size(path):
            return "ro&immutable=1"
    return "ro"


def _connect(path: Path, access: _Access) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.as_uri()}?mode={access}",
        uri=True,
        timeout=BUSY_TIMEOUT_S,
        isolation_level=None,
        check_same_thread=False,
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
            if version != FORMAT:
                raise _of_another_format(path, version)
            if thoroughly and (damage := find_damage(connection)):
                raise _damaged(path, damage)
    except UnicodeDecodeError as error:  # a message of SQLite quotes the damaged page
        raise _damaged(path, "bytes that are no text where text has to be") from error
    except sqlite3.DatabaseError as error:
        if error_code(error) in DAMAGE:
            raise _damaged(path, str(error)) from error
        raise


def _of_another_format(path: Path, version: int) -> StoreUnusable:
    reads = f"this plait reads format {FORMAT} only"
    if version > FORMAT:
        return StoreUnusable(f"{path} was made by a newer plait (database format {version}); {reads}. Upgrade plait")
    return StoreUnusable(
        f"{path} was made by a development version of plait (database format {version}); {reads}. "
        f"Start a new file, e.g. --store NEW.db"
    )


def find_damage(connection: sqlite3.Connection) -> str:
    """Return what is wrong with the tables or the pages of the file; empty if they are whole."""
    with closing(open_memory()) as fresh:
        changed = sorted(name for name, _ in _tables(fresh) - _tables(connection))
    if changed:
        return f"the definition of {', '.join(changed)} has changed"
    # Not quick_check, which takes as long, and is blind to an index with missing rows.
    (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
    return "" if verdict == "ok" else str(verdict).strip().replace("\n", "; ")


def _tables(connection: sqlite3.Connection) -> frozenset[tuple[str, str | None]]:
    """Return the names and definitions, without the comments, which later versions of plait may improve."""
    rows = connection.execute("SELECT name, sql FROM sqlite_schema").fetchall()
    return frozenset((name, sql and " ".join(re.sub(r"--[^\n]*", "", sql).split())) for name, sql in rows)


def _damaged(path: Path, reason: str) -> StoreUnusable:
    return StoreUnusable(
        f"{path} is not a database or is damaged ({reason}); {repair_advice(path)}, or choose another path"
    )


def repair_advice(path: Path) -> str:
    """Return advice for the damaged database at `path`.

    SQLite finds a log by name alone: a copy that is restored beside the log of the file before gets the latest pages of
    the file before.
    """
    if not wal_size(path):
        return "restore a copy"
    log = wal_path(path).name
    return f"end its users, remove {log} and {log.removesuffix('wal')}shm, and restore a copy"


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
            connection.execute("PRAGMA page_size = 8192")
            connection.execute(_DURABLE)
            with transaction(connection):
                _create_tables(connection)
                reached("schema.before_commit")
            _use_wal(path, connection)
        reached("file.before_link")
        with suppress(FileExistsError):  # another process was faster, and made an equal file
            os.link(fresh, path)
        _sync_names(path.parent)
        reached("file.after_link")
    finally:
        fresh.unlink(missing_ok=True)


def _create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables in an empty database. `executescript` would commit a transaction first."""
    for statement in schema(_WORDS).split(";\n"):
        connection.execute(statement)
    for mark in _MARKS:
        connection.execute(mark)


def unfinished_files(path: Path) -> list[Path]:
    """Return the unfinished files beside `path`: from processes that create the store now, or that died meanwhile."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.new(-journal|-wal|-shm)?")
    return sorted(one for one in path.parent.iterdir() if name.fullmatch(one.name))


def _remove_abandoned(path: Path) -> None:
    with suppress(OSError):  # abandoned files only waste space
        for one in unfinished_files(path):
            if time.time() - one.stat().st_mtime > _ABANDONED_S:
                one.unlink()
