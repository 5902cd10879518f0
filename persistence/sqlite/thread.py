"""aiosqlite's thread, used for whole functions. The only place that touches aiosqlite.

Why whole functions: a cancelled `await connection.execute(...)` goes on in the thread, and the transaction that it
belonged to stays open until somebody else's commit publishes it. A function that runs from BEGIN to COMMIT on the
thread cannot be cut in two: whoever waits for it may be cancelled, and the next function finds no transaction open.
aiosqlite has no public call for that, hence `_execute` here and nowhere else.

What is queued runs on whichever connection is there when its turn comes, so a connection is replaced between two
functions without any of those who wait noticing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING, Concatenate, Final, ParamSpec, TypeVar, cast

import aiosqlite
import anyio
import anyio.to_thread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from threading import Thread

P = ParamSpec("P")
T = TypeVar("T")


_LEAVE_DOUBT: Final = frozenset(
    {
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CORRUPT,
        sqlite3.SQLITE_NOTADB,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_INTERNAL,
        sqlite3.SQLITE_MISUSE,
    }
)
"""Errors after which nothing may be taken for granted of the connection that met them."""
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class _Database:
    """A connection, and another one in its place before the next function where it came into doubt."""

    def __init__(self, connect: Callable[[bool], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection = connect(True)
        self._in_doubt = False
        self._look_for_damage = False

    def run(self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._in_doubt:
            self._replace()
        try:
            return function(self._connection, *args, **kwargs)
        except BaseException as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            self._look_for_damage = code in _DAMAGE or isinstance(error, UnicodeDecodeError)
            self._in_doubt = self._look_for_damage or code in _LEAVE_DOUBT or self._connection.in_transaction
            raise

    def _replace(self) -> None:
        """The old connection is closed only when there is a new one: without, it can at least still be closed later."""
        fresh = self._connect(self._look_for_damage)
        self.close()
        self._connection, self._in_doubt = fresh, False

    def close(self) -> None:
        with suppress(
            sqlite3.Error
        ):  # what was written is safe; a checkpoint that failed is made up by the next opening
            self._connection.close()


class DatabaseThread:
    """One connection on one thread of its own; functions run there one after the other, in the order of the calls.

    After an error that leaves the connection in doubt, the next function gets a new one; when there is none to be had,
    that function is not run, and the one after it tries again.
    """

    def __init__(self, connection: aiosqlite.Connection, thread: Thread, database: _Database) -> None:
        self._connection = connection
        self._thread = thread
        self._database = database

    @classmethod
    async def start(cls, connect: Callable[[bool], sqlite3.Connection]) -> DatabaseThread:
        """Start the thread and run `connect` on it; what it raises is raised here, and the thread ends. Its argument
        says whether damage is to be looked for. RuntimeError on another event loop than asyncio's.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RuntimeError(
                "a SQLiteStore needs asyncio's event loop: asyncio.run(main()), or anyio.run(main)"
            ) from None
        opened: list[_Database] = []

        def connector() -> sqlite3.Connection:
            opened.append(_Database(connect))
            return cast("sqlite3.Connection", opened[0])  # nothing but `close` is ever called by aiosqlite

        connection = aiosqlite.Connection(connector, iter_chunk_size=1)
        # A daemon, so that a program which forgets to close the store still ends; a transaction cut off by the end of
        # the process is undone like one cut off by a crash. Before 0.22 the connection was the thread itself.
        thread = cast("Thread", getattr(connection, "_thread", connection))
        thread.daemon = True
        try:
            await connection
        except BaseException:
            await _join(thread)
            for database in opened:
                database.close()
            raise
        return cls(connection, thread, opened[0])

    async def run(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function(connection, ...)` on the thread. When the caller is cancelled, the function still runs to its
        end and its outcome is lost.
        """
        execute = cast("Callable[..., Awaitable[T]]", self._connection._execute)  # pyright: ignore
        return await execute(self._database.run, function, *args, **kwargs)

    async def stop(self) -> None:
        """Let the waiting functions finish, then close the connection and end the thread."""
        with anyio.CancelScope(shield=True):
            try:
                await self._connection.close()
            except BaseException:
                await _join(self._thread)
                raise


async def _join(thread: Thread) -> None:
    """Wait for a thread that was told to end: its last words go to the event loop, which must still be there."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(thread.join)
