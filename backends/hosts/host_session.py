"""The hosts of one run: their connections, the choice of a host for each attempt, and which of them are away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from operator import itemgetter

import anyio
import anyio.abc

from plait.backends.backend_protocol import Output, RunOnHosts
from plait.backends.hosts.host_connection import END_S, LOST, AttemptChannel, Frame, HostConnection
from plait.errors import BackendError, ErrorKind

OnOutput = Callable[[Output], None]
_ASK_S = 1.0
"""Seconds for a host to have room, before another host is asked."""
ROUNDING = 1e-9
"""Part of an attempt by which a sum or a division may be wrong, as 0.3 / 0.1 is."""


def slots_for(resources: Mapping[str, float], needs: Iterable[Mapping[str, float]]) -> int:
    """Return the number of attempts for which a host has the `resources`. Attempts of several `needs` are counted as if
    each kind had the host for itself: some may have to wait for room, and no room stays unused.
    """
    return sum(int(min(resources.get(name, 0) / need for name, need in one.items()) + ROUNDING) for one in needs)


class HostSession:
    """The hosts of one run while this process owns the run, for attempts of the kinds `needs`."""

    def __init__(
        self,
        connections: Iterable[HostConnection],
        patience: float,
        run: RunOnHosts,
        needs: Sequence[Mapping[str, float]],
    ) -> None:
        self.connections: dict[str, HostConnection] = {}
        self.problem = ""
        """Why no host can be reached, if there is one reason for all."""
        self._patience = patience
        self._needs = needs
        self._changed: anyio.Event | None = None
        self._group: anyio.abc.TaskGroup | None = None
        self._refusals: set[str] = set()
        """The hosts whose version of plait was reported as another one."""
        self._run = run
        self._waiting: dict[str, dict[str, None]] = {}
        """The names of the attempts that wait, by host that is away, in the order in which they began to wait."""
        self._reported: dict[str, tuple[str, ...]] = {}
        """The tasks reported last, by host that is waited for."""
        self._is_report_due = False
        self._closed = anyio.Event()
        for connection in connections:
            self._add(connection)

    def _add(self, connection: HostConnection) -> None:
        self.connections[connection.name] = connection
        connection.on_change = self._wake
        if self._group is not None:
            self._group.start_soon(connection.run)

    async def run(self) -> None:
        """Keep the hosts connected until `close`."""
        async with anyio.create_task_group() as self._group:
            for connection in self.connections.values():
                self._group.start_soon(connection.run)
            await self._closed.wait()

    def close(self) -> None:
        """Disconnect all hosts."""
        self._closed.set()
        for connection in self.connections.values():
            connection.close()

    async def reached(self) -> list[str]:
        """Implement `HostConnections.reached`."""
        with anyio.move_on_after(END_S):
            while not self._has_asked():
                await self._change()
        return [one.name for one in self.connections.values() if one.is_connected]

    def _has_asked(self) -> bool:
        return all(one.is_connected or one.tries for one in self.connections.values())

    async def more_slots(self, known: int) -> int:
        """Implement `HostConnections.more_slots`."""
        while (slots := self._slots()) <= known:
            await self._change()
        return slots

    def _slots(self) -> int:
        return sum(slots_for(one.resources, self._needs) for one in self.connections.values())

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

    async def place(self, attempt: AttemptChannel, wanted: str | None, on_output: OnOutput) -> None:
        """Give the attempt room on the host `wanted`, or on the least loaded host.

        If the host `wanted` is away for the patience of the hosts, another host is chosen. Raises BackendError
        (transient) if no host can be reached, and (unavailable) if all refuse this version of plait.
        """
        for connection in self.connections.values():
            if connection.refusal == "version" and connection.name not in self._refusals:
                self._refusals.add(connection.name)
                on_output(Output("notice", f"{connection.name} is not used: {connection.reason}"))
        preferred = None if wanted is None else self.connection(wanted)
        if preferred is not None and not await self.wait_until_back(preferred, attempt, on_output):
            preferred = None
        while True:
            connection = attempt.connection = await self._with_room(preferred, attempt, on_output)
            connection.attempts[attempt.name] = attempt
            try:
                connection.ask(attempt)
                if await self._answer(attempt, may_move=preferred is None) is not LOST:
                    return
                await attempt.end()  # before the host is asked again, with the same name
                attempt.release()
            except BaseException:
                attempt.cancel()
                attempt.release()
                raise

    async def _answer(self, attempt: AttemptChannel, *, may_move: bool) -> Frame:
        """Return the answer of a host that was asked for room; LOST to choose a host again, because other runs have
        taken the room, and another host may have some.

        A busy host is asked again after all others: to this run, which counts its own attempts alone, the host may look
        the least loaded one.
        """
        connection = attempt.connection
        while True:
            with anyio.move_on_after(_ASK_S):
                while (frame := await attempt.next())["op"] not in {"slot", "lost"}:
                    pass  # of an attempt that was ended here late
                return frame
            others = (one for one in self.connections.values() if one is not connection)
            if may_move and any(one.load(attempt.needs) is not None for one in others):
                connection.busy_until = anyio.current_time() + _ASK_S * len(self.connections)
                return LOST

    def follow(self, attempt: AttemptChannel, host: str) -> None:
        """Connect an attempt that a dead owner placed on `host`. Raises BackendError (unavailable) if the host is no
        longer one of the hosts.
        """
        connection = self.connection(host)
        if connection is None:
            message = (
                f"the attempt was placed on {host}, which is none of the hosts ({', '.join(self.connections)}); name "
                f"{host} again and resume, or run the task again with --retry-failed"
            )
            raise BackendError(ErrorKind.UNAVAILABLE, message)
        attempt.connection = connection
        connection.attempts[attempt.name] = attempt

    async def wait_until_back(self, connection: HostConnection, attempt: AttemptChannel, on_output: OnOutput) -> bool:
        """Wait until the host is connected. Return False after the patience, or if the host refuses."""
        while not connection.is_connected and not connection.tries:  # the first connection is still being made
            await self._change()
        if connection.is_connected or connection.refusal is not None:
            return connection.is_connected
        reason = ""
        with self._away([connection], attempt), anyio.move_on_after(self._patience):
            while not connection.is_connected and connection.refusal is None:
                if connection.reason != reason:
                    reason, away = connection.reason, ""
                    if (since := connection.away_since) is not None:
                        away = f", away since {datetime.fromtimestamp(since, UTC).astimezone():%H:%M:%S}"
                    on_output(Output("waiting", f"waiting for {connection.name}{away}: {reason}"))
                await self._change()
        return connection.is_connected

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
            if self._is_there(attempt.needs):
                await self._change()
            else:
                await self._wait_for_any(attempt, on_output)

    async def _wait_for_any(self, attempt: AttemptChannel, on_output: OnOutput) -> None:
        """Wait until a host with the resources of the attempt is connected, taken or not.

        Raise BackendError after the patience, which begins once each such host has been asked, or if no host can be
        expected.
        """
        while self._is_opening(attempt.needs):
            await self._change()
        reason = ""
        away = [one for one in self._offering(attempt.needs) if one.refusal is None]
        with self._away(away, attempt), anyio.move_on_after(self._patience):
            while not self._is_hopeless():
                if self._is_there(attempt.needs):
                    return
                if (now := self.problem or f"waiting for {self._wanted(attempt.needs)}") != reason:
                    reason = now
                    on_output(Output("waiting", reason))
                await self._change()
        connections = self.connections.values()
        kind = ErrorKind.UNAVAILABLE if {one.refusal for one in connections} == {"version"} else ErrorKind.TRANSIENT
        reasons = "; ".join(f"{one.name}: {one.reason}" for one in connections if one.reason)
        unusable = self._unusable(attempt.needs)
        raise BackendError(kind, self.problem or (f"{unusable}: {reasons}" if reasons else unusable))

    def _offering(self, needs: Mapping[str, float]) -> list[HostConnection]:
        return [one for one in self.connections.values() if one.offers(needs)]

    def _is_there(self, needs: Mapping[str, float]) -> bool:
        return any(one.is_connected for one in self._offering(needs))

    def _is_opening(self, needs: Mapping[str, float]) -> bool:
        """Return whether a host with the resources `needs` has not answered yet, and none is there."""
        return not self._is_there(needs) and any(not one.tries for one in self._offering(needs))

    def _is_hopeless(self) -> bool:
        """Return whether no host can be expected: none has accepted this process before, and all have been asked."""
        return all(one.refusal or (one.tries and not one.was_connected) for one in self.connections.values())

    def _wanted(self, needs: Mapping[str, float]) -> str:  # noqa: ARG002 - for other hosts
        """Return the words for what an attempt with `needs` waits for."""
        return ", ".join(self.connections)

    def _unusable(self, needs: Mapping[str, float]) -> str:  # noqa: ARG002 - for other hosts
        """Return the error of an attempt with `needs` that waited for too long."""
        return "no host can be used"

    async def _change(self) -> None:
        if self._changed is None:
            self._changed = anyio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    @contextmanager
    def _away(self, connections: Collection[HostConnection], attempt: AttemptChannel) -> Generator[None]:
        """Count the attempt as one that waits for the hosts of `connections`, all of which are away.

        Each host is reported once for all attempts that begin to wait at the same time; again if other attempts wait,
        and when none waits any longer.
        """
        names = [connection.name for connection in connections]
        for name in names:
            self._waiting.setdefault(name, {})[attempt.name] = None
        self._report_soon()
        try:
            yield
        finally:
            for name in names:
                self._waiting[name].pop(attempt.name, None)
            self._report_soon()

    def _report_soon(self) -> None:
        if not self._is_report_due:
            self._is_report_due = True
            asyncio.get_running_loop().call_soon(self._report)

    def _report(self) -> None:
        self._is_report_due = False
        if self._closed.is_set():
            return
        for name, attempts in self._waiting.items():
            connection = self.connections[name]
            since = connection.away_since
            tasks = () if since is None else tuple(attempt.rpartition("/")[0] for attempt in attempts)
            if set(tasks) != set(self._reported.get(name, ())):
                self._reported[name] = tasks
                self._run.on_away(name, since if tasks else None, connection.reason, tasks)
