"""Agents on a Dask cluster while a part of the cluster, or everything, is killed and started again.

`python -m tests.faults.campaigns.cluster PART ...` plays the parts, of `worker`, `nanny`, `scheduler`, `runner` and
`all`: the scheduler, the nannies, the workers and the runner. `--rounds`, `--agents` and `--workers` say how many. No
agent may be begun twice, each has to be adopted, and none may be left behind. `--planted` plays rounds with planted
bugs (tests/support/hosts/bugs.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from plait import RunResult, TaskStatus
from plait.runner.engine.backend_call import only_error
from tests.faults.campaigns.planted import Shown, try_planted
from tests.faults.campaigns.report import Report, Scale
from tests.support.hosts.bugs import BUGS
from tests.support.hosts.dask_outliving import DaskWorld

PARTS = ("worker", "nanny", "scheduler", "runner", "all")
ROUNDS = {"quick": 1, "nightly": 10}
"""Rounds of each part but `all`, which has one round, with AT_ONCE agents."""
AGENTS, WORKERS = {"quick": 4, "nightly": 8}, 4
AT_ONCE = {"quick": 8, "nightly": 100}
PLANTED: Mapping[str, tuple[str, Shown]] = {
    "worker killed": ("a broken connection taken for the end", Shown("worker", "begun twice")),
    "scheduler killed": ("a broken connection taken for the end", Shown("scheduler", "begun twice")),
    "runner killed": ("placed attempts begun anew", Shown("runner", "assert isinstance(event, events.TaskAdopted)")),
    "all killed": ("placed attempts begun anew", Shown("all", "assert isinstance(event, events.TaskAdopted)")),
}
"""The bug, and where it has to show."""
_FEW, _ONE = 2, 1
"""Agents and workers of a round with a planted bug."""
_READY_S = 120.0
"""Seconds for the cluster to start."""


async def play(part: str, agents: int, workers: int, bug: str = "") -> tuple[list[str], int]:
    """Play a round, with the bug planted, if any. Return what is wrong, and the number of agents adopted."""
    with tempfile.TemporaryDirectory(prefix="plait-cluster-") as folder, ExitStack() as stack:
        each = -(-agents // workers)
        world = DaskWorld(Path(folder), {f"m{number}": each for number in range(workers)}, patience=300.0)
        tasks = ({"id": f"t{number}", "prompt": f"work {number} [[until go]]"} for number in range(agents))
        world.plan(*tasks, concurrency=agents)
        if bug:
            stack.enter_context(BUGS[bug]())
        stack.callback(world.end)
        world.cluster.start()
        wrong, found = list[str](), list[RunResult]()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(_end_once_begun_twice, world, agents, group.cancel_scope)
                found.append(await _play(world, part, agents))
                group.cancel_scope.cancel()
        except* (AssertionError, TimeoutError) as error:
            wrong.append(_place_of(only_error(error)))
        twice, left = max(0, len(world.turns) - agents), len(world.alive()) if found else 0
    ends = [one for result in found for one in result.tasks.values() if one.status is TaskStatus.COMPLETED]
    adopted = sum(one.attempts == 1 for one in ends)
    counts = {"begun twice": twice, "left behind": left, "not adopted": agents - adopted}
    return [*wrong, *(f"{count} agents {what}" for what, count in counts.items() if count)], adopted


def _place_of(error: BaseException) -> str:
    """Return the line of the tests that raised the error: an assertion, or a wait."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "/tests/" in frame.filename]
    return f"{type(error).__name__}: {ours[-1].line}"


async def _end_once_begun_twice(world: DaskWorld, agents: int, scope: anyio.CancelScope) -> None:
    """End a round that would wait for ever: an agent begun twice is not the one that the round waits for."""
    while len(world.turns) <= agents:  # noqa: ASYNC110 - it is another process's doing
        await anyio.sleep(0.05)
    scope.cancel()


def run(*, scale: Scale, seed: int = 0) -> Report:
    """Play rounds with each part, one with all, and the planted bugs."""
    began, wrong, adopted = time.monotonic(), list[str](), 0
    rounds = [(part, AGENTS[scale]) for part in PARTS[:-1] for _ in range(ROUNDS[scale])]
    rounds.append((PARTS[-1], AT_ONCE[scale]))
    for part, agents in rounds:
        found, count = anyio.run(play, part, agents, WORKERS)
        wrong += [f"{part}: {one}" for one in found]
        adopted += count
    return Report(
        method="cluster",
        unit="rounds",
        cases=len(rounds),
        violations=tuple(wrong),
        planted={name: is_caught(name) for name in PLANTED},
        seconds=time.monotonic() - began,
        figures={"agents adopted": adopted, "agents of the round without survivors": AT_ONCE[scale]},
    )


def _play_with(name: str) -> list[str]:
    """Return what is wrong with a small round in which a bug is planted."""
    bug, shown = PLANTED[name]
    return anyio.run(play, shown.case, _FEW, _ONE, bug)[0]


def is_caught(name: str) -> bool:
    """Whether a round shows a planted bug as what it is."""
    return PLANTED[name][1].within(_play_with(name))


async def _play(world: DaskWorld, part: str, agents: int) -> RunResult:
    with anyio.fail_after(_READY_S):  # a client of Dask that has lost its scheduler would wait for ever
        await world.cluster.ready()
    if part in {"worker", "nanny", "scheduler"}:
        return await world.run_without(part, agents)
    await world.killed(agents)
    if part == "all":
        await run_sync(world.restart)
    return await world.resumed(agents)


def main() -> int:
    """Play the rounds, and print a line for each. 1 if an agent was begun twice, lost or left behind, else 0."""
    if sys.argv[1:] == ["--planted"]:
        return try_planted({name: shown for name, (_, shown) in PLANTED.items()}, _play_with)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    bad = 0
    for part in given.parts:
        for number in range(given.rounds):
            began = time.monotonic()
            wrong, adopted = anyio.run(play, part, given.agents, given.workers)
            bad += bool(wrong)
            print(
                f"{part} killed, round {number + 1}: {adopted} of {given.agents} adopted, "
                f"{'; '.join(wrong) or 'none begun twice or left behind'}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
