"""A PostgreSQL server that is killed again and again during a run, and the planted bugs of the campaign.

Further faults: tests/persistence/postgres.
"""

from __future__ import annotations

import pytest

from tests.faults.campaigns import servers
from tests.faults.campaigns.server_bugs import BUGS

pytestmark = pytest.mark.slow


async def test_a_server_that_is_killed_every_half_second_loses_nothing() -> None:
    assert await servers.killed(tasks=300, kills=3) == []


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert servers.is_caught(bug)
