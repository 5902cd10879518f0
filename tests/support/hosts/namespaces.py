"""Hosts in network namespaces, each joined to this one by a pair of interfaces that a test can cut. Needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress

import psutil
import pytest

CAN_BE_MADE = os.geteuid() == 0 and shutil.which("ip") is not None
_CLONE_NEWNET = 0x40000000
needs_namespaces = pytest.mark.skipif(not CAN_BE_MADE, reason="network namespaces need root and the command ip")


class Namespace:
    """A host at `address`, reached from this namespace alone."""

    def __init__(self, number: int) -> None:
        # The number of this process keeps the tests of two processes apart.
        own = os.getpid() % 1_000_000
        self.name = f"plait{own}n{number}"
        self.address = f"10.{100 + own // 250 % 100}.{own % 250}.{4 * number + 2}"
        self.near_address = f"{self.address.rpartition('.')[0]}.{4 * number + 1}"
        """The address of this namespace, as seen by the host."""
        self._near, self._far = f"pl{own}n{number}a", f"pl{own}n{number}b"

    @property
    def within(self) -> list[str]:
        """The words before a command that runs on the host."""
        return ["ip", "netns", "exec", self.name]

    @property
    def entrance(self) -> str:
        """The Python code with which a process without threads moves to the host."""
        opened = f"os.open('/run/netns/{self.name}', os.O_RDONLY)"
        return f"import ctypes, os; assert not ctypes.CDLL(None).setns({opened}, {_CLONE_NEWNET})"

    def make(self) -> None:
        """Make the namespace. Raises CalledProcessError without the rights."""
        _ip("netns", "add", self.name)
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far, "netns", self.name)
        _ip("address", "add", f"{self.near_address}/30", "dev", self._near)
        _ip("link", "set", self._near, "up")
        _ip("-n", self.name, "address", "add", f"{self.address}/30", "dev", self._far)
        _ip("-n", self.name, "link", "set", "lo", "up")
        self.heal()

    def cut(self) -> None:
        """Drop every packet, both ways and silently: neither side is told."""
        _ip("-n", self.name, "link", "set", self._far, "down")

    def heal(self) -> None:
        """Let packets pass again."""
        _ip("-n", self.name, "link", "set", self._far, "up")

    def processes(self) -> list[psutil.Process]:
        """The processes of the host."""
        told = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        found: list[psutil.Process] = []
        for pid in told.split():
            with suppress(psutil.NoSuchProcess):
                found.append(psutil.Process(int(pid)))
        return found

    def remove(self) -> None:
        """End the processes of the host, and the host."""
        with suppress(subprocess.CalledProcessError):  # the end of a namespace removes its interfaces only later
            _ip("link", "delete", self._near)
        with suppress(subprocess.CalledProcessError):
            for process in self.processes():
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            _ip("netns", "delete", self.name)


@contextmanager
def namespaces(count: int) -> Generator[list[Namespace]]:
    """Make hosts, and remove the hosts and their processes at the end. Skips without the rights."""
    made = [Namespace(number) for number in range(count)]
    try:
        try:
            for one in made:
                one.make()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespace can be made here: {error.stderr.strip()}")
        yield made
    finally:
        for one in made:
            one.remove()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, text=True, check=True)
