"""SQLiteStore, which keeps runs in a file, and MemoryStore, the same store on a private database in memory.

Theory: every call of a store is one plain function on a connection, which runs from BEGIN to COMMIT and cannot be cut.
A cancelled `await connection.execute(...)` would continue in the thread of aiosqlite, and its transaction would stay
open until the commit of another task published it. So `SQLiteStore` hands whole functions to aiosqlite, and
`MemoryStore` calls them directly.
"""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from contextlib import contextmanager
from functools import cache
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Final, Self, TypeVar, TypeVarTuple, cast

import aiosqlite
import anyio

from plait.errors import Conflict, StoreBusy, StoreError, StoreNotOpen
from plait.failpoints import reached
from plait.persistence import sql_store, tables
from plait.persistence.sql_store import SQLStore
from plait.persistence.sqlite_file import (
    BUSY_TIMEOUT_S,
    DAMAGE,
    decode_lossy,
    error_code,
    open_database,
    open_memory,
    transaction,
)
from plait.persistence.store_records import Purged

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator

    from plait.persistence.apply_events import CachedRun
    from plait.persistence.store_records import Batch, Note
    from plait.persistence.tables import Mode, Reading, Row, Write

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_HINTS: Final = {
    sqlite3.SQLITE_FULL: "free some space",
    sqlite3.SQLITE_IOERR: "check the disk",
    sqlite3.SQLITE_BUSY: f"another process has been writing for {BUSY_TIMEOUT_S:g} s; try again",
    sqlite3.SQLITE_READONLY: "check the permissions of the file and of its directory",
    sqlite3.SQLITE_CORRUPT: "the file is damaged; restore a copy",
}
_IN_THE_WAY: Final = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL})
"""The codes of what keeps a file from being written anew for the moment."""
_FILE_SIZE: Final = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"


class _OneConnection(SQLStore):
    """The calls of `Store`, each one function on the connection, which a subclass runs whole (`_call`)."""

    def __init__(self) -> None:
        self._runs: dict[str, CachedRun] = {}

    async def _call(self, function: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        raise NotImplementedError

    async def _write(self, function: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        return await self._call(function, *args)

    async def _read(self, read: Callable[[*Ts], Reading[T]], *args: *Ts) -> T:
        return await self._call(lambda connection: read_on(connection, read, *args))

    async def write(self, batch: Batch) -> None:
        await self._write(write_batch, batch, self._runs)

    async def send(self, run_id: str, note: Note) -> None:
        await self._write(_transact, sql_store.add_note(run_id, note))


class MemoryStore(_OneConnection):
    """Keeps runs in memory as long as the object lives. Implements `Store`; needs no `async with`."""

    def __init__(self) -> None:
        super().__init__()
        self._connection = open_memory()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    def __del__(self) -> None:
        self._connection.close()

    async def _call(self, function: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        try:
            return function(self._connection, *args)
        except sqlite3.Error as error:
            raise StoreError(f"the store in memory failed: {error}") from error


class SQLiteStore(_OneConnection):
    """Keeps runs in the SQLite file at `path`, through crashes and power losses. Implements `Store`; asyncio only.

    An async context manager, which can be entered again; outside of the block every call raises StoreError. Entering
    raises StoreUnusable if the file cannot be used, and then has changed nothing. Several processes may share a file.
    The modes:

    - `"create"`: open the file, or create a missing file (mode 0600, in a directory created with 0700).
    - `"existing"`: open the file; a missing file is an error. For continuing a run.
    - `"read"`: only read, even while another process writes. `write` raises StoreNotOpen.

    A `write` that raised because of the disk (full, failing, read-only, damaged) is *unknown*: the file holds the whole
    batch or nothing. Write the same batch again, over a new connection to the same file.
    """

    def __init__(self, path: str | os.PathLike[str], *, mode: Mode = "create") -> None:
        if mode not in {"create", "existing", "read"}:
            raise ValueError(f"a store's mode is 'create', 'existing' or 'read', not {mode!r}")
        if os.fspath(path) in {"", ":memory:"}:
            raise ValueError(f"a SQLiteStore needs the path of a file, not {os.fspath(path)!r}; see MemoryStore")
        super().__init__()
        self.path = Path(path).absolute()
        self.mode: Mode = mode
        self._connection: aiosqlite.Connection | None = None
        self._file: tuple[int, int] | None = None

    @property
    def files_root(self) -> Path:
        """The folder beside the real database file, named like the file with `.files` added; see FilesStore."""
        real = self.path.resolve()
        return real.parent / f"{real.name}.files"

    async def __aenter__(self) -> Self:
        if self._connection is not None:
            raise StoreError(f"the store {self.path} is open already; use one object for each opening")
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "a SQLiteStore needs asyncio's event loop: asyncio.run(main()), or anyio.run(main)"
            ) from None
        self._file = None
        self._connection = await _on_a_thread(_WholeFunctions(self._open))
        try:
            await self._call(lambda _: None)  # opens the file
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Finish all calls and close the file. A second call does nothing."""
        connection, self._connection, self._runs = self._connection, None, {}
        if connection is not None:
            with anyio.CancelScope(shield=True):
                await connection.close()

    async def purge(self, run_ids: Collection[str]) -> Purged:
        """Delete all of the runs, so that no byte of the runs is left in the file or in the WAL.

        Raises Conflict, and deletes nothing, if a run has not ended (completed, failed or cancelled) or has an owner.
        Raises StoreError like `write`. Unknown ids are ignored. A cancelled call is still finished.

        After the deletion the file is written anew, which takes time and free space in proportion to the rest; other
        writers wait meanwhile. If another process prevents the writing, `Purged.remains` has the reason.
        """
        return await self._write(_purge, tuple(run_ids))

    async def transact(self, writing: Reading[T]) -> T:
        """Run the statements of `writing` in one transaction, and return its result."""
        return await self._write(_transact, writing)

    async def _write(self, function: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        if self.mode == "read":
            raise StoreNotOpen(f"the store {self.path} was opened for reading only; open it with mode 'existing'")
        if self._connection is not None:
            self._check_identity()
        return await self._call(function, *args)

    async def _call(self, function: Callable[[sqlite3.Connection, *Ts], T], *args: *Ts) -> T:
        if self._connection is None:
            raise StoreNotOpen(f"the store {self.path} is not open; use it inside `async with`")
        results: list[T] = []

        def whole(connection: sqlite3.Connection) -> None:
            results.append(function(connection, *args))

        try:
            # If the caller is cancelled, the function still runs to its end.
            await self._connection.execute_fetchall(cast("str", whole))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            code = error_code(error)
            hint = f"; {_HINTS[code]}" if code in _HINTS else ""
            kind = StoreBusy if code == sqlite3.SQLITE_BUSY else StoreError
            raise kind(f"the store {self.path} failed: {error}{hint}") from error
        return results.pop()  # the thread keeps `whole` until the next call, and would keep the result

    def _open(self, look_for_damage: bool) -> sqlite3.Connection:
        """Return the first connection, or a new connection to the same file. Runs on the thread."""
        if self._file is None:
            connection = open_database(self.path, self.mode, look_for_damage=look_for_damage)
            self._file = self._identity()
            return connection
        self._check_identity()
        mode = "existing" if self.mode == "create" else self.mode
        return open_database(self.path, mode, look_for_damage=look_for_damage)

    def _check_identity(self) -> None:
        if self._identity() != self._file:
            # SQLite would write into the removed file, or the log beside an empty one, and every write would succeed.
            raise StoreError(
                f"the store {self.path} was removed or replaced, or emptied, while in use; put it back, or start again"
            )

    def _identity(self) -> tuple[int, int] | None:
        try:
            file_stat = self.path.stat()
        except OSError:
            return None
        return (file_stat.st_dev, file_stat.st_ino) if file_stat.st_size else None


class _WholeFunctions:
    """What aiosqlite takes for a connection: `execute_fetchall(function)` calls the function on its thread.

    The connection behind is replaced before the next function if its state is in doubt, as after every error of SQLite
    but a lock: SQLite cannot know whether a commit that failed during a flush has reached the disk.
    """

    def __init__(self, connect: Callable[[bool], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection: sqlite3.Connection | None = None
        self._is_usable = False
        self._look_for_damage = True

    def execute(self, function: Callable[[sqlite3.Connection], None], _parameters: object) -> Self:
        if not self._is_usable:
            fresh = self._connect(self._look_for_damage)  # if it fails, the old connection stays, to be closed later
            self.close()
            self._connection, self._is_usable = fresh, True
        assert self._connection is not None
        try:
            function(self._connection)
        except BaseException as error:
            code = error_code(error)
            self._look_for_damage = code in DAMAGE or isinstance(error, UnicodeDecodeError)
            is_sqlite_error = code not in {sqlite3.SQLITE_OK, sqlite3.SQLITE_BUSY}
            self._is_usable = not (self._look_for_damage or is_sqlite_error or self._connection.in_transaction)
            raise
        return self

    def fetchall(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()  # all commits are safe, and the next opening repeats a failed checkpoint


async def _on_a_thread(functions: _WholeFunctions) -> aiosqlite.Connection:
    """Return a connection of aiosqlite whose thread is a daemon, so that a program ends without closing the store.
    SQLite then undoes an open transaction, as after a crash.
    """
    made: list[aiosqlite.Connection] = []

    def make() -> None:
        made.append(aiosqlite.Connection(lambda: cast("sqlite3.Connection", functions), iter_chunk_size=1))

    maker = Thread(target=make, daemon=True)  # a thread is a daemon if the thread that makes it is one
    maker.start()
    maker.join()
    return await made[0]


# Writes: from BEGIN to COMMIT, all or nothing.


def _change(connection: sqlite3.Connection, write: Write, rows: list[Row]) -> None:
    changed = 0
    for start in range(0, len(rows), write.at_once):
        some = rows[start : start + write.at_once]
        changed += connection.execute(tables.for_each_row(write, len(some)), [*chain.from_iterable(some)]).rowcount
    if write.key and changed != len(rows):
        raise StoreError(f"the store is damaged: {len(rows) - changed} rows of {write.table} are missing")


def write_batch(connection: sqlite3.Connection, batch: Batch, runs: dict[str, CachedRun]) -> None:
    """Apply the changes that are not applied yet, all or nothing. Raises Fenced, Conflict, or an error of sqlite3."""
    run = runs.pop(batch.run_id, None)
    with _refused_values():
        with sql_store.without_collections(), transaction(connection):
            reached("txn.begun")
            run = _apply(connection, batch, run)
            reached("txn.before_commit")
        reached("txn.after_commit")
    if run is not None and run.head.owner is not None:
        runs[batch.run_id] = run


@contextmanager
def _refused_values() -> Generator[None]:
    """Raise Conflict for a value that the database refuses in the block."""
    try:
        yield
    except UnicodeDecodeError:  # a message of SQLite quotes a damaged page: the value is not the cause
        raise
    except (UnicodeEncodeError, OverflowError, ValueError, sqlite3.DataError, sqlite3.IntegrityError) as error:
        raise Conflict(f"a value cannot be stored: {error}") from error


def _apply(connection: sqlite3.Connection, batch: Batch, run: CachedRun | None) -> CachedRun | None:
    """Return the run after the batch; None if nothing was left to apply."""
    if run is not None and connection.execute(tables.GET_LAST, (batch.run_id,)).fetchone() != run.head.last_written:
        run = None
    applied = _rows_of(connection, sql_store.apply_batch(batch, run))
    if applied is None:
        return None
    for rows in applied.segments:
        for write, of_one in rows.items():
            if of_one:
                _change(connection, write, of_one)
    write, values = applied.head
    _change(connection, write, [(*values, batch.run_id)])
    return applied.run


def _transact(connection: sqlite3.Connection, writing: Reading[T]) -> T:
    with _refused_values(), transaction(connection):
        return _rows_of(connection, writing)


def _purge(connection: sqlite3.Connection, run_ids: Collection[str]) -> Purged:
    connection.execute("PRAGMA secure_delete = ON").fetchall()
    (before,) = connection.execute(_FILE_SIZE).fetchone()
    deleted = _transact(connection, sql_store.delete_runs(run_ids))
    remains = wipe(connection)
    (after,) = connection.execute(_FILE_SIZE).fetchone()
    return Purged(deleted, max(0, before - after), remains)


def wipe(connection: sqlite3.Connection) -> str | None:
    """Remove deleted bytes from the file and from the WAL. Return the reason if the removal has to wait, else None.

    Secure deletion alone is not enough: rows that were overwritten or moved earlier may have left bytes in used pages.
    VACUUM writes every page anew, and the checkpoint empties the WAL.
    """
    try:
        connection.execute("VACUUM")
        (busy, _, _) = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.OperationalError as error:
        if error_code(error) not in _IN_THE_WAY:
            raise
        return f"the runs are deleted, but the file could not be rewritten ({error}); purge again later"
    if busy:
        return "the runs are deleted, but another process is still reading the old pages; purge again later"
    return None


# Reads: whole results, never a cursor, of one state of the database.

_NOW: Final = "(julianday('now') - 2440587.5) * 86400.0"
_WORDS: Final = {
    "among": "IN (SELECT value FROM json_each(?))",
    "named": "(SELECT * FROM tasks WHERE task_id IN (SELECT value FROM json_each(?)) AND run_id = ?)",
    # All processes that share the file have the clock of one host.
    "expired": f"(owner_id IS NOT NULL AND (lease_expires_at IS NULL OR lease_expires_at < {_NOW}))",
    "now": _NOW,
    "lock": "",
    "bytes_of": "length",
    "bytes": "BLOB",
}


@cache
def _in_sqlite(statement: str) -> str:
    return statement.format_map(_WORDS)


def _rows_of(connection: sqlite3.Connection, reading: Reading[T]) -> T:
    try:
        statement, values = next(reading)
        while True:
            parameters = [json.dumps(value) if isinstance(value, list) else value for value in values]
            statement, values = reading.send(connection.execute(_in_sqlite(statement), parameters))
    except StopIteration as done:
        return cast("T", done.value)


def read_on(connection: sqlite3.Connection, read: Callable[[*Ts], Reading[T]], *args: *Ts) -> T:
    """Read in one transaction, by a function of sql_store.py.

    If the file holds bytes that are no UTF-8, the reading begins again with a lossy decoder. The checksum then shows
    the damaged record, and the other records can still be read.
    """
    try:
        with transaction(connection, "BEGIN"):
            return _rows_of(connection, read(*args))
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    except sql_store.WRONG_TYPES as error:
        raise StoreError(
            f"a stored row is damaged: a value has the wrong type ({error}); restore a copy of the store"
        ) from error
    connection.text_factory = decode_lossy
    try:
        return read_on(connection, read, *args)
    finally:
        connection.text_factory = str
