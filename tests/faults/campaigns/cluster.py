"""Agents on a Dask cluster while a part of the cluster, or everything, is killed and started again.

`python -m tests.faults.campaigns.cluster PART ...` plays the parts, of `worker`, `nanny`, `scheduler`, `runner` and
`all`: the scheduler, the nannies, the workers and the runner. `--rounds`, `--agents` and `--workers` say how many. No
agent may be begun twice, each has to be adopted, and none may be left behind.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from plait.runner import RunResult
from tests.support.hosts.dask_outliving import DaskWorld

PARTS = ("worker", "nanny", "scheduler", "runner", "all")


async def play(part: str, agents: int, workers: int) -> dict[str, float]:
    """Play a round. Return the numbers of agents adopted, begun twice and left behind, and the seconds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="plait-cluster-") as folder:
        each = -(-agents // workers)
        world = DaskWorld(Path(folder), {f"m{number}": each for number in range(workers)}, patience=300.0)
        tasks = ({"id": f"t{number}", "prompt": f"work {number} [[until go]]"} for number in range(agents))
        world.plan(*tasks, concurrency=agents)
        world.cluster.start()
        try:
            result = await _play(world, part, agents)
            adopted = sum(one.attempts == 1 and one.text is not None for one in result.tasks.values())
            left = len(world.alive())
        finally:
            world.end()
        twice = len(world.turns) - agents
    return {"adopted": adopted, "twice": twice, "left": left, "seconds": time.monotonic() - began}


async def _play(world: DaskWorld, part: str, agents: int) -> RunResult:
    await world.cluster.ready()
    if part in {"worker", "nanny", "scheduler"}:
        return await world.run_without(part, agents)
    await world.killed(agents)
    if part == "all":
        await run_sync(world.restart)
    return await world.resumed(agents)


def main() -> None:
    """Play the rounds, and print a line for each. Exit code 1 if an agent was begun twice, lost or left behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    given = parser.parse_args()
    bad = 0
    for part in given.parts:
        for number in range(given.rounds):
            found = anyio.run(play, part, given.agents, given.workers)
            bad += (found["adopted"], found["twice"], found["left"]) != (given.agents, 0, 0)
            print(
                f"{part} killed, round {number + 1}: {found['adopted']} of {given.agents} adopted, "
                f"{found['twice']} begun twice, {found['left']} left behind, {found['seconds']:.0f} s",
                flush=True,
            )
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
