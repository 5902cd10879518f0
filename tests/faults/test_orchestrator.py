"""The orchestrator's process is killed at each position of its loop, before and after it is durable, and at each call:
the resumed run ends as an uncrashed one, and what was stored is not asked for again.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import Orchestrator, failpoints
from plait.clock_and_ids import Clock
from plait.events import Event, RunCompleted, TaskCompleted, TasksAdded, TaskStarted
from plait.orchestration import OrchestratorResult, Phase
from plait.persistence import Batch, SQLiteStore, Store
from tests.support.fakes import QuickClock
from tests.support.processes.forked import Child
from tests.support.sizes import size
from tests.support.team import ANSWER, CALLS, CONTEXT, GOAL, TASKS, LoopState, Team, loop_state

POSITIONS: dict[str, tuple[Callable[[Event], bool], LoopState, LoopState]] = {
    "after planning": (
        lambda change: isinstance(change, TasksAdded) and change.tasks[0].task_id == "do.a",
        (Phase.PLANNING, 0, ("plan.1",)),
        (Phase.EXECUTING, 0, ("do.a",)),
    ),
    "before executing": (
        lambda change: isinstance(change, TaskStarted) and change.task_id == "do.b",
        (Phase.REFLECTING, 2, ("reflect.1",)),
        (Phase.EXECUTING, 2, ("do.b",)),
    ),
    "after a completion": (
        lambda change: isinstance(change, TaskCompleted) and change.task_id == "do.a",
        (Phase.EXECUTING, 0, ("do.a",)),
        (Phase.EXECUTING, 1, ("do.c",)),
    ),
    "before reflection": (
        lambda change: isinstance(change, TasksAdded) and change.tasks[0].task_id == "reflect.2",
        (Phase.EXECUTING, 3, ("do.d",)),
        (Phase.REFLECTING, 4, ("reflect.2",)),
    ),
    "done": (
        lambda change: isinstance(change, TaskCompleted) and change.task_id == "answer",
        (Phase.EXECUTING, 4, ("answer",)),
        (Phase.DONE, 4, ()),
    ),
    "ended": (
        lambda change: isinstance(change, RunCompleted),
        (Phase.DONE, 4, ()),
        (Phase.DONE, 4, ()),
    ),
}
"""The change that makes a position durable; where the loop stands before it, and after it."""
SIDES = ("txn.before_commit", "txn.after_commit", "batch.after_write", "attempt.before_call", "attempt.after_call")


class Watched:
    """A store that says when a batch with such a change is on its way to the disk."""

    def __init__(self, store: Store, is_it: Callable[[Event], bool]) -> None:
        self._store, self._is_it, self.now = store, is_it, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, batch: Batch) -> None:
        self.now = any(map(self._is_it, batch.events))
        await self._store.write(batch)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def orchestrate(folder: Path, position: str, side: str, places: int) -> OrchestratorResult:
    """Until `side` of the batch that makes `position` durable is reached; or, for calls, of the call of that number."""

    def note(call: str) -> None:
        with (folder / "calls").open("a") as file:
            file.write(f"{call}\n")

    seen: Counter[str] = Counter()
    team, is_it = Team(note).backends, POSITIONS.get(position, (lambda _: False,))[0]
    async with SQLiteStore(folder / "plait.db") as store:
        watched = Watched(store, is_it)

        def at_boundary(name: str) -> None:
            seen[name] += 1
            if name == side and (watched.now or str(seen[name]) == position):
                die()

        failpoints.on_reach = at_boundary
        if await store.get_run("r") is None:
            made = Orchestrator(GOAL, 10, team, store=watched, run_id="r", reflect_every=2, concurrency=places)
        else:
            made = await Orchestrator.resume("r", store=watched, backends=team, concurrency=places)
        return await made.run()


def in_child(folder: Path, position: str = "", side: str = "", places: int = 1) -> OrchestratorResult | None:
    """`orchestrate` in a process of its own; None if that was killed."""

    def work(_say: Callable[[str], None]) -> str:
        # A task that was cut at a death waits before it starts again: in this process alone, that time passes at once.
        clock = QuickClock()
        for method in ("wall", "monotonic", "sleep"):
            setattr(Clock, method, getattr(clock, method))
        result = asdict(anyio.run(orchestrate, folder, position, side, places))
        return json.dumps({**result, "usage": None})

    child = Child(work)
    line = child.line(time.monotonic() + 60)
    code = child.wait()
    if line is None:
        assert code == -signal.SIGKILL, f"the child ended by itself, with {code}"
        return None
    return OrchestratorResult(**json.loads(line))


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().split("\n")[:-1]


async def stored(folder: Path) -> tuple[LoopState | None, set[str]]:
    """Where the loop stands, and which tasks are completed."""
    async with SQLiteStore(folder / "plait.db", mode="read") as store:
        if await store.get_run("r") is None:
            return None, set()
        tasks = await store.list_tasks("r")
        done = {task.task_id for task in tasks if task.status == "completed"}
        return await loop_state(store, "r"), done


def check(folder: Path, done: set[str], before: list[str], result: OrchestratorResult | None) -> None:
    """`result` is that of a resume after a crash with `done` completed and the calls `before`."""
    assert result is not None
    assert (result.status, result.phase, result.stopped) == ("completed", "done", None)
    assert (result.answer, result.context, result.iteration) == (ANSWER, CONTEXT, 4)
    # The task that was cut starts again after a delay, and others go ahead.
    left = [call for call, task in zip(CALLS, TASKS, strict=True) if task not in done]
    assert sorted(calls(folder)[len(before) :]) == sorted(left)


@pytest.mark.parametrize("side", size(["txn.after_commit"], ["txn.before_commit", "txn.after_commit"]))
@pytest.mark.parametrize("position", POSITIONS)
def test_killed_at_a_position(tmp_path: Path, position: str, side: str) -> None:
    assert in_child(tmp_path, position, side) is None
    loop, done = anyio.run(stored, tmp_path)
    _, not_yet, by_now = POSITIONS[position]
    assert loop == (not_yet if side == "txn.before_commit" else by_now)
    before = calls(tmp_path)
    check(tmp_path, done, before, in_child(tmp_path))


@pytest.mark.parametrize("side", ["attempt.before_call", "attempt.after_call"])
@pytest.mark.parametrize("number", size([3, 4], [1, 3, 4, 8]))  # a plan, a task, a reflection and the answer
def test_killed_at_a_call(tmp_path: Path, number: int, side: str) -> None:
    assert in_child(tmp_path, str(number), side) is None
    loop, done = anyio.run(stored, tmp_path)
    assert loop is not None
    assert loop[2] == (TASKS[number - 1],)
    assert done == set(TASKS[: number - 1])
    before = [*calls(tmp_path)] if (tmp_path / "calls").exists() else []
    check(tmp_path, done, before, in_child(tmp_path))


def test_killed_again_and_again(tmp_path: Path) -> None:
    """Each process dies at the second call that it makes, and leaves what it got for the first one."""
    deaths = 0
    while (result := in_child(tmp_path, "2", "attempt.after_call")) is None:
        deaths += 1
        assert deaths <= len(CALLS)
    assert (result.answer, result.context) == (ANSWER, CONTEXT)
    assert deaths == len(CALLS) - 1
    assert Counter(calls(tmp_path))["plan"] == 1
    assert len(calls(tmp_path)) == 2 * len(CALLS) - 1


@pytest.mark.parametrize("seed", range(2))
def test_killed_anywhere_with_tasks_beside_one_another(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    asked_before: Counter[str] = Counter()
    done: set[str] = set()
    for _ in range(20):
        result = in_child(tmp_path, str(rng.randrange(1, 9)), rng.choice(SIDES), places=4)
        asked = Counter(calls(tmp_path)) if (tmp_path / "calls").exists() else Counter[str]()
        again = {call for call in asked if asked[call] > asked_before[call]}
        assert not again & {call for call, task in zip(CALLS, TASKS, strict=True) if task in done and call != "reflect"}
        if result is not None:
            break
        asked_before, (_, done) = asked, anyio.run(stored, tmp_path)
    else:
        result = in_child(tmp_path, places=4)
    assert result is not None
    assert (result.status, result.answer, result.context, result.iteration) == ("completed", ANSWER, CONTEXT, 4)


def test_uncrashed(tmp_path: Path) -> None:
    result = in_child(tmp_path)
    check(tmp_path, set(), [], result)
