"""The hosts of one run: their connections, the choice of a host for each attempt, and which of them are away."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter

import anyio

from plait.backends.backend_protocol import AwayHost, Output
from plait.backends.hosts.host_connection import LOST, AttemptChannel, HostConnection
from plait.backends.hosts.host_frames import Frame
from plait.errors import BackendError, ErrorKind

_END_S = 20.0
"""Seconds for a host to end an attempt: more than an agent has between SIGTERM and SIGKILL."""


class HostSession:
    """The hosts of one run while this process owns the run."""

    def __init__(
        self, connections: Sequence[HostConnection], patience: float, on_away: Callable[[AwayHost], None]
    ) -> None:
        self.connections = {one.name: one for one in connections}
        self._away = AwayReporter(self.connections, on_away)
        self._patience = patience
        self._changed: anyio.Event | None = None
        self._named: set[str] = set()
        for connection in connections:
            connection.on_change = self._wake

    async def run(self) -> None:
        """Keep the hosts connected until `close`."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._away.run)
            for connection in self.connections.values():
                group.start_soon(connection.run)

    def close(self) -> None:
        """Disconnect all hosts."""
        self._away.close()
        for connection in self.connections.values():
            connection.close()

    async def reached(self) -> Sequence[str]:
        """Implement `HostConnections.reached`."""
        with anyio.move_on_after(_END_S):
            while not self._are_asked():
                await self._change()
        return [one.name for one in self.connections.values() if one.is_connected]

    def _are_asked(self) -> bool:
        return all(one.is_connected or one.tries for one in self.connections.values())

    async def more_slots(self, known: int) -> int:
        """Implement `HostConnections.more_slots`."""
        while (slots := self._slots()) <= known:
            await self._change()
        return slots

    def _slots(self) -> int:
        return sum(one.slots for one in self.connections.values())

    def wind_down(self) -> None:
        """Ask the attempts on all hosts to end, because the run is being cancelled."""
        for connection in self.connections.values():
            connection.send({"op": "wind_down"})

    def remove_files(self) -> None:
        """Implement `HostConnections.remove_files`."""
        for connection in self.connections.values():
            connection.send({"op": "remove_files"})

    def connection(self, name: str) -> HostConnection | None:
        """Return the connection to the host `name`; None if the host is none of the hosts."""
        return self.connections.get(name)

    async def place(self, attempt: AttemptChannel, wanted: str | None, on_output: OnOutput) -> HeldSlot:
        """Return a slot on the host `wanted`, or on the least loaded host, for an attempt.

        If the host `wanted` is away for the patience of the hosts, another host is chosen. Raises BackendError
        (transient) if no host can be reached, and (unavailable) if all refuse this version of plait.
        """
        self._name_refused(on_output)
        preferred = None if wanted is None else self.connection(wanted)
        if preferred is not None and not await self.wait_until_back(preferred, attempt, on_output):
            preferred = None
        while True:
            connection = await self._with_room(preferred, attempt, on_output)
            connection.attempts[attempt.name] = attempt
            slot = HeldSlot(self, connection, attempt)
            try:
                connection.ask(attempt)
                if await self._answer(connection, attempt, may_move=preferred is None) is not LOST:
                    return slot
                slot.release()
            except BaseException:
                connection.send({"op": "cancel", "attempt": attempt.name})
                slot.release()
                raise

    async def _answer(self, connection: HostConnection, attempt: AttemptChannel, *, may_move: bool) -> Frame:  # noqa: ARG002 - for other hosts
        """Return the answer of a host that was asked for room; LOST to choose a host again."""
        return await attempt.next()

    def _name_refused(self, on_output: OnOutput) -> None:
        """Report each host that refuses this version of plait, once."""
        for connection in self.connections.values():
            if connection.refusal == "version" and connection.name not in self._named:
                self._named.add(connection.name)
                on_output(Output("notice", f"{connection.name} is not used: {connection.reason}"))

    def follow(self, attempt: AttemptChannel, host: str) -> HeldSlot:
        """Return the slot of an attempt that a dead owner placed on `host`. Raises BackendError (unavailable) if
        the host is no longer one of the hosts.
        """
        connection = self.connection(host)
        if connection is None:
            message = (
                f"the attempt was placed on {host}, which is none of the hosts ({', '.join(self.connections)}); name "
                f"{host} again and resume, or let the task run anew with --retry-failed"
            )
            raise BackendError(ErrorKind.UNAVAILABLE, message)
        connection.attempts[attempt.name] = attempt
        return HeldSlot(self, connection, attempt)

    async def wait_until_back(self, connection: HostConnection, attempt: AttemptChannel, on_output: OnOutput) -> bool:
        """Wait until the host is connected. Return False after the patience, or if the host refuses."""
        while not connection.is_connected and not connection.tries:  # the first connection is still being made
            await self._change()
        if not connection.is_connected and connection.refusal is None:
            with self._away.waiting([connection], attempt), anyio.move_on_after(self._patience):
                await self._wait_connected(connection, on_output)
        return connection.is_connected

    async def _wait_connected(self, connection: HostConnection, on_output: OnOutput) -> None:
        """Wait until the host is connected, or refuses."""
        last_reason = ""
        while not connection.is_connected and connection.refusal is None:
            if connection.reason != last_reason:
                last_reason, since = (
                    connection.reason,
                    "" if connection.away_since is None else f", away since {_time(connection.away_since)}",
                )
                on_output(Output("waiting", f"waiting for {connection.name}{since}: {last_reason}"))
            await self._change()

    def away_error(self, connection: HostConnection) -> BackendError:
        """Return the error of an attempt on a host that refuses this process, or has been away for too long."""
        if connection.refusal is not None:
            kind = ErrorKind.CRASHED if connection.refusal == "fenced" else ErrorKind.UNAVAILABLE
            return BackendError(kind, f"{connection.name}: {connection.reason}")
        away = f"{connection.name} has been away for {self._patience:g} s ({connection.reason})"
        return BackendError(
            ErrorKind.CRASHED, f"{away}; an attempt still under way there is ended when {connection.name} is back"
        )

    async def _with_room(
        self, preferred: HostConnection | None, attempt: AttemptChannel, on_output: OnOutput
    ) -> HostConnection:
        """Wait for a host with room, and return the least loaded one."""
        while True:
            connections = self.connections.values() if preferred is None or not preferred.is_connected else (preferred,)
            loads = [(load, one.name) for one in connections if (load := one.load(attempt.needs)) is not None]
            if loads:
                return self.connections[min(loads, key=itemgetter(0))[1]]
            if any(one.is_connected for one in self.connections.values()):
                await self._change()
            else:
                await self._any_back(attempt, on_output)

    async def _any_back(self, attempt: AttemptChannel, on_output: OnOutput) -> None:
        """Wait until a host is connected. Raise BackendError after the patience, or if no host can be expected: none
        has accepted this process before, and the first attempt to connect to each has failed.
        """
        connections = self.connections.values()
        while any(not one.tries for one in connections) and not any(one.is_connected for one in connections):
            await self._change()
        away = [one for one in connections if one.refusal is None]
        with self._away.waiting(away, attempt), anyio.move_on_after(self._patience):
            while not all(one.refusal or (one.tries and not one.was_connected) for one in connections):
                if any(one.is_connected for one in connections):
                    return
                on_output(Output("waiting", f"waiting for {', '.join(self.connections)}"))
                await self._change()
        why = "; ".join(f"{one.name}: {one.reason}" for one in connections)
        refused = all(one.refusal == "version" for one in connections)
        kind = ErrorKind.UNAVAILABLE if refused else ErrorKind.TRANSIENT
        raise BackendError(kind, f"no host can be used: {why}")

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None


OnOutput = Callable[[Output], None]


def _time(when: float) -> str:
    return f"{datetime.fromtimestamp(when, UTC).astimezone():%H:%M:%S}"


class HeldSlot:
    """A slot of a host, held by an attempt until `leave`."""

    def __init__(self, session: HostSession, connection: HostConnection, attempt: AttemptChannel) -> None:
        self.session = session
        self.connection = connection
        self.attempt = attempt

    def release(self) -> None:
        """Free the slot. A host that is away ends the attempt when connected again."""
        self.connection.release(self.attempt)

    async def end(self) -> bool:
        """End the attempt on the host. Return whether the host has confirmed the end. Not cancelled from outside."""
        with anyio.move_on_after(_END_S, shield=True):
            self.connection.send({"op": "cancel", "attempt": self.attempt.name})
            while self.connection.is_connected:
                if (await self.attempt.next())["op"] in {"ended", "reply", "error", "asked"}:
                    return True
        return False


class AwayReporter:
    """Reports each host that attempts wait for, once for all attempts that begin to wait at the same time.

    A later report follows if other attempts wait, and when no attempt waits any longer.
    """

    def __init__(self, connections: Mapping[str, HostConnection], report: Callable[[AwayHost], None]) -> None:
        self._connections = connections
        self._report = report
        self._waiting: dict[str, dict[str, None]] = {}
        """The names of the attempts that wait, by host, in the order in which they began to wait."""
        self._reported: dict[str, tuple[str, ...]] = {}
        """The tasks reported last, by host that is waited for."""
        self._changed = anyio.Event()
        self._is_closed = False

    @contextmanager
    def waiting(self, connections: Iterable[HostConnection], attempt: AttemptChannel) -> Generator[None]:
        """Count the attempt as one that waits for the hosts of `connections`, all of which are away."""
        names = [connection.name for connection in connections]
        for name in names:
            self._waiting.setdefault(name, {})[attempt.name] = None
        self._changed.set()
        try:
            yield
        finally:
            for name in names:
                self._waiting[name].pop(attempt.name, None)
            self._changed.set()

    def close(self) -> None:
        """End `run`."""
        self._is_closed = True
        self._changed.set()

    async def run(self) -> None:
        """Report changes until `close`."""
        while True:
            await self._changed.wait()
            if self._is_closed:
                return
            self._changed = anyio.Event()
            for name, attempts in self._waiting.items():
                self._report_host(self._connections[name], attempts)

    def _report_host(self, connection: HostConnection, attempts: Iterable[str]) -> None:
        since = connection.away_since
        tasks = () if since is None else tuple(name.rpartition("/")[0] for name in attempts)
        if set(tasks) == set(self._reported.get(connection.name, ())):
            return
        if tasks:
            self._reported[connection.name] = tasks
            self._report(AwayHost(connection.name, since, connection.reason, tasks))
        else:
            del self._reported[connection.name]
            self._report(AwayHost(connection.name, None, connection.reason, ()))
