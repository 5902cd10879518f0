"""Every public call cancelled at each of its waits, over real files; see tests/faults/campaigns/cancels.py."""

from __future__ import annotations

import asyncio

import anyio
import anyio.lowlevel
import pytest

from tests.faults.campaigns import cancels
from tests.support.cancelling import HOWS, Cancelled, How

pytestmark = pytest.mark.slow


def test_every_call_can_be_cancelled_anywhere() -> None:
    report = cancels.run(scale="quick", planted=False)
    assert report.ok, "\n".join(report.violations)
    assert report.cases > 250


async def waits_four_times() -> str:
    """One wait of its own, one for the group to end, and two in a task of the group."""

    async def beside() -> None:
        await anyio.lowlevel.cancel_shielded_checkpoint()
        await anyio.lowlevel.cancel_shielded_checkpoint()

    await asyncio.sleep(0)
    async with anyio.create_task_group() as group:
        group.start_soon(beside)
    return "done"


@pytest.mark.parametrize("how", HOWS)
async def test_waits_of_all_tasks_count_and_each_can_be_the_one(how: How) -> None:
    uncancelled = Cancelled(0, how)
    await uncancelled.call(waits_four_times)
    assert (uncancelled.waits, uncancelled.landed, uncancelled.error) == (4, False, None)
    for at in (1, 2, 3, 4):
        cancelled = Cancelled(at, how)
        await cancelled.call(waits_four_times)
        assert cancelled.landed
        assert isinstance(cancelled.error, asyncio.CancelledError) or how == "scope"
    beyond = Cancelled(5, how)
    await beyond.call(waits_four_times)
    assert not beyond.landed
