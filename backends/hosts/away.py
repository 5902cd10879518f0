"""`AwayReporter`: reports the hosts that are away and that attempts of a run wait for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager

import anyio

from plait.backends.hosts.line import Line, Turn
from plait.backends.protocol import AwayHost


class AwayReporter:
    """Reports each host of `lines` that attempts wait for, once for all attempts that begin to wait at the same time.

    A later report follows if other attempts wait, and when no attempt waits any longer.
    """

    def __init__(self, lines: Mapping[str, Line], report: Callable[[AwayHost], None]) -> None:
        self._lines = lines
        self._report = report
        self._waiting: dict[str, dict[str, None]] = {}
        """The names of the attempts that wait, by host, in the order in which they began to wait."""
        self._reported: dict[str, tuple[str, ...]] = {}
        """The tasks reported last, by host that is waited for."""
        self._changed = anyio.Event()
        self._is_closed = False

    @contextmanager
    def waiting(self, lines: Iterable[Line], turn: Turn) -> Generator[None]:
        """Count the attempt as one that waits for the hosts of `lines`, all of which are away."""
        names = [line.name for line in lines]
        for name in names:
            self._waiting.setdefault(name, {})[turn.name] = None
        self._changed.set()
        try:
            yield
        finally:
            for name in names:
                self._waiting[name].pop(turn.name, None)
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
            for name, turns in self._waiting.items():
                self._report_host(self._lines[name], turns)

    def _report_host(self, line: Line, turns: Iterable[str]) -> None:
        since = line.away_since
        tasks = () if since is None else tuple(name.rpartition("/")[0] for name in turns)
        if set(tasks) == set(self._reported.get(line.name, ())):
            return
        if tasks:
            self._reported[line.name] = tasks
            self._report(AwayHost(line.name, since, line.reason, tasks))
        else:
            del self._reported[line.name]
            self._report(AwayHost(line.name, None, line.reason, ()))
