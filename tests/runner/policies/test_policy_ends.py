"""Policies at the edges of a run: a stop at the last end, damaged results, failed policies, tasks that wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import anyio

from plait import DAG, ParallelRunner, Retry, Run, RunStatus, Task, TaskStatus, events
from plait.backends import Reply, as_backend
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore, TaskRecord
from plait.results import ResumeAction
from plait.workflows import Decision
from tests.support.growth import Scripted, by_end, talker, tasks
from tests.support.seeded_loop import VirtualClock, run_seeded

ONE = DAG([Task("a", "a")])


async def test_a_stop_as_the_last_task_ends_leaves_its_end_to_be_asked_about() -> None:
    store, runs, policy = MemoryStore(), list[Run](), Scripted(by_end({"a": Decision(add=tasks("more"))}))

    async def answer(prompt: str) -> str:
        if prompt == "a":
            runs[0].stop()  # no await follows, so the task still completes
        return prompt

    runner = ParallelRunner(answer, store=store)
    async with runner.start(ONE, "x", policy=policy) as run:
        runs.append(run)
        result = await run.result()
    assert (result.status, result["a"].status) == (RunStatus.INTERRUPTED, TaskStatus.COMPLETED)
    result = await runner.resume("x", policy=policy)
    assert (result.status, policy.asked) == (RunStatus.COMPLETED, ["a", "more", None])


class DamagedStore(MemoryStore):
    """What it holds of the tasks named in `damaged` fits no checksum, until they have run again."""

    damaged: Sequence[str] = ()

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        return tuple(
            replace(task, damaged=True, text=None, data=None) if task.task_id in self.damaged else task
            for task in await super().list_tasks(run_id, only)
        )


async def test_a_damaged_result_of_a_run_that_its_policy_completed_is_asked_for_again() -> None:
    store, policy = DamagedStore(), Scripted(by_end({"b": Decision(end=RunStatus.COMPLETED)}))
    runner = ParallelRunner(talker(), store=store)
    await runner.run(DAG([Task("a", "a"), Task("b", "b", ["a"])]), "x", policy=policy)
    store.damaged = ["a"]
    preview = await runner.runs.preview("x", retry_failed=True)
    assert preview.tasks["a"].action is ResumeAction.START_OVER
    result = await runner.resume("x", retry_failed=True, policy=policy)
    assert (result["a"].status, result["a"].attempts) == (TaskStatus.COMPLETED, 2)


async def test_a_policy_that_failed_about_an_end_is_asked_about_it_again_once_it_is_mended() -> None:
    def broken(_view: object) -> Decision:
        raise KeyError("bug")

    store = MemoryStore()
    runner = ParallelRunner(talker(), store=store)
    assert (await runner.run(ONE, "x", policy=Scripted(broken))).status is RunStatus.FAILED
    mended = Scripted(by_end({"a": Decision(add=tasks("after"))}))
    result = await runner.resume("x", retry_failed=True, policy=mended)
    assert (result.status, mended.asked) == (RunStatus.COMPLETED, ["a", "after", None])


def test_cancelling_a_task_that_waits_for_its_next_attempt_lets_the_run_end() -> None:
    async def main() -> None:
        clock = VirtualClock()
        flaky = BackendError(ErrorKind.TRANSIENT, "later", retry_after=3600)
        policy = Scripted(by_end({"b": Decision(cancel=("a",))}))
        dag = DAG(
            [
                Task("a", "a", retry=Retry(base_delay=3600, max_delay=3600)),
                Task("b", "b", ["c"]),
                Task("c", "c", backend="last"),
            ]
        )
        began = clock.monotonic()
        failed = anyio.Event()

        async def last(_prompt: str) -> str:
            await failed.wait()
            return "c"

        runner = ParallelRunner(talker({"a": flaky}), backends={"last": as_backend(last)}, clock=clock)
        async with runner.start(dag, policy=policy) as run:
            async for event in run.events():
                if isinstance(event, events.TaskRetried):
                    failed.set()
            result = await run.result()
        assert (result.status, result["a"].status) == (RunStatus.COMPLETED, TaskStatus.CANCELLED)
        assert clock.monotonic() - began < 60

    run_seeded(main, 0)


def test_nor_does_a_resumed_run_wait_for_such_a_task_that_its_policy_cancels_at_once() -> None:
    async def main() -> None:
        clock, store = VirtualClock(), MemoryStore()
        limited = BackendError(ErrorKind.RATE_LIMITED, "later", retry_after=3600)
        policy = Scripted(by_end({"b": Decision(cancel=("a",))}))
        backend = talker({"a": limited, "b": Reply("?", question=Question("how?"))})
        runner = ParallelRunner(backend, store=store, clock=clock)
        async with runner.start(DAG(tasks("a", "b")), "x", policy=policy) as run:
            waits = {events.TaskRetried, events.TaskWaiting}
            async for event in run.events():
                waits.discard(type(event))
                if not waits:
                    run.stop()
        await runner.runs.settle("x", "b", "done", "so")
        began = clock.monotonic()
        result = await runner.resume("x", policy=policy)
        assert (result.status, result["a"].status) == (RunStatus.COMPLETED, TaskStatus.CANCELLED)
        assert clock.monotonic() - began < 60

    run_seeded(main, 0)


async def test_cancelling_a_task_with_for_each_cancels_its_parts() -> None:
    policy = Scripted(by_end({"m.1": Decision(cancel=("m",))}))
    dag = DAG([Task("l", "l"), Task("m", "do {{ item }}", for_each="l")])
    backend = talker({"l": Reply("", ["x", "y", "z"])})
    result = await ParallelRunner(backend, concurrency=1).run(dag, policy=policy)
    assert {name: task.status.value for name, task in result.tasks.items()} == {
        "l": "completed",
        "m": "cancelled",
        "m.1": "completed",
        "m.2": "cancelled",
        "m.3": "cancelled",
    }
