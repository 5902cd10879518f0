"""Store failures: never fatal, in order, caught up; a write of unknown outcome is written again; strict is strict."""

from __future__ import annotations

import logging
import subprocess
import sys

import anyio
import pytest

from plait.persistence import Batch, MemoryStore, SQLiteStore, StoreError
from plait.runner import DAG, OwnershipLost, ParallelRunner, RunStatus, Task
from plait.runner.domain.events import RunCompleted, StoreDegraded, StoreRecovered, TaskStarted
from tests.support.fakes import Talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write
from tests.support.stores.wide import WIDE, everything_is_stored, run


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER, Fault.ODD])
@pytest.mark.parametrize("nth", range(1, 9))
async def test_one_failed_write_is_caught_up(fault: Fault, nth: int) -> None:
    store = FaultyStore(MemoryStore(), on_write(lambda n: fault if n == nth else None))
    result = await run(store).run(WIDE)
    assert result.status is RunStatus.COMPLETED
    await everything_is_stored(store.inner, result.run_id)
    assert len(result.degraded) == 1
    assert result.degraded[0].until is not None
    assert result.degraded[0].lost == 0


async def test_a_long_outage_is_caught_up_when_the_store_answers(caplog: pytest.LogCaptureFixture) -> None:
    released = anyio.Event()

    async def body(_prompt: str) -> str:
        if _prompt == "z":
            released.set()
        return "done"

    store = FaultyStore(MemoryStore(), on_write(lambda n: Fault.BEFORE if n > 1 and not released.is_set() else None))
    with caplog.at_level(logging.WARNING, logger="plait"):
        result = await ParallelRunner(body, store=store, concurrency=4).run(WIDE)
    assert result.status is RunStatus.COMPLETED
    await everything_is_stored(store.inner, result.run_id)
    (degraded,) = result.degraded
    assert degraded.until is not None and degraded.since <= degraded.until
    assert degraded.error == "planted: fails before any effect"
    text = caplog.text
    assert "store_degraded" in text and "store_recovered" in text and result.run_id in text
    assert "{{ a }}" not in text and "done" not in text.replace("store_", "")


async def test_a_store_that_fails_on_every_call_costs_the_record_and_nothing_else() -> None:
    store = FaultyStore(MemoryStore(), on_write(lambda _: Fault.BEFORE))
    result = await run(store).run(WIDE)
    assert result.status is RunStatus.COMPLETED
    assert len(result.text) == 22
    (degraded,) = result.degraded
    assert degraded.until is None
    assert degraded.lost > 2 * 22, "it says how much is not kept: of each task its start and its end, and more"
    assert await store.inner.list_runs() == ()


async def test_a_hanging_store_is_cut_off_by_its_time_out_and_then_waited_for_no_more() -> None:
    store = FaultyStore(MemoryStore(), on_write(lambda _: Fault.HANG))
    with anyio.fail_after(5):
        result = await run(store, store_timeout=0.05).run(WIDE)
    assert result.status is RunStatus.COMPLETED
    assert result.degraded[0].error == "the store did not answer within 0.05 s"


async def test_strict_makes_store_failures_fatal() -> None:
    backend = Talker()
    store = FaultyStore(MemoryStore(), on_write(lambda n: Fault.BEFORE if n == 3 else None))
    with pytest.raises(StoreError, match="planted: fails before"):
        await ParallelRunner(backend, store=store, concurrency=4, strict=True).run(WIDE, run_id="r")
    assert len(backend.prompts) < 22
    result = await ParallelRunner(backend, store=store.inner).resume("r")
    assert result.status is RunStatus.COMPLETED


async def test_strict_at_the_very_first_write_starts_nothing() -> None:
    backend = Talker()
    store = FaultyStore(MemoryStore(), on_write(lambda _: Fault.BEFORE))
    with pytest.raises(StoreError, match="planted: fails before"):
        await ParallelRunner(backend, store=store, strict=True).run(WIDE)
    assert backend.prompts == []


async def test_nothing_is_told_before_it_is_stored() -> None:
    store = MemoryStore()
    async with ParallelRunner(Talker(), store=store, concurrency=3).start(WIDE) as live:
        async for event in live.events():
            stored = {(e.kind, e.task_id) for e in await store.list_events(live.run_id)}
            if hasattr(event, "task_id") and event.kind != "task_output":
                assert (event.kind, event.task_id) in stored


async def test_degradation_is_an_event_and_never_the_last_one() -> None:
    store = FaultyStore(MemoryStore(), on_write(lambda n: Fault.BEFORE if n == 2 else None))
    async with run(store).start(WIDE) as live:
        seen = [event async for event in live.events()]
    kinds = [type(event) for event in seen]
    assert kinds.index(StoreDegraded) < kinds.index(StoreRecovered)
    assert kinds[-1] is RunCompleted


async def test_an_owner_whose_run_was_taken_over_stops_at_its_first_refused_write() -> None:
    inner = MemoryStore()
    thief = ParallelRunner(Talker(), store=inner)
    started = anyio.Event()
    go_on = anyio.Event()

    async def body(prompt: str) -> str:
        if prompt == "a":
            started.set()
            await go_on.wait()
        return prompt

    from plait.runner.state.owner import _live_here

    async with ParallelRunner(body, store=inner).start(WIDE, run_id="r") as live:
        await started.wait()
        _live_here.clear()
        taken = await thief.resume("r")
        go_on.set()
        with pytest.raises(OwnershipLost, match="run r was taken over by another process"):
            await live.result()
    assert taken.status is RunStatus.COMPLETED
    await everything_is_stored(inner, "r")


class Recording(FaultyStore):
    """Keeps every batch; holds back each write until told, so that a batch can be seen to gather."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.batches: list[Batch] = []

    async def write(self, batch: Batch) -> None:
        self.batches.append(batch)
        await super().write(batch)


async def test_a_chain_pays_one_commit_a_task() -> None:
    store = Recording()
    chain = DAG([Task(f"t{i}", depends_on=[f"t{i - 1}"] if i else []) for i in range(50)])
    await ParallelRunner(Talker(), store=store).run(chain)
    assert len(store.batches) <= 50 + 4
    both = [{type(change).__name__ for change in batch.changes} for batch in store.batches]
    assert sum({"TaskCompleted", "TaskStarted"} <= kinds for kinds in both) == 49


async def test_concurrent_completions_share_a_commit() -> None:
    store = Recording()
    await ParallelRunner(Talker(), store=store, concurrency=64).run(
        DAG([Task("a"), *[Task(f"t{i}", depends_on=["a"]) for i in range(256)]])
    )
    assert len(store.batches) < 30


async def test_the_dag_is_stored_whole_before_anything_starts() -> None:
    store = Recording()
    async with ParallelRunner(Talker(), store=store).start(WIDE) as live:
        async for event in live.events():
            if isinstance(event, TaskStarted):
                break
        assert len(await store.list_tasks(live.run_id)) == 22
    kinds = [type(change).__name__ for batch in store.batches for change in batch.changes]
    assert kinds[:3] == ["RunCreated", "RunStatusChanged", "RunClaimed"]
    assert kinds.index("TaskStarted") > 2
    assert "TaskStarted" not in {type(change).__name__ for change in store.batches[0].changes}


FULL_DISK = """
import resource, signal, sys, anyio
from plait.persistence import SQLiteStore
from plait.runner import DAG, ParallelRunner, Task

async def body(prompt):
    return "x" * 20_000

async def main():
    dag = DAG([Task(f"t{i}", prompt="go", depends_on=[f"t{i-1}"] if i else []) for i in range(60)])
    async with SQLiteStore(sys.argv[1]) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))
        result = await ParallelRunner(body, store=store).run(dag, "r")
        print(result.status.value, len(result.text), result.degraded[0].until, result.degraded[0].lost > 0)

anyio.run(main)
"""


async def test_a_disk_that_fills_up_costs_the_rest_of_the_record_and_what_is_kept_can_be_resumed(tmp_path) -> None:
    path = tmp_path / "plait.db"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["completed", "60", "None", "True"], done.stderr
    backend = Talker()
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(backend, store=store).resume("r")
    assert result.status is RunStatus.COMPLETED
    assert 0 < len(backend.prompts) == 60 - result.reused < 60
