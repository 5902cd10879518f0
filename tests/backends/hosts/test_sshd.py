"""Hosts over OpenSSH itself: a server of this user on 127.0.0.1. Skipped where there is no sshd."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from plait.backends.hosts.look import look_at_hosts
from plait.backends.hosts.ssh import SSHHost, SSHHosts
from plait.persistence import SQLiteStore
from plait.runner import ParallelRunner, RunStatus
from plait.runner.domain import events
from tests.support.agents.outliving import RUN
from tests.support.hosts.agent import Agent
from tests.support.hosts.outliving import HostsWorld
from tests.support.hosts.ssh import ROOT
from tests.support.hosts.world import PLAIT

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
pytestmark = pytest.mark.skipif(SSHD is None or shutil.which("ssh") is None, reason="this machine has no sshd")
SERVER = """
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
AcceptEnv XDG_STATE_HOME PYTHONPATH
"""
CLIENT = """
Host *
    HostName 127.0.0.1
    Port {port}
    User {user}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking no
    BatchMode yes
    LogLevel ERROR
    SetEnv XDG_STATE_HOME={folder}/state PYTHONPATH={root}
"""


@pytest.fixture
def server(tmp_path: Path) -> Generator[psutil.Process]:
    """A server, with a configuration of the client in tmp_path/config."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True)
    names = {"port": port, "folder": tmp_path, "user": getpass.getuser(), "root": ROOT}
    (tmp_path / "server").write_text(SERVER.format(**names))
    (tmp_path / "config").write_text(CLIENT.format(**names))
    log = tmp_path / "log"
    with subprocess.Popen([str(SSHD), "-D", "-f", str(tmp_path / "server"), "-E", str(log)]) as process:
        try:
            if not _answers(port, process):
                pytest.skip(f"sshd does not run as this user: {log.read_text().strip()}")
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def _answers(port: int, process: subprocess.Popen[bytes]) -> bool:
    while process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), 1.0):
                return True
        except OSError:
            continue
    return False


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
                if isinstance(event, events.SessionOpened) and len(world.told) == 2 and not cut:
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
    assert [(one.name, one.at_work, one.problem) for one in await look_at_hosts(hosts_at(tmp_path))] == [
        ("m1", 0, None),
        ("m2", 0, None),
    ]
