"""A Dask cluster of this machine: a scheduler and workers as processes, each worker with a host's files of its own."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from plait.backends.hosts.dask_hosts import DaskHosts
from tests.support.hosts.namespaces import Namespace
from tests.support.hosts.ssh import ROOT
from tests.support.processes.warm import Warm

LOADED = (
    "dask.cli",
    "distributed.cli.dask_scheduler",
    "distributed.cli.dask_worker",
    "plait.backends.hosts.dask_hosts",
)
"""Modules that a scheduler or a worker would import for a second."""
_DASK = """
import runpy
import dask.config
dask.config.refresh()  # from the environment: it has been imported in another
runpy.run_module("dask", run_name="__main__", alter_sys=True)
"""
_LIMIT_S = 60.0


class DaskCluster:
    """A cluster with its files in `folder`. The workers of a cluster begun anew have the same names."""

    def __init__(
        self,
        folder: Path,
        agents: Mapping[str, int],
        *,
        nanny: bool = False,
        host: str = "127.0.0.1",
        worker_host: str = "",
    ) -> None:
        self.folder = folder
        self._host, self._worker_host = host, worker_host or host
        self.scheme = "tcp"
        self.certificate: Path | None = None
        self._nanny = "--nanny" if nanny else "--no-nanny"
        self.agents = agents
        """The number of attempts at once, by the name of the worker."""
        self.port = _free_port()
        self.processes: dict[str, Warm] = {}
        self.namespaces: Mapping[str, Namespace] = {}
        """The namespaces of the workers that are in one, by name. The scheduler is in none, and needs TLS then."""
        self.settings: Mapping[str, str] = {}
        """Settings of Dask for the scheduler and the workers, as variables of the environment."""
        folder.mkdir(exist_ok=True)

    @property
    def address(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> DaskCluster:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(*self.processes)

    def hosts(self, *, patience: float = 30.0) -> DaskHosts:
        return DaskHosts(self.address, patience=patience)

    def start(self) -> None:
        """Start the scheduler and all workers. Return once the scheduler listens, before the workers are ready.

        A run whose first connection to its scheduler fails has failed: plait takes the address for a wrong one.
        """
        self.start_scheduler()
        until = time.monotonic() + _LIMIT_S
        while True:
            with suppress(ConnectionRefusedError), socket.create_connection((self._host, self.port)):
                break
            assert time.monotonic() < until, self.log("scheduler")
            time.sleep(0.01)
        for name in self.agents:
            self.start_worker(name)

    async def ready(self) -> None:
        """Return once each worker is there."""
        from distributed import Client  # takes a second, and most who import this start no cluster

        async with Client(self.address, asynchronous=True, timeout=_LIMIT_S) as client:
            await client.wait_for_workers(len(self.agents), timeout=_LIMIT_S)  # pyright: ignore[reportGeneralTypeIssues]

    def start_scheduler(self) -> None:
        self._start(
            "scheduler", "scheduler", "--host", self._host, "--port", str(self.port), "--no-dashboard", *self._tls()
        )

    def start_worker(self, name: str) -> None:
        space = self.namespaces.get(name)
        host = self._worker_host if space is None else space.address
        scheduler = self.address if space is None else f"{self.scheme}://{space.near_address}:{self.port}"
        words = ["worker", scheduler, "--host", host, "--no-dashboard", "--nthreads", "1", "--name", name]
        words += ["--local-directory", str(self.folder), *self._tls()]
        words += ["--resources", f"agents={self.agents[name]}", self._nanny]
        self._start(name, *words, XDG_STATE_HOME=str(self.folder / name))

    def kill(self, *names: str) -> None:
        """SIGKILL of each process, and of the worker of a nanny; returns once they are gone."""
        for name in names:
            with self.processes.pop(name) as process, suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def suspend(self, name: str) -> None:
        """SIGSTOP of a process: its connections stay, and it is silent."""
        os.killpg(self.processes[name].pid, signal.SIGSTOP)

    def wake(self, name: str) -> None:
        """SIGCONT of a process."""
        os.killpg(self.processes[name].pid, signal.SIGCONT)

    def wait(self, *names: str) -> None:
        """Return once the processes have exited by themselves."""
        for name in names:
            self.processes[name].wait(_LIMIT_S)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def use_tls(self) -> dict[str, str]:
        """Make a certificate for all, before the start. Return the settings of a client of Dask, by variable."""
        self.scheme, self.certificate = "tls", self.folder / "cluster.pem"
        key = ("-keyout", str(self.certificate), "-out", str(self.certificate))
        words = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=cluster", *key)
        subprocess.run(("openssl", *words), check=True, capture_output=True)
        names = ("CA_FILE", "CLIENT__CERT", "CLIENT__KEY")
        return {f"DASK_DISTRIBUTED__COMM__TLS__{name}": str(self.certificate) for name in names}

    def _tls(self) -> list[str]:
        if self.certificate is None:
            return []
        return [f"{option}={self.certificate}" for option in ("--tls-ca-file", "--tls-cert", "--tls-key")]

    def _start(self, name: str, *words: str, **environment: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            space = self.namespaces.get(name)
            self.processes[name] = Warm(
                [sys.executable, "-c", _DASK if space is None else space.entrance + _DASK, *words],
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": str(ROOT), **self.settings, **environment},
                start_new_session=True,
                loaded=LOADED,
                warnings="default",
            )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
