"""A PostgreSQL server that is killed again and again during a run; see tests/faults/campaigns/servers.py.

Further faults: tests/persistence/postgres.
"""

from __future__ import annotations

import pytest

from tests.faults.campaigns import servers
from tests.support.sizes import size

pytestmark = pytest.mark.slow


async def test_a_server_that_is_killed_every_half_second_loses_nothing() -> None:
    assert await servers.killed(tasks=size(150, 300), kills=size(2, 3)) == []
