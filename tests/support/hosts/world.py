"""Hosts that are folders of this machine: see ssh.py."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from plait.backends.hosts.host_backend import SSHHost, SSHHosts
from plait.backends.process.process_table import start_time

PLAIT = str(Path(sys.executable).with_name("plait"))
SSH = str(Path(__file__).with_name("ssh.py"))


class HostFolder:
    """The hosts below a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    @property
    def ssh(self) -> list[str]:
        return [sys.executable, "-S", SSH, str(self.folder)]

    def hosts(self, *names: str, slots: int = 4, patience: float = 30.0) -> SSHHosts:
        every = [SSHHost(name, slots=slots, plait=PLAIT) for name in names]
        return SSHHosts(every, ssh=self.ssh, patience=patience)

    def set_away(self, name: str) -> None:
        (self.folder / f"{name}.away").touch()

    def set_silent(self, name: str) -> None:
        """Stop the host processes, those of later connections too."""
        (self.folder / f"{name}.silent").touch()
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def set_back(self, name: str) -> None:
        for how in ("away", "silent"):
            (self.folder / f"{name}.{how}").unlink(missing_ok=True)

    def processes(self, name: str) -> list[int]:
        """The host processes of all connections that live."""
        path = self.folder / f"{name}.pids"
        pids = map(int, path.read_text().split()) if path.exists() else ()
        return [pid for pid in pids if start_time(pid) is not None]

    def kill(self, name: str) -> None:
        """SIGKILL of the host process; returns once it is gone."""
        for pid in self.processes(name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            while start_time(pid) is not None:
                pass
