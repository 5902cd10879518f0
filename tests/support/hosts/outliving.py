"""Agents on hosts that outlive their runner and their host process, and a runner in a process of its own to be killed.

`python -m tests.support.hosts.outliving FOLDER` runs the tasks of `plan.json` there, or resumes the run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from plait.persistence import SQLiteStore
from plait.runner import ParallelRunner
from tests.support.agents.outliving import RUN, World, dag_of
from tests.support.hosts.agent import Agent
from tests.support.hosts.world import HostFolder

NAMES = ("m1", "m2", "m3")
LEASE = 1.0


class HostsWorld(World):
    """A world whose agents work on three hosts."""

    module = "tests.support.hosts.outliving"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = HostFolder(folder / "hosts")

    def runner(self, store: SQLiteStore, names: Sequence[str] = NAMES, **options: Any) -> ParallelRunner:
        return runner_of(self.folder, store, names, **options)

    def kill_hosts(self) -> None:
        for name in NAMES:
            self.hosts.kill(name)


def runner_of(
    folder: Path, store: SQLiteStore, names: Sequence[str] = NAMES, *, patience: float = 30.0, **options: Any
) -> ParallelRunner:
    hosts = HostFolder(folder / "hosts").hosts(*names, patience=patience)
    return ParallelRunner(hosts.placed(Agent(str(folder))), store=store, concurrency=12, lease=LEASE, **options)


async def run(folder: Path) -> None:
    """Run or resume the plan."""
    if not (folder / "plan.json").exists():
        raise SystemExit(f"no plan in {folder}")
    patience = json.loads((folder / "plan.json").read_text()).get("patience", 30.0)
    async with SQLiteStore(folder / "runs.db") as store:
        runner = runner_of(folder, store, patience=patience)
        if await store.get_run(RUN) is None:
            await runner.run(dag_of(folder), RUN)
        else:
            await runner.resume(RUN)


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]))
