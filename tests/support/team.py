"""A planner, an executor and a reflector that always answer the same, and write down what they were asked."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, TypeAlias

from plait import Runs, TaskStatus
from plait.orchestration import Phase
from plait.persistence import Store
from plait.runner.engine.run_options import RunOptions

GOAL = "Know a and b"
PLAN = {
    "tasks": [
        {"id": "a", "prompt": "find a"},
        {"id": "b", "prompt": "find b", "depends_on": ["a"]},
        {"id": "c", "prompt": "find c"},
    ]
}
MORE = {"done": False, "add": [{"id": "d", "prompt": "find d", "depends_on": ["a"]}]}
CALLS = ["plan", "find a", "find c", "reflect", "find b", "find d", "reflect", "answer"]
"""What they are asked with one place and a reflection after every two tasks, in this order."""
TASKS = ["plan.1", "do.a", "do.c", "reflect.1", "do.b", "do.d", "reflect.2", "answer"]
"""The tasks behind these calls."""
CONTEXT = {"do.a": "found a", "do.c": "found c", "do.b": "found b after found a", "do.d": "found d after found a"}
ANSWER = "found a; found b after found a; found c; found d after found a"

LoopState: TypeAlias = tuple[Phase, int, tuple[str, ...]]
"""The phase of the loop, the number of executed tasks, and the running tasks."""


async def loop_state(store: Store, run_id: str) -> LoopState:
    """Where the loop of the stored run stands."""
    run = await Runs(RunOptions(store=store)).get(run_id)
    assert run.loop is not None
    running = tuple(task_id for task_id, task in run.tasks.items() if task.status is TaskStatus.RUNNING)
    return run.loop.phase, run.loop.iteration, running


class Team:
    """`note` is told every call as it comes in. `fails` holds texts of tasks that cannot be done."""

    def __init__(self, note: Callable[[str], None] = lambda _: None, fails: tuple[str, ...] = ()) -> None:
        self._note = note
        self._fails = fails

    @property
    def backends(self) -> dict[str, Callable[[str], Any]]:
        return {"planner": self.plan, "executor": self.execute, "reflector": self.reflect}

    async def plan(self, prompt: str) -> Any:
        if prompt.startswith("You plan"):
            self._note("plan")
            return PLAN
        self._note("answer")
        return "; ".join(sorted(re.findall(r"^  (found .*)$", prompt, re.MULTILINE)))

    async def execute(self, prompt: str) -> str:
        task = prompt.split("Task:\n")[1].split("\n", maxsplit=1)[0]
        self._note(task)
        if task in self._fails:
            raise RuntimeError(f"cannot {task}")
        before = re.findall(r"^found (\w)", prompt, re.MULTILINE)
        return task.replace("find", "found") + (f" after found {', '.join(before)}" if before else "")

    async def reflect(self, prompt: str) -> Any:
        self._note("reflect")
        return {"done": True} if "find d" in prompt else MORE
