"""A plan of 60 agent tasks, two limits on the way (5 hours, then 6 days), SIGKILL at random boundaries, nobody there.

The agent speaks Claude Code's stream-json. A clock is passed in, and nothing sleeps: a process parks the run, the clock
is set to a moment before its time, where a resume may call nothing, then to its time, and the next process wakes the
run. The second limit has not ended at its time: the probe alone may find that out. At the end every task is completed
and was answered once.

`python -m tests.faults.campaigns.parking SEED ...` plays seeds, `--count N` those from 0 on, `--planted` the bugs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import anyio

from plait import DAG, ParallelRunner, Runs, RunStatus, SQLiteStore, Task, failpoints
from plait.backends import ClaudeCodeBackend
from plait.clock_and_ids import Clock, parse_time
from plait.runner.engine.executor import PARK_S
from plait.runner.recovery import resume, resume_plan
from tests.faults.campaigns import killed_runs
from tests.faults.campaigns.killed_runs import Campaign, in_a_process
from tests.faults.campaigns.report import Scale

RUNS: dict[Scale, int] = {"quick": 2, "nightly": 40}
TASKS = 60
WIDTH = 6
_HOUR, _DAY = 3600.0, 86_400.0
CLOSINGS = [["five_hour", 5 * _HOUR, 0.0], ["seven_day", 6 * _DAY, 2 * _HOUR]]
_KILLS = 7
"""A person is asked about a task at the tenth death of its process."""
_ROUNDS = 60
_BURST_S = 0.5 * _HOUR
"""The clock moves by less while a limit is met by what is under way."""
_ROUNDING_S = 1.0
_AGENT = Path(__file__).parents[2] / "support" / "agents" / "limited_claude.py"


@dataclass
class Shifted(Clock):
    """The system clock, `offset` seconds off."""

    offset: float

    def wall(self) -> float:
        return time.time() + self.offset


@dataclass
class Told(killed_runs.Told):
    """What one run showed."""

    parked: int = 0
    calls: int = 0
    refused: int = 0


class World:
    """The account, the clock and the folder of one run."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self.deaths = 0
        (folder / "sessions").mkdir()
        left, following = rng.randint(WIDTH + 1, 25), rng.randint(WIDTH + 1, 25)
        account = {"left": left, "next": following, "closed": None, "closings": CLOSINGS}
        (folder / "account").write_text(json.dumps(account))
        command = folder / "claude"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -S {_AGENT} "$@"\n')
        command.chmod(0o755)
        # In the past: SQLite judges by the real clock what is due, and nothing waits for it.
        self.set_offset(-30 * _DAY)
        self.note_death(0)

    def set_offset(self, offset: float) -> None:
        self.offset = offset
        (self.folder / "offset").write_text(repr(offset))

    def set_clock(self, now: float) -> None:
        self.set_offset(now - time.time())

    def note_death(self, deaths: int) -> None:
        self.deaths = deaths
        (self.folder / "deaths").write_text(str(deaths))

    @property
    def log(self) -> list[tuple[float, str, str, int]]:
        file = self.folder / "log"
        return [tuple(json.loads(line)) for line in file.read_text().splitlines()] if file.exists() else []


def tell(seed: int, bug: str | None = None) -> Told:
    """Play one seed to its end, in processes of its own. Call it in a process without threads."""
    told, rng = Told("parking", seed), random.Random(f"parking {seed}")
    with tempfile.TemporaryDirectory(prefix="plait-parking-") as place:
        world = World(Path(place), rng)
        for _ in range(_ROUNDS):
            kill = rng.randint(1, 90) if told.kills.total() < _KILLS and rng.random() < 0.9 else None
            ended = in_a_process(partial(_execute, world, kill, bug), world.folder)
            if isinstance(ended, str):
                told.kills[ended] += 1
                world.note_death(told.kills.total())
                world.set_offset(world.offset + rng.uniform(0, 60))
                continue
            if ended["status"] != RunStatus.PARKED:
                _judge_end(world, ended, told)
                break
            told.parked += 1
            if not ended["due"]:
                told.broken("the run is parked without a time")
                break
            before = len(world.log)
            world.set_clock(ended["due"] - rng.uniform(2 * PARK_S, _BURST_S))
            early = in_a_process(partial(_execute, world, None, bug, is_early=True), world.folder)
            if len(world.log) != before:
                told.broken(f"{len(world.log) - before} calls before the time")
                break
            if isinstance(early, str) or not early["due"] or abs(early["due"] - ended["due"]) > _ROUNDING_S:
                told.broken(f"the time {ended['due']} became {early}")
                break
            world.set_clock(ended["due"] + rng.uniform(0.1, 60))
        else:
            told.broken(f"no end after {_ROUNDS} processes")
        _judge_calls(world, told)
    return told


def _judge_end(world: World, ended: Mapping[str, Any], told: Told) -> None:
    if ended["status"] != RunStatus.COMPLETED or ended.get("failed"):
        told.broken(f"the run is {ended['status']}, failed are {ended.get('failed')}")
    answered = Counter(task for _, what, task, _ in world.log if what == "answered")
    if len(answered) != TASKS and ended["status"] == RunStatus.COMPLETED:
        told.broken(f"{len(answered)} tasks were answered")
    if repeated := {task: times for task, times in answered.items() if times > 1}:
        told.broken(f"answered more than once: {repeated}")


def _judge_calls(world: World, told: Told) -> None:
    """Judge what was sent to the closed account, and what was sent first after it opened."""
    log = world.log
    told.calls = sum(what != "answered" for _, what, _, _ in log)
    bursts: list[list[tuple[float, int]]] = []
    for at, what, _, deaths in log:
        if what != "refused":
            continue
        told.refused += 1
        if not bursts or at - bursts[-1][0][0] > _BURST_S:
            bursts.append([])
        bursts[-1].append((at, deaths))
    allowed = [WIDTH, WIDTH, 1]
    for number, burst in enumerate(bursts):
        deaths = burst[-1][1] - burst[0][1]
        most = (allowed[number] if number < len(allowed) else 0) * (1 + deaths)
        if len(burst) > most:
            told.broken(f"{len(burst)} calls were refused in a row, where {most} may be")
    calls = [one for one in log if one[1] != "refused"]
    for last, first in pairwise(calls):
        if first[0] - last[0] < _BURST_S:
            continue
        after = calls[calls.index(first) : calls.index(first) + 2]
        if after[-1][1:3] != ("answered", first[2]) and len({deaths for *_, deaths in after}) == 1:
            told.broken(f"{after[-1][2]} was called before the probe {first[2]} had answered")


def _execute(world: World, kill: int | None, bug: str | None, *, is_early: bool = False) -> dict[str, Any]:
    """Begin the run, or wake what is due, until it ends or is parked, or until the boundary number `kill`. With
    `is_early` resume the run whether or not it is due.
    """
    reached = 0

    def count(name: str) -> None:
        nonlocal reached
        reached += 1
        if reached == kill:
            (world.folder / "boundary").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.on_reach = count
    os.environ["HOME"] = str(world.folder)
    plant = nullcontext if bug is None else BUGS[bug]
    with plant(), mock.patch.object(resume, "longest_delay", return_value=0.0):
        return anyio.run(_go_on, world, is_early)


async def _go_on(world: World, is_early: bool) -> dict[str, Any]:
    clock = Shifted(world.offset)
    backend = ClaudeCodeBackend(command=str(world.folder / "claude"), cwd=world.folder, now=clock.wall)
    tasks = [Task(f"t{n}", f"do t{n}", [f"t{n - WIDTH * 2}"] if n >= WIDTH * 2 else []) for n in range(TASKS)]
    async with SQLiteStore(world.folder / "runs.db") as store:
        options: dict[str, Any] = {"store": store, "clock": clock, "concurrency": WIDTH}
        if await store.get_run("r") is None:
            await ParallelRunner(backend, **options, park=True).run(DAG(tasks), run_id="r")
        elif is_early:
            await ParallelRunner(backend, **options, park=True).resume("r")
        else:
            async with ParallelRunner(backend, **options).runs as runs:
                await runs.wake()
                await runs.driven_to_end()
        failpoints.on_reach = None
        run = await ParallelRunner(backend, **options).runs.get("r")
    return {
        "status": run.status.value,
        "due": None if run.due_at is None else parse_time(run.due_at),
        "failed": [one.task_id for one in run.tasks.values() if one.status == "failed"],
    }


@contextmanager
def _time_forgotten() -> Generator[None]:
    """Both that of the tasks and that of their backends."""

    async def none(*_args: Any) -> dict[str, float]:
        return {}

    with mock.patch.object(resume_plan, "next_tries", none), _no_probe():
        yield


def _no_probe() -> AbstractContextManager[object]:
    async def none(*_args: Any) -> dict[str, tuple[float | None, str]]:
        return {}

    return mock.patch.object(resume, "_closed_backends", none)


def _not_due_at_its_time() -> AbstractContextManager[object]:
    async def never(*_args: Any) -> bool:
        return False

    return mock.patch.object(Runs, "_is_due", never)


def _dead_runs_left() -> AbstractContextManager[object]:
    is_due = Runs._is_due  # pyright: ignore[reportPrivateUsage]

    async def of_parked(self: Runs, run: Any, now: float) -> bool:
        return run.owner is None and await is_due(self, run, now)

    return mock.patch.object(Runs, "_is_due", of_parked)


BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "a resume forgets the time": _time_forgotten,
    "no probe after a resume": _no_probe,
    "a parked run is never due": _not_due_at_its_time,
    "runs of dead processes are left": _dead_runs_left,
}
"""What plants each bug in a process."""
CAMPAIGN = Campaign(
    method="parking",
    unit="plans of 60 tasks with two limits",
    runs=RUNS,
    tell=tell,
    bugs=BUGS,
    tried=4,
    figures=lambda told: {
        "calls": sum(one.calls for one in told),
        "refused calls": sum(one.refused for one in told),
        "times parked": sum(one.parked for one in told),
    },
)
run = CAMPAIGN.run


if __name__ == "__main__":
    sys.exit(CAMPAIGN.main(sys.argv[1:]))
