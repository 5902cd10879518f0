"""The reports of hosts that attempts wait for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import count

import anyio
import pytest
from anyio.lowlevel import checkpoint

from plait.backends.backend_protocol import Output, RunOnHosts
from plait.backends.hosts import host_connection
from plait.backends.hosts.host_connection import (
    AttemptChannel,
    Channel,
    HostConnection,
    ReachableHost,
    open_process,
)
from plait.backends.hosts.host_session import HostSession
from plait.errors import BackendError
from plait.hosts import SSHHosts


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


class Peer:
    """A host whose connections say `first` and wait; without it they end at once."""

    code: int | None = None
    errors = ""

    def __init__(self, first: bytes = b"") -> None:
        self.opened, self.sent, self._first, self._has_spoken = 0, b"", first, False
        self._ends = anyio.Event()

    async def open(self) -> Peer:
        self.opened += 1
        return self

    async def receive(self) -> bytes:
        if not self._first:
            raise anyio.EndOfStream
        if self._has_spoken:
            await self._ends.wait()
            raise anyio.EndOfStream
        self._has_spoken = True
        return self._first

    async def send(self, data: bytes) -> bool:
        self.sent += data
        return True

    async def end_input(self) -> None:
        self._ends.set()

    async def close(self) -> None:
        pass


class Growing(HostSession):
    def grow(self, connection: HostConnection) -> None:
        self._add(connection)


async def test_a_host_that_comes_later_is_connected_again_and_again_for_no_reason_of_its_own() -> None:
    run, host = RunOnHosts("r", "0" * 32, 1), Peer()
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


async def test_the_hosts_are_told_that_the_run_winds_down() -> None:
    run, host = RunOnHosts("r", "0" * 32, 1), Peer(b'{"op":"ready"}\n')
    connection = HostConnection("m1", run, {"slots": 1}, host.open)
    session = HostSession([connection], 60.0, run, [])
    async with anyio.create_task_group() as group:
        group.start_soon(session.run)
        with anyio.fail_after(60):
            while not connection.is_connected:  # noqa: ASYNC110 - no event announces it
                await anyio.sleep(0.01)
            session.wind_down()
            while b"wind_down" not in host.sent:  # noqa: ASYNC110
                await anyio.sleep(0.01)
        session.close()
    assert host.sent.endswith(b'{"op":"wind_down"}\n')
    assert connection.reason == "", "it has just ended"


async def test_a_host_that_does_not_answer_a_probe_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_connection, "_PROBE_S", 0.05)

    async def open_silent(_words: Sequence[str]) -> Channel:
        return await open_process(("sleep", "60"))

    assert (await ReachableHost("m1", 1, open_silent).probe()).problem == "away: no answer within 0.05 s"


@pytest.mark.parametrize("steps", range(1, 7))
async def test_a_cancellation_waits_for_a_process_that_starts(steps: int) -> None:
    channels: list[Channel] = []

    async def start() -> None:
        channels.append(await open_process(("cat",)))

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        for _ in range(steps):
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    [channel] = channels
    await channel.close()
    assert channel.code == 0


async def test_the_last_words_of_a_process_are_shown_whatever_their_bytes() -> None:
    channel = await open_process(("sh", "-c", "printf 'first\\n\\377last\\n' >&2"))
    with pytest.raises(anyio.EndOfStream):
        await channel.receive()
    await channel.close()
    assert channel.errors == "\ufffdlast"


@pytest.mark.parametrize(("patience", "is_possible"), [(0, True), (-1, False), (float("inf"), False)])
def test_the_patience_with_hosts_may_be_none_but_not_endless(patience: float, *, is_possible: bool) -> None:
    with nullcontext() if is_possible else pytest.raises(ValueError, match="patience must be 0 seconds or more"):
        SSHHosts(["m1"], patience=patience)
