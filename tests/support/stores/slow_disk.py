"""A run in a process of its own whose disk is slow, fails at syncs or is full (fsync_shim.c): what it saw and wrote."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias
from unittest import mock

import anyio

from plait import DAG, ParallelRunner, RunResult, Task
from plait.errors import StoreError
from plait.events import TaskCompleted
from plait.persistence import Batch, SQLiteStore, sqlite_store

RUN = "r"
FILE = "runs.db"
_SOURCE = Path(__file__).with_name("fsync_shim.c")
_LIMIT = 120.0  # seconds

Shape: TypeAlias = tuple[int, int]
"""How many chains, and how many tasks in each: so many at once, and so many commits one after the other."""
Sabotage: TypeAlias = Literal[
    "synced on the event loop", "acknowledged although the sync failed", "going on after SQLITE_FULL"
]


def missing() -> str | None:
    """Why no disk can be slowed here; None when it can."""
    if not sys.platform.startswith("linux"):
        return "slows the disk by LD_PRELOAD, which is Linux's"
    return None if shutil.which("gcc") else "needs gcc, to build what slows the disk"


def build(folder: Path) -> Path:
    """The shim, built in `folder`."""
    shim = folder / "fsync_shim.so"
    subprocess.run(["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", shim, _SOURCE, "-ldl"], check=True)
    return shim


def run_on(
    shim: Path, folder: Path, shape: Shape, settings: Mapping[str, int], sabotage: Sabotage | None = None
) -> dict[str, Any]:
    """What a run in `folder` saw, nothing if it was killed; `settings` are those of fsync_shim.c, for
    SQLite's WAL.
    """
    told = {name: str(value) for name, value in settings.items()}
    done = subprocess.run(
        [sys.executable, "-m", __name__, folder, json.dumps(shape), sabotage or ""],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "LD_PRELOAD": str(shim), "SYNC_FILES": f"{FILE}-wal", **told},
        capture_output=True,
        text=True,
        timeout=_LIMIT,
        check=False,
    )
    if "SYNC_KILL_AT" in settings and done.returncode == -signal.SIGKILL:
        return {}
    assert done.returncode == 0, done.stderr
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def acknowledged(folder: Path) -> set[str]:
    """The tasks whose completion the store had acknowledged to the run in `folder`."""
    return set((folder / "acknowledged").read_text().split())


def answer_to(prompt: str) -> str:
    """The one right answer."""
    return f"{prompt} " + "x" * (len(prompt) * 100)


def _dag(shape: Shape) -> DAG:
    chains, length = shape
    upstream = [[f"t{n - chains}"] if n >= chains else [] for n in range(chains * length)]
    return DAG([Task(f"t{n}", prompt=f"t{n}", depends_on=needed) for n, needed in enumerate(upstream)])


@contextmanager
def _going_on(connection: sqlite3.Connection, begin: str) -> Generator[None]:
    """A transaction that is taken to be there still after the disk was full, when SQLite has rolled it back."""
    connection.execute(begin)
    try:
        yield
        with suppress(sqlite3.OperationalError):  # there is space again, and then: no transaction is active
            try:
                connection.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_FULL:
                    raise
                connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


class _Noting(SQLiteStore):
    """The store; what it has acknowledged is noted beside it. From the write `PAGES_FROM` on, counted from 1, its
    connection has no page left.
    """

    def __init__(self, folder: Path, sabotage: str) -> None:
        super().__init__(folder / FILE)
        self._note = (folder / "acknowledged").open("a", buffering=1)
        self._lies = sabotage == "acknowledged although the sync failed"
        self._blocks = sabotage == "synced on the event loop"
        self._until_full = int(os.environ.get("PAGES_FROM", "0"))

    async def write(self, batch: Batch) -> None:
        self._until_full -= 1
        if self._until_full == 0:
            await self._call(_leave_no_page)
        try:
            await super().write(batch)
        except StoreError:
            if not self._lies:
                raise
        if self._blocks:
            time.sleep(0.05)  # noqa: ASYNC251 - that is the bug
        self._note.writelines(f"{change.task_id}\n" for change in batch.events if isinstance(change, TaskCompleted))


def _leave_no_page(connection: sqlite3.Connection) -> None:
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()


async def _run(folder: Path, shape: Shape, sabotage: str) -> dict[str, Any]:
    late: list[float] = []
    if sabotage == "going on after SQLITE_FULL":
        mock.patch.object(sqlite_store, "transaction", _going_on).start()

    async def work(prompt: str) -> str:
        await anyio.sleep(0.005)
        return answer_to(prompt)

    async def sample() -> None:
        while True:
            before = time.perf_counter()
            await anyio.sleep(0.001)
            late.append(time.perf_counter() - before - 0.001)

    results: list[RunResult] = []
    async with _Noting(folder, sabotage) as store, anyio.create_task_group() as group:
        group.start_soon(sample)
        results.append(await ParallelRunner(work, store=store, concurrency=shape[0]).run(_dag(shape), RUN))
        group.cancel_scope.cancel()
    (result,) = results
    late.sort()
    return {
        "status": result.status.value,
        "wrong": [task_id for task_id, task in result.tasks.items() if task.text != answer_to(task_id)],
        "degraded": [{"until": one.until, "lost": one.lost} for one in result.degraded],
        "p50_ms": late[len(late) // 2] * 1e3,
        "p99_ms": late[int(len(late) * 0.99)] * 1e3,
        "max_ms": late[-1] * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(anyio.run(_run, Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3])))
