"""`DaskHosts`: hosts that are the workers of a Dask cluster; its addresses, and the connection to its scheduler."""

from __future__ import annotations

import re
import secrets
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from importlib import import_module
from ipaddress import ip_address
from itertools import count
from typing import Any, TypeAlias, cast
from urllib.parse import urlsplit

import anyio

from plait.backends.backend_protocol import RunOnHosts
from plait.backends.extras import require
from plait.backends.hosts.host_backend import PATIENCE, HostGroup
from plait.backends.hosts.host_connection import (
    LOST,
    AttemptChannel,
    Channel,
    Frame,
    HostConnection,
    HostUnreachable,
    ReachableHost,
    open_process,
)
from plait.backends.hosts.host_session import HostSession
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

        async def opened(cluster: Cluster, worker: str, words: Sequence[str]) -> Channel:
            return RemoteProcess(await cluster.open(worker, words, secrets.token_hex(8)))

        async with AsyncExitStack() as stack:
            try:
                cluster = await stack.enter_async_context(connected(self.address))
                workers = await cluster.workers()
            except HostUnreachable as error:
                raise HostUnreachable(f"the scheduler {self.address} cannot be used: {error}") from None
            yield [
                ReachableHost(worker.name, slots_for(worker.resources, kinds), partial(opened, cluster, worker.address))
                for worker in workers
            ]

    def _new_session(self, run: RunOnHosts) -> HostSession:
        return DaskSession(self.address, self._patience, self._needs, run)


class WorkerConnection(HostConnection):
    """The connection to the host `name`, for as long as a worker has this name. Dask gives the room.

    `token` tells the relays of this process and run from others.
    """

    def __init__(self, name: str, run: RunOnHosts, token: str) -> None:
        super().__init__(name, run, {}, self._open)
        self.busy_until = 0.0
        """The time, of the event loop, until which other runs are taken to have the resources."""
        self._token = token
        self._cluster: Cluster | None = None
        self._worker: str | None = None
        self._has_worker = anyio.Event()
        self._opening = anyio.CancelScope()
        self._numbers = count()
        self._holds: dict[str, Any] = {}
        """The tasks of Dask that hold the resources, by attempt."""
        self._waiting: set[str] = set()
        """The attempts that wait for room."""
        self._unneeded: list[str] = []
        """The attempts that need no room any longer, to be reported to the worker."""

    def use_worker(self, cluster: Cluster, worker: DaskWorker) -> None:
        """Use the worker that has the name of the host now."""
        self.resources = worker.resources
        changed = cluster is not self._cluster
        if changed or worker.address != self._worker:
            self._opening.cancel()
        self._cluster, self._worker = cluster, worker.address
        self._has_worker.set()
        if changed and self.is_connected:  # the scheduler no longer counts the resources taken
            self._hold_all()

    def lose_worker(self, reason: str) -> None:
        """Use no worker until `use_worker`. An existing connection goes on."""
        self._worker = None
        if self._has_worker.is_set():
            self._has_worker = anyio.Event()
        self._opening.cancel()
        if not self.is_connected and self.reason != reason:
            self._lost(reason)

    def load(self, needs: Mapping[str, float]) -> float | None:
        """Return the load as for all hosts; None while other runs are taken to have the resources."""
        return None if anyio.current_time() < self.busy_until else super().load(needs)

    def ask(self, attempt: AttemptChannel) -> None:
        """Ask Dask for the resources of an attempt."""
        self._waiting.add(attempt.name)
        self._hold(attempt)

    def release(self, attempt: AttemptChannel) -> None:
        """Free the resources of an attempt."""
        self._waiting.discard(attempt.name)
        if (task := self._holds.pop(attempt.name, None)) is not None:
            task.release()
        self._free(attempt.name)
        super().release(attempt)

    def _hold(self, attempt: AttemptChannel) -> None:
        if self._cluster is not None and self._worker is not None:
            number = next(self._numbers)
            self._holds[attempt.name] = self._cluster.hold(
                self._worker, self._token, attempt.name, number, attempt.needs
            )

    def _hold_all(self) -> None:
        for attempt in self.attempts.values():
            self._hold(attempt)

    def _free(self, name: str) -> None:
        if self.is_connected:
            self._unneeded.append(name)
            self._to_send.set()

    def _accepted(self) -> None:
        super()._accepted()
        self._hold_all()  # the attempts of an earlier connection

    async def _open(self) -> Channel | None:
        await self._has_worker.wait()
        assert self._cluster is not None
        assert self._worker is not None
        with anyio.CancelScope() as self._opening:
            return RemoteProcess(await self._cluster.open(self._worker, ("host",), self._token), self._on_room)
        return None  # the worker has another address now

    def _lost(self, reason: str) -> None:
        for task in self._holds.values():
            task.release()
        self._holds.clear()
        self._waiting.clear()
        self._unneeded.clear()
        super()._lost(reason)

    async def _send_waiting(self, channel: Channel) -> bool:
        assert isinstance(channel, RemoteProcess)
        message: dict[str, Any] = {}
        if self._unsent:
            message["data"], self._unsent = bytes(self._unsent), bytearray()
        if self._unneeded:
            message["free"], self._unneeded = self._unneeded, []
        return not message or await channel.write(message)

    def _on_room(self, name: str) -> None:
        """Give an attempt its room. Free the room if no attempt wants it: Dask has begun a task again."""
        attempt = self.attempts.get(name)
        if attempt is None:
            self._free(name)
        elif name in self._waiting:
            self._waiting.discard(name)
            attempt.put({"op": "slot", "attempt": name})


_POLL_S = 1.0
"""Seconds between two requests for the workers of the scheduler."""
_ASK_S = 1.0
"""Seconds for a worker to have room, before another worker is asked."""
_RETRY_S = 1.0
"""Seconds between two attempts to connect to the scheduler."""


class DaskSession(HostSession):
    """The workers of one run, for attempts of the kinds `needs`."""

    def __init__(self, address: str, patience: float, needs: Sequence[Mapping[str, float]], run: RunOnHosts) -> None:
        super().__init__((), patience, run)
        self._address = address
        self._needs = needs
        self._token = secrets.token_hex(8)
        self._workers: dict[str, WorkerConnection] = {}
        self._following = anyio.CancelScope()
        self._is_scheduler_tried = False
        """Whether the scheduler has answered, or one attempt to connect to it has failed."""
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
            connection = self._workers[name] = WorkerConnection(name, self._run, self._token)
            self._add(connection)
            if self._is_scheduler_tried:
                connection.lose_worker(self._missing(name))
        return self._workers[name]

    def _has_asked(self) -> bool:
        return self._is_scheduler_tried and super()._has_asked()

    def _slots(self) -> int:
        return sum(slots_for(one.resources, self._needs) for one in self._workers.values())

    async def _follow_scheduler(self) -> None:
        with self._following:
            while True:
                try:
                    async with connected(self._address) as cluster:
                        while True:
                            workers = await cluster.workers()
                            self.problem, self._has_answered = "", True
                            for worker in reversed(workers):  # the first of several with one name counts
                                self.connection(worker.name).use_worker(cluster, worker)
                            self._lose_others({worker.name for worker in workers})
                            await anyio.sleep(_POLL_S)
                except HostUnreachable as error:
                    self.problem = f"the scheduler {self._address} cannot be used: {error}"
                    self._lose_others(())
                await anyio.sleep(_RETRY_S)

    def _lose_others(self, names: Collection[str]) -> None:
        self._is_scheduler_tried = True
        for connection in self._workers.values():
            if connection.name not in names:
                connection.lose_worker(self._missing(connection.name))
        self._wake()

    def _missing(self, name: str) -> str:
        return self.problem or f"the scheduler {self._address} has no worker of this name: {name}"

    async def _answer(self, attempt: AttemptChannel, *, may_move: bool) -> Frame:
        """Return the answer of a worker. LOST if its resources stay taken, by other runs, and another may have room.

        A busy worker is asked again after all others: to this run, which counts its own attempts alone, the worker may
        look the least loaded one.
        """
        connection = self._workers[attempt.connection.name]
        while True:
            with anyio.move_on_after(_ASK_S):
                return await attempt.next()
            others = (one for one in self._workers.values() if one is not connection)
            if may_move and any(one.load(attempt.needs) is not None for one in others):
                connection.busy_until = anyio.current_time() + _ASK_S * len(self._workers)
                return LOST

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


# The connection of this process to a Dask scheduler; its addresses, its workers and their slots.

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
_ROUNDING = 1e-9
"""Part of an attempt by which a division may be too low, as 0.3 / 0.1 is."""


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


def slots_for(resources: Mapping[str, float], needs: Iterable[Mapping[str, float]]) -> int:
    """Return the number of attempts for which a host has the `resources`. Attempts of several `needs` are counted as if
    each kind had the host for itself: some may have to wait for room, and no room stays unused.
    """
    return sum(int(min(resources.get(name, 0) / need for name, need in one.items()) + _ROUNDING) for one in needs)


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

    async def open(self, worker: str, words: Sequence[str], token: str) -> Comm:
        """Start `plait` with `words` on the machine of the worker with this address, behind a relay.

        Raises HostUnreachable.
        """
        with _cluster_errors():
            listens = (await self._client.run(prepare, workers=[worker]))[worker]
            if is_open(listens):
                raise HostUnreachable(_OPEN.format(listens))
            connect = cast("Any", import_module("distributed.comm")).connect
            comm: Comm = await connect(worker, timeout=CONNECT_S, **self._client.connection_args)
            await comm.write({"op": HANDLER, "reply": False, "words": list(words), "token": token})
            return comm

    def hold(self, worker: str, token: str, attempt: str, number: int, needs: Mapping[str, float]) -> Any:
        """Take resources of a worker for an attempt, as soon as the worker has them. Never waits.

        Return the future of Dask: `release` cancels the task, if it has not begun, and drops its result.
        """
        # With the worker: Dask takes two tasks of one key for the same task.
        key = f"plait-{token}-{worker}-{attempt}-{number}"
        return self._client.submit(
            hold,
            token,
            attempt,
            key,
            key=key,
            workers=[worker],
            resources=dict(needs),
            retries=0,
            pure=False,
        )


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


# The part of plait that runs in a Dask worker: a process of plait on the worker's machine, and the room for attempts.
#
#     runner -> worker    data     for the standard input of the process; empty for its end
#                         free     attempts that need no room any longer
#     worker -> runner    data     from the standard output of the process
#                         held     an attempt that has room
#                         exit     the exit code, and the last line of standard error; the last message
#
# A relay ends with its connection, and its process with the relay. The process is no part of the worker: code of users
# does not run in the worker, and a worker that is killed ends no agent.
#
# The room for an attempt is a Dask task, `hold`, which takes the resources of the attempt and does nothing. A `hold`
# that Dask begins again, or that the runner no longer wants, holds nothing and ends.

CLOSE_S = 2.0
"""Seconds for the process to exit once its input has ended, and for the connection to close."""


Comm: TypeAlias = Any
"""A connection of Dask, which has no types. Its methods raise OSError once it is broken."""


class RemoteProcess:
    """The runner's side of a relay; implements Channel. `on_room` gets the attempts that have room."""

    def __init__(self, comm: Comm, on_room: Callable[[str], None] = lambda _: None) -> None:
        self._comm = comm
        self._on_room = on_room
        self.code: int | None = None
        self.errors = "the connection to the worker broke"

    async def receive(self) -> bytes:
        """Return the next part of the output. Raise EndOfStream at the end."""
        while self.code is None:
            try:
                message = await self._comm.read()
            except OSError:
                break
            if "data" in message:
                data: bytes = message["data"]
                return data
            if "held" in message:
                self._on_room(message["held"])
            else:
                self.code = message["exit"]
                self.errors = message["errors"]
        raise anyio.EndOfStream

    async def send(self, data: bytes) -> bool:
        return await self.write({"data": data})

    async def end_input(self) -> None:
        await self.write({"data": b""})

    async def write(self, message: Mapping[str, Any]) -> bool:
        """Send a message. Return False if the connection is broken."""
        try:
            await self._comm.write(message)
        except OSError:
            return False
        return True

    async def close(self) -> None:
        with anyio.move_on_after(CLOSE_S, shield=True), suppress(OSError):
            await self._comm.close()
        self._comm.abort()


HANDLER = "plait"
"""The operation of the worker that opens a relay."""
_relays: dict[tuple[str, str], _Relay] = {}
"""The relays by the address of the worker and the token of the runner."""


def prepare(dask_worker: Any) -> str:
    """Make the worker open relays. Return the address on which the worker listens."""

    async def relay(comm: Comm, words: Sequence[str], token: str) -> Any:
        await _serve(dask_worker.address, comm, words, token)
        return import_module("distributed.core").Status.dont_reply

    dask_worker.handlers[HANDLER] = relay
    return str(dask_worker.listen_address)


async def hold(token: str, attempt: str, key: str) -> None:
    """Take the resources of an attempt until the runner frees them. Returns at once without the connection."""
    worker = import_module("distributed").get_worker()
    relay = _relays.get((worker.address, token))
    if relay is not None:
        # The resources alone limit the attempts, and not the threads of the worker.
        secede = import_module("distributed.worker_state_machine").SecedeEvent
        worker.handle_stimulus(secede(stimulus_id=f"plait-{key}", key=key, compute_duration=0.0))
        await relay.hold(attempt)


async def _serve(address: str, comm: Comm, words: Sequence[str], token: str) -> None:
    """Run `plait` with `words` on the machine of the worker, until the process or the connection ends."""
    command = [sys.executable, "-m", "plait", *words]
    relay = _relays[address, token] = _Relay(comm, await open_process(command))
    try:
        await relay.run()
    finally:
        del _relays[address, token]


class _Relay:
    def __init__(self, comm: Comm, process: Channel) -> None:
        self._comm = comm
        self._process = process
        self._unsent: deque[dict[str, Any]] = deque()
        self._to_send = anyio.Event()
        self._holds: dict[str, anyio.Event] = {}

    async def run(self) -> None:
        """Pass on messages until the process or the connection ends."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read_comm, group.cancel_scope)
                group.start_soon(self._read_process)
                await self._send()
                await self._comm.close()
                group.cancel_scope.cancel()
        finally:
            for event in self._holds.values():
                event.set()
            await self._process.close()

    async def hold(self, attempt: str) -> None:
        """Report that an attempt has room, and wait until the attempt needs none."""
        if attempt in self._holds:
            self._holds[attempt].set()
        event = self._holds[attempt] = anyio.Event()
        self._queue({"held": attempt})
        try:
            await event.wait()
        finally:  # also if Dask cancels the task
            if self._holds.get(attempt) is event:
                del self._holds[attempt]

    def _queue(self, message: dict[str, Any]) -> None:
        self._unsent.append(message)
        self._to_send.set()

    async def _send(self) -> None:
        """Send messages until the last one is sent."""
        while True:
            await self._to_send.wait()
            self._to_send = anyio.Event()
            while self._unsent:
                message = self._unsent.popleft()
                with suppress(OSError):  # `_read_comm` ends the relay
                    await self._comm.write(message)
                if "exit" in message:
                    return

    async def _read_comm(self, relay: anyio.CancelScope) -> None:
        """Serve the runner. Cancel the relay at the end of the connection."""
        with suppress(OSError):
            while True:
                message = await self._comm.read()
                for attempt in message.get("free", ()):
                    if attempt in self._holds:
                        self._holds[attempt].set()
                data = message.get("data")
                if data:
                    await self._process.send(data)
                elif data is not None:
                    await self._process.end_input()
        relay.cancel()

    async def _read_process(self) -> None:
        with suppress(anyio.EndOfStream):
            while True:
                data = await self._process.receive()
                if self._unsent and "data" in self._unsent[-1]:
                    self._unsent[-1]["data"] += data
                else:
                    self._queue({"data": data})
        await self._process.close()
        self._queue({"exit": self._process.code, "errors": self._process.errors})
