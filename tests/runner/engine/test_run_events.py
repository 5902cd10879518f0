"""The handle of a live run: its events, its end, and leaving it early."""

from __future__ import annotations

import gc
import weakref
from collections.abc import AsyncIterator

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task, TaskStatus
from plait import events as ev
from plait.errors import RunExists
from plait.persistence import MemoryStore
from tests.support.fakes import Talker

TWO = DAG([Task("a", prompt="one"), Task("b", prompt="two", depends_on=["a"])])


async def test_events_come_typed_and_in_order_and_end_with_the_run() -> None:
    async with ParallelRunner(Talker()).start(TWO) as run:
        seen = [event async for event in run.events()]
        result = await run.result()
    assert [event.kind for event in seen] == [
        "run_created",
        "run_started",
        "task_started",
        "task_output",
        "task_completed",
        "task_started",
        "task_output",
        "task_completed",
        "run_completed",
    ]
    completed = seen[4]
    assert isinstance(completed, ev.TaskCompleted)
    assert (completed.task_id, completed.text, completed.usage.input_tokens) == ("a", "re: one", 3)
    assert result.status is RunStatus.COMPLETED
    assert [event async for event in run.events()] == [], "nothing follows the end"


async def test_the_handle_mirrors_the_stored_status() -> None:
    store = MemoryStore()
    async with ParallelRunner(Talker(), store=store).start(TWO) as run:
        assert run.status is RunStatus.QUEUED
        async for _event in run.events():
            record = await store.get_run(run.run_id)
            assert record is not None
            # What is told is stored; the store may be ahead of the teller by what is being told.
            assert run.status in {RunStatus.QUEUED, RunStatus.RUNNING, RunStatus(record.status)}
    assert run.status is RunStatus.COMPLETED


async def test_a_run_that_nobody_reads_keeps_no_events() -> None:
    in_memory: list[int] = []

    async def count_events(_prompt: str) -> str:
        in_memory.append(sum(isinstance(one, ev.TaskCompleted) for one in gc.get_objects()))
        return "x"

    ids = [f"t{i}" for i in range(8)]
    chain = DAG([Task(name, "x", depends_on=ids[i - 1 : i] if i else []) for i, name in enumerate(ids)])
    async with MemoryStore() as store:
        await ParallelRunner(count_events, store=store).run(chain)
    assert max(in_memory) - in_memory[0] <= 2, "all of the run's events are in memory"


async def test_several_readers_see_the_same() -> None:
    async with ParallelRunner(Talker()).start(TWO) as run:
        first, second = run.events(), run.events()
        assert [e.kind async for e in first] == [e.kind async for e in second]


async def test_two_who_share_a_reader_share_its_events_and_its_end() -> None:
    go, seen = anyio.Event(), list[str]()

    async def held(prompt: str) -> str:
        await go.wait()
        return prompt

    async def read(reader: AsyncIterator[ev.Event]) -> None:
        seen.extend([event.kind async for event in reader])

    with anyio.fail_after(60):
        async with ParallelRunner(held).start(TWO) as run, anyio.create_task_group() as group:
            reader = run.events()
            group.start_soon(read, reader)
            group.start_soon(read, reader)
            await anyio.wait_all_tasks_blocked()
            go.set()
    twice = ["task_started", "task_completed"] * 2
    assert sorted(seen) == sorted(["run_created", "run_started", *twice, "run_completed"])


async def test_a_slow_reader_loses_only_outputs_and_is_told_how_many() -> None:
    def chatty(prompt, request):
        from plait.backends import Output

        for _ in range(20_000):
            request.on_output(Output("text", "x"))
        return "done"

    async with ParallelRunner(Talker(chatty)).start(TWO) as run:
        reader = run.events()
        await run.result()
        seen = [event async for event in reader]
    outputs = sum(isinstance(event, ev.TaskOutput) for event in seen)
    dropped = sum(event.count for event in seen if isinstance(event, ev.EventsDropped))
    assert outputs + dropped == 40_002 and dropped > 20_000
    kinds = [event.kind for event in seen if event.kind not in {"task_output", "events_dropped"}]
    assert kinds.count("task_completed") == 2 and kinds[-1] == "run_completed"


def stuck_after(prompts: int):
    """A backend that answers so many prompts and then hangs; and the event that says it does."""
    hanging, count = anyio.Event(), 0

    async def f(prompt: str) -> str:
        nonlocal count
        count += 1
        if count > prompts:
            hanging.set()
            await anyio.sleep_forever()
        return f"<{prompt}>"

    return f, hanging


async def test_stop_writes_down_where_the_run_stands_and_resume_goes_on() -> None:
    store = MemoryStore()
    backend, hanging = stuck_after(1)
    async with ParallelRunner(backend, store=store).start(TWO) as run:
        await hanging.wait()
        run.stop()
        result = await run.result()
    assert (result.status, result["a"].status, result["b"].status) == (
        RunStatus.INTERRUPTED,
        TaskStatus.COMPLETED,
        TaskStatus.PENDING,
    )
    record = await store.get_run(run.run_id)
    assert record is not None
    assert (record.status, record.owner, record.counts) == ("running", None, {"completed": 1, "pending": 1})
    again = Talker()
    result = await ParallelRunner(again, store=store).resume(run.run_id)
    assert (again.prompts, result.status, result.reused) == (["two"], RunStatus.COMPLETED, 1)


async def test_cancel_is_for_good() -> None:
    store = MemoryStore()
    backend, hanging = stuck_after(1)
    async with ParallelRunner(backend, store=store).start(TWO) as run:
        await hanging.wait()
        run.cancel()
        run.stop()
        result = await run.result()
        seen = [event.kind async for event in run.events()]
    assert result.status is RunStatus.CANCELLED
    assert result["b"].status is TaskStatus.CANCELLED
    assert seen[-2:] == ["task_cancelled", "run_cancelled"]
    record = await store.get_run(run.run_id)
    assert record is not None
    assert (record.status, record.counts) == ("cancelled", {"completed": 1, "cancelled": 1})


async def test_stopping_before_the_first_step_starts_nothing() -> None:
    backend = Talker()
    async with ParallelRunner(backend, store=MemoryStore()).start(TWO) as run:
        run.stop()
        result = await run.result()
    assert (result.status, backend.prompts) == (RunStatus.INTERRUPTED, [])


async def test_stopping_an_ended_run_changes_nothing() -> None:
    async with ParallelRunner(Talker()).start(TWO) as run:
        result = await run.result()
        run.stop()
        run.cancel()
        assert await run.result() is result
    assert result.status is RunStatus.COMPLETED


@pytest.mark.parametrize("native", [False, True])
async def test_cancelling_the_caller_writes_down_where_the_run_stands(native: bool) -> None:
    store = MemoryStore()
    backend, hanging = stuck_after(1)
    runner = ParallelRunner(backend, store=store)
    async with anyio.create_task_group() as tg:
        if native:
            import asyncio

            task: list[asyncio.Task] = []

            async def body() -> None:
                task.append(asyncio.current_task())
                await runner.run(TWO, run_id="r")

            tg.start_soon(body)
            await hanging.wait()
            task[0].cancel()
        else:
            tg.start_soon(runner.run, TWO, "r")
            await hanging.wait()
            tg.cancel_scope.cancel()
    record = await store.get_run("r")
    assert record is not None
    assert (record.status, record.owner, record.counts) == ("running", None, {"completed": 1, "pending": 1})
    assert (await ParallelRunner(Talker(), store=store).resume("r")).status is RunStatus.COMPLETED


async def test_an_error_in_the_block_stops_the_run() -> None:
    store = MemoryStore()
    backend, hanging = stuck_after(0)
    with pytest.raises(ValueError, match="mine"):  # noqa: PT012 - the block is what is tested
        async with ParallelRunner(backend, store=store).start(TWO, run_id="r"):
            await hanging.wait()
            raise ValueError("mine")
    record = await store.get_run("r")
    assert record is not None
    assert (record.status, record.owner) == ("running", None)


async def test_a_run_that_was_not_entered_says_so() -> None:
    run = ParallelRunner(Talker()).start(TWO)
    with pytest.raises(RuntimeError, match="use it as `async with"):
        await run.result()
    with pytest.raises(RuntimeError, match="use it as `async with"):
        run.events()
    async with run:
        assert len([event async for event in run.events()]) == 9, "from the start all the same"
    with pytest.raises(RuntimeError, match="entered only once"):
        async with run:
            pass


async def test_errors_of_the_run_come_out_of_the_block_as_they_are() -> None:
    store = MemoryStore()
    runner = ParallelRunner(Talker(), store=store)
    await runner.run(TWO, "taken")
    with pytest.raises(RunExists):
        async with runner.start(TWO, "taken") as run:
            await run.result()


async def test_a_cancel_that_comes_after_the_last_task_changes_nothing() -> None:
    store = MemoryStore()
    async with ParallelRunner(Talker(), store=store).start(TWO) as run:
        done = 0
        async for event in run.events():
            done += event.kind == "task_completed"
            if done == 2:
                run.cancel()
        result = await run.result()
    assert result.status is RunStatus.COMPLETED


async def test_a_reader_that_nobody_reads_any_more_is_let_go_with_what_waits_in_it() -> None:
    chain = DAG([Task(f"t{n}", "x", depends_on=[f"t{n - 1}"] if n else []) for n in range(20)])
    async with ParallelRunner(Talker()).start(chain) as run:
        left: list[weakref.ref[object]] = []
        for _ in range(5):
            reader = run.events()
            left.append(weakref.ref(reader))
            async for _event in reader:
                break
            del reader
        kept = run.events()
        gc.collect()
        assert [one() for one in left] == [None] * 5
        assert [event.kind async for event in kept][-1] == "run_completed"


async def test_the_handle_of_a_run_that_has_ended_says_so() -> None:
    runner = ParallelRunner(Talker(), store=MemoryStore())
    ended = await runner.run(TWO)
    async with runner.start_resume(ended.run_id) as run:
        assert (await run.result()).status is run.status is RunStatus.COMPLETED
