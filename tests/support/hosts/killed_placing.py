"""A run with one attempt on a host, in a process that kills itself while the place of the attempt is being stored.

`python -m tests.support.hosts.killed_placing FOLDER FAILPOINT [unstored]`. With `unstored` the process has a bug: the
attempt begins before its place is stored. Then the process waits for the agent before it kills itself.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import anyio

from plait import events, failpoints
from plait.events import TaskPlaced
from plait.persistence import Batch, SQLiteStore
from plait.runner.engine.attempt import Attempt, AttemptRunner
from tests.support.agents.outliving import RUN
from tests.support.hosts.outliving import HostsWorld

LIMIT = 60.0  # seconds


class WatchedStore(SQLiteStore):
    """Kills the process at a failpoint, once the place of an attempt is being written."""

    def kill_at(self, failpoint: str, world: HostsWorld, *, begun: bool) -> None:
        self._failpoint, self._world, self._begun = failpoint, world, begun

    async def write(self, batch: Batch) -> None:
        if any(isinstance(change, TaskPlaced) for change in batch.events):
            failpoints.on_reach = self._reach
        await super().write(batch)

    def _reach(self, name: str) -> None:
        if name == self._failpoint:
            ends = time.monotonic() + LIMIT
            while self._begun and not self._world.turns and time.monotonic() < ends:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


async def _not_stored(self: AttemptRunner, attempt: Attempt, place: str) -> None:
    attempt.place, attempt.has_begun = place, True
    self._run.sink.submit([events.TaskPlaced(self._stamp(), attempt.task.id, attempt.number, place, False)])  # pyright: ignore[reportPrivateUsage]


async def run(folder: Path, failpoint: str, *bug: str) -> None:
    """Run the plan, to its end or to the failpoint."""
    if bug:
        AttemptRunner._place = _not_stored  # type: ignore[method-assign]  # pyright: ignore[reportPrivateUsage]
    world = HostsWorld(folder)
    async with WatchedStore(folder / "runs.db") as store:
        store.kill_at(failpoint, world, begun=bool(bug))
        await world.runner(store, ["m1"]).run(world.dag(), RUN)


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]), *sys.argv[2:])
