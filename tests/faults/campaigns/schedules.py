"""Schedules: whole runs in virtual time, in an order drawn from a seed, over a failing store, disturbed and resumed.

Each seed is a story (tests/support/story.py): a random DAG whose end can be told beforehand. It is run over a memory
store behind planted faults, stopped, cancelled, natively cancelled or raced by a rival at random moments, resumed up to
a dozen times, and at last resumed without faults. Then everything must have come out as foretold, and on the way
nothing may have happened that `World` and `_Check` forbid.
`python -m tests.faults.campaigns.schedules SEED` repeats one.
"""

from __future__ import annotations

import asyncio
import logging
import random
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from plait import ParallelRunner, PlaitError, Run, RunStatus, TaskStatus
from plait.errors import RunNotFound, RunNotResumable, RunOwned
from plait.persistence import MemoryStore
from plait.runner.engine.live_run import EventReader
from plait.statuses import RUN_DONE
from tests.faults.campaigns.planted import shows
from tests.faults.campaigns.report import Report, Scale
from tests.faults.campaigns.schedule_bugs import BUGS
from tests.faults.campaigns.schedule_checks import Outcome, check_ended, check_round, was_cancelled
from tests.support.seeded_loop import Stuck, VirtualClock, run_seeded
from tests.support.stores.faulty_store import FaultyStore, at_once, by_chance
from tests.support.story import Story, endings, last_status, story
from tests.support.world import RUN, World

CASES: Final[dict[Scale, int]] = {"quick": 100, "nightly": 10_000}
PLANTED_CASES = 400
"""Seeds tried at most until a planted bug shows."""
SHOWN_BY = {"written within the caller's scope": 2196, "lease judged by the wall clock alone": 259}
"""Seeds that showed rare bugs once, tried before all others."""
PATIENCE, PLANTED_PATIENCE = 20_000, 4_000
"""Virtual seconds, times the story's pace, and a twentieth of the loop's turns: few stories have needed 500."""
MOST_VIOLATIONS = 20
HOWS = ("nothing", "stop", "stop", "cancel", "native", "native twice", "scope", "rival", "rival", "cancel_run")
OTHERS = frozenset({"rival", "cancel_run"})
"""Disturbances by another process, whose outcome is told beforehand only while the store never fails."""


def run(*, scale: Scale, seed: int = 0, planted: bool = True) -> Report:
    """As many stories as `scale` says, from `seed` on, and, where wanted, the planted bugs."""
    began = time.monotonic()
    violations: list[str] = []
    cases = rounds = 0
    with _quiet():
        while cases < CASES[scale] and len(violations) < MOST_VIOLATIONS:
            told = tell(seed + cases)
            cases += 1
            rounds += told.rounds
            violations += told.violations[:1]
        caught = {name: is_caught(name, seed) for name in BUGS} if planted else {}
    return Report(
        method="schedules",
        unit="schedules",
        cases=cases,
        violations=tuple(violations),
        planted=caught,
        seconds=time.monotonic() - began,
        figures={"runs and resumes": rounds},
    )


def is_caught(bug: str, seed: int = 0) -> bool:
    """Whether some seed shows the planted bug."""
    seeds = (SHOWN_BY.get(bug, seed), *range(seed, seed + PLANTED_CASES))
    with _quiet(), BUGS[bug]():
        return any(shows(tell(number, PLANTED_PATIENCE).violations) for number in seeds)


@dataclass(frozen=True, slots=True)
class Told:
    """What came of a story: what was wrong, how often it was run or resumed, and a checksum of all that was told."""

    violations: list[str]
    rounds: int
    trace: int


def tell(seed: int, patience: int = PATIENCE) -> Told:
    """Run the story of a seed to its end."""
    told = story(seed)
    teller = _Teller(told)
    try:
        run_seeded(teller.tell, seed, limit_s=patience * told.pace, limit_turns=20 * patience)
    except Stuck as stuck:
        teller.world.wrong(f"I9: {stuck}")
    except Exception as error:  # whatever escapes is a finding
        teller.world.wrong(f"raised {' / '.join(traceback.format_exception_only(error)).strip()}")
    repeat = f"python -m tests.faults.campaigns.schedules {seed}"
    return Told(
        [f"seed {seed}, {what} ({repeat})" for what in teller.world.violations], teller.rounds, teller.world.trace
    )


class _Teller:
    def __init__(self, told: Story) -> None:
        self._story = told
        self._rng = random.Random(told.seed)
        self._store = MemoryStore() if told.stored else None
        self._ends = endings(told)
        self.world = World(told, self._store, self._rng)
        self.rounds = 0

    async def tell(self) -> None:
        if self._store is None:
            outcome = await self._round("nothing", self._runner(0.0))
            check_ended(self.world, outcome.result, self._ends)
            return
        for _ in range(self._rng.choice((1, 1, 2, 3, 12))):
            await self._round(self._rng.choice(HOWS), self._runner(self._story.faults))
            record = await self._store.get_run(RUN)
            if record is not None and RunStatus(record.status) in RUN_DONE:
                break
            await self._answer()
        await self._finish(self._store)

    async def _finish(self, store: MemoryStore) -> None:
        """The last round, without faults, and what must have come of it all."""
        record = await store.get_run(RUN)
        if record is not None and record.status == RunStatus.CANCELLED.value:
            try:
                await self._runner(0.0).resume(RUN)
                self.world.wrong("a cancelled run was resumed")
            except RunNotResumable:
                check_ended(self.world, None, self._ends)
            return
        outcome = await self._round("nothing", self._runner(0.0))
        if outcome.result is not None and was_cancelled(self.world, outcome.result.status):
            check_ended(self.world, None, self._ends)
        elif outcome.result is None or outcome.result.status is not last_status(self._ends):
            self.world.wrong(f"I9: the last resume ended with {outcome}")
        else:
            check_ended(self.world, outcome.result, self._ends)

    def _runner(self, faults: float, ahead: float = 0.0) -> ParallelRunner:
        told, rng, pace = self._story, self._rng, self._story.pace
        store = self._store and FaultyStore(
            self._store,
            by_chance(rng, faults, reads=faults / 4),
            pause=lambda: 0.0 if told.hasty else rng.random() ** 4 * pace,
            slow_s=rng.choice((1, 8)) * pace,
        )
        return ParallelRunner(
            backends=self.world.backends(),
            default="choosing",
            store=store,
            concurrency=told.concurrency,
            limits=told.limits,
            strict=told.strict,
            store_timeout=5 * pace,
            lease=30 * pace,
            cancel_grace=rng.choice((0.0, pace)),
            clock=VirtualClock(ahead),
            rng=rng,
        )

    async def _round(self, how: str, runner: ParallelRunner) -> Outcome:
        self.rounds += 1
        self.world.begin_round()
        exists = self._store is not None and at_once(self._store.get_run(RUN)) is not None
        handle = runner.start_resume(RUN) if exists else runner.start(self._story.dag, RUN)
        outcome = Outcome("nothing" if how in OTHERS and self._story.faults else how, exists)
        async with anyio.create_task_group() as group:
            group.start_soon(self._live, handle, outcome, group)
        await anyio.sleep(60 * self._story.pace)  # what comes late comes now
        check_round(self.world, outcome)
        return outcome

    async def _listen(self, reader: EventReader) -> None:
        async for event in reader:
            self.world.hear(event)

    async def _live(self, handle: Run, outcome: Outcome, group: TaskGroup) -> None:
        task = asyncio.current_task()
        assert task is not None
        scope = anyio.CancelScope()
        acts = {"stop": handle.stop, "cancel": handle.cancel, "scope": scope.cancel}
        async with anyio.create_task_group() as beside:
            beside.start_soon(self._disturb, outcome, acts.get(outcome.how, task.cancel))
            try:
                with scope:
                    async with handle:
                        group.start_soon(self._listen, handle.events())
                        outcome.result = await handle.result()
            except asyncio.CancelledError:
                while task.cancelling():
                    task.uncancel()
            except PlaitError as error:
                outcome.error = error
            if outcome.how not in OTHERS:
                beside.cancel_scope.cancel()

    async def _disturb(self, outcome: Outcome, act: Callable[[], object]) -> None:
        if outcome.how == "nothing":
            return
        await anyio.sleep(self._rng.choice((0, 0.01, 1, 10)) * self._rng.random() * self._story.pace)
        for _ in range(self._rng.randrange(20)):
            await anyio.lowlevel.checkpoint()
        if outcome.how == "rival":
            await self._rival(outcome)
            return
        if outcome.how == "cancel_run":
            await self._cancel_from_elsewhere(outcome)
            return
        act()
        if outcome.how == "native twice":
            await anyio.lowlevel.checkpoint()
            act()

    async def _rival(self, outcome: Outcome) -> None:
        """Somebody else wants the run at the same time; their clock may be a day off."""
        ahead = self._rng.choice((0.0, 86_400.0, 86_400.0, -86_400.0))
        try:
            await self._runner(0.0, ahead).resume(RUN)
            outcome.rival_ran = True
        except (RunNotFound, RunOwned):
            pass
        except RunNotResumable:
            if not self.world.is_cancelled:
                raise

    async def _cancel_from_elsewhere(self, outcome: Outcome) -> None:
        """Somebody else cancels the run at the same time, and may wait for that."""
        with suppress(RunNotFound):
            wait = self._rng.choice((0.0, 10 * self._story.pace))
            outcome.rival_ran = await self._runner(0.0).runs.cancel(RUN, wait=wait) is RunStatus.CANCELLED
            self.world.is_cancelled = True

    async def _answer(self) -> None:
        """Settle the tasks that wait for a person, in one of the ways that do not change the end."""
        for task_id, record in self.world.stored().items():
            if record.status != "waiting_input":
                continue
            if self._rng.random() < 0.5 or self._ends[task_id].status is not TaskStatus.COMPLETED:
                self.world.again[task_id] += 1
                await self._runner(0.0).runs.settle(RUN, task_id, "again")
            else:
                await self._runner(0.0).runs.settle(RUN, task_id, "done", self._ends[task_id].text)


@contextmanager
def _quiet() -> Generator[None]:
    """Degraded stores are what this is about; nobody needs to read of each."""
    log = logging.getLogger("plait")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


if __name__ == "__main__":
    with _quiet():
        for one in sys.argv[1:]:
            print("\n".join(tell(int(one)).violations) or f"seed {one}: nothing wrong")
