"""`Cluster`: the connection of this process to a Dask scheduler; its addresses, its workers and their slots."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from ipaddress import ip_address
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import anyio

from plait.backends.hosts import dask_relay
from plait.backends.hosts.dask_relay import Comm
from plait.backends.hosts.host_connection import HostUnreachable
from plait.json_form import value
from plait.safe_text import one_line

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


def slots_of(resources: Mapping[str, float]) -> int:
    """Return the number of attempts that a host with `resources` offers at most, for attempts of one each."""
    return max(1, min(1000, int(max(resources.values(), default=1))))


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


class Future(Protocol):
    """The part of a future of Dask that is used."""

    def release(self) -> None:
        """Cancel the task, if it has not begun, and drop its result."""
        ...


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
            listens = (await self._client.run(dask_relay.prepare, workers=[worker]))[worker]
            if is_open(listens):
                raise HostUnreachable(_OPEN.format(listens))
            connect = cast("Any", import_module("distributed.comm")).connect
            comm: Comm = await connect(worker, timeout=CONNECT_S, **self._client.connection_args)
            await comm.write({"op": dask_relay.HANDLER, "reply": False, "words": list(words), "token": token})
            return comm

    def hold(self, worker: str, token: str, attempt: str, number: int, needs: Mapping[str, float]) -> Future:
        """Take resources of a worker for an attempt, as soon as the worker has them. Never waits."""
        # With the worker: Dask takes two tasks of one key for the same task.
        key = f"plait-{token}-{worker}-{attempt}-{number}"
        task: Future = self._client.submit(
            dask_relay.hold,
            token,
            attempt,
            key,
            key=key,
            workers=[worker],
            resources=dict(needs),
            retries=0,
            pure=False,
        )
        return task


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
