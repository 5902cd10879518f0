"""`shared_limits`: the runs of one runner together keep to its limits, and none of them keeps the others out."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, Retry, RunResult, RunStatus, Task, events
from plait.backends import ask
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore, SQLiteStore, Store
from plait.runner.engine.attempt import Attempt, AttemptRunner
from plait.runner.state.run_state import MOST_THROTTLINGS
from tests.support.fakes import QuickClock, Talker
from tests.support.quick_runs import quick_runs
from tests.support.sharing import COMPLETED, Meter, chain, run_all, wide


async def test_all_runs_together_keep_to_concurrency() -> None:
    meter = Meter()
    runner = ParallelRunner(meter, concurrency=3, shared_limits=True)
    assert await run_all(runner, [wide(f"r{number}-", 7) for number in range(10)]) == [COMPLETED] * 10
    assert (meter.most, len(meter.order)) == (3, 70)


async def test_without_it_each_run_has_its_own_limits() -> None:
    meter = Meter()
    assert await run_all(ParallelRunner(meter, concurrency=3), [wide("a", 7), wide("b", 7)]) == [COMPLETED] * 2
    assert meter.most == 6


async def test_all_runs_together_keep_to_the_limit_of_one_backend() -> None:
    deep, quick = Meter(), Meter()
    runner = ParallelRunner(
        backends={"deep": deep, "quick": quick}, default="quick", concurrency=9, limits={"deep": 2}, shared_limits=True
    )
    mixed = [wide("d", 6, "deep"), wide("d", 6, "deep"), wide("q", 90)]
    assert await run_all(runner, mixed) == [COMPLETED] * 3
    assert (deep.most, quick.most) == (2, 9), "what the others leave is for who can use it"


async def test_a_wide_run_does_not_keep_a_later_one_out() -> None:
    meter = Meter()
    runner = ParallelRunner(meter, concurrency=4, shared_limits=True)
    async with runner.start(wide("wide", 400)) as first:
        while len(meter.order) < 40:
            await anyio.lowlevel.checkpoint()
        began = len(meter.order)
        assert (await runner.run(chain("late", 5))).status is COMPLETED
        meanwhile = Counter(meter.order[began:])
        assert meanwhile["wide"] < 60, "of 400, while five ran one after the other"
        assert (await first.result()).status is COMPLETED
    assert meter.most == 4


async def test_runs_that_stand_in_line_get_places_in_turn() -> None:
    meter = Meter()
    runner = ParallelRunner(meter, concurrency=1, shared_limits=True)
    await run_all(runner, [wide("a", 30), wide("b", 30), wide("c", 30)])
    for start in range(0, 60, 3):  # the first one began before the others were there
        assert sorted(meter.order[start + 3 : start + 6]) == ["a", "b", "c"], meter.order


async def test_places_that_come_free_together_are_spread_over_those_who_stand_in_line() -> None:
    began: list[str] = []

    async def body(prompt: str) -> str:
        began.append(prompt)
        await anyio.sleep_forever()
        return prompt

    runner = ParallelRunner(body, concurrency=6, shared_limits=True)
    async with AsyncExitStack() as stack:
        runs = []
        for name in "abcd":
            runs.append(await stack.enter_async_context(runner.start(wide(name, 9))))
            await anyio.wait_all_tasks_blocked()
        assert began == ["a"] * 6
        runs[0].stop()
        await runs[0].result()
        await anyio.wait_all_tasks_blocked()
        assert Counter(began[6:]) == {"b": 2, "c": 2, "d": 2}
        for run in runs:
            run.stop()


async def test_a_rate_limit_met_by_one_run_holds_for_the_others() -> None:
    clock, gate = QuickClock(), anyio.Event()
    calls: list[str] = []

    async def sleep(seconds: float) -> None:
        if seconds >= 10:
            await gate.wait()
        await QuickClock.sleep(clock, seconds)

    clock.sleep = sleep  # type: ignore[method-assign]

    async def server(prompt: str) -> str:
        calls.append(prompt)
        if len(calls) == 1:
            raise BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=100.0)
        return prompt

    runner = ParallelRunner(server, concurrency=4, shared_limits=True, clock=clock)
    async with runner.start(wide("first", 1)) as first:
        async for event in first.events():
            if isinstance(event, events.TaskRetried):
                break
        async with runner.start(wide("other", 2)) as other:
            await anyio.wait_all_tasks_blocked()
            assert calls == ["first"], "the backend has asked to be left alone"
            gate.set()
            assert (await other.result()).status is COMPLETED
        assert (await first.result()).status is COMPLETED
    assert Counter(calls) == {"first": 2, "other": 2}


async def test_a_run_has_its_whole_patience_with_a_backend_that_earlier_ones_have_given_up() -> None:
    calls = 0

    async def limited(_prompt: str) -> str:
        nonlocal calls
        calls += 1
        raise BackendError(ErrorKind.OVERLOADED, "slow down")

    runner = ParallelRunner(limited, shared_limits=True, clock=QuickClock())
    for number in range(1, 4):
        assert (await runner.run(wide("a", 1))).status is RunStatus.FAILED
        assert calls == number * (MOST_THROTTLINGS + 3), "what is throttled that often, and then three attempts"


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_all_places_come_back(seed: int, shared: bool) -> None:
    """Many small runs on two backends, some of which fail, retry, are throttled, stopped or cancelled at any moment.

    Refusals hold for all of them, whether the runs share their slots or not.
    """
    rng = random.Random(seed)
    meters = {"one": Meter(), "two": Meter()}

    async def body(meter: Meter, prompt: str) -> str:
        await meter(prompt)
        if (chance := rng.random()) < 0.1:
            raise BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=rng.choice([None, 0.0, 3.0]))
        if chance < 0.2:
            raise BackendError(rng.choice([ErrorKind.TRANSIENT, ErrorKind.REFUSED]), "no")
        return prompt

    runner = ParallelRunner(
        backends={name: partial(body, meter) for name, meter in meters.items()},
        default="one",
        concurrency=5,
        limits={"two": 2},
        shared_limits=shared,
        clock=QuickClock(),
        rng=rng,
        store=MemoryStore(),
    )

    async def one(number: int) -> None:
        tasks = [
            Task(
                f"t{i}",
                prompt=f"{number}",
                backend=rng.choice(["one", "two"]),
                depends_on=[f"t{j}" for j in range(i) if rng.random() < 0.2],
                failure_mode=rng.choice(["hard", "soft", "skip"]),
                retry=Retry(attempts=3),
            )
            for i in range(rng.randint(1, 12))
        ]
        for _ in range(rng.randint(0, 30)):
            await anyio.lowlevel.checkpoint()
        async with runner.start(DAG(tasks)) as run:
            if rng.random() < 0.4:
                for _ in range(rng.randint(0, 60)):
                    await anyio.lowlevel.checkpoint()
                rng.choice([run.stop, run.cancel])()
            await run.result()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for number in range(25):
                group.start_soon(one, number)
    if shared:
        assert max(meters["one"].most, meters["two"].most) <= 5
        assert meters["two"].most <= 2
    meters["one"].most = 0
    assert await run_all(runner, [wide("after", 40, "one")]) in ([COMPLETED], [RunStatus.FAILED])
    assert meters["one"].most == 5, "nothing keeps the backend narrow"
    slots = runner.runs.options.slot_pool()
    assert (slots.taken, slots.slots("one").taken, slots.slots("two").taken) == (0, 0, 0)
    assert not slots.accounts, "all runs have left"
    assert not slots.account_of("one").runs


async def test_resumed_runs_keep_to_the_limits_as_well(sqlite_store: SQLiteStore) -> None:
    never = anyio.Event()

    async def hangs(_prompt: str) -> str:
        await never.wait()
        return ""

    for name in "abc":
        async with ParallelRunner(hangs, store=sqlite_store, concurrency=2).start(wide(name, 6), name) as run:
            await anyio.wait_all_tasks_blocked()
            run.stop()
    meter = Meter()
    runner = ParallelRunner(meter, store=sqlite_store, concurrency=2, shared_limits=True)
    with anyio.fail_after(60):
        async with quick_runs(runner) as service:
            for name in "abc":
                await service.start(name)
            for name in "abc":
                assert [event.kind async for event in service.events(name)][-1] == "run_completed"
    assert (meter.most, len(meter.order)) == (2, 18)


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_run_that_is_ended_gives_its_places_to_others(how: str) -> None:
    held, go = anyio.Event(), anyio.Event()

    async def body(prompt: str) -> str:
        if prompt == "held":
            held.set()
            await go.wait()
        return prompt

    runner = ParallelRunner(body, concurrency=2, shared_limits=True, cancel_grace=0.1)
    async with runner.start(wide("held", 5)) as holding, runner.start(wide("next", 3)) as waiting:
        await held.wait()
        await anyio.wait_all_tasks_blocked()
        assert waiting.status is RunStatus.RUNNING
        getattr(holding, how)()
        with anyio.fail_after(60):
            assert (await waiting.result()).status is COMPLETED
    assert (await run_all(runner, [wide("last", 5)])) == [COMPLETED]


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_run_that_stands_in_line_can_be_ended(how: str) -> None:
    go = anyio.Event()

    async def body(prompt: str) -> str:
        await go.wait()
        return prompt

    runner = ParallelRunner(body, concurrency=1, shared_limits=True)
    async with runner.start(wide("holding", 2)) as holding:
        await anyio.wait_all_tasks_blocked()
        async with runner.start(wide("waiting", 2)) as waiting:
            await anyio.wait_all_tasks_blocked()
            getattr(waiting, how)()
            with anyio.fail_after(60):
                ended = await waiting.result()
            assert ended.status is (RunStatus.CANCELLED if how == "cancel" else RunStatus.INTERRUPTED)
        go.set()
        assert (await holding.result()).status is COMPLETED


async def test_an_answer_that_comes_while_others_have_all_places_is_not_lost(store: Store) -> None:
    go = anyio.Event()

    async def body(prompt: str) -> str:
        if prompt == "hold":
            await go.wait()
        return f"{prompt} {await ask('Go?')}" if prompt == "asks" else prompt

    runner = ParallelRunner(body, store=store, concurrency=1, shared_limits=True)
    asking = DAG([Task("a", prompt="asks"), Task("b", prompt="b", depends_on=["a"])])
    async with quick_runs(runner) as service:
        asks = await service.create(asking)
        await service.start(asks)
        async for event in service.events(asks):
            if event.kind == "run_waiting_input":
                break
        holds = await service.create(wide("hold", 1))
        await service.start(holds)
        await service.start(asks, {"a": "yes"})
        await anyio.wait_all_tasks_blocked()
        assert (await service.get(asks)).status is RunStatus.RUNNING, "not over, though nothing of it runs"
        go.set()
        with anyio.fail_after(60):
            assert [event.kind async for event in service.events(asks)][-1] == "run_completed"


async def test_a_task_may_run_a_dag_with_another_runner() -> None:
    inner = ParallelRunner(Meter(), concurrency=1)

    async def outer(prompt: str) -> str:
        return (await inner.run(wide(prompt, 3))).status.value

    runner = ParallelRunner(outer, concurrency=2, shared_limits=True)
    assert await run_all(runner, [wide("a", 3), wide("b", 3)]) == [COMPLETED] * 2


async def test_a_task_sees_the_context_variables_of_its_own_run_alone() -> None:
    seen: dict[str, set[str]] = {"a": set(), "b": set()}
    whose = ContextVar("whose", default="nobody's")

    async def body(prompt: str) -> str:
        await anyio.lowlevel.checkpoint()
        seen[prompt].add(whose.get())
        return prompt

    runner = ParallelRunner(body, concurrency=2, shared_limits=True)

    async def run(name: str) -> None:
        whose.set(name)
        await runner.run(wide(name, 5))

    async with anyio.create_task_group() as group:
        group.start_soon(run, "a")
        group.start_soon(run, "b")
    assert seen == {"a": {"a"}, "b": {"b"}}


async def test_an_error_ends_the_run_whose_it_is_and_not_the_one_that_gave_it_a_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = AttemptRunner.begin

    def broken_begin(self: AttemptRunner, position: int) -> Attempt:
        attempt = begin(self, position)
        if attempt.task.id == "y":
            raise RuntimeError("broken")
        return attempt

    monkeypatch.setattr(AttemptRunner, "begin", broken_begin)
    runner = ParallelRunner(Talker(), concurrency=2, shared_limits=True)
    breaks = DAG([Task("x", prompt="x"), Task("y", prompt="y", continues="x")])
    with anyio.fail_after(60):
        async with runner.start(wide("a", 30)) as sound, runner.start(breaks) as broken:
            with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="broken"), flatten_subgroups=True):
                await broken.result()
            assert (await sound.result()).status is COMPLETED


def test_what_an_event_loop_that_was_given_up_has_left_holds_no_places() -> None:
    async def body(prompt: str) -> str:
        if prompt == "hangs":
            await anyio.sleep_forever()
        return prompt

    async def begun() -> list[asyncio.Task[RunResult]]:
        tasks = [asyncio.create_task(runner.run(wide(name, 3))) for name in ("hangs", "waits")]
        await anyio.wait_all_tasks_blocked()
        return tasks

    runner = ParallelRunner(body, concurrency=2, shared_limits=True)
    given_up = asyncio.new_event_loop()
    left = given_up.run_until_complete(begun())
    assert asyncio.run(run_all(runner, [wide("a", 5), wide("b", 5)])) == [COMPLETED] * 2
    for task in left:
        task.cancel()
    given_up.run_until_complete(asyncio.wait(left))
    assert [task.cancelled() for task in left] == [True, True]
    given_up.close()
