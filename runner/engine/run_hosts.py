"""The connections of a run to the hosts of its backends, for as long as this process owns the run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from plait import events
from plait.backends.backend_protocol import Backend, HostConnections, PlacedBackend, RunOnHosts
from plait.clock_and_ids import iso
from plait.program_log import logger
from plait.runner.engine.checkpointer import EventSink
from plait.runner.state.attempt_files import hosts_key


def away_reporter(
    sink: EventSink, stamp: Callable[[], str]
) -> Callable[[str, float | None, str, tuple[str, ...]], None]:
    """Return a function that makes the event HostAway of each host that attempts wait for, or no longer wait for."""

    def report(host: str, since: float | None, reason: str, tasks: tuple[str, ...]) -> None:
        sink.submit([events.HostAway(stamp(), host, None if since is None else iso(since), reason, tasks)])

    return report


def run_on_hosts(run_id: str, created_at: str, epoch: int, adopted: Iterable[tuple[str, str, int]] = ()) -> RunOnHosts:
    """Return a run and its owner's claim as hosts read them.

    The hosts keep the attempts in `adopted`, each a host, a task id and a number, and end all others of the run.
    """
    attempts: dict[str, list[str]] = {}
    for place, task_id, attempt in adopted:
        attempts.setdefault(place, []).append(f"{task_id}/{attempt}")
    return RunOnHosts(run_id, hosts_key(run_id, created_at), max(1, epoch), attempts)


@asynccontextmanager
async def connected_hosts(backends: Iterable[Backend], run: RunOnHosts) -> AsyncGenerator[Sequence[HostConnections]]:
    """Connect the hosts of all `backends` that place attempts on other hosts. Leaving disconnects the hosts."""
    every = {id(backend.hosts): backend.hosts for backend in backends if isinstance(backend, PlacedBackend)}
    if not every:
        yield ()
        return
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(hosts.connected(run)) for hosts in every.values()]


async def follow_slots(connections: Sequence[HostConnections], on_slots: Callable[[int], None]) -> None:
    """Call `on_slots` with the number of slots of all hosts, whenever it grows. Runs until it is cancelled."""
    slots = [0] * len(connections)

    async def follow(index: int, hosts: HostConnections) -> None:
        while True:
            slots[index] = await hosts.more_slots(slots[index])
            on_slots(sum(slots))

    async with anyio.create_task_group() as group:
        for index, hosts in enumerate(connections):
            group.start_soon(follow, index, hosts)


def remove_files_on_hosts(connections: Iterable[HostConnections]) -> None:
    """Ask the hosts to remove the files of the run, which is over."""
    for hosts in connections:
        hosts.remove_files()


async def end_on_hosts(
    backends: Iterable[Backend], run: RunOnHosts, placed: Mapping[str, Sequence[str]]
) -> Mapping[str, Sequence[str]]:
    """End all attempts of a cancelled run, and remove its files, on all hosts of `backends` that can be reached.

    `placed` names the tasks whose attempts may be under way, for each host that had attempts. Return the part of the
    other hosts, which is logged as well.
    """
    if not placed:
        return {}
    async with connected_hosts(backends, run) as connections:
        reached = await _reached(connections)
        remove_files_on_hosts(connections)
    missing = {host: tasks for host, tasks in placed.items() if tasks and host not in reached}
    if missing:
        logger(run=run.run_id).warning("attempts_not_ended", hosts=list(missing), why="the hosts cannot be reached")
    return missing


async def _reached(connections: Iterable[HostConnections]) -> Collection[str]:
    """Return the names of the hosts that are connected, of all groups, which are waited for at once."""
    names: set[str] = set()

    async def add(hosts: HostConnections) -> None:
        names.update(await hosts.reached())

    async with anyio.create_task_group() as group:
        for connection in connections:
            group.start_soon(add, connection)
    return names
