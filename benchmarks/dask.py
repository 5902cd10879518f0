"""Attempts that answer at once on a Dask cluster of this machine, beside tasks of Dask that answer at once."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio
import psutil

from benchmarks.gauge import body
from benchmarks.stores import sqlite_store
from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends.backend_protocol import Backend
from plait.hosts import DaskHosts

_PORT = "18786"
_SLOTS = 64


async def on_dask(shape: str, tasks: str, what: str = "attempts") -> dict[str, float]:
    """Measure `tasks` attempts in a fan or a chain on one worker, or, with `what` as submit, bare calls of
    `client.submit`. The cost of a task is that of all tasks but two, without the start of the connection.
    """
    async with _cluster() as (address, processes):
        measure = _submit if what == "submit" else _run
        used = [_cpu(processes)]
        few = await measure(address, shape, 2)
        used.append(_cpu(processes))
        took = await measure(address, shape, int(tasks))
        used.append(_cpu(processes))
    cpu = (used[2] - used[1]) - (used[1] - used[0])
    more = int(tasks) - 2
    return {"wall_s": took, "ms_per_task": (took - few) / more * 1e3, "cpu_ms_per_task": cpu / more * 1e3}


def _cpu(processes: Sequence[int]) -> float:
    """Return the CPU time of this process and of others, with their children that have ended, in seconds."""
    times = [psutil.Process(pid).cpu_times() for pid in (os.getpid(), *processes)]
    return sum(one.user + one.system + one.children_user + one.children_system for one in times)


def _client(address: str, **options: Any) -> Any:
    """Return a client. Imported here: distributed is heavy, and other benchmarks measure memory."""
    return import_module("distributed").Client(address, **options)


async def _run(address: str, shape: str, tasks: int) -> float:
    backend: Backend = DaskHosts(address).placed(body)
    dag = DAG(Task(f"t{n}", "work", depends_on=(f"t{n - 1}",) if n and shape == "chain" else ()) for n in range(tasks))
    async with sqlite_store() as store:
        before = time.perf_counter()
        result = await ParallelRunner(backend, store=store, concurrency=_SLOTS).run(dag)
        took = time.perf_counter() - before
    assert result.status is RunStatus.COMPLETED
    return took


async def _submit(address: str, shape: str, tasks: int) -> float:
    async with _client(address, asynchronous=True) as client:
        before = time.perf_counter()
        if shape == "chain":
            for _ in range(tasks):
                await client.submit(body, "work", pure=False)
        else:
            await client.gather([client.submit(body, "work", pure=False) for _ in range(tasks)])
        return time.perf_counter() - before


@asynccontextmanager
async def _cluster() -> AsyncGenerator[tuple[str, Sequence[int]]]:
    """Start a scheduler and a worker. Return the address, once the worker is there, and the processes."""
    dask, local = Path(sys.executable).with_name("dask"), ("--host", "127.0.0.1", "--no-dashboard")
    address = f"tcp://127.0.0.1:{_PORT}"
    with tempfile.TemporaryDirectory() as state:
        environment = {**os.environ, "XDG_STATE_HOME": state, "PYTHONPATH": str(Path(__file__).parent.parent)}
        worker = ("--nthreads", "64", "--no-nanny", "--resources", f"agents={_SLOTS}", "--local-directory", state)
        commands = (("scheduler", *local, "--port", _PORT), ("worker", address, *local, *worker))
        quiet = subprocess.DEVNULL
        processes = [
            subprocess.Popen((dask, *words), env=environment, stdout=quiet, stderr=quiet)  # noqa: ASYNC220
            for words in commands
        ]
        try:
            async with _client(address, asynchronous=True) as client:
                with anyio.fail_after(60):
                    await client.wait_for_workers(1)
            yield address, [process.pid for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()


MEASURES = {"dask": on_dask}
