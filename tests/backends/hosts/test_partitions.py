"""A network that is cut and healed, between a run and its hosts: network namespaces, with a real sshd in each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from plait.backends.hosts.ssh import SSHHost, SSHHosts
from plait.persistence import AttemptRecord, EventKind
from plait.runner import ParallelRunner, RunStatus
from plait.runner.domain import events
from tests.support.agents.outliving import RUN
from tests.support.hosts import sshd
from tests.support.hosts.agent import Agent
from tests.support.hosts.namespaces import Namespace, namespaces, needs_namespaces
from tests.support.hosts.outliving import HostsWorld
from tests.support.hosts.sshd import needs_sshd
from tests.support.hosts.world import PLAIT

pytestmark = [needs_sshd, needs_namespaces]
COUNT = 8
NAMES: Sequence[str] = ("m1", "m2", "m3", "m4")
CUT = {"m1", "m2"}


@pytest.fixture
def net(tmp_path: Path) -> Generator[dict[str, Namespace]]:
    """Hosts with their servers by name, and the configuration of the client in tmp_path/config."""
    sshd.make_keys(tmp_path)
    with ExitStack() as stack:
        made = dict(zip(NAMES, stack.enter_context(namespaces(len(NAMES))), strict=True))
        for name, one in made.items():
            server = sshd.server(tmp_path, name, one.address, 22, state=f"state-{name}", within=one.within)
            stack.enter_context(server)
        yield made


@pytest.fixture
def world(tmp_path: Path) -> HostsWorld:
    world = HostsWorld(tmp_path)
    world.plan(*({"id": f"t{number}", "prompt": f"work {number} [[until go-t{number}]]"} for number in range(COUNT)))
    return world


def hosts(folder: Path, patience: float) -> SSHHosts:
    """The hosts, with two slots each, over connections that notice a silent partition after about two seconds."""
    watchful = ("ServerAliveInterval=1", "ServerAliveCountMax=2", "ConnectTimeout=1")
    ssh = ["ssh", "-F", str(folder / "config"), *(word for option in watchful for word in ("-o", option))]
    return SSHHosts([SSHHost(name, slots=2, plait=PLAIT) for name in NAMES], ssh=ssh, patience=patience)


def allow(world: HostsWorld, tasks: Iterable[str]) -> None:
    """Let the agents of the tasks answer."""
    for task in tasks:
        world.allow(f"go-{task}")


def host_processes(net: dict[str, Namespace]) -> list[int]:
    found: list[int] = []
    for one in net.values():
        for process in one.processes():
            try:
                found += [process.pid] if process.cmdline()[-1:] == ["host"] else []
            except psutil.NoSuchProcess:
                continue
    return found


async def test_hosts_cut_off_for_longer_than_the_patience_cost_one_attempt_each(
    tmp_path: Path, world: HostsWorld, net: dict[str, Namespace]
) -> None:
    placed: dict[str, str] = {}
    again: set[str] = set()
    cut = False
    async with world.opened_store() as store:
        runner = ParallelRunner(hosts(tmp_path, 1.0).placed(Agent(str(tmp_path))), store=store, concurrency=COUNT)
        async with runner.start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskPlaced) and event.attempt == 1:
                    placed[event.task_id] = event.place
                if isinstance(event, events.SessionOpened) and len(world.told) == COUNT and not cut:
                    cut = True
                    for name in CUT:
                        net[name].cut()
                    allow(world, (task for task, place in placed.items() if place not in CUT))
                if isinstance(event, events.SessionOpened) and event.attempt > 1:
                    assert event.attempt == 2
                    again.add(event.task_id)
                    if len(again) == 4:
                        assert len(world.alive()) == 8  # the four that are lost, and four anew
                        for name in CUT:
                            net[name].heal()
                        await world.until(lambda: len(world.alive()) == 4)
                        allow(world, again)
            result = await run.result()
        attempts = await store.list_attempts(RUN)
        completed = await store.list_events(RUN, kind=EventKind.TASK_COMPLETED)
    assert Counter(placed.values()) == dict.fromkeys(NAMES, 2)
    lost = {task for task, place in placed.items() if place in CUT}
    assert again == lost
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT + 4, [])
    assert {one.id: one.attempts for one in result.tasks.values()} == {task: 1 + (task in lost) for task in placed}
    assert Counter(one.task_id for one in completed) == dict.fromkeys(placed, 1)
    assert _recorded(attempts) == sorted((task, number) for task in placed for number in range(1, 2 + (task in lost)))
    await world.until(lambda: not host_processes(net))


async def test_hosts_cut_off_for_less_than_the_patience_cost_nothing(
    tmp_path: Path, world: HostsWorld, net: dict[str, Namespace]
) -> None:
    waits: set[str] = set()
    cut = False
    async with world.opened_store() as store:
        runner = ParallelRunner(hosts(tmp_path, 60.0).placed(Agent(str(tmp_path))), store=store, concurrency=COUNT)
        async with runner.start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.SessionOpened) and len(world.told) == COUNT and not cut:
                    cut = True
                    for name in CUT:
                        net[name].cut()
                if isinstance(event, events.TaskOutput) and event.output == "waiting":
                    waits.add(event.task_id)
                    if len(waits) == 4:
                        for name in CUT:
                            net[name].heal()
                        allow(world, (f"t{number}" for number in range(COUNT)))
            result = await run.result()
    assert len(waits) == 4
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT, [])
    assert {one.attempts for one in result.tasks.values()} == {1}
    await world.until(lambda: not host_processes(net))


def _recorded(attempts: tuple[AttemptRecord, ...]) -> list[tuple[str, int]]:
    return sorted((one.task_id, one.attempt) for one in attempts)
