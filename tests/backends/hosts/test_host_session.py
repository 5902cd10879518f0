"""The reports of hosts that attempts wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count

import anyio
import pytest
from anyio.lowlevel import checkpoint

from plait.backends.backend_protocol import AwayHost, Output
from plait.backends.hosts.host_connection import AttemptChannel, HostConnection
from plait.backends.hosts.host_session import AwayReporter, HostSession
from plait.errors import BackendError


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


def away_host(name: str) -> HostConnection:
    """A host that was connected before, and cannot be reached now."""
    connection = HostConnection(name, 1, ("ssh",), dict)
    connection.was_connected, connection.tries, connection.away_since = True, 1, 1.0
    return connection


async def _keep_changing(connections: Sequence[HostConnection]) -> None:
    """Let the hosts fail to connect again and again, each time for another reason."""
    for number in count():
        for connection in connections:
            connection.reason, connection.tries = f"no route, try {number}", number + 1
            connection.on_change()
        await anyio.sleep(0.01)


@pytest.mark.parametrize("wanted", ["m1", None])
async def test_the_patience_with_a_host_does_not_begin_anew_with_each_try(wanted: str | None) -> None:
    connections = [away_host("m1"), away_host("m2")]
    session = HostSession(connections, 0.2, lambda _: None)
    told: list[Output] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_keep_changing, connections)
        with anyio.fail_after(5), pytest.raises(BackendError, match="no host can be used"):
            await session.place(attempt("t"), wanted, told.append)
        if wanted is not None:
            with anyio.fail_after(5):
                assert not await session.wait_until_back(connections[0], attempt("t"), told.append)
        group.cancel_scope.cancel()
    assert wanted is None or len({one.text for one in told}) > 3
