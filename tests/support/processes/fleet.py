"""Workers of a fleet in processes of their own, on a SQLite file or a PostgreSQL server."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes.command import environment
from tests.support.processes.warm import Warm
from tests.support.stores.postgres import empty, worker_dsn

LIMIT_S = 120.0
STORES = ("sqlite", "postgres")


def empty_store(kind: str, folder: Path) -> str:
    """Return the place of an empty store of this kind, as `--store` takes it."""
    if kind == "sqlite":
        return str(folder / "plait.db")
    dsn = worker_dsn()
    asyncio.run(empty(dsn))
    return dsn


@contextmanager
def worker(folder: Path, store: str, concurrency: int = 2, *host: str) -> Generator[Warm]:
    """A worker with a lease of `fleet_worker.LEASE_S`, as if on the machine `host`, killed at the end of the block."""
    command = [sys.executable, "-m", "tests.support.processes.fleet_worker", store, str(concurrency), *host]
    process = Warm(command, cwd=folder, env=environment(), stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stop(process: Warm) -> str:
    """Stop a worker by SIGTERM, and return what it wrote to standard error."""
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=LIMIT_S)[1]
    assert process.returncode == 0, said
    return said


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)
