"""Random plans with called plans and loops, within each other, with failures and conditions, against an oracle that
plays them one task after the other.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, Run, RunStatus, TaskStatus
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from plait.runner.plan.plan_file import parse_plan

DONE, FAILED, SKIPPED, PENDING = TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.SKIPPED, TaskStatus.PENDING
Plan = list[dict[str, Any]]
Ended = dict[str, tuple[TaskStatus, str]]


def answer(prompt: str) -> str | None:
    """Return the answer to the prompt, one of three letters, or None for a failure."""
    number = hashlib.sha256(prompt.encode()).digest()[0]
    return None if number % 11 == 0 else "abc"[number % 3]


def random_plan(odds: random.Random, depth: int) -> Plan:
    tasks: Plan = []
    for number in range(odds.randint(1, 4)):
        before = [task["id"] for task in tasks if odds.random() < 0.5]
        mode = odds.choice(["hard", "hard", "soft", "skip"])
        task: dict[str, Any] = {"id": f"t{number}", "depends_on": before, "failure_mode": mode}
        if before and odds.random() < 0.2:
            task["when"] = f"{{{{ {before[0]} }}}} != 'b'"
        if depth and odds.random() < 0.5:
            task["inner"] = random_plan(odds, depth - 1)
            task["rounds"] = odds.choice([0, 0, 1, 2, 3])
        tasks.append(task)
    return tasks


def written(tasks: Plan, folder: Path, name: str, odds: random.Random) -> Plan:
    """Return the tasks as in a plan file, and write the plans that they call."""
    plan: Plan = []
    for task in tasks:
        part = {key: task[key] for key in ("id", "depends_on", "failure_mode", "when") if key in task}
        values = " ".join(f"{{{{ {each} }}}}" for each in task["depends_on"])
        if "inner" not in task:
            part["prompt"] = f"{task['id']} {values} {{{{ x }}}}"
        else:
            inner, last = written(task["inner"], folder, f"{name}-{task['id']}", odds), task["inner"][-1]["id"]
            call: dict[str, Any] = {"with": {"x": f"{task['id']} {values}"}}
            if task["rounds"]:
                call |= {"until": f"{{{{ {last} }}}} == 'a'", "max": task["rounds"]}
                call["with"]["x"] += f" {{{{ previous.{last} }}}}"
            if task["rounds"] and odds.random() < 0.5:
                call |= {"tasks": inner, "returns": f"{{{{ {last} }}}}"}
            else:
                file = f"{name}-{task['id']}.json"
                (folder / file).write_text(
                    json.dumps({"inputs": {"x": ""}, "tasks": inner, "returns": f"{{{{ {last} }}}}"})
                )
                call["plan"] = file
            part |= {"loop": call} if task["rounds"] else call
        plan.append(part)
    return plan


class Oracle:
    def __init__(self) -> None:
        self.ended: Ended = {}
        self.calls: Counter[str] = Counter()
        self.modes: dict[str, str] = {}
        self.by_condition: set[str] = set()
        """The tasks that their own condition has skipped."""

    def play(self, tasks: Plan, prefix: str, x: str) -> Ended:
        own: Ended = {}
        for task in tasks:
            own[task["id"]] = self.ended[f"{prefix}{task['id']}"] = self.end(task, prefix, own, x)
        return own

    def end(self, task: dict[str, Any], prefix: str, own: Ended, x: str) -> tuple[TaskStatus, str]:
        modes = {"hard": FAILED, "soft": FAILED, "skip": SKIPPED}
        failed = modes[task["failure_mode"]], ""
        self.modes[f"{prefix}{task['id']}"] = task["failure_mode"]
        for each in task["depends_on"]:
            if own[each][0] is PENDING or (own[each][0] is FAILED and self.modes[f"{prefix}{each}"] == "hard"):
                return PENDING, ""
        if "when" in task and own[task["depends_on"][0]][1] == "b":
            self.by_condition.add(f"{prefix}{task['id']}")
            return SKIPPED, ""
        values = " ".join(own[each][1] for each in task["depends_on"])
        if "inner" not in task:
            prompt = f"{task['id']} {values} {x}"
            self.calls[prompt] += 1
            said = answer(prompt)
            return failed if said is None else (DONE, said)
        previous, last = "", task["inner"][-1]["id"]
        for number in range(1, max(task["rounds"], 1) + 1):
            value = f"{task['id']} {values}" + (f" {previous}" if task["rounds"] else "")
            begin = f"{prefix}{task['id']}." + (f"{number}." if task["rounds"] else "")
            inner = self.play(task["inner"], begin, value)
            hard = [name for name in inner if self.modes[begin + name] == "hard"]
            if any(inner[name][0] is PENDING or (name in hard and inner[name][0] is FAILED) for name in inner):
                return failed
            previous = inner[last][1]
            if not task["rounds"]:
                return DONE, previous
            good = all(inner[name][0] is DONE or begin + name in self.by_condition for name in inner)
            if good and inner[last][0] is DONE and previous == "a":
                return DONE, previous
        return failed


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
async def test_random_plans_run_as_the_oracle_plays_them(tmp_path: Path, seed: int) -> None:
    odds = random.Random(seed)
    for number in range(20):
        tasks = random_plan(odds, 3)
        plan = parse_plan(
            json.dumps({"inputs": {"x": ""}, "tasks": written(tasks, tmp_path, f"p{number}", odds)}),
            format="json",
            folder=tmp_path,
        )
        oracle = Oracle()
        oracle.play(tasks, "", "")
        whole, calls = await played(plan.dag, stop_at=0)
        assert (whole, calls) == (oracle.ended, oracle.calls), f"plan {number} of seed {seed}"
        stop_at = odds.randint(1, max(1, calls.total()))
        resumed, again = await played(plan.dag, stop_at)
        assert resumed == oracle.ended, f"plan {number} of seed {seed}, stopped at call {stop_at}"
        assert {*again} == {*calls}
        assert again.total() <= calls.total() + 3, "more than the calls under way were made again"


async def played(dag: DAG, stop_at: int) -> tuple[dict[str, tuple[TaskStatus, str]], Counter[str]]:
    """Return how each task of a run ended, and the calls. The run is stopped at a call, and resumed."""
    calls: Counter[str] = Counter()
    runs: list[Run] = []

    async def say(prompt: str) -> str:
        calls[prompt] += 1
        if calls.total() == stop_at:
            runs[0].stop()
        await anyio.lowlevel.checkpoint()
        if (said := answer(prompt)) is None:
            raise BackendError(ErrorKind.REFUSED, "no")
        return said

    runner = ParallelRunner(say, store=MemoryStore(), concurrency=3)
    runs.append(runner.start(dag, "r"))
    async with runs[0] as run:
        result = await run.result()
    if result.status is RunStatus.INTERRUPTED:
        result = await runner.resume("r")
    return {task.id: (task.status, task.text) for task in result.tasks.values()}, calls
