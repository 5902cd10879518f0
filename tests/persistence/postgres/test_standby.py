"""Failovers between real servers: a standby that lags, one that commits together with the primary, the end of a run
while the server is away, and a cut network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import anyio
import asyncpg
import pytest

from plait import ParallelRunner, PostgresStore, Run
from plait.errors import StoreUnusable
from plait.events import StoreAwaited, StoreDegraded
from plait.persistence.tables import Mode
from tests.persistence.postgres.runs import dag
from tests.support.stores.network import network
from tests.support.stores.postgres import worker_dsn
from tests.support.stores.standby import Pair, pair

pytestmark = pytest.mark.slow

TASKS = 60


@pytest.fixture
def servers() -> Iterator[Pair]:
    with pair() as servers:
        yield servers


class Stages:
    """A backend as a function: its calls wait at chosen numbers until a test has changed the servers."""

    def __init__(self, *at: int) -> None:
        self.calls = 0
        self.reached = {number: anyio.Event() for number in at}
        self.go_on = {number: anyio.Event() for number in at}

    async def __call__(self, prompt: str) -> str:
        self.calls += 1
        for number in self.reached:
            if self.calls > number:
                self.reached[number].set()
                await self.go_on[number].wait()
        return f"re: {prompt}"


async def assert_whole(dsn: str, run_id: str) -> None:
    """Each task of the run is stored as completed at its first attempt, and nobody owns the run."""
    async with PostgresStore(dsn, mode="read") as store:
        record = await store.get_run(run_id)
        attempts = await store.list_attempts(run_id)
    assert record is not None
    assert (record.status, record.owner) == ("completed", None)
    assert len(attempts) == TASKS
    assert {one.status for one in attempts} == {"completed"}


@asynccontextmanager
async def started(dsn: str, backend: Stages, store_timeout: float = 10.0) -> AsyncGenerator[Run]:
    """Start a run of TASKS tasks, and yield it."""
    async with PostgresStore(dsn) as store:
        runner = ParallelRunner(backend, store=store, concurrency=4, store_timeout=store_timeout)
        async with runner.start(dag(TASKS)) as run:
            yield run


async def stored(dsn: str, run_id: str) -> int:
    async with PostgresStore(dsn, mode="read") as store:
        return sum(task.status == "completed" for task in await store.list_tasks(run_id))


async def test_a_standby_is_refused_until_it_is_promoted(servers: Pair) -> None:
    async with started(servers.dsn, Stages()) as run:
        await run.result()
    await servers.wait_until_equal()
    with pytest.raises(StoreUnusable, match="is a standby, which can only be read; name the primary server"):
        async with PostgresStore(servers.standby_dsn, mode="existing"):
            pass
    await assert_whole(servers.standby_dsn, run.run_id)
    await asyncio.to_thread(servers.fail_over)
    async with started(servers.standby_dsn, Stages()) as run:
        await run.result()
    await assert_whole(servers.standby_dsn, run.run_id)


async def test_what_a_lagging_standby_lost_is_written_again(servers: Pair) -> None:
    stages = Stages(10, 40)
    async with started(servers.dsn, stages) as run:
        await stages.reached[10].wait()
        await servers.wait_until_equal()
        await servers.cut_standby_off()
        stages.go_on[10].set()
        await stages.reached[40].wait()
        assert await stored(servers.dsn, run.run_id) >= 36  # acknowledged, and unknown to the standby
        await asyncio.to_thread(servers.fail_over)
        stages.go_on[40].set()
        result = await run.result()
    assert (len(result.text), stages.calls) == (TASKS, TASKS)
    assert [one.lost for one in result.degraded] == [0] * len(result.degraded)
    assert any("is next" in one.error for one in result.degraded)
    await assert_whole(servers.dsn, run.run_id)


async def test_a_standby_that_commits_with_the_primary_loses_nothing(servers: Pair) -> None:
    stages = Stages(20)
    await servers.wait_until_streaming()
    await servers.set_primary("synchronous_standby_names", "*")
    async with started(servers.dsn, stages) as run:
        await stages.reached[20].wait()
        await asyncio.to_thread(servers.fail_over)
        stages.go_on[20].set()
        result = await run.result()
    assert (len(result.text), stages.calls) == (TASKS, TASKS)
    assert not any("is next" in one.error for one in result.degraded)
    await assert_whole(servers.dsn, run.run_id)


async def test_a_run_that_ends_while_the_server_is_away_waits_for_the_failover(servers: Pair) -> None:
    stages = Stages(TASKS - 1)
    async with started(servers.dsn, stages) as run:
        await stages.reached[TASKS - 1].wait()
        await asyncio.to_thread(servers.stop_primary)
        stages.go_on[TASKS - 1].set()
        async for event in run.events():
            if isinstance(event, StoreAwaited):
                await asyncio.to_thread(servers.promote)
        result = await run.result()
    assert [one.lost for one in result.degraded] == [0] * len(result.degraded)
    await assert_whole(servers.dsn, run.run_id)


async def test_a_cut_network_delays_a_run_and_loses_nothing() -> None:
    """The connection stays open on both sides, but nothing passes."""
    stages, dsn = Stages(20), await asyncio.to_thread(worker_dsn)
    async with network(dsn) as link, started(link.dsn, stages, 0.5) as run:
        await stages.reached[20].wait()
        link.cut()
        stages.go_on[20].set()
        async for event in run.events():
            if isinstance(event, StoreDegraded):
                link.heal()
        result = await run.result()
    assert (len(result.text), stages.calls) == (TASKS, TASKS)
    assert [one.lost for one in result.degraded] == [0] * len(result.degraded) and result.degraded
    await assert_whole(dsn, run.run_id)


async def usual_user(servers: Pair) -> str:
    """Return the address of the primary for a new user with no right but to read the tables of plait."""
    async with PostgresStore(servers.dsn):  # makes the tables
        connection = await asyncpg.connect(servers.dsn)
    try:
        await connection.execute("CREATE ROLE usual LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO usual")
    finally:
        await connection.close()
    return servers.dsn.replace("postgres@", "usual@")


async def warnings(dsn: str, mode: Mode = "create") -> tuple[str, ...]:
    async with PostgresStore(dsn, mode=mode) as store:
        return await store.warnings()


async def test_a_usual_user_is_warned_of_asynchronous_standbys(servers: Pair) -> None:
    await servers.wait_until_streaming()
    usual = await usual_user(servers)
    [warning] = await warnings(usual, "read")
    assert warning.startswith("1 standby servers are asynchronous")
    assert await warnings(servers.dsn) == (warning,)
    await servers.set_primary("synchronous_standby_names", "*")
    assert await warnings(usual, "read") == await warnings(servers.dsn) == ()


async def test_a_commit_that_waits_for_no_standby_is_a_warning(servers: Pair) -> None:
    local = f"{servers.dsn}&synchronous_commit=local"
    await servers.wait_until_streaming()
    await servers.set_primary("synchronous_standby_names", "*")
    [warning] = await warnings(local)
    assert warning.startswith("synchronous_commit is local")
    await servers.set_primary("synchronous_standby_names", "")
    [warning] = await warnings(local)
    assert "asynchronous" in warning
