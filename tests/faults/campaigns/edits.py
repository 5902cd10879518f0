"""Random plans with random edits, run like the plan before and forked: the calls are the oracle's, as the preview said.

`python -m tests.faults.campaigns.edits 1000` tries the seeds from 0 on, `... 1 7` the seed 7 alone. `--planted` plants
each bug of `edit_bugs` instead, and tries seeds until one of them shows the bug.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from plait import ParallelRunner
from plait.backends import PersonBackend
from plait.clock_and_ids import Clock
from plait.persistence import MemoryStore
from plait.results import Fork, ReuseAction, ReusePreview, ReuseStep
from tests.faults.campaigns.edit_bugs import BUGS, Bug
from tests.faults.campaigns.report import Report, Scale
from tests.support.edited_plans import Plan, dag_of, edited, random_plan, write_files
from tests.support.reuse_oracle import (
    Earlier,
    Identity,
    Model,
    Oracle,
    Person,
    ReusableModel,
    downstream,
    foreseen,
)

PLANS = {"quick": 50, "nightly": 1_000}
_ROUNDS = 2
_PLANTED = 300


class _Later(Clock):
    """A clock that the campaign sets forward, so that no two runs end at the same time."""

    ahead = 0.0

    def wall(self) -> float:
        return super().wall() + self.ahead


class _Campaign:
    """The runs of the plans of one seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.calls: list[str] = []
        """Differences between the calls and the oracle."""
        self.foretold: list[str] = []
        """Differences between a run and its preview."""
        self._seed = seed
        self._rng = random.Random(seed)
        self._folder = folder
        self._model, self._agent, self._person = ReusableModel(), Model(), Person()
        self._clock = _Later()
        self._cache: dict[tuple[Any, ...], Any] = {}
        self._runner = ParallelRunner(
            backends={"model": self._model, "agent": self._agent, "person": PersonBackend()},  # type: ignore[dict-item]
            default="model",
            store=MemoryStore(),
            on_question=self._person,
            clock=self._clock,
            rng=self._rng,
        )

    async def go(self) -> None:
        """Run a random plan, its edits one after the other, and a fork of the last run."""
        plan = random_plan(self._rng)
        oracle = self._begin(plan, Earlier(), 0)
        await self._runner.run(self._dag(plan), "run-0")
        self._end("run 0", oracle)
        for number in range(1, _ROUNDS + 1):
            plan = edited(self._rng, plan)
            oracle = await self._run_like(plan, number, oracle)
        await self._fork(plan, oracle)

    async def _run_like(self, plan: Plan, number: int, before: Oracle) -> Oracle:
        fresh = [self._rng.choice(plan).id] if self._rng.random() < 0.3 else []
        keep, like, dag = self._rng.random() < 0.5, f"run-{number - 1}", self._dag(plan)
        oracle = self._begin(plan, Earlier(before.trace, self._cache, fresh, keep), number)
        preview = await self._runner.runs.preview_like(dag, like, fresh=fresh, keep_answers=keep)
        self._calls_nothing()
        known: ReusePreview | str = like
        if self._rng.random() < 0.5:  # the command previews with the answers of persons kept, and then decides
            known = await self._runner.runs.preview_like(dag, like, fresh=fresh, keep_answers=True)
        async with self._runner.start(dag, f"run-{number}", like=known, fresh=fresh, keep_answers=keep):
            pass
        self._look_back(f"run {number}", preview, before, oracle)
        return oracle

    async def _fork(self, plan: Plan, before: Oracle) -> None:
        names = {task: one for task, one in foreseen(before, before.trace).items() if one in before.trace}
        start = self._rng.choice(sorted(names))
        fork: Fork = await self._runner.runs.fork(f"run-{_ROUNDS}", start)
        unfinished = {one for one, call in before.trace.items() if call.answer is None} | before.skipped
        cone = downstream(before, {names[start], *unfinished})
        kept = before.trace.keys() - cone
        oracle = self._begin(plan, Earlier(before.trace, self._cache, {names[start]}, kept=kept), _ROUNDS + 1)
        preview = await self._runner.runs.preview_fork(fork)
        self._calls_nothing()
        async with self._runner.runs.start_fork(fork) as run:
            pass
        await run.result()
        self._look_back(f"fork from {start}", preview, before, oracle)

    def _dag(self, plan: Plan) -> Any:
        return dag_of(plan, self._folder)

    def _begin(self, plan: Plan, earlier: Earlier, epoch: int) -> Oracle:
        self._model.epoch = self._agent.epoch = epoch
        return Oracle(plan, earlier, epoch)

    def _look_back(self, where: str, preview: ReusePreview, before: Oracle, after: Oracle) -> None:
        self._end(where, after)
        self.foretold += [f"seed {self._seed}, {where}: {one}" for one in _foretold(preview, before, after)]

    def _end(self, where: str, oracle: Oracle) -> None:
        expected, made = Counter(oracle.trace[one].prompt for one in oracle.called), self._made()
        for prompt in made - expected:
            self.calls.append(f"seed {self._seed}, {where}: called without need: {prompt!r}")
        for prompt in expected - made:
            self.calls.append(f"seed {self._seed}, {where}: not called: {prompt!r}")
        self._cache |= oracle.answers()
        self._clock.ahead += 10

    def _made(self) -> Counter[str]:
        made = Counter([*self._model.made, *self._agent.made, *self._person.made])
        for one in (self._model, self._agent, self._person):
            one.made.clear()
        return made

    def _calls_nothing(self) -> None:
        if self._made():
            self.foretold.append(f"seed {self._seed}: the preview calls a backend")


def _foretold(preview: ReusePreview, before: Oracle, after: Oracle) -> list[str]:
    """Return where the run does not keep to the preview."""
    names = foreseen(after, before.trace)
    found: list[str] = []
    seen: set[Identity] = set()
    for step in preview.tasks:
        identity = names[step.task_id]
        seen.add(identity)
        is_whole = identity[1] is None and identity[0] in after.nodes and after.nodes[identity[0]].kind == "mapped"
        is_called, exists = identity in after.called, identity in after.trace
        said = f"and the preview said: {step.action}, {step.reason}"
        if step.action is ReuseAction.REUSE and (is_called or not exists):
            found.append(f"{step.task_id} {'runs' if is_called else 'is left out'}, {said}")
        if step.action is ReuseAction.RUN and not is_called and not is_whole:
            found.append(f"{step.task_id} {'is reused' if exists else 'is left out'}, {said}")
        if step.action is ReuseAction.DEPENDS:
            found += _resolved(step, names, (before, after), is_called=is_called, said=said)
    for identity in after.called - seen:
        whole = after.whole.get(identity)
        if whole is None or (whole, None) not in after.called:
            found.append(f"{identity} runs, and the preview has no such task")
    return found


def _resolved(
    step: ReuseStep, names: Mapping[str, Identity], runs: tuple[Oracle, Oracle], *, is_called: bool, said: str
) -> list[str]:
    """Return how the run differs from a step that depends on answers."""
    before, after = runs
    upstream = [names[name] for name in step.depends_on]
    behind = downstream(after, after.called)
    wholes = [one for one in upstream if one not in after.trace and one not in after.skipped]
    if not upstream or not all(one in behind or one in wholes for one in upstream):
        return [f"{step.task_id} depends on a task that does not run, {said}"]
    is_same = all(_answer(before, one) is not None and _answer(before, one) == _answer(after, one) for one in upstream)
    if is_same and is_called is not step.runs_if_same:
        return [f"{step.task_id} {'runs' if is_called else 'does not run'} behind the same answers, {said}"]
    return []


def _answer(oracle: Oracle, identity: Identity) -> Any:
    """Return the answer of a completed task; None without."""
    if identity in oracle.trace:
        return oracle.trace[identity].answer
    node = oracle.nodes.get(identity[0])
    return oracle.values[node.id] if node is not None and node.kind == "mapped" and identity[1] is None else None


async def differences(seed: int) -> tuple[list[str], list[str]]:
    """Return how the runs of the plans of this seed differ from the oracle, and from their previews."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder))
        campaign = _Campaign(seed, Path(folder))
        try:
            await campaign.go()
        except Exception as error:
            campaign.calls.append(f"seed {seed}: {type(error).__name__}: {error}")
    return campaign.calls, campaign.foretold


async def violations(seed: int) -> list[str]:
    """Return all differences of the plans of this seed; empty if everything agrees."""
    calls, foretold = await differences(seed)
    return [*calls, *foretold]


async def shows(bug: Bug) -> int | None:
    """Return the first seed that shows the bug; None if none does."""
    with bug.plant():
        for seed in range(bug.seed, bug.seed + _PLANTED):
            if await violations(seed):
                return seed
    return None


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Try plans, from this seed on, and the planted bugs."""
    began, wrong = time.monotonic(), list[str]()
    for number in range(seed, seed + PLANS[scale]):
        wrong += anyio.run(violations, number)
    return Report(
        method="edits",
        unit="plans",
        cases=PLANS[scale],
        violations=tuple(wrong),
        planted={name: anyio.run(shows, bug) is not None for name, bug in BUGS.items()},
        seconds=time.monotonic() - began,
    )


def _try_planted() -> int:
    unseen = 0
    for name, bug in BUGS.items():
        seed = anyio.run(shows, bug)
        unseen += seed is None
        print(f"{name}: {'NOT SEEN' if seed is None else f'seen by seed {seed}'}")
    print(f"{len(BUGS) - unseen} of {len(BUGS)} planted bugs seen")
    return 1 if unseen else 0


def main(arguments: list[str]) -> int:
    """Print every difference. Return 1 if there is one."""
    if arguments == ["--planted"]:
        return _try_planted()
    count, first = int(arguments[0]) if arguments else 1000, int(arguments[1]) if len(arguments) > 1 else 0
    began, equal = time.monotonic(), [0, 0]
    for seed in range(first, first + count):
        found = anyio.run(differences, seed)
        equal = [number + (not one) for number, one in zip(equal, found, strict=True)]
        for difference in [*found[0], *found[1]]:
            print(difference)
    took = time.monotonic() - began
    print(f"{count:,} plans, each edited {_ROUNDS} times and forked, {took:.0f} s")
    print(f"calls equal to the oracle: {equal[0]:,} of {count:,}; equal to the preview: {equal[1]:,} of {count:,}")
    return 0 if equal == [count, count] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
