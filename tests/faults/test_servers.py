"""A PostgreSQL server that is killed again and again during a run. Further faults: tests/persistence/postgres."""

from __future__ import annotations

from tests.faults.campaigns import servers


async def test_a_server_that_is_killed_every_half_second_loses_nothing() -> None:
    assert await servers.killed(tasks=300, kills=3) == []
