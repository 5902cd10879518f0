"""Decisions of a person about a task of a run that another process looks at."""

from __future__ import annotations

import time

import pytest

from plait import DAG, ParallelRunner, PersonBackend, Store, Task
from plait.clock_and_ids import Clock
from plait.errors import RunOwned
from plait.events import Owner, RunClaimed, RunReleased
from plait.persistence import Batch, MemoryStore
from plait.persistence.store_records import TaskRecord
from plait.runner.engine.lease import claim_for_this_process, unregister
from tests.support.fakes import QuickClock
from tests.support.stores.faulty_store import FaultyStore

AT = "2026-01-01T00:00:00.000Z"


class Releasing(Clock):
    """A clock whose sleep is the moment in which the other process releases the run."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store

    async def sleep(self, seconds: float) -> None:
        record = await self._store.get_run("r")
        assert record is not None
        if record.owner is not None:
            await self._store.write(Batch("r", record.epoch, record.last_seq + 1, (RunReleased(AT),)))
        await super().sleep(seconds)


async def owned(store: Store, expires: float) -> Owner:
    """The owner of a run that waits for a person."""
    await ParallelRunner(PersonBackend(), store=store).run(DAG([Task("a", prompt="Which one?")]), "r")
    record = await store.get_run("r")
    assert record is not None
    owner = claim_for_this_process(AT)
    await store.write(Batch("r", record.epoch, record.last_seq + 1, (RunClaimed(AT, owner, expires),)))
    return owner


async def test_a_decision_waits_for_a_process_that_only_looks_at_the_run(store: Store) -> None:
    owner = await owned(store, time.time() + 60)
    await ParallelRunner(PersonBackend(), store=store, clock=Releasing(store)).runs.settle("r", "a", "done", "this")
    unregister(owner)
    assert [(task.status, task.text) for task in await store.list_tasks("r")] == [("completed", "this")]


async def test_an_answered_run_that_nobody_runs_is_due_for_a_worker(store: Store) -> None:
    runner = ParallelRunner(PersonBackend(), store=store)
    await runner.run(DAG([Task("a", prompt="Which one?")]), "r")
    assert await store.list_claimable() == ()
    assert await runner.runs.answer("r", "a", "this")
    assert [run.run_id for run in await store.list_claimable()] == ["r"]


async def test_a_decision_that_waits_reads_the_tasks_once() -> None:
    class Reading(FaultyStore):
        reads = 0

        async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
            self.reads += 1
            return await super().list_tasks(run_id, only)

    store, clock = Reading(MemoryStore()), QuickClock()
    owner, began = await owned(store, clock.wall() + 60), clock.wall()
    with pytest.raises(RunOwned):
        await ParallelRunner(PersonBackend(), store=store, clock=clock).runs.settle("r", "a", "done", "this")
    unregister(owner)
    assert store.reads == 1
    assert clock.wall() - began == pytest.approx(2.0, abs=0.3)
