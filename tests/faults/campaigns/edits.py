"""Random plans with random edits, run like the plan before and forked: the calls are the oracle's, as the preview said.

`python -m tests.faults.campaigns.edits 1000` tries the seeds from 0 on, `... 1 7` the seed 7 alone.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Mapping

import anyio

from plait.persistence import MemoryStore
from plait.runner import ParallelRunner, ReuseAction, ReusePreview
from tests.support.edited_plans import (
    Identity,
    Model,
    Oracle,
    Plan,
    ReusableModel,
    dag_of,
    downstream,
    edited,
    foreseen,
    must_call,
    random_plan,
)

_ROUNDS = 2


async def violations(seed: int) -> list[str]:
    """Return how the runs of the plans of this seed differ from the oracle; empty if they agree."""
    rng = random.Random(seed)
    plan = random_plan(rng)
    backends = {"model": ReusableModel(), "agent": Model()}
    runner = ParallelRunner(backends=backends, default="model", store=MemoryStore(), rng=rng)  # type: ignore[arg-type]
    await runner.run(dag_of(plan), "run-0")
    oracle = Oracle(plan)
    found = _compare(seed, "first run", _made(backends), Counter(call.prompt for call in oracle.trace.values()))
    for number in range(1, _ROUNDS + 1):
        like, before = f"run-{number - 1}", oracle
        plan = edited(rng, plan)
        oracle = Oracle(plan)
        fresh = [rng.choice(plan).id] if rng.random() < 0.2 else []
        preview = await runner.preview_like(dag_of(plan), like, fresh=fresh)
        if _made(backends):
            found.append(f"seed {seed}: the preview calls a backend")
        await runner.run(dag_of(plan), f"run-{number}", like=like, fresh=fresh)
        called = must_call(before.trace, oracle.trace, fresh)
        expected = Counter(oracle.trace[one].prompt for one in called)
        found += _compare(seed, f"run {number}", _made(backends), expected)
        names = foreseen(plan, before.trace)
        found += [f"seed {seed}, run {number}: {one}" for one in _foretold(preview, names, (plan, oracle), called)]
    return found + await _forked(seed, runner, plan, oracle)


async def _forked(seed: int, runner: ParallelRunner, plan: Plan, oracle: Oracle) -> list[str]:
    """Fork the last run from a random task or part, and return how the calls differ from the oracle."""
    rng = random.Random(seed)
    names = {task: one for task, one in foreseen(plan, oracle.trace).items() if one in oracle.trace}
    start = rng.choice(sorted(names))
    fork = await runner.fork(f"run-{_ROUNDS}", start)
    preview = await runner.preview_fork(fork)
    async with runner.start_fork(fork) as run:
        pass
    await run.result()
    failed = {one for one, call in oracle.trace.items() if call.answer is None}
    cone = downstream(plan, oracle, {names[start]}) | downstream(plan, oracle, failed)
    called = {one for one in cone if not oracle.trace[one].reusable} | failed | {names[start]}
    made = _made(runner.config.backends)  # type: ignore[arg-type]
    found = _compare(seed, f"fork from {start}", made, Counter(oracle.trace[one].prompt for one in called))
    return found + [f"seed {seed}, fork: {one}" for one in _foretold(preview, names, (plan, oracle), called)]


def _made(backends: dict[str, Model]) -> Counter[str]:
    made = Counter(prompt for backend in backends.values() for prompt in backend.made)
    for backend in backends.values():
        backend.made.clear()
    return made


def _compare(seed: int, where: str, made: Counter[str], expected: Counter[str]) -> list[str]:
    more, less = made - expected, expected - made
    found = [f"seed {seed}, {where}: called without need: {prompt!r}" for prompt in more]
    return found + [f"seed {seed}, {where}: not called: {prompt!r}" for prompt in less]


def _foretold(
    preview: ReusePreview, names: Mapping[str, Identity], after: tuple[Plan, Oracle], called: set[Identity]
) -> list[str]:
    """Return where the run does not keep to the preview. A part of a list that changed may be missing from the run."""
    plan, oracle = after
    behind = downstream(plan, oracle, called) - called
    found: list[str] = []
    seen: set[Identity] = set()
    for step in preview.tasks:
        identity = names.get(step.task_id)
        if identity is None or identity not in oracle.trace:
            continue  # the list, or the planner, gave another answer
        seen.add(identity)
        if step.action is ReuseAction.REUSE and identity in called:
            found.append(f"{step.task_id} runs, and the preview said: {step.reason}")
        if step.action is ReuseAction.RUN and identity not in called:
            found.append(f"{step.task_id} is reused, and the preview said: {step.reason}")
        if step.action is ReuseAction.DEPENDS and identity not in behind | called:
            found.append(f"{step.task_id} depends on nothing that runs, and the preview said: {step.reason}")
    for identity in called - seen:
        whole = oracle.whole.get(identity)
        if whole is None or (whole, None) not in called:
            found.append(f"{identity} runs, and the preview has no such task")
    return found


def main(arguments: list[str]) -> int:
    """Print every violation. Return 1 if there is one."""
    count, first = int(arguments[0]) if arguments else 1000, int(arguments[1]) if len(arguments) > 1 else 0
    began, broken = time.monotonic(), 0
    for seed in range(first, first + count):
        for violation in anyio.run(violations, seed):
            broken += 1
            print(violation)
    took = time.monotonic() - began
    print(f"{count:,} plans, each edited {_ROUNDS} times and forked: {broken} violations, {took:.0f} s")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
