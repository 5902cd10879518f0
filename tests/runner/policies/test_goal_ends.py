"""Whatever its models answer, the orchestrator's loop comes to an end, within its limits and with an answer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from plait.json_form import JsonValue
from plait.runner.policies.goal_policy import Loop, LoopLimits, OrchestratorPolicy, Phase
from plait.statuses import RunStatus, TaskStatus
from plait.task import Task
from tests.support.simulated import Simulation

pytestmark = pytest.mark.slow

CONCURRENCY = 3


class Whims:
    """Answers by chance, the same answer to the same task however often it is asked."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, task: Task) -> JsonValue | Exception:
        rng = random.Random(f"{self.seed} {task.id}")
        if rng.random() < 0.02:
            return RuntimeError("by chance")
        if task.id.startswith("plan."):
            return {"tasks": self._tasks(rng, rng.randrange(0, 8))}
        if task.id.startswith("reflect."):
            drop: list[JsonValue] = [rng.choice("abcdefgh") for _ in range(rng.randrange(3))]
            return {"done": rng.random() < 0.1, "add": self._tasks(rng, rng.randrange(0, 4)), "drop": drop}
        return RuntimeError("no luck") if rng.random() < 0.2 else rng.choice(["this", "that"])

    def _tasks(self, rng: random.Random, count: int) -> list[Any]:
        names = rng.sample("abcdefgh", count)
        wrong = ["nobody"] if rng.random() < 0.05 else []
        return [
            {"id": name, "prompt": f"do {name}", "depends_on": rng.sample([*names[:i], *wrong], min(i, 1))}
            for i, name in enumerate(names)
        ]


@pytest.mark.parametrize("seeds", range(10))
def test_every_run_ends_within_its_limits(seeds: int) -> None:
    for seed in range(100 * seeds, 100 * seeds + 100):
        limits = LoopLimits(max_iterations=1 + seed % 12, reflect_every=1 + seed % 4, max_tasks=1 + seed % 15)
        policy = OrchestratorPolicy("goal", limits)
        run = Simulation(policy, policy.dag(), Whims(seed), CONCURRENCY)
        rng = random.Random(seed)
        for _ in range(300):
            if run.status is not RunStatus.RUNNING:
                break
            run.end(rng.choice(run.running)) if run.running else run.rest()
        _check(run, limits, seed)


def _check(run: Simulation, limits: LoopLimits, seed: int) -> None:
    loop, own = Loop.of(run.state), [one.id for one in run.tasks if not one.id.startswith("do.")]
    assert run.status in {RunStatus.COMPLETED, RunStatus.FAILED}, seed
    begun = [one for one in run.begun if one.startswith("do.")]
    assert loop.iteration <= len(begun) <= limits.max_iterations, seed
    assert len(run.tasks) - len(own) <= limits.max_tasks, seed
    if run.status is RunStatus.COMPLETED:
        assert loop.phase is Phase.DONE, seed
        assert run.status_of("answer") is TaskStatus.COMPLETED, seed
    else:
        failed = [one for one in own if run.status_of(one) is TaskStatus.FAILED]
        assert (run.error or "").startswith("the ") or len(failed) == 1, seed
