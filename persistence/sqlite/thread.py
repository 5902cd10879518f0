"""The thread of aiosqlite, used for whole functions. The only module that uses aiosqlite.

Theory: a cancelled `await connection.execute(...)` continues in the thread, and its transaction stays open until the
commit of another task publishes the transaction. A function that runs from BEGIN to COMMIT on the thread cannot be cut:
the waiting task may be cancelled, and the next function finds no open transaction. aiosqlite has no public call for
whole functions, hence `_execute` and `_thread`, here and nowhere else; pyproject.toml bounds the version.

A queued function uses the connection that is current at its turn. A connection can therefore be replaced between two
functions, invisible to the waiting tasks.
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
"""Errors that leave the state of the connection in doubt."""
_DAMAGE: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class _Database:
    """A connection, replaced before the next function if its state is in doubt."""

    def __init__(self, connect: Callable[[bool], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connection = connect(True)
        self._in_doubt = False
        self._look_for_damage = False

    def run(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """Return the result of `function` as the only element of a list, for the caller to take out: the thread keeps
        the list until the next function, and would keep a large result.
        """
        if self._in_doubt:
            self._replace()
        try:
            return [function(self._connection, *args, **kwargs)]
        except BaseException as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            self._look_for_damage = code in _DAMAGE or isinstance(error, UnicodeDecodeError)
            self._in_doubt = self._look_for_damage or code in _LEAVE_DOUBT or self._connection.in_transaction
            raise

    def _replace(self) -> None:
        """Open a new connection, then close the old. If opening fails, the old connection stays, to be closed later."""
        fresh = self._connect(self._look_for_damage)
        self.close()
        self._connection, self._in_doubt = fresh, False

    def close(self) -> None:
        with suppress(sqlite3.Error):  # all commits are safe, and the next opening repeats a failed checkpoint
            self._connection.close()


class DatabaseThread:
    """One connection on its own thread. Functions run one after the other, in the order of the calls.

    After an error that leaves the connection in doubt, the next function gets a new connection. If opening fails, the
    error is raised instead of running the function, and the function after tries again.
    """

    def __init__(self, connection: aiosqlite.Connection, thread: Thread, database: _Database) -> None:
        self._connection = connection
        self._thread = thread
        self._database = database

    @classmethod
    async def start(cls, connect: Callable[[bool], sqlite3.Connection]) -> DatabaseThread:
        """Start the thread and call `connect(look_for_damage)` on the thread.

        An error of `connect` ends the thread and is raised. Raises RuntimeError on another event loop than asyncio's.
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
            return cast("sqlite3.Connection", opened[0])  # aiosqlite calls nothing but `close`

        connection = aiosqlite.Connection(connector, iter_chunk_size=1)
        # A daemon, so that a program ends without closing the store. SQLite then undoes an open transaction, as after a
        # crash.
        thread = connection._thread  # pyright: ignore[reportPrivateUsage]
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
        """Return the result of `function(connection, ...)`, run on the thread.

        If the caller is cancelled, the function still runs to the end, and the result is lost.
        """
        execute = cast("Callable[..., Awaitable[list[T]]]", self._connection._execute)  # pyright: ignore
        return (await execute(self._database.run, function, *args, **kwargs)).pop()

    async def stop(self) -> None:
        """Wait for the queued functions, then close the connection and end the thread. Shielded from cancellation."""
        with anyio.CancelScope(shield=True):
            try:
                await self._connection.close()
            except BaseException:
                await _join(self._thread)
                raise


async def _join(thread: Thread) -> None:
    """Wait for the end of the thread, which calls the event loop last, so the loop must not be closed before."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(thread.join)
