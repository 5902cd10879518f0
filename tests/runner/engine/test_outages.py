"""Outages of the store: leases, retries, catching up in steps, and the record of what is lost."""

from __future__ import annotations

import logging
from itertools import pairwise

import anyio
import pytest

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task, failpoints
from plait.clock_and_ids import parse_time
from plait.errors import Conflict, StoreError
from plait.events import Event, PolicyDecided, SessionOpened, StoreDegraded, StoreRecovered, TaskCancelled
from plait.persistence import Batch, MemoryStore
from plait.runner.engine import checkpointer
from plait.runner.engine.run_options import LEASE_SECONDS
from plait.workflows import Decision
from tests.support.fakes import Talker
from tests.support.growth import Recording as Recorded
from tests.support.growth import Scripted, by_end, tasks
from tests.support.seeded_loop import EPOCH, VirtualClock, run_seeded
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write


class AwayFor(FaultyStore):
    """Fails from the second write on, until `until` on the clock; `tries` are the times of the failed writes."""

    def __init__(self, clock: VirtualClock, until: float) -> None:
        super().__init__(MemoryStore())
        self._clock = clock
        self.until = until
        self.tries: list[float] = []
        self.first: tuple[Event, ...] = ()
        """The changes of the first failed write."""

    async def write(self, batch: Batch) -> None:
        if self.writes and self._clock.monotonic() < self.until:
            self.tries.append(self._clock.monotonic())
            self.first = self.first or batch.events
            raise StoreError("away")
        await super().write(batch)


async def expiry(store: MemoryStore) -> float:
    record = await store.get_run("r")
    assert record is not None and record.lease_expires_at is not None
    return record.lease_expires_at


def test_the_lease_of_a_long_run_never_expires() -> None:
    async def main() -> None:
        store, clock = MemoryStore(), VirtualClock()

        async def body(prompt: str) -> str:
            for _ in range(40):
                await clock.sleep(LEASE_SECONDS / 10)
                assert await expiry(store) > clock.wall() + LEASE_SECONDS / 2, "one renewal may be late or lost"
            return prompt

        result = await ParallelRunner(body, store=store, clock=clock).run(DAG([Task("a", "a")]), "r")
        assert result.status is RunStatus.COMPLETED

    run_seeded(main, 1)


def test_a_lease_renewed_during_an_outage_holds_after_the_outage() -> None:
    async def main() -> None:
        clock = VirtualClock()
        away = LEASE_SECONDS * 2 + 1
        store = AwayFor(clock, until=away)

        async def body(prompt: str) -> str:
            await clock.sleep(away + LEASE_SECONDS / 5)  # caught up, and no renewal since
            assert isinstance(store.inner, MemoryStore)
            assert await expiry(store.inner) > clock.wall() + LEASE_SECONDS / 3
            return prompt

        async with ParallelRunner(body, store=store, clock=clock).start(DAG([Task("a", "a")]), "r") as run:
            told = [event async for event in run.events()]
            result = await run.result()
        assert result.status is RunStatus.COMPLETED
        assert [(one.lost, one.until is not None) for one in result.degraded] == [(0, True)]
        assert [event.error for event in told if isinstance(event, StoreDegraded)] == ["away"]

    run_seeded(main, 1)


def test_a_store_that_is_away_is_tried_at_growing_intervals_of_five_seconds_at_most() -> None:
    async def main() -> None:
        clock = VirtualClock()
        store = AwayFor(clock, until=60)

        async def body(prompt: str) -> str:
            await clock.sleep(70)
            first.extend(store.tries)
            store.tries, store.until = [], clock.monotonic() + 30
            await clock.sleep(40)
            return prompt

        def waits(tries: list[float]) -> list[float]:
            return [later - earlier for earlier, later in pairwise(tries)]

        first: list[float] = []
        await ParallelRunner(body, store=store, clock=clock).run(DAG([Task("a", "a")]), "r")
        for tries in (first, store.tries):  # a further outage begins like the first
            assert waits(tries)[:6] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2], abs=0.05)
        assert waits(first)[6:] == pytest.approx([5.0] * len(waits(first)[6:]), abs=0.05)
        assert len(first) > 11

    run_seeded(main, 1)


def refused(reasons: dict[str, str]) -> RunResult:
    """The result of a chain of four tasks of 10 virtual seconds, whose session ids are refused for `reasons`."""

    class Refuses(FaultyStore):
        async def write(self, batch: Batch) -> None:
            for change in batch.events:
                if isinstance(change, SessionOpened) and change.task_id in reasons:
                    raise Conflict(reasons[change.task_id])
            await super().write(batch)

    class Slow(Talker):
        def __init__(self, clock: VirtualClock) -> None:
            super().__init__(own_ids=True)
            self._clock = clock

        async def before_send(self) -> None:
            await self._clock.sleep(10)

    async def main() -> RunResult:
        clock = VirtualClock()
        chain = DAG([Task("a", "a"), Task("b", "b", ["a"]), Task("c", "c", ["b"]), Task("d", "d", ["c"])])
        return await ParallelRunner(Slow(clock), store=Refuses(MemoryStore()), clock=clock).run(chain, "r")

    return run_seeded(main, 1)


def seconds(at: str | None) -> int:
    return round(parse_time(at or "") - EPOCH)


def test_equal_losses_are_one_from_the_first_to_the_last() -> None:
    (lost,) = refused({"a": "the disk says no", "c": "the disk says no"}).degraded
    assert (lost.error, lost.lost, seconds(lost.since), seconds(lost.until)) == ("the disk says no", 2, 10, 30)


def test_losses_of_other_errors_are_told_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Although one error begins as the other does."""
    with caplog.at_level(logging.ERROR, logger="plait"):
        result = refused({"a": "task 1", "b": "task 12", "c": "task 12", "d": "task 1"})
    assert [(one.error, one.lost, seconds(one.since), seconds(one.until)) for one in result.degraded] == [
        ("task 1", 1, 10, 10),
        ("task 12", 2, 20, 30),
        ("task 1", 1, 40, 40),
    ]
    assert [record.getMessage().count("task 12") for record in caplog.records] == [0, 1, 0]


def test_the_log_counts_what_an_outage_keeps_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> int:
        clock = VirtualClock()
        store = AwayFor(clock, until=1)
        await ParallelRunner(Talker(), store=store, clock=clock).run(DAG([Task("a", "a")]), "r")
        return len(store.first)

    with caplog.at_level(logging.WARNING, logger="plait"):
        unstored = run_seeded(main, 1)
    assert unstored > 0
    (said,) = [record.getMessage() for record in caplog.records if "store_degraded" in record.getMessage()]
    assert said == f"store_degraded run=r error=away unstored={unstored}"


async def test_a_session_opened_while_the_store_is_away_is_stored_and_continued_by_a_resume() -> None:
    class Away(FaultyStore):
        is_away = False

        async def write(self, batch: Batch) -> None:
            if self.is_away:
                raise StoreError("away")
            await super().write(batch)

    store, is_known_away = Away(MemoryStore()), anyio.Event()

    class Opening(Talker):
        async def before_send(self) -> None:
            store.is_away = True
            self.requests[0].on_session("first")  # the write that finds out
            await is_known_away.wait()
            self.requests[0].on_session("second")
            store.is_away = False
            await anyio.sleep_forever()

    async with ParallelRunner(Opening(own_ids=True), store=store).start(DAG([Task("a", "a")]), "r") as run:
        async for event in run.events():
            if isinstance(event, StoreDegraded):
                is_known_away.set()
            if isinstance(event, StoreRecovered):
                run.stop()
        await run.result()
    (task,) = await store.inner.list_tasks("r")
    assert (task.session_id, task.session_confirmed) == ("second", True)
    backend = Talker()
    await ParallelRunner(backend, store=store.inner).resume("r")
    assert [(one.session_id, one.resume) for one in backend.requests] == [("second", True)]


@pytest.mark.parametrize("limit", range(1, 12))
async def test_cancellations_are_written_with_the_decision_of_the_policy(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catching up goes in steps. A crash between two of them must not cancel tasks for a decision that was not made."""
    monkeypatch.setattr(checkpointer, "BATCH_LIMIT", limit)
    inner = Recorded(MemoryStore())
    is_away = True

    async def work(prompt: str) -> str:
        nonlocal is_away
        is_away = prompt != "last"
        return prompt

    policy = Scripted(by_end({"a": Decision(add=tasks("last"), cancel=("b", "c"))}))
    store = FaultyStore(inner, on_write(lambda n: Fault.BEFORE if n > 1 and is_away else None))
    dag = DAG([Task("a", "a"), Task("b", "b", ["a"]), Task("c", "c", ["b"])])
    result = await ParallelRunner(work, store=store, concurrency=1).run(dag, "r", policy=policy)
    assert result.degraded[0].lost == 0
    changes = [change for batch in inner.batches for change in batch.events]
    assert [change.task_id for change in changes if isinstance(change, TaskCancelled)] == ["b", "c"]
    assert any(isinstance(change, PolicyDecided) for change in changes)
    for batch in inner.batches:
        assert not isinstance(batch.events[-1], TaskCancelled)


async def test_each_write_passes_the_failpoints_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """The crash campaigns kill at these places, by name."""
    seen: list[str] = []
    monkeypatch.setattr(failpoints, "on_reach", seen.append)
    await ParallelRunner(Talker(), store=MemoryStore()).run(DAG([Task("a", "a")]))
    assert set(seen) <= set(failpoints.FAILPOINTS)
    writes = [name for name in seen if name in {"batch.before_write", "batch.after_write", "events.published"}]
    assert writes[:3] == ["batch.before_write", "batch.after_write", "events.published"]
    assert writes.count("batch.before_write") == writes.count("batch.after_write")


async def test_a_recovery_counts_what_was_caught_up_in_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpointer, "BATCH_LIMIT", 2)
    inner = Recorded(MemoryStore())
    is_away = True

    async def work(prompt: str) -> str:
        nonlocal is_away
        is_away = prompt != "last"
        return prompt

    store = FaultyStore(inner, on_write(lambda n: Fault.BEFORE if n > 1 and is_away else None))
    dag = DAG([Task("a", "a"), Task("b", "b", ["a"]), Task("last", "last", ["b"])])
    async with ParallelRunner(work, store=store).start(dag, "r") as run:
        told = [event async for event in run.events()]
    (recovered,) = [event.changes for event in told if isinstance(event, StoreRecovered)]
    caught_up = [len(batch.events) for batch in inner.batches[1:]]
    assert sum(caught_up) >= recovered > max(caught_up)
