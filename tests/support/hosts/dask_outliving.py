"""Agents on the workers of a Dask cluster that outlive their runner, their worker and the scheduler.

`python -m tests.support.hosts.dask_outliving FOLDER` runs the tasks of `plan.json` there, or resumes the run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
from anyio.to_thread import run_sync

from plait import ParallelRunner, RunResult, events
from plait.backends.hosts.host_backend import HostBackend
from plait.events import TaskPlaced
from plait.hosts import DaskHosts
from plait.persistence import SQLiteStore
from tests.support.agents.outliving import RUN, dag_of
from tests.support.hosts.agent import Agent
from tests.support.hosts.dask_cluster import DaskCluster
from tests.support.hosts.outliving import PlacedWorld, busy_hosts
from tests.support.sizes import size

LEASE = 1.0
AGENTS = size({"m1": 4, "m2": 4}, {"m1": 4, "m2": 4, "m3": 4})


class DaskWorld(PlacedWorld):
    """A world whose agents work on the workers of a cluster."""

    module = "tests.support.hosts.dask_outliving"

    def __init__(
        self, folder: Path, agents: Mapping[str, int] = AGENTS, *, patience: float = 60.0, nanny: bool = True
    ) -> None:
        super().__init__(folder)
        self.cluster = DaskCluster(folder / "cluster", agents, nanny=nanny)
        (folder / "cluster.json").write_text(json.dumps([self.cluster.address, patience]))

    @property
    def states(self) -> Path:
        return self.cluster.folder

    def runner(self, store: SQLiteStore, **options: Any) -> ParallelRunner:
        return runner_of(self.folder, store, **options)

    def placed(self) -> HostBackend:
        return self.cluster.hosts().placed(Agent(str(self.folder)))

    def restart(self) -> None:
        """SIGKILL of the scheduler, the nannies and the workers, which are started anew."""
        self.cluster.kill(*self.cluster.processes)
        self.cluster.start()

    def kill_part(self, part: str, place: str) -> None:
        """SIGKILL of the worker or the nanny of `place`, of the scheduler, or of all.

        Only a nanny starts a worker anew; everything else is started anew here.
        """
        match part:
            case "worker":
                nanny = psutil.Process(self.cluster.processes[place].pid)
                (worker,) = [one for one in nanny.children() if "spawn_main" in " ".join(one.cmdline())]
                os.kill(worker.pid, signal.SIGKILL)
            case "nanny":
                self.cluster.kill(place)
                self.cluster.start_worker(place)
            case "scheduler":
                self.cluster.kill("scheduler")
                self.cluster.wait(*self.cluster.agents)  # workers exit without their scheduler
                self.cluster.start()
            case _:
                self.restart()

    async def resumed(self, count: int) -> RunResult:
        """Resume the run, and let the `count` agents go on once all are adopted, and no host ends one any more."""
        adopted: set[str] = set()
        async with self.store() as store, self.runner(store).start_resume(RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskStarted):
                    assert isinstance(event, events.TaskAdopted)
                    adopted.add(event.task_id)
                if len(adopted) == count:
                    adopted.clear()
                    await self.followed(count, epoch=2)
                    assert len(self.alive()) == count
                    self.allow("go")
            return await run.result()

    async def run_without(self, part: str, count: int) -> RunResult:
        """Run the plan, kill a part of the cluster once the `count` agents work, and let the agents go on once the run
        waits for a host.
        """
        async with self.opened_store() as store, self.runner(store).start(self.dag(), RUN) as run:
            place, opened = "", set[str]()
            async for event in run.events():
                if isinstance(event, events.SessionOpened):
                    opened.add(event.task_id)
                if len(opened) == count and not place:
                    (place, *_) = busy_hosts(await store.list_events(RUN, kind=TaskPlaced.kind))
                    await run_sync(self.kill_part, part, place)
                if place and isinstance(event, events.TaskOutput) and event.text.startswith(f"waiting for {place}"):
                    self.allow("go")
            return await run.result()

    def end(self) -> None:
        """SIGKILL of every process of the world."""
        self.cluster.kill(*self.cluster.processes)
        for pid in self.alive():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def runner_of(folder: Path, store: SQLiteStore, **options: Any) -> ParallelRunner:
    address, patience = json.loads((folder / "cluster.json").read_text())
    concurrency = json.loads((folder / "plan.json").read_text())["concurrency"]
    backend = DaskHosts(address, patience=patience).placed(Agent(str(folder)))
    return ParallelRunner(backend, store=store, concurrency=concurrency, lease=LEASE, **options)


async def run(folder: Path) -> None:
    """Run or resume the plan."""
    async with SQLiteStore(folder / "runs.db") as store:
        runner = runner_of(folder, store)
        first = await store.get_run(RUN) is None
        print(await (runner.run(dag_of(folder), RUN) if first else runner.resume(RUN)), file=sys.stderr)


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]))
