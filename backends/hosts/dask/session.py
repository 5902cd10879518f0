"""`DaskSession`: the workers of a Dask cluster while this process owns a run, found by asking the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import anyio
import anyio.abc

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.hosts.dask.address import slots_for
from plait.backends.hosts.dask.cluster import Cluster, ClusterError, DaskWorker, connected
from plait.backends.hosts.dask.line import DaskLine
from plait.backends.hosts.frames import Frame
from plait.backends.hosts.line import LOST, Line, Turn
from plait.backends.hosts.session import HostSession, OnOutput
from plait.backends.protocol import Output, RunOnHosts

_POLL_S = 1.0
"""Seconds between two looks at the workers of the scheduler."""
_ASK_S = 1.0
"""Seconds for a worker to have room, before another worker is asked."""
_RETRY_S = 1.0
"""Seconds between two attempts to connect to the scheduler."""


class DaskSession(HostSession):
    """The hosts of one run, for attempts of the kinds `needs`. `make_line` makes the line to a host."""

    def __init__(
        self,
        address: str,
        patience: float,
        make_line: Callable[[str], DaskLine],
        needs: Sequence[Mapping[str, float]],
        run: RunOnHosts,
    ) -> None:
        super().__init__((), patience, run.on_away)
        self._address = address
        self._make_line = make_line
        self._needs = needs
        self._closing = anyio.Event()
        self._group: anyio.abc.TaskGroup | None = None
        self._asked = False
        """Whether the scheduler has answered, or one attempt to connect to it has failed."""
        self._answered = False
        """Whether the scheduler has answered."""
        self._problem = ""
        """Why the scheduler cannot be used."""
        for name in run.adopted:
            self.line(name)

    async def run(self) -> None:
        """Keep the hosts connected until `close`."""
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._away.run)
            for line in self.lines.values():
                group.start_soon(line.run)
            await self._follow_scheduler()

    def close(self) -> None:
        """Disconnect all hosts."""
        self._closing.set()
        super().close()

    def line(self, name: str) -> DaskLine:
        """Return the line to the host `name`, which may have no worker yet."""
        found = self.lines.get(name)
        if isinstance(found, DaskLine):
            return found
        line = self.lines[name] = self._make_line(name)
        line.on_change = self._wake
        if self._asked:
            line.miss(self._missing(name))
        if self._group is not None:
            self._group.start_soon(line.run)
        return line

    async def unreached(self) -> Sequence[str]:
        """Implement `HostConnections.unreached`."""
        while not self._asked:
            await self._change()
        found = await super().unreached()
        return found if self._answered else [*found, self._address]

    def _slots(self) -> int:
        return sum(slots_for(line.resources, self._needs) for line in self._workers())

    async def _follow_scheduler(self) -> None:
        while not self._closing.is_set():
            try:
                async with connected(self._address) as cluster:
                    while not self._closing.is_set():
                        workers = await cluster.workers()
                        if self._closing.is_set():  # nothing would close the line to a new worker
                            break
                        self._see(cluster, workers)
                        with anyio.move_on_after(_POLL_S):
                            await self._closing.wait()
            except ClusterError as error:
                self._problem = f"the scheduler {self._address} cannot be used: {error}"
                self._miss_all(())
            with anyio.move_on_after(_RETRY_S):
                await self._closing.wait()

    def _see(self, cluster: Cluster, workers: Sequence[DaskWorker]) -> None:
        """Take over the workers that the scheduler has now. The first of several with one name counts."""
        self._problem, self._answered = "", True
        for worker in reversed(workers):
            self.line(worker.name).meet(cluster, worker)
        self._miss_all({worker.name for worker in workers})

    def _miss_all(self, found: Collection[str]) -> None:
        self._asked = True
        for line in self._workers():
            if line.name not in found:
                line.miss(self._missing(line.name))
        self._wake()

    def _missing(self, name: str) -> str:
        return self._problem or f"the scheduler {self._address} has no worker of this name: {name}"

    async def _with_room(self, preferred: Line | None, turn: Turn, on_output: OnOutput) -> Line:
        await self._wait_for(turn.needs, turn, on_output)
        return await super()._with_room(preferred, turn, on_output)

    async def _any_back(self, turn: Turn, on_output: OnOutput) -> None:
        await self._wait_for({}, turn, on_output)

    async def _wait_for(self, needs: Mapping[str, float], turn: Turn, on_output: OnOutput) -> None:
        """Wait until a host with the resources `needs` is connected, taken or not.

        Raise BackendError after the patience, which begins once each such worker has been asked, or if no host can be
        expected: the scheduler was never reached, or all workers refuse this version of plait.
        """
        while not self._asked or self._is_opening(needs):
            await self._change()
        told = ""
        gone = [line for line in self._workers() if line.away_since is not None and line.offers(needs)]
        with self._away.waiting(() if self._is_there(needs) else gone, turn), anyio.move_on_after(self._patience):
            while not self._is_hopeless():
                if self._is_there(needs):
                    return
                reason = self._problem or f"waiting for a worker of {self._address}{_words(needs)}"
                if reason != told:
                    told = reason
                    on_output(Output("waiting", reason))
                await self._change()
        refusals = {line.refusal for line in self._workers()}
        kind = ErrorKind.UNAVAILABLE if refusals == {"version"} else ErrorKind.TRANSIENT
        why = "; ".join(f"{line.name}: {line.reason}" for line in self._workers() if line.reason)
        no_worker = f"no worker of {self._address} can be used{_words(needs)}"
        raise BackendError(kind, self._problem or (f"{no_worker}: {why}" if why else no_worker))

    async def _answer(self, line: Line, turn: Turn, *, may_move: bool) -> Frame:
        """Return the answer of a worker. LOST if its resources stay taken, by other runs, and another may have room.

        A worker found taken is asked again after all others: to this run, which counts its own attempts alone, the
        worker may look the least loaded one.
        """
        while True:
            with anyio.move_on_after(_ASK_S):
                return await turn.next()
            others = (one for one in self._workers() if one is not line)
            if may_move and isinstance(line, DaskLine) and any(one.load(turn.needs) is not None for one in others):
                line.is_taken_until = anyio.current_time() + _ASK_S * len(self.lines)
                return LOST

    def _is_there(self, needs: Mapping[str, float]) -> bool:
        return any(line.is_connected and line.offers(needs) for line in self._workers())

    def _is_opening(self, needs: Mapping[str, float]) -> bool:
        """Return whether a host with the resources `needs` has not answered yet, and none is there."""
        asked = [line for line in self._workers() if line.offers(needs)]
        return not self._is_there(needs) and any(not (line.tries or line.is_connected) for line in asked)

    def _is_hopeless(self) -> bool:
        if not self._answered:
            return True
        return bool(self.lines) and all(line.refusal == "version" for line in self._workers())

    def _workers(self) -> Iterator[DaskLine]:
        return (line for line in self.lines.values() if isinstance(line, DaskLine))


def _words(needs: Mapping[str, float]) -> str:
    """Return the resources as words behind a noun."""
    return f" with --resources {','.join(f'{name}={need:g}' for name, need in needs.items())}" if needs else ""
