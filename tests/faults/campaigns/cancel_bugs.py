"""Bugs that the cancellations have to show, each planted by changing one thing while it is looked for."""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel

from plait import events
from plait.events import LeaseRenewed
from plait.persistence import SQLiteStore, sqlite_store
from plait.runner.engine import checkpointer as checkpoint
from plait.runner.engine import executor as execution
from plait.runner.engine import lease


class _Unshielding:
    """anyio, but for what shields."""

    def __getattr__(self, name: str) -> Any:
        return getattr(anyio, name)

    def CancelScope(self, *, shield: bool = False) -> anyio.CancelScope:  # noqa: N802 - stands for the class
        return anyio.CancelScope()


def _writer_not_shielded() -> AbstractContextManager[object]:
    return mock.patch.object(checkpoint, "anyio", _Unshielding())


@contextmanager
def _statement_by_statement() -> Generator[None]:
    """A batch is begun, written and committed by three calls of the thread instead of one."""

    async def in_steps(self: Any, function: Any, *args: Any) -> Any:
        await self._call(_execute, "BEGIN IMMEDIATE")
        written = await self._call(function, *args)
        await self._call(_execute, "COMMIT")
        return written

    with (
        mock.patch.object(SQLiteStore, "_write", in_steps),
        mock.patch.object(sqlite_store, "transaction", return_value=nullcontext()),
    ):
        yield


def _execute(connection: sqlite3.Connection, statement: str) -> None:
    connection.execute(statement)


def _nothing_settled() -> AbstractContextManager[object]:
    """A run that is cancelled is left as it stands: nobody says what became of the tasks under way."""

    leaving = execution.Executor.finish

    def leave(self: Any) -> list[events.Event]:
        return leaving(self)[-1:]

    return mock.patch.object(execution.Executor, "finish", leave)


def _claim_not_given_back() -> AbstractContextManager[object]:
    def released(_at: str, **_due: object) -> LeaseRenewed:
        return LeaseRenewed("2026-11-21T23:00:00.000Z", 0.0)

    return mock.patch.object(lease, "RunReleased", released)


def _store_not_closed() -> AbstractContextManager[object]:
    """A store that is cancelled while it closes leaves its thread going."""

    async def close(self: Any) -> None:
        connection, self._connection = self._connection, None
        await anyio.lowlevel.checkpoint()
        if connection is not None:
            await connection.close()

    return mock.patch.object(SQLiteStore, "close", close)


BUGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "the writer's shield removed": _writer_not_shielded,
    "a transaction in three calls": _statement_by_statement,
    "what was under way not settled": _nothing_settled,
    "a cancelled claim not given back": _claim_not_given_back,
    "a cancelled close leaves the thread": _store_not_closed,
}
