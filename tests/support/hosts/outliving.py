"""Agents on hosts that outlive their runner and their host process, and a runner in a process of its own to be killed.

`python -m tests.support.hosts.outliving FOLDER` runs the tasks of `plan.json` there, or resumes the run.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio

from plait.backends.hosts.slots import Slots
from plait.persistence import SQLiteStore
from plait.runner import ParallelRunner
from tests.support.agents.outliving import RUN, World, dag_of
from tests.support.hosts.agent import Agent
from tests.support.hosts.world import HostFolder

NAMES = ("m1", "m2", "m3")
SLOTS = 4
LEASE = 1.0
LIMIT = 30.0  # seconds


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

    async def followed(self, count: int, epoch: int) -> None:
        """Return once so many attempts hold slots, all of host processes of the owner with this epoch.

        A host process ends the attempts that it is not to keep before it takes a slot.
        """
        fences = list(self.hosts.folder.glob("*/plait/hosts/*/*/fence.json"))
        await self.until(lambda: all(fence.read_text().startswith(f"[{epoch},") for fence in fences))
        await self.until(lambda: self._slots_taken() == count)

    async def suspend(self, pid: int) -> None:
        """SIGSTOP of a runner, at a moment at which the runner holds no lock of the store."""
        with anyio.fail_after(LIMIT):
            while True:
                os.kill(pid, signal.SIGSTOP)
                if self._is_free():
                    return
                os.kill(pid, signal.SIGCONT)
                await anyio.sleep(0.005)

    def _is_free(self) -> bool:
        store = sqlite3.connect(self.folder / "runs.db", timeout=0, isolation_level=None)
        try:
            store.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        finally:
            store.close()
        return True

    def _slots_taken(self) -> int:
        return sum(Slots(folder, SLOTS).taken() for folder in self.hosts.folder.glob("*/plait/hosts/slots"))


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
