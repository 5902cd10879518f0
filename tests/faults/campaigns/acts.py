"""Acts: random plans with commands, checks, loops, called plans, joins, races, samples and lists of lists.

Each seed is a plan with an oracle (tests/support/acting_plans.py). It is played three times: through; stopped at a call
and resumed; and by processes that die of SIGKILL at a durable boundary, the last of which resumes the run to its end.
Each time all tasks have to end as foretold, no call, no round and no command may be made again but those under way, and
the evidence of each checked answer has to be there.
`python -m tests.faults.campaigns.acts SEED` repeats one; with `--planted` it looks for the planted bugs.
"""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final
from unittest import mock

import anyio.lowlevel

from plait import DAG, CommandBackend, ParallelRunner, Run, RunStatus, SQLiteStore, Store, failpoints
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore
from plait.runner.domain.continuation import EVIDENCE
from plait.runner.engine import growth
from plait.runner.engine.executor import Executor
from plait.runner.engine.outcomes import OutcomeHandler
from plait.runner.engine.work_folders import WorkFolders
from plait.runner.plan.plan_file import parse_plan
from plait.runner.scheduling import scheduler
from plait.statuses import TASK_DONE
from tests.faults.campaigns.report import Report, Scale
from tests.support.acting_plans import CANCELLED, CORRECTION, Oracle, answer, random_plan, written
from tests.support.fakes import ShortDelays

PLANS: Final[dict[Scale, int]] = {"quick": 25, "nightly": 500}
KILLED: Final[dict[Scale, tuple[int, int]]] = {"quick": (2, 4), "nightly": (500, 4)}
"""Plans that are killed, and the number of boundaries of each, spread over the run."""
KILLED_EVERYWHERE: Final[dict[Scale, int]] = {"quick": 0, "nightly": 20}
"""Plans that are killed at every boundary."""
AT_ONCE = 3
MOST_VIOLATIONS = 20
PLANTED_CASES = 60


class Case:
    """The plan of a seed in a folder."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.odds = random.Random(seed)
        self.folder = folder
        tasks = random_plan(self.odds, 2, commands=seed % 2 == 0)
        text = json.dumps({"inputs": {"x": ""}, "tasks": written(tasks, folder, folder / "log")})
        self.dag: DAG = parse_plan(text, format="json", folder=folder).dag
        self.tasks = tasks
        self.calls = self.foretold({}).calls.total()
        """About how often the model is asked."""

    def foretold(self, found: Mapping[str, str]) -> Oracle:
        oracle = Oracle(found)
        oracle.play(self.tasks)
        return oracle

    def runner(self, store: Store, say: Callable[[str], Any]) -> ParallelRunner:
        backends = {"command": CommandBackend(cwd=self.folder)}
        return ParallelRunner(say, backends=backends, store=store, concurrency=AT_ONCE, rng=ShortDelays())

    def commands(self) -> Counter[str]:
        """Return how often each command was begun."""
        log = self.folder / "log"
        return Counter(log.read_text().split()) if log.exists() else Counter()

    async def problems(self, store: Store, calls: Counter[str], *, lives: int, commands_again: int) -> list[str]:
        """Return what differs from the oracle, after a run by `lives` processes: `calls` are those of the model."""
        tasks = {one.task_id: one for one in await store.list_tasks("r")}
        statuses = {name: one.status for name, one in tasks.items()}
        foretold = self.foretold(statuses)
        found = foretold.unexplained()
        ends = {name: end for name, end in foretold.statuses.items() if name not in foretold.absent}
        if statuses != ends:
            differ = sorted(statuses.items() ^ ends.items())[:4]
            found.append(f"tasks ended otherwise than foretold: {differ}")
        else:
            texts = {name: tasks[name].text for name in foretold.texts}
            found += [f"the answer of {name} is another" for name in texts if texts[name] != foretold.texts[name]]
        again = calls - foretold.calls - foretold.lost["calls"]
        if foretold.calls - calls or again.total() > AT_ONCE * (lives - 1) or (lives == 1 and again):
            found.append(f"calls: {dict(again)} too many, {dict(foretold.calls - calls)} too few")
        begun = self.commands()
        again = begun - foretold.commands - foretold.lost["commands"]
        if foretold.commands - begun or again.total() > commands_again:
            found.append(f"commands: {dict(again)} begun again, {dict(foretold.commands - begun)} never")
        evidence = Counter[str]()
        for name in tasks:
            messages = await store.list_messages("r", name)
            if statuses[name] != CANCELLED:
                evidence[name] += len({one.attempt for one in messages if one.content.startswith(EVIDENCE)})
        if +evidence != foretold.evidence:
            found.append(
                f"evidence: {dict(evidence - foretold.evidence)} too much, {dict(foretold.evidence - evidence)} lost"
            )
        return found


async def played(case: Case, stop_at: int = 0) -> list[str]:
    """Play the plan, stopped at a call and resumed if `stop_at` is not 0, and return what is wrong."""
    calls, runs, store = Counter[str](), list[Run](), MemoryStore()
    (case.folder / "log").unlink(missing_ok=True)

    async def say(prompt: str) -> Any:
        calls[CORRECTION if prompt.startswith(CORRECTION) else prompt] += 1
        if calls.total() == stop_at:
            runs[0].stop()
        for _ in range(1 + len(prompt) % 4):  # some are slower, and lose their races
            await anyio.lowlevel.checkpoint()
        return _said(prompt)

    runner = case.runner(store, say)
    runs.append(runner.start(case.dag, "r"))
    with anyio.fail_after(120):
        async with runs[0] as run:
            result = await run.result()
        if result.status is RunStatus.INTERRUPTED:
            await runner.resume("r")
    return await case.problems(store, calls, lives=1 + bool(stop_at), commands_again=bool(stop_at))


def _said(prompt: str) -> Any:
    if (said := answer(prompt)) is None:
        raise BackendError(ErrorKind.REFUSED, "no")
    return said


def tell(seed: int) -> list[str]:
    """Play the plan of the seed, through and stopped, and return what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        case = Case(seed, Path(folder))
        found = asyncio.run(played(case))
        if not found and case.calls:
            stop_at = case.odds.randint(1, case.calls)
            found = [f"stopped at call {stop_at}: {one}" for one in asyncio.run(played(case, stop_at))]
        return [f"seed {seed}: {one}" for one in found]


def kills(seed: int, count: int) -> tuple[list[str], int]:
    """Let processes die at `count` boundaries of the plan, spread over the run, or at every one if `count` is 0. Return
    what is wrong, and how many died. Forks: only for a process without threads.
    """
    found, died = list[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        _, reached = _trial(seed, Path(folder, "whole"), [])
        count = count or reached
        for number in range(count):
            kill_at = 1 + (seed + number * max(1, reached // count)) % max(1, reached)
            at = [kill_at, 1 + kill_at * 7 % 17] if number % 2 else [kill_at]
            wrong, _ = _trial(seed, Path(folder, str(number)), at)
            died += len(at)
            found += [f"seed {seed}, killed at {at}: {one}" for one in wrong]
    return found, died


def _trial(seed: int, folder: Path, kill_at: list[int]) -> tuple[list[str], int]:
    """Play the plan by processes that die at the boundaries of these numbers, and one that does not. Return what is
    wrong, and the number of boundaries.
    """
    folder.mkdir()
    case = Case(seed, folder)
    deaths = sum(_lived(case, at) for at in [*kill_at, 0])
    calls = Counter((folder / "calls").read_text().splitlines()) if (folder / "calls").exists() else Counter[str]()

    async def look() -> list[str]:
        async with SQLiteStore(folder / "plait.db") as store:
            return await case.problems(store, calls, lives=1 + deaths, commands_again=deaths)

    return asyncio.run(look()), len((folder / "reached").read_text().splitlines())


def _lived(case: Case, kill_at: int) -> bool:
    """Execute the run in a child of this process. Return whether the child has died of the kill."""
    child = os.fork()
    if child:
        return os.WIFSIGNALED(os.waitpid(child, 0)[1])

    def note(name: str, text: str) -> None:
        with (case.folder / name).open("a") as file:
            file.write(f"{text}\n")

    left = [kill_at]

    def die(name: str) -> None:
        note("reached", name)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    async def say(prompt: str) -> Any:
        note("calls", CORRECTION if prompt.startswith(CORRECTION) else prompt)
        return _said(prompt)

    async def go() -> None:
        async with SQLiteStore(case.folder / "plait.db") as store:
            runner = case.runner(store, say)
            is_new = await store.get_run("r") is None
            async with runner.start(case.dag, "r") if is_new else runner.start_resume("r") as run:
                await run.result()

    failpoints.on_reach = die
    try:
        asyncio.run(asyncio.wait_for(go(), 120))
        os._exit(0)
    except BaseException as error:
        note("errors", repr(error))
        os._exit(1)


_elements_of = growth.elements_of


def _from_the_end(task: Any, result: Any) -> Any:
    return [*_elements_of(task, result)][::-1]


def _fail_at_once(self: Any, attempt: Any, error: BackendError, duration: float, _tries: int) -> Any:
    return self._fail(attempt, error, duration)


def _races(self: Any, position: int) -> bool:
    return self._tasks[position].race


def _waits_for_its_plan(self: Any, position: int) -> bool:
    return self._state.statuses[position] not in TASK_DONE and not self._is_won(position)


BUGS: Mapping[str, tuple[object, str, Mapping[str, Any]]] = {
    "a loop that never ends before its last round": (growth, "is_reached", {"return_value": False}),
    "a list that is read from its end": (growth, "elements_of", {"new": _from_the_end}),
    "a join that waits for nothing": (scheduler, "may_start", {"return_value": True}),
    "a failed check that is not told": (OutcomeHandler, "_correct_or_fail", {"new": _fail_at_once}),
    "a failed child that nobody notices": (growth, "unfinished", {"return_value": []}),
    "a race that cancels nobody": (Executor, "_end_race", {"return_value": []}),
    "a race that cancels what others need": (Executor, "_waits", {"return_value": False}),
    "a race that is won before its end": (Executor, "_is_won", {"new": _races}),
    "a race whose losers the plan around it keeps": (Executor, "_waits", {"new": _waits_for_its_plan}),
    "two commands at once in a folder": (WorkFolders, "take", {"return_value": None}),
}
"""Bugs of plans that act."""


def is_caught(bug: str) -> bool:
    """Return whether a plan shows the planted bug."""
    where, name, how = BUGS[bug]
    with mock.patch.object(where, name, **how):
        for seed in range(PLANTED_CASES):
            try:
                if tell(seed):
                    return True
            except Exception:
                return True
    return False


def run(*, scale: Scale, seed: int = 0, planted: bool = True) -> Report:
    """Play as many plans as `scale` says, from `seed` on, and, where wanted, the planted bugs."""
    began, violations, cases = time.monotonic(), list[str](), 0
    while cases < PLANS[scale] and len(violations) < MOST_VIOLATIONS:
        violations += tell(seed + cases)
        cases += 1
    died = 0
    for plans, count in (KILLED[scale], (KILLED_EVERYWHERE[scale], 0)):
        for first in range(seed, seed + plans, 25):
            wanted = ["--kills", str(first), str(min(25, seed + plans - first)), str(count)]
            told = json.loads(_alone(wanted))
            violations += told["violations"]
            died += told["died"]
    caught = {bug: is_caught(bug) for bug in BUGS} if planted else {}
    figures = {"plans killed": KILLED[scale][0], "plans killed everywhere": KILLED_EVERYWHERE[scale], "deaths": died}
    return Report(
        method="acts",
        unit="plans",
        cases=cases,
        violations=tuple(violations),
        planted=caught,
        seconds=time.monotonic() - began,
        figures=figures,
    )


def _alone(arguments: list[str]) -> str:
    command = [sys.executable, "-m", "tests.faults.campaigns.acts", *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main(arguments: list[str]) -> int:
    """Repeat the case of a seed, look for the planted bugs, or report what kills have shown."""
    if arguments[:1] == ["--kills"]:
        first, plans, count = map(int, arguments[1:])
        found, died = list[str](), 0
        for seed in range(first, first + plans):
            wrong, deaths = kills(seed, count)
            found, died = found + wrong, died + deaths
        print(json.dumps({"violations": found, "died": died}))
        return 0
    if arguments == ["--planted"]:
        missed = [bug for bug in BUGS if not is_caught(bug)]
        print(*(f"NOT CAUGHT: {bug}" for bug in missed), f"{len(BUGS) - len(missed)} of {len(BUGS)} caught", sep="\n")
        return int(bool(missed))
    found = list[str]()
    for seed in range(int(arguments[0]), int(arguments[-1]) + 1):
        found += tell(seed)
    print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
