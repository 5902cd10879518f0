"""`cancel_requested`: code of a task reads that it is to end, wherever the code runs."""

from __future__ import annotations

import asyncio
import threading
import time

import anyio
import pytest

from plait import (
    DAG,
    BackendError,
    ErrorKind,
    ParallelRunner,
    Retry,
    RunStatus,
    Task,
    TaskStatus,
    Usage,
    cancel_requested,
)
from plait.persistence import MemoryStore
from tests.support.fakes import Talker
from tests.support.polling import until

ONE = DAG([Task("a", prompt="a")])


class Worker:
    """Code of a task that works until it is to end."""

    def __init__(self) -> None:
        self.began, self.ended = threading.Event(), threading.Event()

    def plain(self, _prompt: str) -> str:
        assert not cancel_requested()
        self.began.set()
        while not cancel_requested():
            time.sleep(0.001)
        self.ended.set()
        return "half"

    async def awaiting(self, _prompt: str) -> str:
        self.began.set()
        await until(cancel_requested)
        self.ended.set()
        return "half"

    async def in_a_thread(self, prompt: str) -> str:
        return await asyncio.to_thread(self.plain, prompt)


@pytest.mark.parametrize("how", ["plain", "awaiting", "in_a_thread"])
async def test_code_ends_by_itself_once_its_run_is_cancelled(how: str) -> None:
    worker = Worker()
    async with ParallelRunner(getattr(worker, how), cancel_grace=600).start(ONE) as run:
        await until(worker.began.is_set)
        run.cancel()
        with anyio.fail_after(60):
            result = await run.result()
    assert (result.status, result.text) == (RunStatus.CANCELLED, {"a": "half"})


@pytest.mark.parametrize("how", ["stop", "timeout", "grace"])
async def test_a_thread_that_nobody_waits_for_any_more_ends(how: str) -> None:
    worker = Worker()
    dag = DAG([Task("a", prompt="a", timeout=0.5 if how == "timeout" else None, retry=Retry(1))])
    async with ParallelRunner(worker.plain, cancel_grace=0).start(dag) as run:
        await until(worker.began.is_set)
        if how == "stop":
            run.stop()
        elif how == "grace":
            run.cancel()
        await run.result()
    await until(worker.ended.is_set)


async def test_other_tasks_and_other_runs_are_not_concerned() -> None:
    seen: list[tuple[str, bool]] = []

    async def look(prompt: str) -> str:
        seen.append((prompt, cancel_requested()))
        return prompt

    assert not cancel_requested()
    runner = ParallelRunner(look, concurrency=1)
    worker = Worker()
    async with ParallelRunner(worker.awaiting).start(ONE) as run:
        await until(worker.began.is_set)
        run.cancel()
        await runner.run(DAG([Task("a", prompt="a"), Task("b", prompt="b")]))
    await runner.run(ONE)
    assert seen == [("a", False), ("b", False), ("a", False)]
    assert not cancel_requested()


@pytest.mark.parametrize("kind", [ErrorKind.TRANSIENT, ErrorKind.AUTH])
async def test_an_attempt_that_breaks_off_is_cancelled_and_neither_failed_nor_repeated(kind: ErrorKind) -> None:
    began = anyio.Event()

    async def breaks_off(_prompt: str) -> str:
        began.set()
        await until(cancel_requested)
        raise BackendError(kind, "broken off", usage=Usage(7, 1))

    store = MemoryStore()
    async with ParallelRunner(breaks_off, store=store).start(DAG([Task("a", prompt="a", retry=Retry(5))]), "r") as run:
        await began.wait()
        run.cancel()
        seen = [event.kind async for event in run.events()]
        result = await run.result()
    assert (result["a"].status, result["a"].attempts, result["a"].usage) == (TaskStatus.CANCELLED, 1, Usage(7, 1))
    assert seen[-3:] == ["run_cancelling", "task_cancelled", "run_cancelled"]
    (attempt,) = await store.list_attempts("r", "a")
    assert (attempt.status, attempt.usage.input_tokens) == ("cancelled", 7)


@pytest.mark.parametrize("seconds", [0.0, 600.0])
async def test_the_grace_time_is_for_a_run_without_a_store_as_well(seconds: float) -> None:
    release = anyio.Event()
    began = anyio.Event()

    async def slow(_prompt: str) -> str:
        began.set()
        await release.wait()
        return "whole"

    async with ParallelRunner(slow, cancel_grace=seconds).start(ONE) as run:
        await began.wait()
        run.cancel()
        run.cancel()
        if seconds:
            await anyio.wait_all_tasks_blocked()
            release.set()
        result = await run.result()
    assert (result.status, result.text) == (RunStatus.CANCELLED, {"a": "whole"} if seconds else {})


async def test_a_cancel_before_the_first_step_starts_nothing() -> None:
    backend = Talker()
    async with ParallelRunner(backend, store=MemoryStore()).start(ONE) as run:
        run.cancel()
        result = await run.result()
    assert (result.status, backend.prompts) == (RunStatus.CANCELLED, [])
