"""The stores of measured durable runs.

`python -m benchmarks.stores` compares PostgreSQL with SQLite, in turn: tasks/s, and the share of batches that are one
round trip.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks import graphs
from plait.persistence import PostgresStore, SQLiteStore
from plait.runner import ParallelRunner
from tests.support.stores.postgres import address, empty, start_server


@asynccontextmanager
async def sqlite_store() -> AsyncIterator[SQLiteStore]:
    """Open a temporary store on the disk of the checkout; a file system in memory would give meaningless figures."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        async with SQLiteStore(Path(folder) / "plait.db") as store:
            yield store


CASES = (("layered", 10_000, 256), ("chain", 1_000, 1))
RELATIVE = {"layered": 0.65, "chain": 0.45}
"""The shares of SQLite's tasks/s that PostgreSQL has to reach on the same machine."""


async def _body(_prompt: str) -> str:
    return "An answer."


async def _rate(store: SQLiteStore | PostgresStore, shape: str, tasks: int, at_once: int) -> float:
    dag = graphs.dag(graphs.SHAPES[shape](tasks))
    before = time.perf_counter()
    result = await ParallelRunner(_body, store=store, concurrency=at_once).run(dag)
    assert len(result.text) == tasks
    assert not result.degraded
    return tasks / (time.perf_counter() - before)


async def compare(dsn: str, times: int = 3) -> dict[str, dict[str, float]]:
    """Return for each case the medians of tasks/s, their ratio, and the share of batches that are one round trip."""
    found: dict[str, dict[str, float]] = {}
    for shape, tasks, at_once in CASES:
        sqlite, postgres, single, batches = [], [], 0, 0
        for _ in range(times):
            async with sqlite_store() as store:
                sqlite.append(await _rate(store, shape, tasks, at_once))
            async with PostgresStore(dsn) as server:
                await empty(dsn)
                postgres.append(await _rate(server, shape, tasks, at_once))
                single, batches = single + server.batches.single, batches + server.batches.all
        rates = statistics.median(sqlite), statistics.median(postgres)
        found[f"{shape} {tasks}"] = {
            "sqlite_tasks_s": round(rates[0]),
            "postgres_tasks_s": round(rates[1]),
            "ratio": round(rates[1] / rates[0], 2),
            "to_reach": RELATIVE[shape],
            "one_round_trip": round(single / batches, 4),
        }
    return found


def main() -> None:
    """Compare the stores, on PLAIT_TEST_POSTGRES or on a server of the benchmark's own, with durable commits."""
    dsn = os.environ.get("PLAIT_TEST_POSTGRES")
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        server = None if dsn else start_server(Path(folder) / "data")
        json.dump(asyncio.run(compare(dsn or address(server))), sys.stdout, indent=2)
        if server is not None:
            server.cleanup()


if __name__ == "__main__":
    main()
