"""Store failures: never fatal, in order, caught up; a write of unknown outcome is written again; strict is strict."""

from __future__ import annotations

import logging
import subprocess
import sys

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task, TaskStatus
from plait.errors import Conflict, OwnershipLost, RunExists, StoreBusy, StoreError
from plait.events import RunCompleted, RunEnded, StoreDegraded, StoreRecovered, TaskCompleted, TaskStarted
from plait.persistence import Batch, MemoryStore, SQLiteStore
from plait.runner.engine import run_options
from plait.runner.engine.attempt import STORE_WAITS_S
from tests.support.fakes import QuickClock, Talker
from tests.support.stores.faulty_store import Fault, FaultyStore, copy_of, on_write
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


async def test_a_second_outage_is_caught_up_like_the_first() -> None:
    class OnAndOff(FaultyStore):
        is_away = False
        written = anyio.Event()

        async def write(self, batch: Batch) -> None:
            if self.is_away:
                raise StoreError("away")
            await super().write(batch)
            self.written.set()

    store = OnAndOff(MemoryStore())
    chain = DAG([Task(f"t{i}", str(i), depends_on=[f"t{i - 1}"] if i else []) for i in range(10)])

    async def body(prompt: str) -> str:
        if prompt in {"2", "6"}:
            store.is_away = True
        if prompt in {"4", "8"}:
            store.is_away, store.written = False, anyio.Event()
            await store.written.wait()
        return prompt

    with anyio.fail_after(60):
        result = await ParallelRunner(body, store=store).run(chain)
    assert [(one.lost, one.until is not None) for one in result.degraded] == [(0, True), (0, True)]
    assert [task.text for task in await store.inner.list_tasks(result.run_id)] == [str(i) for i in range(10)]


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
    with anyio.fail_after(60):
        result = await run(store, store_timeout=0.05).run(WIDE)
    assert result.status is RunStatus.COMPLETED
    assert result.degraded[0].error == "the store did not answer within 0.05 s"


async def test_a_write_that_adds_many_tasks_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_options, "TASKS_WITHIN_LIMIT", 11)
    store = FaultyStore(MemoryStore(), on_write(lambda _: Fault.HANG))
    with anyio.fail_after(60):
        result = await run(store, store_timeout=0.05).run(WIDE)
    assert result.degraded[0].error == "the store did not answer within 0.15 s", "22 tasks"


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


async def test_a_task_that_must_not_happen_twice_waits_longer_and_longer_for_a_store_that_is_away() -> None:
    store = FaultyStore(MemoryStore(), on_write(lambda n: Fault.BEFORE if n > 1 else None))
    clock, called = QuickClock(), list[str]()

    async def pay(prompt: str) -> str:
        called.append(prompt)
        return prompt

    dag = DAG([Task("first", "first"), Task("pay", "x", at_most_once=True, depends_on=["first"])])
    with anyio.fail_after(60):
        result = await ParallelRunner(pay, store=store, clock=clock).run(dag)
    assert (result["pay"].status, result["pay"].attempts, called) == (TaskStatus.FAILED, 1, ["first"])
    assert clock.slept[:6] == list(STORE_WAITS_S)


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

    from plait.runner.engine.lease import _live_here

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
    chain = DAG([Task(f"t{i}", "x", depends_on=[f"t{i - 1}"] if i else []) for i in range(50)])
    await ParallelRunner(Talker(), store=store).run(chain)
    assert len(store.batches) <= 50 + 4
    both = [{type(change).__name__ for change in batch.events} for batch in store.batches]
    assert sum({"TaskCompleted", "TaskStarted"} <= kinds for kinds in both) == 49


async def test_concurrent_completions_share_a_commit() -> None:
    store = Recording()
    await ParallelRunner(Talker(), store=store, concurrency=64).run(
        DAG([Task("a", "a"), *[Task(f"t{i}", "x", depends_on=["a"]) for i in range(256)]])
    )
    assert len(store.batches) < 30


async def test_the_dag_is_stored_whole_before_anything_starts() -> None:
    store = Recording()
    async with ParallelRunner(Talker(), store=store).start(WIDE) as live:
        async for event in live.events():
            if isinstance(event, TaskStarted):
                break
        assert len(await store.list_tasks(live.run_id)) == 22
    kinds = [type(change).__name__ for batch in store.batches for change in batch.events]
    assert kinds[:3] == ["RunCreated", "RunStarted", "RunClaimed"]
    assert kinds.index("TaskStarted") > 2
    assert "TaskStarted" not in {type(change).__name__ for change in store.batches[0].events}


FULL_DISK = """
import resource, signal, sys, anyio
from plait.persistence import SQLiteStore
from plait import DAG, ParallelRunner, Task

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

    with anyio.fail_after(60):
        result = await ParallelRunner(body, store=store, store_timeout=600).run(chain)
    assert (result.status, result.degraded[0].lost) == (RunStatus.COMPLETED, 0)
    assert [task.text for task in await store.inner.list_tasks(result.run_id)] == [str(i) for i in range(40)]


class FailsLate(FaultyStore):
    """The writes from number `first` on fail until `works` is set; number `late` is under way until `ends` is set."""

    def __init__(self, first: int, late: int) -> None:
        super().__init__(MemoryStore(), on_write(lambda n: Fault.BEFORE if n == late or self._is_away(n) else None))
        self.first, self.late = first, late
        self.begun, self.ends, self.works = anyio.Event(), anyio.Event(), anyio.Event()

    def _is_away(self, number: int) -> bool:
        return number >= self.first and not self.works.is_set()

    async def write(self, batch: Batch) -> None:
        if self.writes + 1 == self.late and not self.begun.is_set():
            self.begun.set()
            await self.ends.wait()
            for _ in range(50):  # until all that follows from the task that set `ends` is submitted
                await anyio.lowlevel.checkpoint()
        await super().write(batch)


async def test_submissions_that_gather_while_a_write_fails_are_told_and_kept() -> None:
    dag = DAG([Task("a", "a"), Task("b", "b"), Task("c", "c", depends_on=["b"]), Task("d", "d", depends_on=["c"])])
    store = FailsLate(3, late=3)  # after the run itself and the starts of a and b

    async def body(prompt: str) -> str:
        if prompt == "b":
            await store.begun.wait()
            store.ends.set()
        if prompt == "d":
            store.works.set()
        return prompt

    with anyio.fail_after(60):
        async with ParallelRunner(body, store=store).start(dag) as run:
            told = [
                event.task_id for event in [event async for event in run.events()] if event.kind == "task_completed"
            ]
            result = await run.result()
    assert (result.status, sorted(told)) == (RunStatus.COMPLETED, ["a", "b", "c", "d"])
    assert [(one.lost, one.until is not None) for one in result.degraded] == [(0, True)]
    record = await store.inner.get_run(result.run_id)
    assert record is not None
    assert (record.status, record.owner, record.counts) == ("completed", None, {"completed": 4})
    assert [task.text for task in await store.inner.list_tasks(result.run_id)] == ["a", "b", "c", "d"]


async def test_a_run_that_ends_while_its_store_is_tried_again_in_vain_is_stored_to_its_end() -> None:
    store = FailsLate(3, late=4)

    async def body(prompt: str) -> str:
        if prompt == "b":
            await store.begun.wait()
            store.ends.set()
            store.works.set()
        return prompt

    with anyio.fail_after(60):
        result = await ParallelRunner(body, store=store).run(DAG([Task("a", "a"), Task("b", "b", depends_on=["a"])]))
    assert [(one.lost, one.until is not None) for one in result.degraded] == [(0, True)]
    record = await store.inner.get_run(result.run_id)
    assert record is not None
    assert (record.status, record.owner, record.counts) == ("completed", None, {"completed": 2})


async def test_a_passing_failure_of_the_very_last_write_is_made_good() -> None:
    class FailsAtTheEnd(FaultyStore):
        failed = False

        async def write(self, batch: Batch) -> None:
            if any(isinstance(change, RunEnded) for change in batch.events) and not self.failed:
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
            if any(isinstance(change, RunEnded) for change in batch.events):
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
    with anyio.fail_after(60), pytest.raises(StoreError, match=r"did not answer within 0\.05 s"):
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
            older.append(copy_of(store.inner))
        if prompt == "10":
            store.inner = older[0]
        return prompt

    with caplog.at_level(logging.WARNING):
        result = await ParallelRunner(body, store=store).run(chain)
    assert result.status is RunStatus.COMPLETED
    [lost] = result.degraded
    assert lost.lost == 2 * 9 + 2, "the end of a task, start and end of those after it, and the end of the run"
    assert "stop this run, and resume the run in the copy" in lost.error
    assert caplog.text.count("store_degraded run=") == 1


async def test_an_outage_ends_also_where_a_change_of_it_is_refused() -> None:
    class Refuses(FaultyStore):
        tried = 0

        async def write(self, batch: Batch) -> None:
            if any(isinstance(change, TaskCompleted) and change.task_id == "b3" for change in batch.events):
                self.tried += 1
                raise StoreError("away") if self.tried < 3 else Conflict("not this one")
            await super().write(batch)

    async with run(Refuses(MemoryStore())).start(WIDE) as live:
        told = [event async for event in live.events()]
        result = await live.result()
    assert [(one.error, one.lost, one.until is not None) for one in result.degraded] == [("away", 0, True)]
    assert result["b3"].error == "the store refused the end of the attempt: not this one"
    assert any(isinstance(event, StoreRecovered) for event in told)


async def test_a_refused_prompt_fails_its_task_also_where_the_store_goes_away_just_then() -> None:
    class Refuses(FaultyStore):
        refused = away = 0

        async def write(self, batch: Batch) -> None:
            if any("b3" in {getattr(one, "turn", ""), getattr(one, "content", "")} for one in batch.events):
                self.refused += 1
                raise Conflict("not this prompt")
            if self.refused >= 2 and not self.away:
                self.away += 1
                raise StoreError("away")
            await super().write(batch)

    store = Refuses(MemoryStore())
    dag = DAG([Task("b3", prompt="b3"), Task("last", prompt="last", depends_on=["b3"])])
    result = await run(store).run(dag)
    assert {one.error: one.lost for one in result.degraded} == {"away": 0}
    assert result["b3"].error == "the store refused the end of the attempt: not this prompt"
    assert await store.inner.list_messages(result.run_id, "b3") == ()


async def test_an_outage_ends_also_where_all_that_it_left_is_refused() -> None:
    class PutBack(FaultyStore):
        tried = 0

        async def write(self, batch: Batch) -> None:
            if self.tried or any(isinstance(change, TaskCompleted) for change in batch.events):
                self.tried += 1
                raise StoreError("away") if self.tried == 1 else Conflict("an older copy is in its place")
            await super().write(batch)

    result = await run(PutBack(MemoryStore())).run(WIDE)
    assert result.status is RunStatus.INTERRUPTED
    assert [one for one in result.degraded if one.until is None] == []
    assert {one.error for one in result.degraded if one.lost} == {"an older copy is in its place"}
