"""Runs executed on the backends that are stored with each run, as `plait resume` does."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from plait.persistence.protocol import Store
from plait.persistence.records import RunRecord
from plait.runner.cli.backends import BackendSet
from plait.runner.cli.commands.resume import select_backends, stored_concurrency
from plait.runner.cli.exits import CliError
from plait.runner.cli.stored_backends import FileOptions, StoredBackends
from plait.runner.engine.inbox import is_to_be_cancelled
from plait.runner.errors import PlaitError
from plait.runner.recovery.resume import ResumeOptions
from plait.runner.run import Run
from plait.runner.service import RunService
from plait.runner.state.codec import decode_dag
from plait.runner.state.owner import LEASE_SECONDS
from plait.runner.state.stored_run import stored_record

_AS_STORED = FileOptions()


@asynccontextmanager
async def resumed_run(
    store: Store,
    record: RunRecord,
    how: ResumeOptions,
    files: FileOptions = _AS_STORED,
    *,
    lease: float = LEASE_SECONDS,
) -> AsyncGenerator[Run]:
    """Open the backends stored with the run, and yield the resumed run, which the caller enters. Leaving the block
    closes the backends. Raises as `plait resume`.
    """
    tasks = await store.list_tasks(record.run_id)
    if await is_to_be_cancelled(store, record):  # cancelling needs no backend
        yield BackendSet({}).make_runner({}, store=store, lease=lease).start_resume(record.run_id)
        return
    stored = StoredBackends.of(record, files)
    dag = decode_dag(record, tasks)
    backend_set, names, _ = select_backends(record, dag, tasks, stored, retry_failed=how.retry_failed)
    async with backend_set.open(names) as made:
        runner = backend_set.make_runner(made, store=store, concurrency=stored_concurrency(record), lease=lease)
        yield runner.start_resume(record.run_id, retry_failed=how.retry_failed, answers=how.answers, policy=how.policy)


class StoredRunService(RunService):
    """A RunService that executes each run on the backends stored with the run."""

    def __init__(self, store: Store) -> None:
        super().__init__(BackendSet({}).make_runner({}, store=store))

    @asynccontextmanager
    async def open_run(self, run_id: str, how: ResumeOptions) -> AsyncGenerator[Run]:
        """Yield the resumed run. Raises PlaitError also if a backend of the run cannot be had."""
        store, record = await stored_record(self._store, run_id)
        try:
            async with resumed_run(store, record, how) as run:
                yield run
        except CliError as error:
            raise PlaitError(error.message) from error
