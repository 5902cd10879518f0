"""`Task(cache=...)`: an exact answer from any run of the store, in place of a call."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.clock_and_ids import Clock
from plait.errors import DAGError
from plait.persistence import MemoryStore, SQLiteStore, Store
from tests.support.fakes import Calls
from tests.support.processes import warm

HOUR = 3600.0


class Later(Clock):
    """A clock whose time of day is set by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.ahead = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead


@pytest.fixture
async def store(tmp_path: Path) -> Any:
    async with SQLiteStore(tmp_path / "plait.db") as opened:
        yield opened


async def run(runner: ParallelRunner, *tasks: Task, run_id: str | None = None) -> dict[str, str]:
    result = await runner.run(DAG(tasks), run_id)
    assert result.status is RunStatus.COMPLETED
    return dict(result.text)


async def test_an_answer_of_any_run_and_any_task_is_taken(store: Store) -> None:
    calls = Calls()
    runner = ParallelRunner(calls, store=store)
    await run(runner, Task("first", "a"), run_id="one")
    await run(runner, Task("other", "b"), run_id="two")
    calls.take()
    tasks = [Task("x", "a", cache=True), Task("y", "b", cache=True), Task("z", "{{ x }}{{ y }}", ["x", "y"])]
    texts = await run(runner, *tasks, run_id="three")
    assert calls.take() == ["<a><b>"]
    assert texts == {"x": "<a>", "y": "<b>", "z": "<<a><b>>"}
    attempts = {one.task_id: one.backend for one in await store.list_attempts("three")}
    assert attempts == {"x": "reused from one", "y": "reused from two", "z": "default"}


async def test_a_task_without_cache_is_called(store: Store) -> None:
    calls = Calls()
    runner = ParallelRunner(calls, store=store)
    await run(runner, Task("a", "a", cache=True))
    await run(runner, Task("a", "a"), Task("b", "b", cache=True))
    assert calls.take() == ["a", "a", "b"]


@pytest.mark.parametrize(
    "changed",
    [
        Task("a", "A", cache=True),
        Task("a", "a", output_schema={"type": "string"}, cache=True),
        Task("a", "a", metadata={"x": 1}, cache=True),
        Task("a", "a", cache=True, at_most_once=True),
    ],
)
async def test_only_an_exact_match_is_taken(store: Store, changed: Task) -> None:
    calls = Calls()
    runner = ParallelRunner(calls, store=store)
    await run(runner, Task("a", "a"))
    calls.take()
    runner = ParallelRunner(Calls() if changed.output_schema is None else _quoted, store=store)
    result = await runner.run(DAG([changed]), "new")
    assert result.status is RunStatus.COMPLETED
    assert [one.backend for one in await store.list_attempts("new")] == ["default"]


async def _quoted(prompt: str) -> str:
    return f'"{prompt}"'


async def test_another_backend_is_another_answer(store: Store) -> None:
    async def one(_prompt: str) -> str:
        return "one"

    async def two(_prompt: str) -> str:
        return "two"

    await run(ParallelRunner(one, store=store), Task("a", "a"))
    assert await run(ParallelRunner(two, store=store), Task("a", "a", cache=True)) == {"a": "two"}
    named = ParallelRunner(backends={"mine": one}, store=store)
    assert await run(named, Task("a", "a", cache=True)) == {"a": "one"}


async def test_a_conversation_is_part_of_the_key(store: Store) -> None:
    calls = Calls()
    runner = ParallelRunner(calls, store=store)
    await run(runner, Task("a", "a"), Task("b", "go on", continues="a"))
    calls.take()
    await run(runner, Task("x", "a", cache=True), Task("y", "go on", continues="x", cache=True))
    assert calls.take() == []
    await run(runner, Task("x", "A", cache=True), Task("y", "go on", continues="x", cache=True))
    assert calls.take() == ["A", "go on"]


async def test_an_answer_is_taken_up_to_its_maximum_age_and_never_grows_younger(store: Store) -> None:
    calls, clock = Calls(), Later()
    runner = ParallelRunner(calls, store=store, clock=clock)
    await run(runner, Task("a", "a"))
    clock.ahead += HOUR / 2
    await run(runner, Task("a", "a", cache=HOUR), Task("b", "b"))
    assert calls.take() == ["a", "b"]
    clock.ahead += HOUR * 0.6  # the answer that was taken over is 0.6 hours old, its source 1.1 hours
    await run(runner, Task("a", "a", cache=HOUR))
    assert calls.take() == ["a"]
    clock.ahead += HOUR * 24
    await run(runner, Task("a", "a", cache=True))
    assert calls.take() == []


async def test_each_task_has_a_maximum_age_of_its_own(store: Store) -> None:
    calls, clock = Calls(), Later()
    runner = ParallelRunner(calls, store=store, clock=clock)
    await run(runner, Task("a", "a"), Task("b", "b"))
    calls.take()
    clock.ahead += HOUR
    await run(runner, Task("a", "a", cache=HOUR * 2), Task("b", "b", cache=HOUR / 2))
    assert calls.take() == ["b"]


async def test_the_newest_answer_is_taken(store: Store) -> None:
    texts = ["old", "new"]

    async def say(_prompt: str) -> str:
        return texts.pop(0)

    clock = Later()
    runner = ParallelRunner(say, store=store, clock=clock)
    for _ in range(2):
        await run(runner, Task("a", "a"))
        clock.ahead += HOUR
    assert await run(runner, Task("a", "a", cache=True)) == {"a": "new"}


async def test_parts_of_a_for_each_have_the_cache_of_the_whole(store: Store) -> None:
    class Lists(Calls):
        async def __call__(self, prompt: str) -> Any:
            await super().__call__(prompt)
            return [1, 2] if prompt == "list" else f"<{prompt}>"

    calls = Lists()
    tasks = [
        Task("l", "list", output_schema={"type": "array"}),
        Task("p", "part {{ item }}", for_each="l", cache=True),
    ]
    runner = ParallelRunner(calls, store=store)
    await run(runner, *tasks)
    calls.take()
    await run(runner, *tasks)
    assert calls.take() == ["list"]


async def test_a_skipped_task_is_not_taken_from_the_cache(store: Store) -> None:
    calls = Calls()
    runner = ParallelRunner(calls, store=store)
    await run(runner, Task("a", "a"))
    calls.take()
    result = await runner.run(DAG([Task("a", "a", cache=True, when="false")]))
    assert result["a"].status == "skipped"


@pytest.mark.parametrize("cache", [0, -1, float("inf"), "1h"])
def test_a_wrong_cache_is_refused_by_the_graph(cache: Any) -> None:
    with pytest.raises(DAGError, match="cache must be true, false or a number of seconds above 0"):
        DAG([Task("a", "a", cache=cache)])


CRASH = """
import asyncio, os, signal, sys
from plait import DAG, ParallelRunner, SQLiteStore, Task
from tests.support.fakes import QuickClock

async def say(prompt):
    print("called", prompt, flush=True)
    if prompt == "hold" and sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return prompt

async def main():
    async with SQLiteStore(sys.argv[1]) as store:
        runner = ParallelRunner(say, store=store, clock=QuickClock())
        if sys.argv[2] == "die":
            await runner.run(DAG([Task("a", "a")]))
            tasks = [Task("hold", "hold"), Task("b", "a", ["hold"], cache=True)]
            await runner.run(DAG(tasks), "r")
        else:
            result = await runner.resume("r")
            print(result.status.value, result.text["b"])

asyncio.run(main())
"""


def test_a_resume_after_a_kill_still_takes_answers_from_the_cache(tmp_path: Path) -> None:
    words = [sys.executable, "-c", CRASH, str(tmp_path / "runs.db")]
    killed = warm.run([*words, "die"], timeout=60)
    assert (killed.returncode, killed.stdout) == (-9, "called a\ncalled hold\n")
    resumed = warm.run([*words, "resume"], timeout=60)
    assert resumed.stdout == "called hold\ncompleted a\n", resumed.stderr


async def test_a_fresh_task_takes_no_answer_from_the_cache() -> None:
    calls, dag = Calls(), DAG([Task("a", "a", cache=True)])
    runner = ParallelRunner(calls, store=MemoryStore())
    await runner.run(dag, "first")
    await runner.run(dag, like="first")
    assert len(calls.made) == 1
    await runner.run(dag, like="first", fresh=["a"])
    assert len(calls.made) == 2
    async with runner.runs.start_fork(await runner.runs.fork("first", "a")) as fork:
        await fork.result()
    assert len(calls.made) == 3
