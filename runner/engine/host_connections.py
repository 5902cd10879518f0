"""The connections of a run to the hosts of its backends, for as long as this process owns the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from plait.backends.protocol import Backend, PlacedBackend, RunOnHosts
from plait.runner.state.attempt_files import hosts_key


@asynccontextmanager
async def connected_hosts(
    backends: Iterable[Backend], run_id: str, created_at: str, epoch: int, adopted: Iterable[tuple[str, str, int]]
) -> AsyncGenerator[None]:
    """Connect the hosts of all `backends` that place attempts on other hosts. Leaving disconnects the hosts.

    The hosts keep the attempts in `adopted`, each a host, a task id and a number, and end all others of the run.
    """
    every = {id(one.hosts): one.hosts for one in backends if isinstance(one, PlacedBackend)}
    if not every:
        yield
        return
    run = RunOnHosts(run_id, hosts_key(run_id, created_at), max(1, epoch), _by_host(adopted))
    async with AsyncExitStack() as stack:
        for hosts in every.values():
            await stack.enter_async_context(hosts.connected(run))
        yield


def _by_host(adopted: Iterable[tuple[str, str, int]]) -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for place, task_id, attempt in adopted:
        found.setdefault(place, []).append(f"{task_id}/{attempt}")
    return found
