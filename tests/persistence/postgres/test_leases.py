"""Leases of owners whose clocks differ from the server's."""

from __future__ import annotations

import time

import anyio
import asyncpg
import pytest

from plait import DAG, ParallelRunner, PostgresStore, Task
from plait.clock_and_ids import Clock, iso
from plait.events import LeaseRenewed, RunClaimed, RunReleased
from tests.contracts.store.samples import CREATED, RUN, RUNNING, Writer, owner, run_becomes

SKEWS = {"ahead": 3600.0, "behind": -3600.0}
LEASE_S = 30.0


class Skewed(Clock):
    """The clock of a host that is `skew` seconds ahead of the server."""

    def __init__(self, skew: float) -> None:
        self._skew = skew

    def wall(self) -> float:
        return time.time() + self._skew


def claim(clock: Clock, lease: float, owner_id: str = "owner-1") -> RunClaimed:
    return RunClaimed(iso(clock.wall()), owner(owner_id), clock.wall() + lease)


async def claimable_after(store: PostgresStore, dsn: str, seconds: float) -> bool:
    """Return whether a worker would take the one run `seconds` after the owner's last batch."""
    connection = await asyncpg.connect(dsn)
    try:
        back = "UPDATE runs SET written_at = clock_timestamp() - make_interval(secs => $1)"
        await connection.execute(back, seconds)
    finally:
        await connection.close()
    return bool(await store.list_claimable())


@pytest.mark.parametrize("skew", SKEWS.values(), ids=SKEWS)
async def test_a_run_is_free_one_lease_after_the_last_batch(store: PostgresStore, dsn: str, skew: float) -> None:
    begun = anyio.Event()

    async def work(prompt: str) -> str:
        begun.set()
        await anyio.sleep_forever()
        return prompt

    runner = ParallelRunner(work, store=store, clock=Skewed(skew), lease=LEASE_S)
    async with runner.start(DAG([Task(id="a", prompt="one")])) as run:
        await begun.wait()
        assert await store.list_claimable() == ()
        assert not await claimable_after(store, dsn, LEASE_S - 5)
        assert await claimable_after(store, dsn, LEASE_S + 1)
        run.stop()


@pytest.mark.parametrize("skew", SKEWS.values(), ids=SKEWS)
async def test_the_lease_of_the_last_claim_counts(store: PostgresStore, dsn: str, skew: float) -> None:
    clock, writer = Skewed(skew), Writer(store, RUN)
    await writer.write(CREATED, claim(clock, LEASE_S), RUNNING)
    # A renewal that waited for the store is written late; the length of the lease stays.
    await writer.write(LeaseRenewed("2026-11-21T23:00:00.000Z", clock.wall() + LEASE_S - 20))
    assert not await claimable_after(store, dsn, LEASE_S - 5)
    assert await claimable_after(store, dsn, LEASE_S + 1)
    await writer.write(claim(clock, 2 * LEASE_S, "owner-2"))
    assert not await claimable_after(store, dsn, LEASE_S + 1)
    assert await claimable_after(store, dsn, 2 * LEASE_S + 1)
    await writer.write(RunReleased(iso(clock.wall())))
    assert await claimable_after(store, dsn, 0)


async def test_a_waiting_run_whose_claimant_died_is_free_one_lease_later(store: PostgresStore, dsn: str) -> None:
    clock, writer = Skewed(0), Writer(store, RUN)
    await writer.write(CREATED, RUNNING, run_becomes(iso(clock.wall()), "waiting_input"), claim(clock, LEASE_S))
    assert not await claimable_after(store, dsn, LEASE_S - 5)
    assert await claimable_after(store, dsn, LEASE_S + 1)
