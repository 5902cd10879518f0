"""`AwayReporter`: reports the hosts that are away and that attempts of a run wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import anyio

from plait.backends.backend_protocol import AwayHost
from plait.backends.hosts.host_connection import AttemptChannel, HostConnection


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
