"""SIGKILL of a runner while the place of an attempt on a host is being stored: the agent is begun once in all.

The agents' own log is the witness.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from plait import RunStatus
from plait.backends.process.process_table import HAS_PROC
from tests.support.agents.outliving import RUN
from tests.support.hosts.outliving import HostsWorld
from tests.support.processes.warm import Warm

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HAS_PROC, reason="looks for processes through procfs")]
UNSTORED = ("txn.begun", "txn.before_commit")
STORED = ("txn.after_commit", "batch.after_write", "events.published")
"""The place is stored, and the permit to begin is not sent yet."""


async def begun(folder: Path, failpoint: str, *bug: str) -> tuple[int, bool]:
    """Kill the runner at the failpoint, and resume the run. Return how many agents were begun by each of the owners
    together, and whether the place of the first attempt was stored.
    """
    world = HostsWorld(folder)
    world.plan({"id": "a", "prompt": "work [[until go]]"})
    first = Warm([sys.executable, "-m", "tests.support.hosts.killed_placing", folder, failpoint, *bug])
    assert first.wait(60) == -signal.SIGKILL
    assert bool(world.turns) is bool(bug)
    world.allow("go")
    async with world.store() as store:
        foretold = await world.runner(store, ["m1"]).runs.preview(RUN)
        result = await world.runner(store, ["m1"]).resume(RUN)
    assert (result.status, result["a"].text) == (RunStatus.COMPLETED, "re: work")
    assert world.alive() == []
    return len(world.turns), "was placed on m1" in foretold.tasks["a"].reason


@pytest.mark.parametrize("failpoint", [*UNSTORED, *STORED])
async def test_an_agent_is_begun_once(tmp_path: Path, failpoint: str) -> None:
    assert await begun(tmp_path, failpoint) == (1, failpoint in STORED)


async def test_an_attempt_that_begins_before_its_place_is_stored_is_begun_twice(tmp_path: Path) -> None:
    """The planted bug."""
    assert (await begun(tmp_path, "txn.before_commit", "unstored"))[0] == 2
