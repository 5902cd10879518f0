"""`plait budget`: the money of runs, and the accounts of a store."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio

from plait import SQLiteStore
from plait.clock_and_ids import Clock
from plait.runner.engine.stored_ledger import StoredLedger
from plait.runner.scheduling.own_limits import CallSize, RateLimiter, RateLimits
from tests.support.processes.command import plait_here

PLAN = """
budget: 5
backends: {w: {kind: function, call: "work.py:work"}}
tasks: [{id: asks, prompt: p, backend: w}]
"""
WORK = """
from plait import ask

async def work(prompt):
    return await ask("Which?")
"""


def test_an_empty_store_says_what_to_write(tmp_path: Path) -> None:
    anyio.run(_used, tmp_path, 0)
    assert "`limits`" in plait_here(tmp_path, "budget").out
    assert plait_here(tmp_path, "budget", "--json").value == {"runs": [], "accounts": []}


async def _used(folder: Path, calls: int) -> None:
    limiter = RateLimiter(RateLimits(600, 60_000), 0.0, is_granted=True)
    async with SQLiteStore(folder / ".plait" / "plait.db") as store:
        ledger = StoredLedger(store, "api 1234", Clock())
        for _ in range(calls):
            await ledger.fill(limiter, CallSize(0), 1, lambda _until, _why: None)
            limiter.reserve(CallSize(0), Clock().monotonic())
        if calls:
            await ledger.close(Clock().wall() + 3_600)


def test_money_and_accounts_are_shown(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK)
    plait_here(tmp_path, "run", "plan.yaml")
    anyio.run(_used, tmp_path, 3)
    told = plait_here(tmp_path, "budget", "--json").value
    assert [(one["usd"], one["spent_usd"], one["reserved_usd"]) for one in told["runs"]] == [(5.0, 0.0, 0.0)]
    [account] = told["accounts"]
    assert (account["account"], account["requests_per_minute"], account["tokens_per_minute"]) == (
        "api 1234",
        600,
        60_000,
    )
    assert [round(one["requests"]) for one in account["used_by"].values()] == [3]
    assert account["closed_until"] is not None
    lines = plait_here(tmp_path, "budget").out.splitlines()
    assert lines[0].split() == ["RUN", "BUDGET", "SPENT", "RESERVED"]
    assert any("600 requests, 60,000 tokens" in line for line in lines)
    assert any("(3 calls)" in line for line in lines)


def test_a_damaged_account_is_named(tmp_path: Path) -> None:
    anyio.run(_used, tmp_path, 1)
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        database.execute("UPDATE accounts SET state = '{\"limits\": 1}'")
        database.commit()
    done = plait_here(tmp_path, "budget")
    assert (done.code, "account 'api 1234' is damaged" in done.err) == (2, True)
