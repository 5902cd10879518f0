"""A time limit for each call of a store; every failure of a call becomes a StoreError."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio

from plait.errors import StoreError
from plait.events import RunCreated, TasksAdded
from plait.persistence.store_protocol import ServerStore, Store, files_root, server_of
from plait.persistence.store_records import Batch
from plait.runner.asyncio_cancellation import Cancels

T = TypeVar("T")
TASKS_WITHIN_LIMIT = 100_000
"""Most tasks that a store adds within its usual limit, which no run may miss for its size alone. SQLite takes about 7 s
for a million.
"""


def bounded(store: Store, seconds: float) -> Store:
    """Return `store` with a limit of `seconds` for each call. After a timeout, as after an exception, the result of a
    write is unknown. A write that adds tasks has as long again for each TASKS_WITHIN_LIMIT of them.
    """
    return store if isinstance(store, _Bounded) else cast("Store", _Bounded(store, seconds))


class _Bounded:
    def __init__(self, store: Store, seconds: float) -> None:
        self._store, self._seconds = store, seconds
        self.server: ServerStore | None = server_of(store)
        """The store itself, without a time limit, if it is on a server."""

    @property
    def files_root(self) -> Path | None:
        return files_root(self._store)

    async def write(self, batch: Batch) -> None:
        added = sum(len(event.tasks) for event in batch.events if isinstance(event, RunCreated | TasksAdded))
        await _answer(self._store.write(batch), self._seconds * (1 + added // TASKS_WITHIN_LIMIT))

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._store, name))

    async def _call(self, method: Callable[..., Awaitable[T]], *arguments: object, **options: object) -> T:
        return await _answer(method(*arguments, **options), self._seconds)


async def _answer(call: Awaitable[T], seconds: float) -> T:
    cancels = Cancels()
    with anyio.move_on_after(seconds) as limit:
        try:
            return await call
        except StoreError:
            raise
        except asyncio.CancelledError as error:
            if limit.cancel_called or cancels.since:
                raise
            raise StoreError(f"the store raised {error!r}, but plait had not cancelled the call") from error
        except Exception as error:
            # A third-party store must not end the run, whatever the exception.
            raise StoreError(f"{type(error).__name__}: {error}") from error
    raise StoreError(f"the store did not answer within {seconds:g} s")
