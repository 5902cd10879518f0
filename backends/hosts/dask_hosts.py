"""`DaskHosts`: hosts that are the workers of a Dask cluster."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from plait.backends.backend_protocol import RunOnHosts
from plait.backends.extras import require
from plait.backends.hosts.dask_address import check_address, slots_of
from plait.backends.hosts.described_backend import describe
from plait.backends.hosts.group import PATIENCE, HostGroup, hello_frame
from plait.backends.hosts.host_backend import BackendTraits, HostBackend, host_backend
from plait.backends.hosts.host_session import HostSession
from plait.backends.hosts.reachable import HostUnreachable, ReachableHost
from plait.json_form import JsonValue

if TYPE_CHECKING:
    from plait.backends.hosts.dask_connection import WorkerConnection

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

    def placed(self, backend: object, needs: Mapping[str, float] | None = None) -> HostBackend:
        """Return `backend` with its attempts on these hosts, each of which takes the resources `needs`.

        `needs` is one of `agents` by default. Otherwise as `SSHHosts.placed`.
        """
        return self.place(describe(backend), BackendTraits.of(backend), needs)

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
        from plait.backends.hosts.dask_cluster import ClusterError, connected  # noqa: PLC0415 - needs the extra
        from plait.backends.hosts.dask_commands import WorkerCommands  # noqa: PLC0415

        kinds: list[Mapping[str, float]] = []
        for one in [NEEDS if each is None else each for each in needs] or [NEEDS]:
            _add_kind(kinds, one)
        try:
            async with connected(self.address) as cluster:
                yield [WorkerCommands(cluster, worker, kinds) for worker in await cluster.workers()]
        except ClusterError as error:
            raise HostUnreachable(f"the scheduler {self.address} cannot be used: {error}") from None

    def _new_session(self, run: RunOnHosts) -> HostSession:
        from plait.backends.hosts.dask_connection import WorkerConnection  # noqa: PLC0415 - needs the extra
        from plait.backends.hosts.dask_session import DaskSession  # noqa: PLC0415

        token = secrets.token_hex(8)

        def new_connection(name: str) -> WorkerConnection:
            connection = WorkerConnection(
                name, token, lambda: hello_frame(run, name, slots_of(connection.resources), connection.kept)
            )
            connection.kept.update(run.adopted.get(name, ()))
            return connection

        return DaskSession(self.address, self._patience, new_connection, self._needs, run)


def _add_kind(kinds: list[Mapping[str, float]], needs: Mapping[str, float]) -> None:
    if needs not in kinds:
        kinds.append(needs)
