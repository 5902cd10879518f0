"""Runners for stored runs on the backends that are stored with each run, as `plait resume` uses them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from plait.errors import TaskNotFound
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli.backends import BackendSet
from plait.runner.cli.resume_command import select_backends
from plait.runner.cli.stored_backends import (
    FileOptions,
    StoredBackends,
    cancelling_runner,
    inspecting_runner,
    stored_concurrency,
)
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.engine.lease import LEASE_SECONDS
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.state.codec import decode_dag
from plait.runner.state.stored_run import has_ended, stored_record

_AS_STORED = FileOptions()


class StoredRunners:
    """The runners of the runs in `store`. `files` name replacements of stored backends; `lease` is that of the runners,
    in seconds.
    """

    def __init__(self, store: Store, files: FileOptions = _AS_STORED, *, lease: float = LEASE_SECONDS) -> None:
        self._store = store
        self._files = files
        self._lease = lease

    @asynccontextmanager
    async def open(
        self, run_id: str, *, retry_failed: bool = False, task_id: str | None = None
    ) -> AsyncGenerator[ParallelRunner]:
        """Open a runner on the backends that the run still needs, or on the backend of one task. Raises PlaitError."""
        record, tasks = await self._read(run_id)
        if task_id is None and has_ended(record, tasks, retry_failed):
            yield BackendSet({}).make_runner({}, store=self._store, lease=self._lease)
            return
        if task_id is None and await is_to_be_cancelled(self._store, record):
            async with cancelling_runner(self._store, record, self._files) as runner:
                yield runner
            return
        backend_set, names = self._select(record, tasks, retry_failed, task_id)
        async with backend_set.open(names) as made:
            concurrency = stored_concurrency(record) or backend_set.concurrency()
            yield backend_set.make_runner(made, store=self._store, concurrency=concurrency, lease=self._lease)

    @asynccontextmanager
    async def inspect(self, run_id: str) -> AsyncGenerator[ParallelRunner]:
        """Open a runner that can judge turns which outlived their process. Raises PlaitError."""
        record, tasks = await self._read(run_id)
        async with inspecting_runner(self._store, record, tasks, self._files) as runner:
            yield runner

    async def _read(self, run_id: str) -> tuple[RunRecord, tuple[TaskRecord, ...]]:
        _, record = await stored_record(self._store, run_id)
        return record, await self._store.list_tasks(run_id)

    def _select(
        self, record: RunRecord, tasks: tuple[TaskRecord, ...], retry_failed: bool, task_id: str | None
    ) -> tuple[BackendSet, list[str]]:
        dag = decode_dag(record, tasks)
        stored = StoredBackends.of(record, self._files)
        if task_id is None:
            backend_set, names, _ = select_backends(record, dag, tasks, stored, retry_failed=retry_failed)
            return backend_set, names
        if task_id not in dag:
            raise TaskNotFound(f"run {record.run_id} has no task {task_id!r}")
        names = [dag.backend_of(dag[task_id]) or stored.default]
        return stored.select(names), names
