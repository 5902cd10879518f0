"""`TimeoutStore`: a store with a time limit for each call. Every failure becomes a StoreError."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import anyio

from plait.errors import StoreError
from plait.events import RunCreated, TasksAdded
from plait.persistence.store_protocol import ServerStore, Store, files_root, server_of
from plait.persistence.store_records import (
    AttemptRecord,
    Batch,
    EventRecord,
    MessageRecord,
    Note,
    NoteRecord,
    RunRecord,
    TaskRecord,
)
from plait.runner.asyncio_cancellation import Cancels

T = TypeVar("T")
TASKS_WITHIN_LIMIT = 100_000
"""Most tasks that a store adds within its usual limit, which no run may miss for its size alone. SQLite takes about 7 s
for a million.
"""


class TimeoutStore:
    """`store` with a limit of `timeout` seconds for each call. After a timeout, as after an exception, the result of a
    write is unknown. A write that adds tasks has as long again for each TASKS_WITHIN_LIMIT of them.
    """

    def __init__(self, store: Store, timeout: float) -> None:
        self._store = store
        self._timeout = timeout
        self.server: ServerStore | None = server_of(store)
        """The store itself, without a time limit, if it is on a server."""

    @property
    def files_root(self) -> Path | None:
        """See FilesStore."""
        return files_root(self._store)

    async def write(self, batch: Batch) -> None:
        """See Store."""
        added = sum(len(one.tasks) for one in batch.events if isinstance(one, RunCreated | TasksAdded))
        await self._answer(self._store.write(batch), self._timeout * (1 + added // TASKS_WITHIN_LIMIT))

    async def get_run(self, run_id: str) -> RunRecord | None:
        """See Store."""
        return await self._answer(self._store.get_run(run_id))

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_runs(limit))

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_claimable(limit))

    async def list_tasks(self, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_tasks(run_id, task_id))

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_attempts(run_id, task_id))

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_messages(run_id, task_id))

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: str | None = None
    ) -> tuple[EventRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_events(run_id, after, limit, kind))

    async def send(self, run_id: str, note: Note) -> None:
        """See Store."""
        await self._answer(self._store.send(run_id, note))

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        """See Store."""
        return await self._answer(self._store.list_notes(run_id, after))

    async def _answer(self, call: Awaitable[T], timeout: float | None = None) -> T:
        cancels, timeout = Cancels(), self._timeout if timeout is None else timeout
        with anyio.move_on_after(timeout) as limit:
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
        raise StoreError(f"the store did not answer within {timeout:g} s")
