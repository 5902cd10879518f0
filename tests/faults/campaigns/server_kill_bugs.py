"""Bugs of a store on a server that the campaign of kills has to show. See runner/crashtest/mutants.py."""

from __future__ import annotations

import asyncio
from typing import Any

from plait.persistence import RunReleased, rules
from plait.persistence.postgres import statements
from plait.persistence.postgres.store import PostgresStore
from plait.runner.crashtest.mutants import Mutant, Original
from plait.runner.crashtest.trial import Kind

_FENCE = "epoch = $26 AND last_seq = $27 AND owner_id IS NOT DISTINCT FROM $28"
_NO_FENCE = "$26::bigint IS NOT NULL AND $27::bigint IS NOT NULL AND ($28::text IS NULL OR true)"
_under_way = set[asyncio.Task[None]]()


async def _acknowledge_first(write: Original, self: Any, batch: Any) -> None:
    task = asyncio.create_task(write(self, batch))
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)


def _leave_the_fence_out(write_sql: Original, added: Any) -> str:
    statement: str = write_sql(added)
    assert _FENCE in statement
    return statement.replace(_FENCE, _NO_FENCE)


def _keep_the_lease(advance_head: Original, head: Any, change: Any, *rest: Any) -> Any:
    return head if isinstance(change, RunReleased) else advance_head(head, change, *rest)


BUGS = (
    Mutant(
        "acknowledged before the server's answer",
        PostgresStore,
        "write",
        _acknowledge_first,
        ("txn.begun", "txn.before_commit"),
        range(3, 11),
    ),
    Mutant(
        "no fence in the one statement",
        statements,
        "write_sql",
        _leave_the_fence_out,
        ("batch.before_write",),
        range(2, 11),
        Kind.RIVAL,
    ),
    Mutant("a lease not released", rules, "advance_head", _keep_the_lease),
)
