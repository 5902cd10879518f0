"""A run on a PostgreSQL server whose host goes away: the wait is stored, and another process reads it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from plait import ParallelRunner, PostgresStore, RunStatus, events
from plait.events import HostAway
from plait.persistence import EventRecord
from plait.runner.state.stored_run import stored_event
from tests.support.agents.outliving import RUN
from tests.support.hosts.agent import Agent
from tests.support.hosts.outliving import HostsWorld
from tests.support.stores.postgres import empty, worker_dsn


async def stored(dsn: str) -> list[EventRecord]:
    """Return the events of hosts that are away, as another process reads them."""
    async with PostgresStore(dsn, mode="read") as store:
        return list(await store.list_events(RUN, kind=HostAway.kind))


async def test_a_host_that_is_away_and_back_is_stored(tmp_path: Path) -> None:
    dsn = await asyncio.to_thread(worker_dsn)
    await empty(dsn)
    world = HostsWorld(tmp_path)
    world.plan({"id": "a", "prompt": "work [[until go]]"})
    backend = world.hosts.hosts("m1").placed(Agent(str(tmp_path)))
    published: list[events.HostAway] = []
    async with PostgresStore(dsn) as store, ParallelRunner(backend, store=store).start(world.dag(), RUN) as run:
        async for event in run.events():
            if isinstance(event, events.SessionOpened) and not published:
                world.hosts.set_away("m1")
                world.hosts.kill("m1")
            if isinstance(event, events.HostAway):
                published.append(event)
                assert len(await stored(dsn)) == len(published)
                if event.tasks:
                    world.hosts.set_back("m1")
                else:
                    world.allow("go")
        result = await run.result()
    assert (result.status, len(world.turns)) == (RunStatus.COMPLETED, 1)
    away, back = [stored_event(HostAway, one) for one in await stored(dsn)]
    assert [away, back] == published
    assert (away.host, away.tasks, away.since is None) == ("m1", ("a",), False)
    assert (back.host, back.tasks, back.since) == ("m1", (), None)
