"""Texts that a run takes from an earlier run outlive the earlier run in PostgreSQL."""

from __future__ import annotations

import asyncio

import pytest

from plait.persistence import PostgresStore
from plait.persistence.contract.samples import whole
from tests.persistence.sqlite.test_copies import fill
from tests.support.stores.postgres import new_store, worker_dsn

RUNS = (("first", None), ("second", "first"), ("third", "second"), ("fourth", "first"))


@pytest.mark.parametrize("purged", [["first"], ["second"], ["first", "second"], ["second", "first"]], ids="-".join)
async def test_a_purge_loses_no_text_of_the_runs_that_stay(purged: list[str]) -> None:
    async with new_store() as store:
        for run_id, like in RUNS:
            await fill(store, run_id, like)
        sizes = await store.run_sizes()
        assert all(sizes[run_id] < sizes["first"] / 50 for run_id, like in RUNS if like is not None)
        kept = {run_id: await whole(store, run_id) for run_id, _ in RUNS if run_id not in purged}
        await store.purge(purged)
        assert {run_id: await whole(store, run_id) for run_id in kept} == kept


async def test_a_purge_beside_a_run_that_takes_texts_over_loses_none() -> None:
    async with new_store() as store, PostgresStore(worker_dsn()) as other:
        await fill(store, "first")
        expected = (await whole(store, "first"))[1:4:2]
        await asyncio.gather(fill(store, "second", "first"), other.purge(["first"]))
        assert (await whole(store, "second"))[1:4:2] == expected
