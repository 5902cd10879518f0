"""aiosqlite's thread, used for whole functions. The only place that touches aiosqlite.

Why whole functions: a cancelled `await connection.execute(...)` goes on in the thread, and the transaction that it
belonged to stays open until somebody else's commit publishes it. A function that runs from BEGIN to COMMIT on the
thread cannot be cut in two: whoever waits for it may be cancelled, and the next function finds no transaction open.
aiosqlite has no public call for that, hence `_execute` here and nowhere else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

import aiosqlite
import anyio
import anyio.to_thread

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable
    from threading import Thread

P = ParamSpec("P")
T = TypeVar("T")


class DatabaseThread:
    """One connection on one thread of its own; functions run there one after the other, in the order of the calls."""

    def __init__(self, connection: aiosqlite.Connection, thread: Thread, database: sqlite3.Connection) -> None:
        self._connection = connection
        self._thread = thread
        self._database = database

    @classmethod
    async def start(cls, connect: Callable[[], sqlite3.Connection]) -> DatabaseThread:
        """Start the thread and run `connect` on it; what it raises is raised here, and the thread ends."""
        opened: list[sqlite3.Connection] = []

        def connector() -> sqlite3.Connection:
            opened.append(connect())
            return opened[0]

        connection = aiosqlite.Connection(connector, iter_chunk_size=1)
        # A daemon, so that a program which forgets to close the store still ends; a transaction cut off by the end of
        # the process is undone like one cut off by a crash. Before 0.22 the connection was the thread itself.
        thread = cast("Thread", getattr(connection, "_thread", connection))
        thread.daemon = True
        try:
            await connection
        except BaseException:
            await _ended(thread)
            for database in opened:
                database.close()
            raise
        return cls(connection, thread, opened[0])

    async def run(
        self, function: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Run `function(database, ...)` on the thread. When the caller is cancelled, the function still runs to its
        end and its outcome is lost.
        """
        execute = cast("Callable[..., Awaitable[T]]", self._connection._execute)  # pyright: ignore
        return await execute(function, self._database, *args, **kwargs)

    async def stop(self) -> None:
        """Let the waiting functions finish, then close the connection and end the thread."""
        with anyio.CancelScope(shield=True):
            try:
                await self._connection.close()
            except BaseException:
                await _ended(self._thread)
                raise


async def _ended(thread: Thread) -> None:
    """Wait for a thread that was told to end: its last words go to the event loop, which must still be there."""
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(thread.join)
