"""`RunService` at the moment when a run has come to its end in the store, and the service has not heard of it yet."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.abc
import pytest

from plait.backends import JsonInput, Opening, Reply, ask
from plait.persistence import Batch, MemoryStore
from plait.persistence.changes import RunReleased
from plait.runner import DAG, ParallelRunner, PlaitError, RunService, RunStatus, Task
from tests.support.fakes import Talker
from tests.support.stores.faulty_store import FaultyStore

ASKING = DAG([Task("a", prompt="a")])


class LateStore(FaultyStore):
    """Its answer to the first write that leaves a run comes only once `answer` is set; `left` tells of that write."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.left, self.answer = anyio.Event(), anyio.Event()

    async def write(self, batch: Batch) -> None:
        await super().write(batch)
        if not self.left.is_set() and any(isinstance(change, RunReleased) for change in batch.changes):
            self.left.set()
            await self.answer.wait()


@asynccontextmanager
async def just_ended(store: LateStore, runner: ParallelRunner) -> AsyncGenerator[tuple[RunService, str]]:
    """A service whose run has ended in the store a moment ago."""
    async with RunService(runner, poll=0.01) as runs:
        run_id = await runs.create_run(ASKING)
        await runs.start_run(run_id)
        with anyio.fail_after(10):
            await store.left.wait()
        assert runs.driven == (run_id,)
        yield runs, run_id


async def ended(runs: RunService, run_id: str) -> RunStatus:
    with anyio.fail_after(5):
        async for _ in runs.events(run_id):
            pass
    return (await runs.get_run(run_id)).status


async def hear_of_it(store: LateStore, group: anyio.abc.TaskGroup, *calls: object) -> None:
    """Make the calls, and have the store answer once all of them wait."""
    for call in calls:
        group.start_soon(call)  # type: ignore[arg-type]
    await anyio.wait_all_tasks_blocked()
    store.answer.set()


async def test_an_answer_to_a_run_that_has_just_stopped_to_wait_for_it_makes_it_go_on() -> None:
    async def work(_prompt: str) -> str:
        return f"got {await ask('Go?')}"

    store = LateStore()
    async with just_ended(store, ParallelRunner(work, store=store)) as (runs, run_id):
        async with anyio.create_task_group() as group:
            await hear_of_it(store, group, lambda: runs.resume_run(run_id, {"a": "yes"}))
        assert await ended(runs, run_id) is RunStatus.COMPLETED
        assert (await runs.get_run(run_id)).tasks["a"].text == "got yes"


@pytest.mark.parametrize("callers", [1, 3])
async def test_a_run_that_has_just_failed_is_tried_again(callers: int) -> None:
    prompts: list[str] = []

    async def work(prompt: str) -> str:
        prompts.append(prompt)
        if len(prompts) == 1:
            raise RuntimeError("not today")
        return prompt

    store = LateStore()
    async with just_ended(store, ParallelRunner(work, store=store)) as (runs, run_id):
        async with anyio.create_task_group() as group:
            again = [lambda: runs.resume_run(run_id, retry_failed=True)] * callers
            await hear_of_it(store, group, *again)
        assert await ended(runs, run_id) is RunStatus.COMPLETED
    assert len(prompts) == 2


async def test_a_mistake_of_one_caller_is_not_that_of_those_who_came_meanwhile() -> None:
    async def whether(_prompt: str) -> str:
        return str(await ask("how many?", schema={"type": "integer"}))

    store = MemoryStore()
    runner = ParallelRunner(whether, store=store)
    first = await runner.run(DAG([Task("a"), Task("b")]))
    told: list[str] = []
    async with RunService(runner, poll=0.01) as runs, anyio.create_task_group() as group:

        async def resume(answers: dict[str, JsonInput] | None) -> None:
            try:
                await runs.resume_run(first.run_id, answers)
            except PlaitError as error:
                told.append(str(error))

        for answers in ({"a": "no number"}, {"b": 7}, None):
            group.start_soon(resume, answers)
    assert ["no number" in one for one in told] == [True]
    assert [task.status for task in await store.list_tasks(first.run_id)] == ["waiting_input", "completed"]


async def test_a_history_ends_also_where_somebody_went_on_with_a_conversation_after_the_run() -> None:
    def another_session(prompt: str, opening: Opening) -> Reply:
        opening.on_session(f"session of {prompt}")
        return Reply(prompt, session_id=f"session of {prompt}")

    runner = ParallelRunner(Talker(another_session, own_ids=True), store=MemoryStore())
    result = await runner.run(ASKING)
    await runner.continue_task(result.run_id, "a", "more")
    async with RunService(runner, poll=3600) as runs:
        kinds = [event.kind async for event in runs.events(result.run_id)]
    assert kinds[-2:] == ["run_completed", "session_opened"]
