"""`Runs`: a run that waits for a person continues once it is answered."""

from __future__ import annotations

import anyio
import pytest

from plait import DAG, ParallelRunner, Runs, RunStatus, Task
from plait.backends import ask
from plait.persistence import MemoryStore, Store
from tests.support.quick_runs import quick_runs

ASKING = DAG([Task("a", prompt="ask"), Task("b", prompt="got {{ a }}", depends_on=["a"])])


async def work(prompt: str) -> str:
    return str(await ask("Who?")) if prompt == "ask" else prompt


async def until(runs: Runs, run_id: str, kind: str, after: int = 0) -> int:
    """Follow the run to an event of `kind`; its number."""
    with anyio.fail_after(60):
        async for event in runs.events(run_id, after):
            if event.kind == kind:
                return event.seq
    raise AssertionError(f"no {kind}")


async def waiting_run(runs: Runs, dag: DAG = ASKING) -> str:
    run_id = await runs.create(dag)
    await runs.start(run_id)
    await until(runs, run_id, "run_waiting_input")
    return run_id


async def test_an_answer_through_the_service(store: Store) -> None:
    async with quick_runs(ParallelRunner(work, store=store)) as runs:
        run_id = await waiting_run(runs)
        assert await runs.answer(run_id, "a", "Ada")
        await until(runs, run_id, "run_completed")
        assert (await runs.get(run_id)).tasks["b"].text == "got Ada"


async def test_an_answer_of_another_process(store: Store) -> None:
    async with quick_runs(ParallelRunner(work, store=store)) as runs:
        run_id = await waiting_run(runs)
        assert await ParallelRunner(store=store).runs.answer(run_id, "a", "Ada")
        await until(runs, run_id, "run_completed")


async def test_the_deadline_of_a_question() -> None:
    async def hurried(prompt: str) -> str:
        return str(await ask("Who?", default="nobody", deadline=0.5)) if prompt == "ask" else prompt

    async with quick_runs(ParallelRunner(hurried, store=MemoryStore())) as runs:
        run_id = await waiting_run(runs)
        await until(runs, run_id, "run_completed")
        assert (await runs.get(run_id)).tasks["b"].text == "got nobody"


async def test_one_answer_of_two_leaves_the_run_waiting() -> None:
    two = DAG([Task("a", prompt="ask"), Task("b", prompt="ask"), Task("c", prompt="{{ a }}", depends_on=["a"])])
    async with quick_runs(ParallelRunner(work, store=MemoryStore())) as runs:
        run_id = await waiting_run(runs, two)
        seen = await until(runs, run_id, "run_waiting_input")
        await runs.answer(run_id, "a", "Ada")
        await until(runs, run_id, "run_waiting_input", seen)
        run = await runs.get(run_id)
        assert (run.status, run.tasks["c"].text, run.tasks["b"].status) == ("waiting_input", "Ada", "waiting_input")
        await runs.answer(run_id, "b", "Bob")
        await until(runs, run_id, "run_completed")


@pytest.mark.parametrize("first", ["answered", "cancelled"])
async def test_a_service_leaves_a_run_that_another_process_continues(first: str) -> None:
    store = MemoryStore()
    runner = ParallelRunner(work, store=store)
    async with quick_runs(runner) as runs:
        run_id = await waiting_run(runs)
        if first == "answered":
            assert (await runner.resume(run_id, answers={"a": "Ada"})).status is RunStatus.COMPLETED
        else:
            assert await runner.runs.cancel(run_id) is RunStatus.CANCELLED
    resumed = [event for event in await store.list_events(run_id) if event.kind == "run_resumed"]
    assert len(resumed) == (1 if first == "answered" else 0)


async def test_leaving_the_service_ends_the_wait(store: Store) -> None:
    with anyio.fail_after(60):
        async with quick_runs(ParallelRunner(work, store=store)) as runs:
            run_id = await waiting_run(runs)
    assert await ParallelRunner(store=store).runs.answer(run_id, "a", "Ada")
    async with quick_runs(ParallelRunner(work, store=store)) as other:
        assert (await other.get(run_id)).status is RunStatus.WAITING_INPUT
