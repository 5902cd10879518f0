"""Attempts that answer at once on a host, over one connection: plait's cost without ssh and without a network.

The connection is a process on this machine that runs `plait host`, with its files in a temporary folder.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from benchmarks.gauge import body
from benchmarks.stores import sqlite_store
from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends.backend_protocol import Backend
from plait.hosts import SSHHost, SSHHosts

SLOTS = 64
_COMMAND = "import os, sys; os.execvp('sh', ['sh', '-c', sys.argv[2]])"


async def placed(shape: str, tasks: str, where: str = "host") -> dict[str, float]:
    """Measure `tasks` tasks in a fan or a chain on one host, or, with `where` as here, in this process.

    The cost of a task is that of all tasks but two, without the start of the connection.
    """
    with tempfile.TemporaryDirectory() as state:
        os.environ |= {"XDG_STATE_HOME": state, "PYTHONPATH": str(Path(__file__).parent.parent)}
        host = SSHHost("host", SLOTS, plait=str(Path(sys.executable).with_name("plait")))
        hosts = SSHHosts([host], ssh=[sys.executable, "-S", "-c", _COMMAND])
        backend: Backend | Callable[[str], Awaitable[str]] = hosts.placed(body) if where == "host" else body
        few = await _run(backend, shape, 2)
        took = await _run(backend, shape, int(tasks))
    wall, cpu = ((more - less) / (int(tasks) - 2) * 1e3 for more, less in zip(took, few, strict=True))
    return {"wall_s": took[0], "ms_per_task": wall, "cpu_ms_per_task": cpu}


async def _run(backend: Backend | Callable[[str], Awaitable[str]], shape: str, tasks: int) -> tuple[float, float]:
    """Return the wall time, and the CPU time of this process and of the host process, in seconds."""
    dag = DAG(Task(f"t{n}", "work", depends_on=(f"t{n - 1}",) if n and shape == "chain" else ()) for n in range(tasks))
    async with sqlite_store() as store:
        before, used = time.perf_counter(), _cpu()
        result = await ParallelRunner(backend, store=store, concurrency=SLOTS).run(dag)
        took = time.perf_counter() - before, _cpu() - used
    assert result.status is RunStatus.COMPLETED
    return took


def _cpu() -> float:
    every = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in every)


MEASURES = {"placed": placed}
