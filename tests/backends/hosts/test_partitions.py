"""A network that is cut and healed, between a run and its hosts: network namespaces, with a real sshd in each, or a
worker of Dask.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.to_thread import run_sync

from plait import ParallelRunner, RunStatus, events
from plait.backends.hosts.host_backend import SSHHost, SSHHosts
from plait.events import TaskCompleted
from plait.hosts import DaskHosts
from plait.persistence import AttemptRecord
from tests.support.agents.outliving import RUN
from tests.support.hosts import sshd
from tests.support.hosts.agent import Agent
from tests.support.hosts.namespaces import Namespace, namespaces, needs_namespaces
from tests.support.hosts.outliving import HostsWorld
from tests.support.hosts.sshd import SSHD
from tests.support.hosts.world import PLAIT
from tests.support.sizes import size

pytestmark = [pytest.mark.slow, needs_namespaces]
NAMES: Sequence[str] = size(("m1", "m2"), ("m1", "m2", "m3", "m4"))
CUT = {*NAMES[::2]}
COUNT, LOST = 2 * len(NAMES), 2 * len(CUT)


class SSHNet:
    """Hosts with a server each, and the configuration of the client in `folder`/config."""

    def __init__(self, folder: Path, spaces: Mapping[str, Namespace]) -> None:
        self.folder, self.spaces = folder, spaces

    @contextmanager
    def serving(self) -> Generator[None]:
        sshd.make_keys(self.folder)
        with ExitStack() as stack:
            for name, one in self.spaces.items():
                server = sshd.server(self.folder, name, one.address, 22, state=f"state-{name}", within=one.within)
                stack.enter_context(server)
            yield

    def hosts(self, patience: float) -> SSHHosts:
        """The hosts, with two slots each, over connections that notice a silent partition after about two seconds."""
        watchful = ("ServerAliveInterval=1", "ServerAliveCountMax=2", "ConnectTimeout=1")
        ssh = ["ssh", "-F", str(self.folder / "config"), *(word for one in watchful for word in ("-o", one))]
        return SSHHosts([SSHHost(name, slots=2, plait=PLAIT) for name in NAMES], ssh=ssh, patience=patience)

    async def heal(self, names: Iterable[str]) -> None:
        for name in names:
            self.spaces[name].heal()


class DaskNet:
    """Workers with room for two attempts each, whose connections notice a silent partition after 11 seconds: Dask
    takes no fewer.
    """

    def __init__(self, folder: Path, spaces: Mapping[str, Namespace], cluster: Any) -> None:
        self.spaces = spaces
        self._cluster = cluster(folder / "cluster", dict.fromkeys(NAMES, 2), host="0.0.0.0")
        self._cluster.namespaces = spaces

    @contextmanager
    def serving(self) -> Generator[None]:
        settings = {**self._cluster.use_tls(), "DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "11s"}
        self._cluster.settings = settings
        config = importlib.import_module("dask.config")
        keys = {name.removeprefix("DASK_").lower().replace("__", ".").replace("_", "-"): name for name in settings}
        with config.set({key: settings[name] for key, name in keys.items()}), self._cluster:
            anyio.run(self._cluster.ready)
            yield

    def hosts(self, patience: float) -> DaskHosts:
        return DaskHosts(self._cluster.address, patience=patience)

    async def heal(self, names: Iterable[str]) -> None:
        """Let packets pass, and start the workers again, which have exited without their scheduler."""
        for name in names:
            await run_sync(self._cluster.wait, name)
            self.spaces[name].heal()
            self._cluster.start_worker(name)


@pytest.fixture(params=["ssh", "dask"])
def net(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[SSHNet | DaskNet]:
    """Four hosts, each in a namespace of its own."""
    if request.param == "ssh" and SSHD is None:
        pytest.skip("this machine has no sshd")
    if request.param == "dask":
        pytest.importorskip("distributed")
    with namespaces(len(NAMES)) as made:
        spaces = dict(zip(NAMES, made, strict=True))
        if request.param == "ssh":
            net: SSHNet | DaskNet = SSHNet(tmp_path, spaces)
        else:
            cluster = importlib.import_module("tests.support.hosts.dask_cluster").DaskCluster
            net = DaskNet(tmp_path, spaces, cluster)
        with net.serving():
            yield net


@pytest.fixture
def world(tmp_path: Path) -> HostsWorld:
    world = HostsWorld(tmp_path)
    world.plan(*({"id": f"t{number}", "prompt": f"work {number} [[until go-t{number}]]"} for number in range(COUNT)))
    return world


def allow(world: HostsWorld, tasks: Iterable[str]) -> None:
    """Let the agents of the tasks answer."""
    for task in tasks:
        world.allow(f"go-{task}")


def host_processes(net: SSHNet | DaskNet) -> list[int]:
    found: list[int] = []
    for one in net.spaces.values():
        for process in one.processes():
            try:
                found += [process.pid] if process.cmdline()[-1:] == ["host"] else []
            except psutil.NoSuchProcess:
                continue
    return found


async def test_hosts_cut_off_for_longer_than_the_patience_cost_one_attempt_each(
    tmp_path: Path, world: HostsWorld, net: SSHNet | DaskNet
) -> None:
    placed: dict[str, str] = {}
    again: set[str] = set()
    opened: set[str] = set()
    cut = False
    async with world.opened_store() as store:
        runner = ParallelRunner(net.hosts(1.0).placed(Agent(str(tmp_path))), store=store, concurrency=COUNT)
        async with runner.start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskPlaced) and event.attempt == 1:
                    placed[event.task_id] = event.place
                if isinstance(event, events.SessionOpened) and not cut:
                    opened.add(event.task_id)
                if len(opened) == COUNT and not cut:
                    cut = True
                    for name in CUT:
                        net.spaces[name].cut()
                    allow(world, (task for task, place in placed.items() if place not in CUT))
                if isinstance(event, events.SessionOpened) and event.attempt > 1:
                    assert event.attempt == 2
                    again.add(event.task_id)
                    if len(again) == LOST:
                        assert len(world.alive()) == 2 * LOST  # those that are lost, and as many anew
                        await net.heal(CUT)
                        await world.until(lambda: len(world.alive()) == LOST)
                        allow(world, again)
            result = await run.result()
        attempts = await store.list_attempts(RUN)
        completed = await store.list_events(RUN, kind=TaskCompleted.kind)
    assert Counter(placed.values()) == dict.fromkeys(NAMES, 2)
    lost = {task for task, place in placed.items() if place in CUT}
    assert again == lost
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT + LOST, [])
    assert {one.id: one.attempts for one in result.tasks.values()} == {task: 1 + (task in lost) for task in placed}
    assert Counter(one.task_id for one in completed) == dict.fromkeys(placed, 1)
    assert _recorded(attempts) == sorted((task, number) for task in placed for number in range(1, 2 + (task in lost)))
    await world.until(lambda: not host_processes(net))


async def test_hosts_cut_off_for_less_than_the_patience_cost_nothing(
    tmp_path: Path, world: HostsWorld, net: SSHNet | DaskNet
) -> None:
    waits: set[str] = set()
    opened: set[str] = set()
    cut = False
    async with world.opened_store() as store:
        runner = ParallelRunner(net.hosts(300.0).placed(Agent(str(tmp_path))), store=store, concurrency=COUNT)
        async with runner.start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.SessionOpened) and not cut:
                    opened.add(event.task_id)
                if len(opened) == COUNT and not cut:
                    cut = True
                    for name in CUT:
                        net.spaces[name].cut()
                if isinstance(event, events.TaskOutput) and event.output == "waiting" and len(waits) < LOST:
                    waits.add(event.task_id)
                    if len(waits) == LOST:
                        await net.heal(CUT)
                        allow(world, (f"t{number}" for number in range(COUNT)))
            result = await run.result()
    assert len(waits) == LOST
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT, [])
    assert {one.attempts for one in result.tasks.values()} == {1}
    await world.until(lambda: not host_processes(net))


def _recorded(attempts: tuple[AttemptRecord, ...]) -> list[tuple[str, int]]:
    return sorted((one.task_id, one.attempt) for one in attempts)
