"""`DaskHosts`: hosts that are the workers of a Dask cluster; its addresses, and the connection to its scheduler."""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator, Collection, Generator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib import import_module
from ipaddress import ip_address
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import anyio

from plait.backends.backend_protocol import RunOnHosts
from plait.backends.extras import require
from plait.backends.hosts.host_backend import PATIENCE, HostGroup
from plait.backends.hosts.host_connection import (
    Channel,
    HostConnection,
    HostUnreachable,
    ReachableHost,
    open_process,
)
from plait.backends.hosts.host_session import HostSession, slots_for
from plait.json_form import value
from plait.safe_text import one_line

NEEDS: Mapping[str, float] = {"agents": 1}
"""The resources of an attempt where none are named."""


class DaskHosts(HostGroup):
    """The workers of a Dask cluster, which may come and go: `DaskHosts("tls://sched:8786")`.

    - `address`: the scheduler's, `tls://HOST:PORT`, or `tcp://127.0.0.1:PORT` for a cluster on this machine alone.
      Certificates are those of Dask's own configuration.
    - `patience`: the seconds for which the attempts of a worker that has gone are waited for. Then each attempt counts
      as crashed, and another follows on any worker.

    A worker offers room as resources: `dask worker tls://sched:8786 --name m1 --resources agents=4`, which the attempts
    of all runs share, and tasks of Dask itself do not. The name tells the machine from others, also after a restart;
    without one the IP address does. Each worker needs the same version of plait. Raises ValueError for invalid values,
    and BackendUnavailable without the package distributed.
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

    def checked(self, needs: Mapping[str, float] | None) -> Mapping[str, float]:
        """Return the resources of an attempt. Raises ValueError for needs that are no positive numbers."""
        needs = NEEDS if needs is None else needs
        if not needs or not all(0 < need < float("inf") for need in needs.values()):
            raise ValueError(f"needs must have positive numbers by name, such as {dict(NEEDS)}, not {dict(needs)}")
        if needs not in self._needs:
            self._needs.append(needs)
        return needs

    @asynccontextmanager
    async def reachable(
        self, needs: Collection[Mapping[str, float] | None] = ()
    ) -> AsyncGenerator[Sequence[ReachableHost]]:
        """Return the workers that the scheduler has now, to run commands of plait there. Raises HostUnreachable."""
        kinds: list[Mapping[str, float]] = []
        for one in needs or [None]:
            kind = NEEDS if one is None else one
            if kind not in kinds:
                kinds.append(kind)

        async with AsyncExitStack() as stack:
            try:
                cluster = await stack.enter_async_context(connected(self.address))
                workers = await cluster.workers()
            except HostUnreachable as error:
                raise HostUnreachable(f"the scheduler {self.address} cannot be used: {error}") from None
            yield [
                ReachableHost(worker.name, slots_for(worker.resources, kinds), partial(cluster.open, worker.address))
                for worker in workers
            ]

    def _new_session(self, run: RunOnHosts) -> HostSession:
        return DaskSession(self.address, self._patience, run, self._needs)


class WorkerConnection(HostConnection):
    """The connection to the host `name`, for as long as a worker has this name."""

    def __init__(self, name: str, run: RunOnHosts) -> None:
        super().__init__(name, run, {}, self._open, pool=name)
        self._cluster: Cluster | None = None
        self._worker: str | None = None
        self._has_worker = anyio.Event()
        self._opening = anyio.CancelScope()

    def use_worker(self, cluster: Cluster, worker: DaskWorker) -> None:
        """Use the worker that has the name of the host now."""
        self.resources = worker.resources
        if cluster is not self._cluster or worker.address != self._worker:
            self._opening.cancel()
        self._cluster, self._worker = cluster, worker.address
        self._has_worker.set()

    def lose_worker(self, reason: str) -> None:
        """Use no worker until `use_worker`. An existing connection goes on."""
        self._worker = None
        if self._has_worker.is_set():
            self._has_worker = anyio.Event()
        self._opening.cancel()
        if not self.is_connected and self.reason != reason:
            self._lost(reason)

    async def _open(self) -> Channel | None:
        await self._has_worker.wait()
        assert self._cluster is not None
        assert self._worker is not None
        with anyio.CancelScope() as self._opening:
            return await self._cluster.open(self._worker, ("host",))
        return None  # the worker has another address now


_POLL_S = 1.0
"""Seconds between two requests for the workers of the scheduler."""
_RETRY_S = 1.0
"""Seconds between two attempts to connect to the scheduler."""


class DaskSession(HostSession):
    """The workers of one run."""

    def __init__(self, address: str, patience: float, run: RunOnHosts, needs: Sequence[Mapping[str, float]]) -> None:
        super().__init__((), patience, run, needs)
        self._address = address
        self._workers: dict[str, WorkerConnection] = {}
        self._following = anyio.CancelScope()
        self._has_answered = False
        """Whether the scheduler has answered."""
        for name in run.adopted:
            self.connection(name)

    async def run(self) -> None:
        """Keep the hosts connected until `close`."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._follow_scheduler)
            await super().run()

    def close(self) -> None:
        """Disconnect all hosts."""
        self._following.cancel()
        super().close()

    def connection(self, name: str) -> WorkerConnection:
        """Return the connection to the host `name`, which may have no worker yet."""
        if name not in self._workers:
            connection = self._workers[name] = WorkerConnection(name, self._run)
            self._add(connection)
            if self._is_scheduler_tried:
                connection.lose_worker(self._missing(name))
        return self._workers[name]

    @property
    def _is_scheduler_tried(self) -> bool:
        """Whether the scheduler has answered, or one attempt to connect to it has failed."""
        return self._has_answered or bool(self.problem)

    def _has_asked(self) -> bool:
        return self._is_scheduler_tried and super()._has_asked()

    async def _follow_scheduler(self) -> None:
        with self._following:
            while True:
                try:
                    async with connected(self._address) as cluster:
                        while True:
                            workers = await cluster.workers()
                            self.problem = ""
                            for worker in reversed(workers):  # the first of several with one name counts
                                self.connection(worker.name).use_worker(cluster, worker)
                            self._has_answered = True
                            self._lose_others({worker.name for worker in workers})
                            await anyio.sleep(_POLL_S)
                except HostUnreachable as error:
                    self.problem = f"the scheduler {self._address} cannot be used: {error}"
                    self._lose_others(())
                await anyio.sleep(_RETRY_S)

    def _lose_others(self, names: Collection[str]) -> None:
        for connection in self._workers.values():
            if connection.name not in names:
                connection.lose_worker(self._missing(connection.name))
        self._wake()

    def _missing(self, name: str) -> str:
        return self.problem or f"the scheduler {self._address} has no worker of this name: {name}"

    def _is_opening(self, needs: Mapping[str, float]) -> bool:
        return not self._is_scheduler_tried or super()._is_opening(needs)

    def _is_hopeless(self) -> bool:
        """Return whether the scheduler was never reached, or all workers refuse this version of plait."""
        workers = self._workers.values()
        return not self._has_answered or (bool(workers) and all(one.refusal == "version" for one in workers))

    def _wanted(self, needs: Mapping[str, float]) -> str:
        return f"a worker of {self._address} with {_option(needs)}"

    def _unusable(self, needs: Mapping[str, float]) -> str:
        return f"no worker of {self._address} can be used with {_option(needs)}"


def _option(needs: Mapping[str, float]) -> str:
    """Return the option that gives a worker the resources."""
    return f"--resources {','.join(f'{name}={need:g}' for name, need in needs.items())}"


# The connection of this process to a Dask scheduler; its addresses and its workers.

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")


def check_address(address: str) -> None:
    """Raise ValueError if `address` is no address of a scheduler, or needs TLS."""
    parts = urlsplit(address)
    if parts.scheme not in {"tcp", "tls"} or not parts.hostname or parts.port is None or parts.path:
        raise ValueError(
            f"the address of a Dask scheduler is tls://HOST:PORT, or tcp://127.0.0.1:PORT on this machine, not "
            f"{address!r}"
        )
    if is_open(address):
        raise ValueError(
            f"{address} has neither encryption nor authentication: whoever reaches a Dask scheduler executes code on "
            "every worker; use tls://, or a tunnel to tcp://127.0.0.1"
        )


def is_open(address: str) -> bool:
    """Return whether others than this machine reach the address without TLS."""
    parts = urlsplit(address)
    return parts.scheme == "tcp" and not _is_loopback(parts.hostname or "")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def host_name(address: str, name: object) -> str:
    """Return the name of the host with a worker: the name given to the worker, else the IP address of the machine.

    A character that session ids and names of folders cannot have is replaced by a dash.
    """
    label = str(name)
    return _FOREIGN.sub("-", urlsplit(address).hostname or "" if label == address else label)


CONNECT_S = 5.0
"""Seconds for the scheduler, or a worker, to answer."""
_CLOSE_S = 2.0
"""Seconds for the client to take its leave."""
_OPEN = "listens on {} without TLS: whoever reaches it executes code; use TLS, or start it with --host 127.0.0.1"


@value
class DaskWorker:
    """A worker of a cluster."""

    name: str
    """The name given to the worker, else the IP address of its machine."""
    address: str
    resources: Mapping[str, float]


class Cluster:
    """A client that is connected to a scheduler."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def workers(self) -> Sequence[DaskWorker]:
        """Return the workers that offer resources. Raises HostUnreachable."""
        with _cluster_errors():
            identity = await self._client.scheduler.identity()
        workers = cast("Mapping[str, Mapping[str, Any]]", identity["workers"])
        return [
            DaskWorker(host_name(address, one["name"]), address, one["resources"])
            for address, one in workers.items()
            if one["resources"] and one["status"] in {"running", "paused"}
        ]

    async def open(self, worker: str, words: Sequence[str]) -> Channel:
        """Start `plait` with `words` on the machine of the worker with this address, behind a relay.

        Raises HostUnreachable.
        """
        with _cluster_errors():
            listens = (await self._client.run(prepare, workers=[worker]))[worker]
            if is_open(listens):
                raise HostUnreachable(_OPEN.format(listens))
            connect = cast("Any", import_module("distributed.comm")).connect
            comm: Comm = await connect(worker, timeout=CONNECT_S, **self._client.connection_args)
            await comm.write({"op": HANDLER, "reply": False, "words": list(words)})
            return RemoteProcess(comm)


@asynccontextmanager
async def connected(address: str) -> AsyncGenerator[Cluster]:
    """Connect to the scheduler at `address`. Raises HostUnreachable."""
    with _cluster_errors():
        dask = cast("Any", import_module("distributed"))  # needs the extra
        security = dask.Security(require_encryption=address.startswith("tls://"))
        client = dask.Client(address, asynchronous=True, security=security, timeout=CONNECT_S, set_as_default=False)
        try:
            await client
            for listens in await client.run_on_scheduler(_listen_addresses):
                if is_open(listens):
                    raise HostUnreachable(_OPEN.format(listens))
        except BaseException:
            await _close(client)
            raise
    try:
        yield Cluster(client)
    finally:
        await _close(client)


def _listen_addresses(dask_scheduler: Any) -> Sequence[str]:
    return [str(one.listen_address) for one in dask_scheduler.listeners]


async def _close(client: Any) -> None:
    with anyio.move_on_after(_CLOSE_S, shield=True), suppress(Exception):
        await client.close(timeout=_CLOSE_S)


@contextmanager
def _cluster_errors() -> Generator[None]:
    """Raise HostUnreachable for the errors of Dask: of the network, of TLS, and of functions that fail on a worker."""
    try:
        yield
    except HostUnreachable:
        raise
    except Exception as error:
        raise HostUnreachable(one_line(str(error)) or type(error).__name__) from error


# The part of plait that runs in a Dask worker: a process of plait on the worker's machine.
#
#     runner -> worker    data     for the standard input of the process; empty for its end
#     worker -> runner    data     from the standard output of the process
#                         exit     the exit code, and the last line of standard error; the last message
#
# The process ends with the connection. It is no part of the worker: code of users does not run in the worker, and a
# worker that is killed ends no agent.

CLOSE_S = 2.0
"""Seconds for the process to exit once its input has ended, and for the connection to close."""


Comm: TypeAlias = Any
"""A connection of Dask, which has no types. Its methods raise OSError once it is broken."""


class RemoteProcess:
    """The runner's side of such a process; implements Channel."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.code: int | None = None
        self.errors = "the connection to the worker broke"

    async def receive(self) -> bytes:
        """Return the next part of the output. Raise EndOfStream at the end."""
        if self.code is None:
            with suppress(OSError):
                message = await self._comm.read()
                if "data" in message:
                    data: bytes = message["data"]
                    return data
                self.code, self.errors = message["exit"], message["errors"]
        raise anyio.EndOfStream

    async def send(self, data: bytes) -> bool:
        """Send data. Return False if the connection is broken."""
        try:
            await self._comm.write({"data": data})
        except OSError:
            return False
        return True

    async def end_input(self) -> None:
        await self.send(b"")

    async def close(self) -> None:
        with anyio.move_on_after(CLOSE_S, shield=True), suppress(OSError):
            await self._comm.close()
        self._comm.abort()


HANDLER = "plait"
"""The operation of the worker that starts a process."""


def prepare(dask_worker: Any) -> str:
    """Make the worker start processes. Return the address on which the worker listens."""

    async def relay(comm: Comm, words: Sequence[str]) -> Any:
        await _serve(comm, words)
        return import_module("distributed.core").Status.dont_reply

    dask_worker.handlers[HANDLER] = relay
    return str(dask_worker.listen_address)


async def _serve(comm: Comm, words: Sequence[str]) -> None:
    """Run `plait` with `words` on the machine of the worker, until the process or the connection ends."""
    process = await open_process([sys.executable, "-m", "plait", *words])
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_read_comm, comm, process, group.cancel_scope)
            with suppress(OSError):
                with suppress(anyio.EndOfStream):
                    while True:
                        await comm.write({"data": await process.receive()})
                await process.close()
                await comm.write({"exit": process.code, "errors": process.errors})
                await comm.close()
            group.cancel_scope.cancel()
    finally:
        await process.close()


async def _read_comm(comm: Comm, process: Channel, relay: anyio.CancelScope) -> None:
    """Pass on what the runner sends. Cancel the relay at the end of the connection."""
    with suppress(OSError):
        while True:
            if data := (await comm.read())["data"]:
                await process.send(data)
            else:
                await process.end_input()
    relay.cancel()
