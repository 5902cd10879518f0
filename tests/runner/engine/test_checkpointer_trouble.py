"""A store that hangs, is busy at the end, refuses changes, or was put back to an older copy."""

from __future__ import annotations

import copy
import logging

import anyio
import pytest

from plait.persistence import Batch, Conflict, MemoryStore, RunReleased, StoreBusy, StoreError
from plait.persistence.changes import TaskCompleted
from plait.runner import DAG, ParallelRunner, RunExists, RunStatus, Task
from plait.runner.domain.events import StoreRecovered
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write
from tests.support.stores.wide import WIDE, everything_is_stored, run


class HangingUntil(FaultyStore):
    """Fails at the second write, then hangs at the third one until `released`."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), on_write(lambda n: Fault.BEFORE if n == 2 else None))
        self.hanging = anyio.Event()
        self.released = anyio.Event()

    async def write(self, batch: Batch) -> None:
        if self.writes == 2:
            self.hanging.set()
            await self.released.wait()
        await super().write(batch)


async def test_nobody_waits_for_a_store_that_hangs_while_it_is_tried_again() -> None:
    store = HangingUntil()
    chain = DAG([Task(f"t{i}", prompt=str(i), depends_on=[f"t{i - 1}"] if i else []) for i in range(40)])

    async def body(prompt: str) -> str:
        if prompt == "3":
            await store.hanging.wait()
        if prompt == "39":
            store.released.set()
        return prompt

    with anyio.fail_after(5):
        result = await ParallelRunner(body, store=store).run(chain)
    assert (result.status, result.degraded[0].lost) == (RunStatus.COMPLETED, 0)
    assert [task.text for task in await store.inner.list_tasks(result.run_id)] == [str(i) for i in range(40)]


async def test_a_passing_failure_of_the_very_last_write_is_made_good() -> None:
    class FailsAtTheEnd(FaultyStore):
        failed = False

        async def write(self, batch: Batch) -> None:
            if any(isinstance(change, RunReleased) for change in batch.changes) and not self.failed:
                self.failed = True
                raise StoreError("a passing failure")
            await super().write(batch)

    store = FailsAtTheEnd(MemoryStore())
    result = await run(store).run(WIDE)
    assert [(one.lost, one.until is not None) for one in result.degraded] == [(0, True)]
    await everything_is_stored(store.inner, result.run_id)  # type: ignore[arg-type]


@pytest.mark.parametrize(("busy", "lost"), [(40.0, False), (80.0, True)])
async def test_who_else_writes_to_the_store_at_the_end_is_waited_for(busy: float, lost: bool) -> None:
    clock = QuickClock()

    class Busy(FaultyStore):
        since: float | None = None

        async def write(self, batch: Batch) -> None:
            if any(isinstance(change, RunReleased) for change in batch.changes):
                self.since = clock.monotonic() if self.since is None else self.since
                clock.now += 5.0  # for so long SQLite waits
                if clock.monotonic() - self.since < busy:
                    raise StoreBusy("the database is locked")
            await super().write(batch)

    store = Busy(MemoryStore())
    result = await run(store, clock=clock).run(WIDE)
    assert [one.lost > 0 for one in result.degraded] == [lost]
    if not lost:
        await everything_is_stored(store.inner, result.run_id)  # type: ignore[arg-type]


async def test_a_store_that_hangs_on_reading_is_an_error_at_resume() -> None:
    class Hanging(FaultyStore):
        async def get_run(self, run_id: str):
            await anyio.sleep_forever()

    store = Hanging(MemoryStore())
    with anyio.fail_after(5), pytest.raises(StoreError, match=r"did not answer within 0\.05 s"):
        await ParallelRunner(Talker(), store=store, store_timeout=0.05).resume("r")


async def test_what_was_refused_for_good_is_not_told() -> None:
    store = MemoryStore()
    runner = ParallelRunner(Talker(), store=store)
    await runner.run(WIDE, "taken")
    async with runner.start(WIDE, "taken") as live:
        seen = [event.kind async for event in live.events()]
        with pytest.raises(RunExists):
            await live.result()
    assert seen == []


async def test_an_older_copy_in_the_place_of_the_store_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    store = FaultyStore(MemoryStore())
    older: list[MemoryStore] = []
    chain = DAG([Task(f"t{i}", prompt=str(i), depends_on=[f"t{i - 1}"] if i else []) for i in range(20)])

    async def body(prompt: str) -> str:
        if prompt == "3":
            older.append(copy.deepcopy(store.inner))
        if prompt == "10":
            store.inner = older[0]
        return prompt

    with caplog.at_level(logging.ERROR):
        result = await ParallelRunner(body, store=store).run(chain)
    assert result.status is RunStatus.COMPLETED
    [lost] = result.degraded
    assert lost.lost > 2 * 10, "start and end of the tasks that came after it"
    assert "stop this run, and resume it from there" in lost.error
    assert caplog.text.count("change_not_stored") == 1


async def test_an_outage_ends_also_where_a_change_of_it_is_refused() -> None:
    class Refuses(FaultyStore):
        tried = 0

        async def write(self, batch: Batch) -> None:
            if any(isinstance(change, TaskCompleted) and change.task_id == "b3" for change in batch.changes):
                self.tried += 1
                raise StoreError("away") if self.tried < 3 else Conflict("not this one")
            await super().write(batch)

    async with run(Refuses(MemoryStore())).start(WIDE) as live:
        told = [event async for event in live.events()]
        result = await live.result()
    assert {one.error: (one.lost, one.until is not None) for one in result.degraded} == {
        "not this one": (1, True),
        "away": (0, True),
    }
    assert any(isinstance(event, StoreRecovered) for event in told)


async def test_a_refused_prompt_is_told_also_where_the_store_goes_away_just_then() -> None:
    class Refuses(FaultyStore):
        refused = away = 0

        async def write(self, batch: Batch) -> None:
            if any("b3" in {getattr(one, "prompt", ""), getattr(one, "content", "")} for one in batch.changes):
                self.refused += 1
                raise Conflict("not this prompt")
            if self.refused >= 2 and not self.away:
                self.away += 1
                raise StoreError("away")
            await super().write(batch)

    store = Refuses(MemoryStore())
    dag = DAG([Task("b3", prompt="b3"), Task("last", prompt="last", depends_on=["b3"])])
    result = await run(store).run(dag)
    assert {one.error: one.lost for one in result.degraded} == {"not this prompt": 1, "away": 0}
    assert [one.content for one in await store.inner.list_messages(result.run_id, "b3")] == [result["b3"].text]


async def test_an_outage_ends_also_where_all_that_it_left_is_refused() -> None:
    class PutBack(FaultyStore):
        tried = 0

        async def write(self, batch: Batch) -> None:
            if self.tried or any(isinstance(change, TaskCompleted) for change in batch.changes):
                self.tried += 1
                raise StoreError("away") if self.tried == 1 else Conflict("an older copy is in its place")
            await super().write(batch)

    result = await run(PutBack(MemoryStore())).run(WIDE)
    assert result.status is RunStatus.COMPLETED
    assert [one for one in result.degraded if one.until is None] == []
    assert {one.error for one in result.degraded if one.lost} == {"an older copy is in its place"}
