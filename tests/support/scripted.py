"""Scripted planners, executors and reflectors, and runs of the orchestrator's policy on them without an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from plait.runner.policies.goal_policy import Loop, LoopLimits, OrchestratorPolicy
from plait.task import Task
from tests.support.simulated import Simulation

DONE = {"done": True}


def task(name: str, *needs: str) -> dict[str, Any]:
    return {"id": name, "prompt": f"do {name}", "depends_on": list(needs)}


def plan(*tasks: dict[str, Any]) -> dict[str, Any]:
    return {"tasks": list(tasks)}


def add(*tasks: dict[str, Any], drop: Sequence[str] = ()) -> dict[str, Any]:
    return {"done": False, "add": list(tasks), "drop": list(drop)}


class Script:
    """Plans and reflections in turn, the last one for ever; a work task says what it was told, or fails."""

    def __init__(self, plans: Sequence[Any], reflections: Sequence[Any] = (DONE,), fails: Sequence[str] = ()) -> None:
        self.plans, self.reflections, self.fails = plans, reflections, fails

    def __call__(self, task: Task) -> Any:
        kind, _, number = task.id.partition(".")
        if kind in {"plan", "reflect"}:
            answers = self.plans if kind == "plan" else self.reflections
            return answers[min(int(number), len(answers)) - 1]
        return RuntimeError(f"{task.id} cannot be done") if task.id in self.fails else f"result of {task.item}"


def simulation(script: Callable[[Task], Any], concurrency: int = 1, **limits: Any) -> Simulation:
    policy = OrchestratorPolicy("reach the goal", LoopLimits(**limits))
    return Simulation(policy, policy.dag(), script, concurrency)


def loop_of(run: Simulation) -> Loop:
    return Loop.of(run.state)


def ids(run: Simulation) -> list[str]:
    return [task.id for task in run.tasks]
