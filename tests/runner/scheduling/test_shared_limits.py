"""`shared_limits`: the runs of one runner together keep to its limits, and none of them keeps the others out."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import anyio
import anyio.lowlevel
import pytest

from plait.backends import BackendError, ErrorKind
from plait.persistence import MemoryStore, SQLiteStore
from plait.runner import DAG, ParallelRunner, Retry, RunService, RunStatus, Task
from plait.runner.domain import events
from plait.runner.state.failures import PATIENCE
from tests.support.fakes import QuickClock
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
        if seconds >= 100:
            await gate.wait()
        else:
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
            if isinstance(event, events.TaskRetrying):
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
        raise BackendError(ErrorKind.RATE_LIMITED, "slow down")

    runner = ParallelRunner(limited, shared_limits=True, clock=QuickClock())
    for number in range(1, 4):
        assert (await runner.run(wide("a", 1))).status is RunStatus.FAILED
        assert calls == number * (PATIENCE + 3), "what is throttled that often, and then three attempts"


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_happens_all_places_come_back(seed: int) -> None:
    """Many small runs on two backends, some of which fail, retry, are throttled, stopped or cancelled at any moment."""
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
        shared_limits=True,
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

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            for number in range(25):
                group.start_soon(one, number)
    assert max(meters["one"].most, meters["two"].most) <= 5
    assert meters["two"].most <= 2
    meters["one"].most = 0
    assert await run_all(runner, [wide("after", 40, "one")]) in ([COMPLETED], [RunStatus.FAILED])
    places = runner.config.places()
    assert (places.taken, places.gate("one").taken, places.gate("two").taken) == (0, 0, 0)
    assert (places.gate("one").away, places.gate("two").away) == (0, 0)


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
    with anyio.fail_after(30):
        async with RunService(runner, poll=0.01) as service:
            for name in "abc":
                await service.resume_run(name)
            for name in "abc":
                assert [event.kind async for event in service.events(name)][-1] == "run_completed"
    assert (meter.most, len(meter.order)) == (2, 18)
