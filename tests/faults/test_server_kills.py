"""SIGKILLs of a runner at every boundary of its work with PostgreSQL, judged by the oracle of `make crashtest`.

tests/faults/campaigns/server_kills.py plays more kills, and the planted bugs.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from plait.failpoints import SERVER_FAILPOINTS
from tests.support.processes import warm
from tests.support.processes.command import environment
from tests.support.stores.postgres import empty, worker_dsn

pytestmark = pytest.mark.slow


def play(folder: Path, *words: str) -> str:
    """Play the campaign on the server of the tests, in a process without threads. Return the output."""
    dsn = worker_dsn()
    asyncio.run(empty(dsn))
    command = [sys.executable, "-m", "tests.faults.campaigns.server_kills", "--seed", "1000", "--database", dsn, *words]
    done = warm.run(command, cwd=folder, env=environment(), timeout=120)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


def test_kills_at_every_boundary_lose_nothing(tmp_path: Path) -> None:
    found = play(tmp_path, "--kills", "12", "--no-bugs")
    assert found.startswith("0\n"), found
    assert f"{len(SERVER_FAILPOINTS)} of {len(SERVER_FAILPOINTS)} covered" in found
    assert ", of which 0 lost" in found
    assert "completed tasks       0 executed again" in found
