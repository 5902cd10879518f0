"""`DaskSession`: the workers of a Dask cluster while this process owns a run, found by asking the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import anyio
import anyio.abc

from plait.backends.backend_protocol import Output, RunOnHosts
from plait.backends.hosts.dask_address import slots_for
from plait.backends.hosts.dask_cluster import Cluster, ClusterError, DaskWorker, connected
from plait.backends.hosts.dask_connection import WorkerConnection
from plait.backends.hosts.host_connection import LOST, AttemptChannel, HostConnection
from plait.backends.hosts.host_frames import Frame
from plait.backends.hosts.host_session import HostSession, OnOutput
from plait.errors import BackendError, ErrorKind

_POLL_S = 1.0
"""Seconds between two requests for the workers of the scheduler."""
_ASK_S = 1.0
"""Seconds for a worker to have room, before another worker is asked."""
_RETRY_S = 1.0
"""Seconds between two attempts to connect to the scheduler."""


class DaskSession(HostSession):
    """The hosts of one run, for attempts of the kinds `needs`. `new_connection` makes the connection to a host."""

    def __init__(
        self,
        address: str,
        patience: float,
        new_connection: Callable[[str], WorkerConnection],
        needs: Sequence[Mapping[str, float]],
        run: RunOnHosts,
    ) -> None:
        super().__init__((), patience, run.on_away)
        self._address = address
        self._new_connection = new_connection
        self._needs = needs
        self._following = anyio.CancelScope()
        self._group: anyio.abc.TaskGroup | None = None
        self._asked = False
        """Whether the scheduler has answered, or one attempt to connect to it has failed."""
        self._answered = False
        """Whether the scheduler has answered."""
        self._problem = ""
        """Why the scheduler cannot be used."""
        for name in run.adopted:
            self.connection(name)

    async def run(self) -> None:
        """Keep the hosts connected until `close`."""
        async with anyio.create_task_group() as group:
            self._group = group
            group.start_soon(self._away.run)
            for connection in self.connections.values():
                group.start_soon(connection.run)
            with self._following:
                await self._follow_scheduler()

    def close(self) -> None:
        """Disconnect all hosts."""
        self._following.cancel()
        super().close()

    def connection(self, name: str) -> WorkerConnection:
        """Return the connection to the host `name`, which may have no worker yet."""
        found = self.connections.get(name)
        if isinstance(found, WorkerConnection):
            return found
        connection = self.connections[name] = self._new_connection(name)
        connection.on_change = self._wake
        if self._asked:
            connection.lose_worker(self._missing(name))
        if self._group is not None:
            self._group.start_soon(connection.run)
        return connection

    def _are_asked(self) -> bool:
        return self._asked and super()._are_asked()

    def _slots(self) -> int:
        return sum(slots_for(one.resources, self._needs) for one in self._workers())

    async def _follow_scheduler(self) -> None:
        while True:
            try:
                async with connected(self._address) as cluster:
                    while True:
                        self._update_workers(cluster, await cluster.workers())
                        await anyio.sleep(_POLL_S)
            except ClusterError as error:
                self._problem = f"the scheduler {self._address} cannot be used: {error}"
                self._lose_others(())
            await anyio.sleep(_RETRY_S)

    def _update_workers(self, cluster: Cluster, workers: Sequence[DaskWorker]) -> None:
        """Take over the workers that the scheduler has now. The first of several with one name counts."""
        self._problem, self._answered = "", True
        for worker in reversed(workers):
            self.connection(worker.name).use_worker(cluster, worker)
        self._lose_others({worker.name for worker in workers})

    def _lose_others(self, found: Collection[str]) -> None:
        self._asked = True
        for connection in self._workers():
            if connection.name not in found:
                connection.lose_worker(self._missing(connection.name))
        self._wake()

    def _missing(self, name: str) -> str:
        return self._problem or f"the scheduler {self._address} has no worker of this name: {name}"

    async def _with_room(
        self, preferred: HostConnection | None, attempt: AttemptChannel, on_output: OnOutput
    ) -> HostConnection:
        await self._wait_for(attempt.needs, attempt, on_output)
        return await super()._with_room(preferred, attempt, on_output)

    async def _any_back(self, attempt: AttemptChannel, on_output: OnOutput) -> None:
        await self._wait_for({}, attempt, on_output)

    async def _wait_for(self, needs: Mapping[str, float], attempt: AttemptChannel, on_output: OnOutput) -> None:
        """Wait until a host with the resources `needs` is connected, taken or not.

        Raise BackendError after the patience, which begins once each such worker has been asked, or if no host can be
        expected: the scheduler was never reached, or all workers refuse this version of plait.
        """
        while not self._asked or self._is_opening(needs):
            await self._change()
        told = ""
        gone = [one for one in self._workers() if one.away_since is not None and one.offers(needs)]
        with self._away.waiting(() if self._is_there(needs) else gone, attempt), anyio.move_on_after(self._patience):
            while not self._is_hopeless():
                if self._is_there(needs):
                    return
                reason = self._problem or f"waiting for a worker of {self._address}{_words(needs)}"
                if reason != told:
                    told = reason
                    on_output(Output("waiting", reason))
                await self._change()
        refusals = {one.refusal for one in self._workers()}
        kind = ErrorKind.UNAVAILABLE if refusals == {"version"} else ErrorKind.TRANSIENT
        why = "; ".join(f"{one.name}: {one.reason}" for one in self._workers() if one.reason)
        no_worker = f"no worker of {self._address} can be used{_words(needs)}"
        raise BackendError(kind, self._problem or (f"{no_worker}: {why}" if why else no_worker))

    async def _answer(self, connection: HostConnection, attempt: AttemptChannel, *, may_move: bool) -> Frame:
        """Return the answer of a worker. LOST if its resources stay taken, by other runs, and another may have room.

        A worker found taken is asked again after all others: to this run, which counts its own attempts alone, the
        worker may look the least loaded one.
        """
        while True:
            with anyio.move_on_after(_ASK_S):
                return await attempt.next()
            others = (one for one in self._workers() if one is not connection)
            if (
                may_move
                and isinstance(connection, WorkerConnection)
                and any(one.load(attempt.needs) is not None for one in others)
            ):
                connection.is_taken_until = anyio.current_time() + _ASK_S * len(self.connections)
                return LOST

    def _is_there(self, needs: Mapping[str, float]) -> bool:
        return any(one.is_connected and one.offers(needs) for one in self._workers())

    def _is_opening(self, needs: Mapping[str, float]) -> bool:
        """Return whether a host with the resources `needs` has not answered yet, and none is there."""
        asked = [one for one in self._workers() if one.offers(needs)]
        return not self._is_there(needs) and any(not (one.tries or one.is_connected) for one in asked)

    def _is_hopeless(self) -> bool:
        if not self._answered:
            return True
        return bool(self.connections) and all(one.refusal == "version" for one in self._workers())

    def _workers(self) -> Iterator[WorkerConnection]:
        return (one for one in self.connections.values() if isinstance(one, WorkerConnection))


def _words(needs: Mapping[str, float]) -> str:
    """Return the resources as words behind a noun."""
    return f" with --resources {','.join(f'{name}={need:g}' for name, need in needs.items())}" if needs else ""
