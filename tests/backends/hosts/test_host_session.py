"""The reports of hosts that attempts wait for."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count

import anyio
import pytest
from anyio.lowlevel import checkpoint

from plait.backends.backend_protocol import Output, RunOnHosts
from plait.backends.hosts.host_connection import AttemptChannel, HostConnection, open_process
from plait.backends.hosts.host_session import HostSession
from plait.errors import BackendError


def attempt(task: str) -> AttemptChannel:
    return AttemptChannel(f"{task}/1", lambda _: None, {"slots": 1})


def away_host(name: str) -> HostConnection:
    """A host that was connected before, and cannot be reached now."""
    connection = HostConnection(name, RunOnHosts("r", "0" * 32, 1), {"slots": 1}, partial(open_process, ("ssh",)))
    connection.was_connected, connection.tries, connection.away_since = True, 1, 1.0
    return connection


async def test_tasks_are_reported_in_the_order_in_which_they_began_to_wait() -> None:
    connection = away_host("m1")
    waiting: list[tuple[str, ...]] = []
    run = RunOnHosts("r", "0" * 32, 1, on_away=lambda _host, _since, _reason, tasks: waiting.append(tasks))
    session = HostSession([connection], 60.0, run, [])
    async with anyio.create_task_group() as group:
        for number in range(1, 12):
            group.start_soon(session.wait_until_back, connection, attempt(f"t.{number}"), lambda _: None)
        await checkpoint()
        await checkpoint()
        group.cancel_scope.cancel()
    await checkpoint()
    assert waiting == [tuple(f"t.{number}" for number in range(1, 12)), ()]


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
    session = HostSession(connections, 0.2, RunOnHosts("r", "0" * 32, 1), [])
    told: list[Output] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_keep_changing, connections)
        with anyio.fail_after(60), pytest.raises(BackendError, match="no host can be used"):
            await session.place(attempt("t"), wanted, told.append)
        if wanted is not None:
            with anyio.fail_after(60):
                assert not await session.wait_until_back(connections[0], attempt("t"), told.append)
        group.cancel_scope.cancel()
    assert wanted is None or len({one.text for one in told}) > 3


class Nearing:
    """A host whose connections end before it has said a word."""

    code: int | None = None
    errors = ""

    def __init__(self) -> None:
        self.opened = 0

    async def open(self) -> Nearing:
        self.opened += 1
        return self

    async def receive(self) -> bytes:
        raise anyio.EndOfStream

    async def send(self, _data: bytes) -> bool:
        return True

    async def end_input(self) -> None:
        pass

    async def close(self) -> None:
        pass


class Growing(HostSession):
    def grow(self, connection: HostConnection) -> None:
        self._add(connection)


async def test_a_host_that_comes_later_is_connected_again_and_again_for_no_reason_of_its_own() -> None:
    run, host = RunOnHosts("r", "0" * 32, 1), Nearing()
    session = Growing([], 60.0, run, [])
    async with anyio.create_task_group() as group:
        group.start_soon(session.run)
        await checkpoint()
        await checkpoint()
        later = HostConnection("m2", run, {"slots": 1}, host.open)
        session.grow(later)
        with anyio.fail_after(60):
            while host.opened < 2:  # noqa: ASYNC110 - no event announces it
                await anyio.sleep(0.01)
        assert (later.refusal, later.reason) == (None, "")
        session.close()
