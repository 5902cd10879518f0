"""`Cluster`: the connection of this process to a Dask scheduler and its workers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol, cast

import anyio
import distributed
import distributed.comm

from plait.backends.hosts import dask_relay
from plait.backends.hosts.dask_address import host_name, is_open
from plait.backends.hosts.dask_remote import Comm
from plait.json_form import value
from plait.safe_text import one_line

CONNECT_S = 5.0
"""Seconds for the scheduler, or a worker, to answer."""
_CLOSE_S = 2.0
"""Seconds for the client to take its leave."""
_OPEN = "listens on {} without TLS: whoever reaches it executes code; use TLS, or start it with --host 127.0.0.1"


_dask = cast("Any", distributed)  # has no types
_connect = cast("Any", distributed.comm).connect


class Future(Protocol):
    """The part of a future of Dask that is used."""

    def release(self) -> None:
        """Cancel the task, if it has not begun, and drop its result."""
        ...


class ClusterError(Exception):
    """The scheduler or a worker cannot be used. The message has the reason."""


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
        """Return the workers that offer resources. Raises ClusterError."""
        with _cluster_errors():
            identity = await self._client.scheduler.identity()
        found = cast("Mapping[str, Mapping[str, Any]]", identity["workers"])
        return [
            DaskWorker(host_name(address, one["name"]), address, one["resources"])
            for address, one in found.items()
            if one["resources"] and one["status"] in {"running", "paused"}
        ]

    async def open(self, worker: str, words: Sequence[str], token: str) -> Comm:
        """Start `plait` with `words` on the machine of the worker with this address, behind a relay.

        Raises ClusterError.
        """
        with _cluster_errors():
            listens = (await self._client.run(dask_relay.prepare, workers=[worker]))[worker]
            if is_open(listens):
                raise ClusterError(_OPEN.format(listens))
            comm: Comm = await _connect(worker, timeout=CONNECT_S, **self._client.connection_args)
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
    """Connect to the scheduler at `address`. Raises ClusterError."""
    with _cluster_errors():
        security = _dask.Security(require_encryption=address.startswith("tls://"))
        client = _dask.Client(address, asynchronous=True, security=security, timeout=CONNECT_S, set_as_default=False)
        try:
            await client
            for listens in await client.run_on_scheduler(_listen_addresses):
                if is_open(listens):
                    raise ClusterError(_OPEN.format(listens))
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
    """Raise ClusterError for the errors of Dask: of the network, of TLS, and of functions that fail on a worker."""
    try:
        yield
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(one_line(str(error)) or type(error).__name__) from error
