"""Agents on hosts that outlive their runner and their host process, and a runner in a process of its own to be killed.

`python -m tests.support.hosts.outliving FOLDER [BUG]` runs the tasks of `plan.json` there, or resumes the run as from
another machine, with a bug of bugs.py planted.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sqlite3
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import anyio

from plait import ParallelRunner
from plait.backends.hosts.host_backend import HostBackend
from plait.backends.hosts.host_process import slots_taken
from plait.persistence import SQLiteStore
from plait.persistence.store_records import EventRecord
from tests.support.agents.outliving import RUN, World, dag_of
from tests.support.hosts.agent import Agent
from tests.support.hosts.bugs import BUGS
from tests.support.hosts.world import HostFolder

NAMES = ("m1", "m2", "m3")
SLOTS = 4
LEASE = 1.0
LIMIT = 60.0  # seconds


def busy_hosts(records: tuple[EventRecord, ...]) -> dict[str, list[str]]:
    """Return the ids of the tasks placed on each host."""
    found: dict[str, list[str]] = {}
    for record in records:
        found.setdefault(json.loads(record.detail)["place"], []).append(record.task_id or "")
    return found


class PlacedWorld(World):
    """A world whose agents work on other hosts, each with its files in a folder of this machine."""

    @property
    def states(self) -> Path:
        """The folder with the state of each host."""
        raise NotImplementedError

    def placed(self) -> HostBackend:
        """Return the agents' backend, on the hosts."""
        raise NotImplementedError

    async def followed(self, count: int, epoch: int) -> None:
        """Return once `is_followed`."""
        await self.until(lambda: self.is_followed(count, epoch))

    def is_followed(self, count: int, epoch: int) -> bool:
        """Whether so many attempts hold slots, all of host processes of the owner with this epoch.

        A host process ends the attempts that it is not to keep before it takes a slot.
        """
        fences = self.states.glob("*/plait/hosts/*/*/fence.json")
        if not all(json.loads(fence.read_text())["epoch"] == epoch for fence in fences):
            return False
        # A test may have this process pass for another machine; the host processes do not.
        with patch.object(platform, "node", lambda: os.uname().nodename):
            return sum(map(slots_taken, self.states.glob("*/plait/hosts"))) == count

    async def suspend(self, pid: int) -> None:
        """SIGSTOP of a runner, at a moment at which the runner holds no lock of the store."""
        with anyio.fail_after(LIMIT):
            while True:
                os.kill(pid, signal.SIGSTOP)
                await self.until(lambda: _is_stopped(pid))
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


class HostsWorld(PlacedWorld):
    """A world whose agents work on three hosts."""

    module = "tests.support.hosts.outliving"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.hosts = HostFolder(folder / "hosts")

    @property
    def states(self) -> Path:
        return self.hosts.folder

    def placed(self) -> HostBackend:
        return self.hosts.hosts(*NAMES, slots=SLOTS).placed(Agent(str(self.folder)))

    def runner(self, store: SQLiteStore, names: Sequence[str] = NAMES, **options: Any) -> ParallelRunner:
        return runner_of(self.folder, store, names, **options)

    @property
    def names(self) -> Sequence[str]:
        """The hosts that have been connected to."""
        return sorted(path.stem for path in self.hosts.folder.glob("*.pids"))

    def kill_hosts(self) -> None:
        for name in self.names:
            self.hosts.kill(name)

    def plan(
        self,
        *tasks: Mapping[str, Any],
        concurrency: int = 12,
        names: Sequence[str] = NAMES,
        slots: int = SLOTS,
    ) -> None:
        """The tasks, and the hosts of the process that runs the tasks."""
        values = {"concurrency": concurrency, "names": names, "slots": slots, "tasks": tasks}
        (self.folder / "plan.json").write_text(json.dumps(values))


def _is_stopped(pid: int) -> bool:
    """Whether each thread of the process is stopped, a moment after SIGSTOP."""
    states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"T"}


def runner_of(
    folder: Path,
    store: SQLiteStore,
    names: Sequence[str] = NAMES,
    *,
    patience: float = 30.0,
    slots: int = SLOTS,
    concurrency: int = 12,
    **options: Any,
) -> ParallelRunner:
    hosts = HostFolder(folder / "hosts").hosts(*names, slots=slots, patience=patience)
    backend = hosts.placed(Agent(str(folder)))
    return ParallelRunner(backend, store=store, concurrency=concurrency, lease=LEASE, **options)


async def run(folder: Path) -> None:
    """Run or resume the plan."""
    if not (folder / "plan.json").exists():
        raise SystemExit(f"no plan in {folder}")
    plan = json.loads((folder / "plan.json").read_text())
    async with SQLiteStore(folder / "runs.db") as store:
        runner = runner_of(folder, store, plan["names"], slots=plan["slots"], concurrency=plan["concurrency"])
        if await store.get_run(RUN) is None:
            await runner.run(dag_of(folder), RUN)
        else:
            platform.node = lambda: "another-machine"
            await runner.resume(RUN)


if __name__ == "__main__":
    with ExitStack() as planted:
        for bug in sys.argv[2:]:
            planted.enter_context(BUGS[bug]())
        anyio.run(run, Path(sys.argv[1]))
