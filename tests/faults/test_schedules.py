"""The runner in virtual time, under random orders, faults and disturbances; see tests/faults/campaigns/schedules.py."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import anyio
import pytest

from plait import FailureMode, RunStatus, TaskStatus
from plait.errors import StoreError
from plait.events import RunCreated
from plait.persistence import Batch, MemoryStore
from tests.faults.campaigns import schedules
from tests.faults.campaigns.schedule_bugs import BUGS
from tests.support.seeded_loop import run_seeded
from tests.support.stores.faulty_store import Fault, FaultyStore, by_chance, by_number
from tests.support.story import endings, last_status, story

BATCH = Batch("r", 0, 1, (RunCreated("2026-11-21T23:01:16.123Z", "r", "a run", "{}", ()),))


@pytest.mark.slow
def test_every_schedule_ends_as_it_has_to() -> None:
    report = schedules.run(scale="quick", planted=False)
    assert report.cases == schedules.CASES["quick"]
    assert report.ok, "\n".join(report.violations)


@pytest.mark.parametrize(
    "seed",
    [
        4703,  # half an answer of a task that failed softly is replayed, by resume, to one that continues it
        4890,
        8266,
        414,  # a session that was lost counts as a failure of the task's, but only after another resume
        514,
    ],
)
def test_a_seed_that_once_showed_a_fault_shows_none(seed: int) -> None:
    assert not schedules.tell(seed).violations


def test_a_violation_names_its_seed_and_how_to_repeat_it() -> None:
    with BUGS["told before the commit"]():
        (first, *_) = schedules.tell(0).violations
    assert first.startswith("seed 0, ") and first.endswith("(python -m tests.faults.campaigns.schedules 0)")


@pytest.mark.slow
def test_a_seed_tells_the_same_story_in_every_process() -> None:
    code = "from tests.faults.campaigns.schedules import tell; print([tell(seed).trace for seed in range(20)])"
    traces = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": salt}, capture_output=True, check=True
        ).stdout
        for salt in ("1", "2")
    }
    assert len(traces) == 1


def test_stories_are_of_every_sort() -> None:
    stories = [story(seed) for seed in range(300)]
    tasks = [task for told in stories for task in told.dag]
    assert {task.failure_mode for task in tasks} == set(FailureMode)
    assert any(task.at_most_once for task in tasks) and any(task.continues for task in tasks)
    assert {behaviour for told in stories for behaviour in told.behaviours.values()} == {
        "answers",
        "stumbles",
        "refuses",
        "breaks",
        "dawdles",
    }
    ends = [endings(told) for told in stories]
    assert {end.status for one in ends for end in one.values()} == {
        TaskStatus.COMPLETED,
        TaskStatus.FAILED,
        TaskStatus.SKIPPED,
        TaskStatus.PENDING,
    }
    assert {last_status(one) for one in ends} == {RunStatus.COMPLETED, RunStatus.FAILED}


@pytest.mark.parametrize(
    ("fault", "error", "at_once", "later"),
    [
        (Fault.BEFORE, StoreError, False, False),
        (Fault.AFTER, StoreError, True, True),
        (Fault.HANG, TimeoutError, False, False),
        (Fault.HANG_AFTER, TimeoutError, True, True),
        (Fault.LATE, StoreError, False, True),
        (Fault.SLOW, None, True, True),
        (Fault.ODD, OSError, False, False),
        (Fault.ODD_AFTER, ZeroDivisionError, True, True),
    ],
)
def test_each_fault_does_what_it_says(fault: Fault, error: type[Exception] | None, at_once: bool, later: bool) -> None:
    async def main() -> None:
        inner = MemoryStore()
        store = FaultyStore(inner, by_number({1: fault}))
        raised: type[Exception] | None = None
        try:
            with anyio.fail_after(60):
                await store.write(BATCH)
        except Exception as caught:
            raised = type(caught)
        assert raised is error
        assert (await inner.get_run("r") is not None) is at_once
        await anyio.sleep(60)
        assert (await store.get_run("r") is not None) is later
        await store.write(BATCH)
        assert await store.get_run("r") is not None

    run_seeded(main, 0)


def test_by_chance_plants_every_fault_where_it_is_told_to() -> None:
    faults = by_chance(random.Random(0), 0.5, reads=0.0)
    planted = [faults("write", number) for number in range(1000)]
    assert 400 < sum(fault is not None for fault in planted) < 600
    assert set(planted) == {None, *Fault}
    assert {faults("get_run", number) for number in range(100)} == {None}
