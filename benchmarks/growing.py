"""Growing runs, and runs with the same tasks declared at once: the same graph with the same answers."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any

import plait.runner.plan.plan_tasks  # noqa: F401 - otherwise the first growing run pays for the import
from benchmarks.stores import sqlite_store
from plait import DAG, GrowthLimits, ParallelRunner, RunStatus, Task
from plait.workflows import Decision, RecordedRun

ANSWER = "x" * 200
AT_ONCE = 256
LIMITS = GrowthLimits(max_tasks=1_000_000, max_depth=1_000_000)
Specs = list[dict[str, Any]]
Shape = Callable[[int], tuple[dict[str, Specs], list[Task]]]
"""Returns, for a number of tasks, the tasks added by each planner, and the declared tasks."""


def _under(planner: str, names: list[str]) -> Specs:
    return [{"id": name, "prompt": name, "depends_on": [planner]} for name in names]


def once(tasks: int) -> tuple[dict[str, Specs], list[Task]]:
    """Return a graph with a single planner for all tasks."""
    return {"p": _under("p", [f"t{i}" for i in range(tasks - 1)])}, [Task("p", "p", adds_tasks=True)]


def planners(tasks: int) -> tuple[dict[str, Specs], list[Task]]:
    """Return a graph with 100 planners, each for the same number of tasks."""
    names = [f"p{i}" for i in range(100)]
    adds = {name: _under(name, [f"{name}_{i}" for i in range(tasks // 100 - 1)]) for name in names}
    return adds, [Task(name, name, adds_tasks=True) for name in names]


def steps(tasks: int) -> tuple[dict[str, Specs], list[Task]]:
    """Return a graph in which each planner adds nine tasks and the next planner."""
    last = tasks // 10 - 1
    adds: dict[str, Specs] = {}
    for step in range(last + 1):
        specs = _under(f"p{step}", [f"p{step}_{i}" for i in range(9)])
        if step < last:
            specs.append({**_under(f"p{step}", [f"p{step + 1}"])[0], "output": "tasks"})
        adds[f"p{step}"] = specs
    return adds, [Task("p0", "p0", adds_tasks=True)]


SHAPES: Mapping[str, Shape] = {"once": once, "planners": planners, "steps": steps}


async def grown(shape: str, tasks: str) -> dict[str, float]:
    """Measure a durable run that grows to `tasks` tasks."""
    if shape == "for_each":
        return await _run(int(tasks), lambda: DAG(_mapped()), {"list": list(range(int(tasks) - 2))})
    adds, first = SHAPES[shape](int(tasks))
    return await _run(int(tasks), lambda: DAG(first), adds)


async def declared(shape: str, tasks: str) -> dict[str, float]:
    """Measure a durable run with the same tasks, all declared at the start."""
    if shape == "for_each":
        parts = [f"each.{i}" for i in range(1, int(tasks) - 1)]
        head, tail = Task("list", "list"), Task("each", "all", ["list", *parts])
        answers: dict[str, Any] = {"list": list(range(int(tasks) - 2)), "all": [ANSWER] * len(parts)}
        return await _run(int(tasks), lambda: DAG([head, *(Task(p, "each", ["list"]) for p in parts), tail]), answers)
    adds, first = SHAPES[shape](int(tasks))
    plain = [Task(task.id, task.prompt) for task in first]
    specs = [spec for added in adds.values() for spec in added]

    def dag() -> DAG:
        return DAG([*plain, *(Task(spec["id"], spec["prompt"], spec["depends_on"]) for spec in specs)])

    return await _run(int(tasks), dag, adds)


def _mapped() -> list[Task]:
    return [Task("list", "list"), Task("each", "each", for_each="list")]


async def _run(tasks: int, dag: Callable[[], DAG], answers: Mapping[str, Any]) -> dict[str, float]:
    said = {name: json.dumps(answer) if name != "list" else answer for name, answer in answers.items()}

    async def body(prompt: str) -> Any:
        return said.get(prompt, ANSWER)

    async with sqlite_store() as store:
        began, cpu = time.perf_counter(), time.process_time()
        runner = ParallelRunner(body, store=store, concurrency=AT_ONCE, growth=LIMITS)
        result = await runner.run(dag())
        wall = time.perf_counter() - began
        assert (result.status, len(result.tasks)) == (RunStatus.COMPLETED, tasks), (result.error, len(result.tasks))
        assert not result.degraded
        return {"wall_s": wall, "cpu_s": time.process_time() - cpu}


class Watching:
    """A policy that counts ended tasks and decides nothing."""

    kind = "watching"

    def settings(self) -> Mapping[str, Any]:
        return {}

    def backends(self) -> Collection[str | None]:
        return ()

    def decide(self, run: RecordedRun) -> Decision:
        seen = run.state if isinstance(run.state, int) else 0
        assert run.ended is None or run.result(run.ended).status.value == "completed"
        return Decision(state=seen + 1)


async def led(tasks: str, policy: str) -> dict[str, float]:
    """Measure a durable run of independent tasks; with `Watching` as the policy if `policy` is "led"."""

    async def body(_prompt: str) -> str:
        return ANSWER

    dag = DAG(Task(f"t{i}", "work") for i in range(int(tasks)))
    async with sqlite_store() as store:
        runner = ParallelRunner(body, store=store, concurrency=AT_ONCE)
        began = time.perf_counter()
        result = await runner.run(dag, policy=Watching() if policy == "led" else None)
        assert result.status is RunStatus.COMPLETED
        return {"us_per_task": (time.perf_counter() - began) / int(tasks) * 1e6}


MEASURES: Mapping[str, Callable[..., Awaitable[dict[str, float]]]] = {
    one.__name__: one for one in (grown, declared, led)
}
