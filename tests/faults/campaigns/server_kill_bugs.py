"""Bugs of a store on a server that the campaign of kills has to show. See tests/faults/crashtest/mutants.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from plait.events import RunEnded, RunReleased
from plait.persistence import tables, write_rules
from plait.persistence.postgres_store import PostgresStore
from tests.faults.crashtest.mutants import Mutant, Original
from tests.faults.crashtest.trial import Kind

_FENCE = "epoch = ? AND last_seq = ? AND owner_id IS NOT DISTINCT FROM ?"
_NO_FENCE = "?::bigint IS NOT NULL AND ?::bigint IS NOT NULL AND (?::text IS NULL OR true)"
_under_way = set[asyncio.Task[None]]()


async def _acknowledge_first(write: Original, self: Any, batch: Any) -> None:
    task = asyncio.create_task(write(self, batch))
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)


def _leave_the_fence_out(for_all_rows: Original, writes: Any, head: Any = None) -> str:
    statement: str = for_all_rows(writes, head)
    assert head is None or _FENCE in statement
    return statement.replace(_FENCE, _NO_FENCE)


def _keep_the_lease(advance_head: Original, head: Any, change: Any, *rest: Any) -> Any:
    after = advance_head(head, change, *rest)
    if not isinstance(change, RunReleased | RunEnded):
        return after
    return replace(after, owner=head.owner, lease_expires_at=head.lease_expires_at)


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
        tables,
        "for_all_rows",
        _leave_the_fence_out,
        ("batch.before_write",),
        range(2, 11),
        Kind.RIVAL,
    ),
    Mutant("a lease not released", write_rules, "advance_head", _keep_the_lease),
)
