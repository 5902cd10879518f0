"""The reports of hosts that attempts wait for."""

from __future__ import annotations

from contextlib import ExitStack

import anyio
from anyio.lowlevel import checkpoint

from plait.backends.hosts.away import AwayReporter
from plait.backends.hosts.connection import AttemptChannel, HostConnection
from plait.backends.protocol import AwayHost


def attempt(task: str) -> AttemptChannel:
    return AttemptChannel(f"{task}/1", lambda _: None, {})


async def test_tasks_are_reported_in_the_order_in_which_they_began_to_wait() -> None:
    connection = HostConnection("m1", 1, ("ssh",), dict)
    connection.away_since = 1.0
    reports: list[AwayHost] = []
    reporter = AwayReporter({"m1": connection}, reports.append)
    async with anyio.create_task_group() as group:
        group.start_soon(reporter.run)
        with ExitStack() as waits:
            for number in range(1, 12):
                waits.enter_context(reporter.waiting([connection], attempt(f"t.{number}")))
            await checkpoint()
            await checkpoint()
        reporter.close()
    assert [one.tasks for one in reports] == [tuple(f"t.{number}" for number in range(1, 12))]
