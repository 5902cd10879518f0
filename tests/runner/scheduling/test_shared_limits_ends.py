"""Runs that share limits: how they end, what goes wrong in them, and what they leave to one another."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar

import anyio
import anyio.lowlevel
import pytest

from plait.backends import ask
from plait.persistence import Store
from plait.runner import DAG, ParallelRunner, RunResult, RunService, RunStatus, Task
from tests.support.fakes import Talker
from tests.support.sharing import COMPLETED, Meter, run_all, wide


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_run_that_is_ended_gives_its_places_to_others(how: str) -> None:
    held, go = anyio.Event(), anyio.Event()

    async def body(prompt: str) -> str:
        if prompt == "held":
            held.set()
            await go.wait()
        return prompt

    runner = ParallelRunner(body, concurrency=2, shared_limits=True)
    async with runner.start(wide("held", 5)) as holding, runner.start(wide("next", 3)) as waiting:
        await held.wait()
        await anyio.wait_all_tasks_blocked()
        assert waiting.status is RunStatus.RUNNING
        getattr(holding, how)()
        with anyio.fail_after(10):
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
            with anyio.fail_after(10):
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
    async with RunService(runner, poll=0.01) as service:
        asks = await service.create_run(asking)
        await service.start_run(asks)
        async for event in service.events(asks):
            if event.kind == "run_waiting_input":
                break
        holds = await service.create_run(wide("hold", 1))
        await service.start_run(holds)
        await service.resume_run(asks, {"a": "yes"})
        await anyio.wait_all_tasks_blocked()
        assert (await service.get_run(asks)).status is RunStatus.RUNNING, "not over, though nothing of it runs"
        go.set()
        with anyio.fail_after(10):
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


class Breaking(Talker):
    """It cannot even say whether it can fork."""

    @property
    def can_fork(self) -> bool:
        raise RuntimeError("broken")


async def test_an_error_ends_the_run_whose_it_is_and_not_the_one_that_gave_it_a_place() -> None:
    runner = ParallelRunner(Breaking(), concurrency=2, shared_limits=True)
    breaks = DAG([Task("x", prompt="x"), Task("y", prompt="y", continues="x")])
    with anyio.fail_after(10):
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
    given_up.close()
