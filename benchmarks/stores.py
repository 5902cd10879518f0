"""The stores of measured durable runs, and PostgreSQL beside SQLite."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from benchmarks import graphs
from benchmarks.delay import delayed
from plait import ParallelRunner
from plait.persistence import PostgresStore, SQLiteStore
from tests.support.stores.postgres import address, empty, start_server


@asynccontextmanager
async def sqlite_store() -> AsyncIterator[SQLiteStore]:
    """Open a temporary store on the disk of the checkout; a file system in memory would give meaningless figures."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        async with SQLiteStore(Path(folder) / "plait.db") as store:
            yield store


@dataclass(frozen=True, slots=True)
class Case:
    """A run that both stores keep, and the share of SQLite's tasks/s that PostgreSQL has to reach."""

    shape: str
    tasks: int
    at_once: int
    to_reach: float
    round_trip_s: float = 0.0
    """The time that the network between runner and server adds to a round trip."""

    @property
    def name(self) -> str:
        """The case in words."""
        away = f" and a round trip of {self.round_trip_s * 1e3:g} ms" if self.round_trip_s else ""
        return f"{self.shape} of {self.tasks:,}{away}"


CASES = (
    Case("layered", 10_000, 256, 0.6),
    Case("layered", 10_000, 256, 0.5, round_trip_s=0.001),
    Case("chain", 1_000, 1, 0.6),
)


async def _body(_prompt: str) -> str:
    return "An answer."


async def _rate(store: SQLiteStore | PostgresStore, case: Case) -> float:
    dag = graphs.dag(graphs.SHAPES[case.shape](case.tasks))
    before = time.perf_counter()
    result = await ParallelRunner(_body, store=store, concurrency=case.at_once).run(dag)
    assert len(result.text) == case.tasks
    assert not result.degraded
    return case.tasks / (time.perf_counter() - before)


async def stores(number: str, times: str) -> dict[str, float]:
    """Measure the case `CASES[number]` on both stores in turn, `times` times. Return the medians of tasks/s and of
    their ratio, and the share of batches that are one round trip.

    The server is the benchmark's own, with durable commits.
    """
    case = CASES[int(number)]
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        server = start_server(Path(folder) / "data")
        try:
            return await _compare(address(server), case, int(times))
        finally:
            server.cleanup()


async def _compare(dsn: str, case: Case, times: int) -> dict[str, float]:
    sqlite: list[float] = []
    postgres: list[float] = []
    single, batches = 0, 0
    with _network(dsn, case.round_trip_s) as address_:
        for _ in range(times):
            async with sqlite_store() as store:
                sqlite.append(await _rate(store, case))
            async with PostgresStore(address_) as server:
                await empty(dsn)
                postgres.append(await _rate(server, case))
                single, batches = single + server.batches["single"], batches + server.batches["all"]
    return {
        "sqlite_tasks_s": statistics.median(sqlite),
        "postgres_tasks_s": statistics.median(postgres),
        "ratio": statistics.median(one / other for one, other in zip(postgres, sqlite, strict=True)),
        "one_round_trip": single / batches,
    }


@contextmanager
def _network(dsn: str, round_trip_s: float) -> Generator[str]:
    """Yield the address of the server behind a network of this round trip."""
    if not round_trip_s:
        yield dsn
        return
    parts = urlsplit(dsn)
    with delayed(f"{parse_qs(parts.query)['host'][0]}/.s.PGSQL.5432", round_trip_s / 2) as port:
        yield f"postgresql://postgres@127.0.0.1:{port}{parts.path}"


MEASURES = {"stores": stores}
