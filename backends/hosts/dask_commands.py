"""Commands of plait on the machine of a worker."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence

import anyio

from plait.backends.hosts.dask_address import slots_for
from plait.backends.hosts.dask_cluster import Cluster, ClusterError, DaskWorker
from plait.backends.hosts.dask_remote import RemoteOutput, close
from plait.backends.hosts.reachable import CommandResult, HostUnreachable


class WorkerCommands:
    """Implements ReachableHost for attempts of the kinds `needs`."""

    def __init__(self, cluster: Cluster, worker: DaskWorker, needs: Collection[Mapping[str, float]]) -> None:
        self._cluster = cluster
        self._worker = worker
        self.name = worker.name
        self.slots = slots_for(worker.resources, needs)

    async def run(self, words: Sequence[str], data: bytes = b"") -> CommandResult:
        """Run `plait` with `words`. Raises HostUnreachable."""
        output = bytearray()
        try:
            comm = await self._cluster.open(self._worker.address, words, secrets.token_hex(8))
        except ClusterError as error:
            raise HostUnreachable(str(error)) from None
        remote = RemoteOutput(comm)
        try:
            if data:
                await comm.write({"data": data})
            await comm.write({"data": b""})
            while True:
                output += await remote.receive()
        except anyio.EndOfStream:
            return CommandResult(remote.code, bytes(output), remote.errors)
        except OSError as error:
            raise HostUnreachable(str(error)) from None
        finally:
            await close(comm)
