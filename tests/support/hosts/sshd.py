"""A real sshd of this user, and the configuration of the client that reaches it. Skips where there is none."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.hosts.ssh import ROOT

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
CAN_BE_STARTED = SSHD is not None and shutil.which("ssh") is not None
needs_sshd = pytest.mark.skipif(not CAN_BE_STARTED, reason="this machine has no sshd")
_SERVER = """
ListenAddress {address}:{port}
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PasswordAuthentication no
AcceptEnv XDG_STATE_HOME PYTHONPATH
"""
_CLIENT = """
Host {names}
    HostName {address}
    Port {port}
    User {user}
    IdentityFile {folder}/user_key
    IdentitiesOnly yes
    UserKnownHostsFile {folder}/known_hosts
    StrictHostKeyChecking no
    BatchMode yes
    LogLevel ERROR
    SetEnv XDG_STATE_HOME={folder}/{state} PYTHONPATH={root}
"""


def make_keys(folder: Path) -> None:
    """Write the keys of the servers and of the user into `folder`."""
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(words, check=True)


@contextmanager
def server(
    folder: Path, names: str, address: str, port: int, *, state: str = "state", within: Sequence[str] = ()
) -> Generator[psutil.Process]:
    """Serve as the hosts `names`, a pattern of ssh, with keys from `folder`, started by the command `within`.

    The client's part is added to `folder`/config.
    """
    own = f"{address}-{port}"
    (folder / own).write_text(_SERVER.format(address=address, port=port, folder=folder))
    with (folder / "config").open("a") as config:
        user = getpass.getuser()
        config.write(
            _CLIENT.format(names=names, address=address, port=port, user=user, folder=folder, state=state, root=ROOT)
        )
    log = folder / f"{own}.log"
    words = [*within, str(SSHD), "-D", "-f", str(folder / own), "-E", str(log)]
    with subprocess.Popen(words) as process:
        try:
            if not _answers(address, port, process):
                pytest.skip(f"sshd does not run as this user: {log.read_text().strip() if log.exists() else ''}")
            yield psutil.Process(process.pid)
        finally:
            process.kill()


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _answers(address: str, port: int, process: subprocess.Popen[bytes]) -> bool:
    while process.poll() is None:
        try:
            with socket.create_connection((address, port), 1.0):
                return True
        except OSError:
            continue
    return False
