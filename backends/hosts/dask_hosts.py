"""`DaskHosts`: hosts that are the workers of a Dask cluster."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import count
from typing import Any

import anyio
import anyio.abc

from plait.backends.backend_protocol import Output, RunOnHosts
from plait.backends.extras import require
from plait.backends.hosts.dask_cluster import (
    Cluster,
    DaskWorker,
    Future,
    check_address,
    connected,
    slots_for,
    slots_of,
)
from plait.backends.hosts.dask_relay import RemoteProcess
from plait.backends.hosts.host_backend import PATIENCE, BackendTraits, HostBackend, HostGroup, hello_frame, host_backend
from plait.backends.hosts.host_connection import (
    LOST,
    AttemptChannel,
    Channel,
    HostConnection,
    HostUnreachable,
)
from plait.backends.hosts.host_frames import Frame
from plait.backends.hosts.host_probe import ReachableHost
from plait.backends.hosts.host_session import HostSession, OnOutput
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue

NEEDS: Mapping[str, float] = {"agents": 1}
"""The resources of an attempt where none are named."""


class DaskHosts(HostGroup):
    """The workers of a Dask cluster, which may come and go: `DaskHosts("tls://sched:8786")`.

    - `address`: the scheduler's, `tls://HOST:PORT`, or `tcp://127.0.0.1:PORT` for a cluster on this machine alone.
      Certificates are those of Dask's own configuration.
    - `patience`: the seconds for which the attempts of a worker that has gone are waited for. Then each attempt counts
      as crashed, and another follows on any worker.

    A worker offers room as resources: `dask worker tls://sched:8786 --name m1 --resources agents=4`. The name tells the
    machine from others, also after a restart; without one the IP address does. Each worker needs the same version of
    plait. Raises ValueError for invalid values, and BackendUnavailable without the package distributed.
    """

    def __init__(self, address: str, *, patience: float = PATIENCE) -> None:
        super().__init__(patience)
        self.address = address
        """The address of the scheduler."""
        self._needs: list[Mapping[str, float]] = []
        """The resources of an attempt of each kind placed here."""
        require("distributed", "dask")
        check_address(address)

    @property
    def names(self) -> Sequence[str]:
        """The address of the scheduler, which belongs to one group of hosts."""
        return [self.address]

    def place(
        self, described: Mapping[str, JsonValue], traits: BackendTraits, needs: Mapping[str, float] | None
    ) -> HostBackend:
        """Return the backend `described` with its attempts on these hosts. Raises ValueError for needs that are no
        positive numbers.
        """
        needs = NEEDS if needs is None else needs
        if not needs or not all(0 < need < float("inf") for need in needs.values()):
            raise ValueError(f"needs must have positive numbers by name, such as {dict(NEEDS)}, not {dict(needs)}")
        _add_kind(self._needs, needs)
        return host_backend(described, self, traits, needs)

    @asynccontextmanager
    async def reachable(
        self, needs: Collection[Mapping[str, float] | None] = ()
    ) -> AsyncGenerator[Sequence[ReachableHost]]:
        """Return the workers that the scheduler has now, to run commands of plait there. Raises HostUnreachable."""
        kinds: list[Mapping[str, float]] = []
        for one in [NEEDS if each is None else each for each in needs] or [NEEDS]:
            _add_kind(kinds, one)
        async with AsyncExitStack() as stack:
            try:
                cluster = await stack.enter_async_context(connected(self.address))
                workers = await cluster.workers()
            except HostUnreachable as error:
                raise HostUnreachable(f"the scheduler {self.address} cannot be used: {error}") from None
            yield [
                ReachableHost(
                    worker.name, slots_for(worker.resources, kinds), partial(_open_relay, cluster, worker.address)
                )
                for worker in workers
            ]

    def _new_session(self, run: RunOnHosts) -> HostSession:
        token = secrets.token_hex(8)

        def new_connection(name: str) -> WorkerConnection:
            connection = WorkerConnection(
                name, token, lambda: hello_frame(run, name, slots_of(connection.resources), connection.kept)
            )
            connection.kept.update(run.adopted.get(name, ()))
            return connection

        return DaskSession(self.address, self._patience, new_connection, self._needs, run)


async def _open_relay(cluster: Cluster, worker: str, words: Sequence[str]) -> Channel:
    return RemoteProcess(await cluster.open(worker, words, secrets.token_hex(8)))


def _add_kind(kinds: list[Mapping[str, float]], needs: Mapping[str, float]) -> None:
    if needs not in kinds:
        kinds.append(needs)


class WorkerConnection(HostConnection):
    """The connection to the host `name`, for as long as a worker has this name.

    `token` tells the relays of this process and run from others.
    """

    def __init__(self, name: str, token: str, hello: Callable[[], Frame]) -> None:
        super().__init__(name, 1, (), hello)
        self.resources: Mapping[str, float] = {}
        self.is_taken_until = 0.0
        """The time, of the event loop, until which other runs are taken to have the resources."""
        self._token = token
        self._cluster: Cluster | None = None
        self._worker: str | None = None
        self._found = anyio.Event()
        self._opening = anyio.CancelScope()
        self._numbers = count()
        self._held: dict[str, Future] = {}
        """The tasks of Dask that hold the resources, by attempt."""
        self._asked: set[str] = set()
        """The attempts that wait for room."""
        self._freed: list[str] = []

    def use_worker(self, cluster: Cluster, worker: DaskWorker) -> None:
        """Use the worker that has the name of the host now."""
        self.resources = worker.resources
        changed = cluster is not self._cluster
        if changed or worker.address != self._worker:
            self._opening.cancel()
        self._cluster, self._worker = cluster, worker.address
        self._found.set()
        if changed and self.is_connected:  # the scheduler no longer counts the resources taken
            self._hold_all()

    def lose_worker(self, reason: str) -> None:
        """Use no worker until `use_worker`. An existing connection goes on."""
        self._worker = None
        if self._found.is_set():
            self._found = anyio.Event()
        self._opening.cancel()
        if not self.is_connected and self.reason != reason:
            self._lost(reason)

    def offers(self, needs: Mapping[str, float]) -> bool:
        """Return whether the worker has the resources `needs`, taken or not."""
        return all(self.resources.get(name, 0) >= need for name, need in needs.items())

    def load(self, needs: Mapping[str, float]) -> float | None:
        """Return the largest part of a needed resource that attempts of this process take; None without room."""
        if not self.is_connected or anyio.current_time() < self.is_taken_until:
            return None
        parts: list[float] = []
        for name, amount in needs.items():
            used = sum(attempt.needs.get(name, 0) for attempt in self.attempts.values())
            if used + amount > self.resources.get(name, 0):
                return None
            parts.append(used / self.resources[name])
        return max(parts)

    def ask(self, attempt: AttemptChannel) -> None:
        """Ask Dask for the resources of an attempt."""
        self._asked.add(attempt.name)
        self._hold(attempt)

    def release(self, attempt: AttemptChannel) -> None:
        """Free the resources of an attempt."""
        self._asked.discard(attempt.name)
        if (future := self._held.pop(attempt.name, None)) is not None:
            future.release()
        self._free(attempt.name)
        super().release(attempt)

    def _hold(self, attempt: AttemptChannel) -> None:
        if self._cluster is not None and self._worker is not None:
            number = next(self._numbers)
            self._held[attempt.name] = self._cluster.hold(
                self._worker, self._token, attempt.name, number, attempt.needs
            )

    def _hold_all(self) -> None:
        for attempt in self.attempts.values():
            self._hold(attempt)

    def _free(self, name: str) -> None:
        if self.is_connected:
            self._freed.append(name)
            self._to_send.set()

    def _accepted(self) -> None:
        super()._accepted()
        self._hold_all()  # the attempts of an earlier connection

    async def _connect(self) -> None:
        await self._found.wait()
        assert self._cluster is not None
        assert self._worker is not None
        comm = None
        try:
            with anyio.CancelScope() as self._opening:
                comm = await self._cluster.open(self._worker, ("host",), self._token)
        except HostUnreachable as error:
            self._lost(str(error))
        if comm is not None:
            await self._talk(RemoteProcess(comm, self._on_held))

    def _lost(self, reason: str) -> None:
        for future in self._held.values():
            future.release()
        self._held.clear()
        self._asked.clear()
        self._freed.clear()
        super()._lost(reason)

    async def _send_waiting(self, channel: Channel) -> bool:
        assert isinstance(channel, RemoteProcess)
        message: dict[str, Any] = {}
        if self._unsent:
            message["data"], self._unsent = bytes(self._unsent), bytearray()
        if self._freed:
            message["free"], self._freed = self._freed, []
        return not message or await channel.write(message)

    def _on_held(self, name: str) -> None:
        """Give an attempt its room. Free the room if no attempt wants it: Dask has begun a task again."""
        attempt = self.attempts.get(name)
        if attempt is None:
            self._free(name)
        elif name in self._asked:
            self._asked.discard(name)
            attempt.put({"op": "slot", "attempt": name})


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
        existing = self.connections.get(name)
        if isinstance(existing, WorkerConnection):
            return existing
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
            except HostUnreachable as error:
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
        last_reason = ""
        gone = [one for one in self._workers() if one.away_since is not None and one.offers(needs)]
        with self._away.waiting(() if self._is_there(needs) else gone, attempt), anyio.move_on_after(self._patience):
            while not self._is_hopeless():
                if self._is_there(needs):
                    return
                reason = self._problem or f"waiting for a worker of {self._address}{_words(needs)}"
                if reason != last_reason:
                    last_reason = reason
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
        workers = [one for one in self._workers() if one.offers(needs)]
        return not self._is_there(needs) and any(not (one.tries or one.is_connected) for one in workers)

    def _is_hopeless(self) -> bool:
        if not self._answered:
            return True
        return bool(self.connections) and all(one.refusal == "version" for one in self._workers())

    def _workers(self) -> Iterator[WorkerConnection]:
        return (one for one in self.connections.values() if isinstance(one, WorkerConnection))


def _words(needs: Mapping[str, float]) -> str:
    """Return the resources as words behind a noun."""
    return f" with --resources {','.join(f'{name}={need:g}' for name, need in needs.items())}" if needs else ""
