"""Who may take a run over, and what a claim that fails leaves behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import anyio
import pytest

from plait import DAG, ParallelRunner, RunResult, RunStatus, Task
from plait.backends import ask
from plait.errors import RunExists, RunOwned, StoreError
from plait.events import LeaseRenewed, RunClaimed
from plait.persistence import Batch, MemoryStore, Store
from plait.runner.engine.lease import claim_for_this_process, unregister
from tests.support.fakes import QuickClock, Talker
from tests.support.stopped import DIAMOND, stopped_after
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write


async def test_a_store_that_cannot_be_claimed_is_an_error_not_a_run(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    backend = Talker()
    with pytest.raises(StoreError, match="planted"):
        await ParallelRunner(backend, store=FaultyStore(store, on_write(lambda _: Fault.BEFORE))).resume("r")
    assert backend.prompts == []
    assert (await ParallelRunner(backend, store=store).resume("r")).status is RunStatus.COMPLETED


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER])
async def test_a_claim_that_fails_leaves_a_waiting_run_due_when_it_was(fault: Fault) -> None:
    async def asks(prompt: str) -> str:
        return str(await ask("When?", default="now", deadline=3600.0))

    inner, dag = MemoryStore(), DAG([Task("done", "x"), Task("asks", "y", backend="asks")])
    await ParallelRunner(Talker(), backends={"asks": asks}, store=inner).run(dag, "r")
    before = await inner.get_run("r")
    failing = FaultyStore(inner, on_write(lambda n: fault if n == 1 else None))
    with pytest.raises(StoreError):
        await ParallelRunner(Talker(), backends={"asks": asks}, store=failing).runs.continue_task("r", "done", "more")
    after = await inner.get_run("r")
    assert before is not None
    assert after is not None
    assert (after.owner, after.lease_expires_at) == (None, before.lease_expires_at)
    assert after.lease_expires_at is not None


async def test_two_resumes_at_once_one_runs_one_is_refused(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    executed: list[str] = []
    outcomes: list[str] = []

    async def body(prompt: str) -> str:
        executed.append(prompt)
        await anyio.lowlevel.checkpoint()
        return prompt

    async def resume() -> None:
        try:
            outcomes.append((await ParallelRunner(body, store=store).resume("r")).status.value)
        except RunOwned as error:
            outcomes.append("owned" if "run r" in str(error) and "process" in str(error) else str(error))

    async with anyio.create_task_group() as tg:
        for _ in range(5):
            tg.start_soon(resume)
    assert sorted(outcomes) == ["completed", *["owned"] * 4]
    assert len(executed) == len(set(executed)) == 3


TWO_QUESTIONS = DAG([Task("a", "which a"), Task("b", "which b"), Task("c", "{{ a }} {{ b }}", ["a", "b"])])


async def asks(prompt: str) -> str:
    return str(await ask(prompt)) if prompt.startswith("which") else prompt


async def test_a_resume_beside_an_answer_uses_the_answer(store: Store) -> None:
    """The answer is stored between the reading of the run and the claim of the resume."""
    assert (await ParallelRunner(asks, store=store).run(TWO_QUESTIONS, "r")).status is RunStatus.WAITING_INPUT

    class AnsweredFirst(FaultyStore):
        async def write(self, batch: Batch) -> None:
            if self.writes == 0:
                assert await ParallelRunner(store=store).runs.answer("r", "a", "1")
            await super().write(batch)

    result = await ParallelRunner(asks, store=AnsweredFirst(store)).resume("r", answers={"b": "2"})
    assert (result.status, result.text["c"]) == (RunStatus.COMPLETED, "1 2")


async def claimed_by(store: Store, **changes: object) -> None:
    """Leave run "r" claimed by an owner that differs from this process in `changes`."""
    await stopped_after(store, DIAMOND, 1)
    await claim_stored_run(store, **changes)


async def claim_stored_run(store: Store, **changes: object) -> None:
    record = await store.get_run("r")
    assert record is not None
    owner = claim_for_this_process("2026-01-01T00:00:00.000Z")
    unregister(owner)
    expires = changes.pop("expires", 3_000_000_000.0)
    claim = RunClaimed("2026-01-01T00:00:00.000Z", replace(owner, **changes), expires)  # type: ignore[arg-type]
    await store.write(Batch("r", record.epoch, record.last_seq + 1, (claim,)))


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, True),  # this process, but nobody here runs it
        ({"pid": 1, "process_started": ""}, False),
        ({"pid": 1, "process_started": "another"}, True),  # the pid was used again
        ({"pid": 1}, True),  # so it was, as the stored start of our own process shows
        ({"pid": 4_190_000}, True),  # gone
        ({"boot_id": "another boot/pid:[1]"}, True),
    ],
)
async def test_who_may_take_over_at_once(changes: dict, free: bool) -> None:
    store = MemoryStore()
    await claimed_by(store, **changes)
    clock = QuickClock()
    runner = ParallelRunner(Talker(), store=store, clock=clock)
    if free:
        assert (await runner.resume("r")).status is RunStatus.COMPLETED
        assert clock.slept == []
        return
    with pytest.raises(RunOwned, match=r"is being run by process .* since 2026-01-01T00:00:00.000Z"):
        await runner.resume("r")


HERE = claim_for_this_process("2026-01-01T00:00:00.000Z")
unregister(HERE)

UNSEEN = [
    {"boot_id": HERE.boot_id.partition("/")[0] + "/pid:[1]"},  # another container: its pids are not ours
    {"host": "another host"},  # whatever its lease says: clocks of two hosts differ
    {"host": "another host", "expires": 1.0},
    {"pid": 1, "process_started": "", "expires": 1.0},  # alive, but it does not renew
]


@pytest.mark.parametrize("changes", UNSEEN)
async def test_an_owner_that_cannot_be_judged_is_watched_for_a_lease(changes: dict) -> None:
    store = MemoryStore()
    await claimed_by(store, **changes)
    clock = QuickClock()
    async with ParallelRunner(Talker(), store=store, clock=clock, lease=6.0).start_resume("r") as run:
        seen = [event.kind async for event in run.events()]
    assert (await run.result()).status is RunStatus.COMPLETED
    assert (clock.slept[:3], seen[:2]) == ([2.0, 2.0, 2.0], ["run_watched", "run_resumed"])  # then renewals


@pytest.mark.parametrize("changes", UNSEEN)
async def test_an_owner_that_is_heard_of_while_it_is_watched_keeps_its_run(changes: dict) -> None:
    store = MemoryStore()
    await claimed_by(store, **changes)

    class Renewing(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await super().sleep(seconds)
            if len(self.slept) == 2:
                record = await store.get_run("r")
                assert record is not None
                await store.write(
                    Batch("r", record.epoch, record.last_seq + 1, (LeaseRenewed("2026-11-21T23:00:00.000Z", 1.0),))
                )

    backend = Talker()
    with pytest.raises(RunOwned, match="is being run by process"):
        await ParallelRunner(backend, store=store, clock=Renewing(), lease=6.0).resume("r")
    assert backend.prompts == []


@pytest.mark.parametrize("native", [False, True])
async def test_a_resume_cancelled_while_it_claims_leaves_the_run_to_others(native: bool) -> None:
    inner = MemoryStore()
    await stopped_after(inner, DIAMOND, 1)
    claiming, go_on = anyio.Event(), anyio.Event()

    class Slow(FaultyStore):
        async def write(self, batch: Batch) -> None:
            await super().write(batch)
            if self.writes == 1:
                claiming.set()
                await go_on.wait()

    runner = ParallelRunner(Talker(), store=Slow(inner))
    async with anyio.create_task_group() as group:
        if native:
            tasks: list[asyncio.Task] = []

            async def body() -> None:
                tasks.append(asyncio.current_task())
                await runner.resume("r")

            group.start_soon(body)
            await claiming.wait()
            tasks[0].cancel()
        else:
            group.start_soon(runner.resume, "r")
            await claiming.wait()
            group.cancel_scope.cancel()
    record = await inner.get_run("r")
    assert record is not None
    assert record.owner is None
    assert (await ParallelRunner(Talker(), store=inner).resume("r")).status is RunStatus.COMPLETED


async def test_a_taken_id_is_refused_also_when_the_store_fails_at_first() -> None:
    inner = MemoryStore()
    await ParallelRunner(Talker(), store=inner).run(DIAMOND, "taken")
    store = FaultyStore(inner, on_write(lambda n: Fault.BEFORE if n == 1 else None))
    with pytest.raises(RunExists):
        await ParallelRunner(Talker(), store=store).run(DIAMOND, "taken")


class Held(FaultyStore):
    """Waits before its write `number` until `go_on`, or until it is cancelled."""

    def __init__(self, inner: Store, number: int) -> None:
        super().__init__(inner)
        self.number, self.there, self.go_on = number, anyio.Event(), anyio.Event()

    async def write(self, batch: Batch) -> None:
        if self.writes + 1 == self.number and not self.there.is_set():
            self.there.set()
            await self.go_on.wait()
        await super().write(batch)


async def test_who_is_cancelled_while_it_claims_does_not_release_the_claim_of_another(store: Store) -> None:
    async def call(name: str, through: Store) -> None:
        results[name] = await ParallelRunner(Talker(), store=through).resume("r")

    results: dict[str, RunResult] = {}
    await stopped_after(store, DIAMOND, 1)
    loser, winner = Held(store, 1), Held(store, 2)
    async with anyio.create_task_group() as context:
        async with anyio.create_task_group() as losing:
            losing.start_soon(call, "loser", loser)
            await loser.there.wait()
            context.start_soon(call, "winner", winner)
            await winner.there.wait()
            losing.cancel_scope.cancel()
        record = await store.get_run("r")
        assert record is not None
        assert record.owner is not None
        winner.go_on.set()
    assert [*results] == ["winner"]
    assert (results["winner"].status, results["winner"].degraded) == (RunStatus.COMPLETED, ())
    assert {task.status for task in await store.list_tasks("r")} == {"completed"}
