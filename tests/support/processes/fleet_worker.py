"""`plait worker` with a lease of LEASE_S seconds, as a program: `python -m ... STORE CONCURRENCY [HOST [BUG]]`.

With HOST the worker counts as one on another machine, and with BUG it has this bug of BUGS.
"""

# A bug is planted in the inside of things.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import anyio

from plait.persistence import PostgresStore
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.cli.serve_commands import work
from plait.runner.client.run_backends import FileOptions
from plait.runner.engine.run_options import store_place
from plait.runner.state.run_state import RunState
from plait.statuses import TaskStatus

LEASE_S = 2.0
LATE_S = 3.0
"""Seconds between the end of a lease and a take-over by a worker that is late: more than may be."""


def _begin_again() -> None:
    """Forget at a take-over which tasks are completed."""
    load = RunState._load

    def forgetting(self: Any, position: int, record: TaskRecord) -> None:
        load(self, position, record)
        if self.statuses[position] is TaskStatus.COMPLETED:
            self._statuses[position] = TaskStatus.PENDING
            del self._results[position]

    mock.patch.object(RunState, "_load", forgetting).start()


def _take_over_late() -> None:
    """Take the runs of dead workers for free only some seconds after the end of their leases."""
    list_claimable = PostgresStore.list_claimable

    async def late(self: PostgresStore, limit: int = 50) -> tuple[RunRecord, ...]:
        found = await list_claimable(self, limit)
        return tuple(run for run in found if (run.lease_expires_at or 0.0) + LATE_S < time.time())

    mock.patch.object(PostgresStore, "list_claimable", late).start()


BUGS: Mapping[str, Callable[[], None]] = {
    "completed tasks queued again": _begin_again,
    "taken over late": _take_over_late,
}

if __name__ == "__main__":
    if sys.argv[3:]:
        mock.patch.object(platform, "node", return_value=sys.argv[3]).start()
    for bug in sys.argv[4:]:
        BUGS[bug]()
    sys.exit(anyio.run(work, store_place(sys.argv[1]), int(sys.argv[2]), FileOptions(plans=()), LEASE_S))
