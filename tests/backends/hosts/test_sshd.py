"""Hosts over OpenSSH itself: a server of this user on 127.0.0.1. Skipped where there is no sshd."""

from __future__ import annotations

import signal
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from plait import ParallelRunner, RunStatus
from plait.backends.hosts.host_backend import SSHHost, SSHHosts
from plait.persistence import SQLiteStore
from tests.support.agents.outliving import RUN
from tests.support.hosts import sshd
from tests.support.hosts.agent import Agent
from tests.support.hosts.outliving import HostsWorld
from tests.support.hosts.sshd import needs_sshd
from tests.support.hosts.world import PLAIT

pytestmark = [pytest.mark.slow, needs_sshd]


@pytest.fixture
def server(tmp_path: Path) -> Generator[psutil.Process]:
    """A server, with a configuration of the client in tmp_path/config."""
    sshd.make_keys(tmp_path)
    with sshd.server(tmp_path, "*", "127.0.0.1", sshd.free_port()) as process:
        yield process


def hosts_at(folder: Path) -> SSHHosts:
    return SSHHosts([SSHHost("m1", plait=PLAIT), SSHHost("m2", plait=PLAIT)], ssh=["ssh", "-F", str(folder / "config")])


async def test_agents_work_over_a_real_line_and_outlive_it(tmp_path: Path, server: psutil.Process) -> None:
    world = HostsWorld(tmp_path)
    world.plan({"id": "a", "prompt": "one [[until go]]"}, {"id": "b", "prompt": "two [[until go]]"})
    cut = False
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(hosts_at(tmp_path).placed(Agent(str(tmp_path))), store=store)
        async with runner.start(world.dag(), RUN) as run:
            async for event in run.events():
                if not cut and await world.all_told(event, 2):
                    cut = True
                    for child in server.children(recursive=False):
                        for one in [child, *child.children(recursive=True)]:
                            if "sshd" in one.name():
                                one.send_signal(signal.SIGKILL)
                    world.allow("go")
            result = await run.result()
    assert cut
    assert (result.status, result.text) == (RunStatus.COMPLETED, {"a": "re: one", "b": "re: two"})
    assert (len(world.turns), world.alive()) == (2, [])


async def test_a_real_host_is_looked_at(tmp_path: Path, server: psutil.Process) -> None:
    assert server.is_running()
    async with hosts_at(tmp_path).reachable() as hosts:
        states = [await host.probe() for host in hosts]
    assert [(one.name, one.at_work, one.problem) for one in states] == [
        ("m1", 0, None),
        ("m2", 0, None),
    ]
