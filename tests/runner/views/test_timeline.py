"""The attempts and the waits of tasks as a timeline shows them, from stored changes with chosen times."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait import Clock
from plait.events import (
    BackendThrottled,
    Event,
    NewTask,
    RunClaimed,
    RunCreated,
    TaskAnswered,
    TaskCompleted,
    TaskFailed,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import MemoryStore
from plait.runner.domain.asked_question import parse_time
from plait.runner.state.codec import SETTINGS_FORMAT
from plait.runner.views.live_view import LiveView
from tests.contracts.store.samples import RUN, Writer, at, owner, run_becomes

NOW = 50
SETTINGS = json.dumps({"format": SETTINGS_FORMAT, "concurrency": 2, "slots": {"default": "api", "limits": {}}})
OPENING = (RunClaimed(at(1), owner(), parse_time(at(59))), run_becomes(at(2), "running"))


class At(Clock):
    """A clock that stands at `NOW`."""

    def wall(self) -> float:
        return parse_time(at(NOW))


async def bars(*changes: Event, tasks: tuple[NewTask, ...] = (NewTask("a", "A."),)) -> dict[str, list[Any]]:
    """The bars of each task after `changes`, with their times in seconds. The run starts in second 2."""
    store = MemoryStore()
    await Writer(store).write(RunCreated(at(0), RUN, "n", SETTINGS, tasks))
    writer = Writer(store)
    writer.next_seq = 2
    await writer.write(*OPENING, *changes)
    view = LiveView(store, At(), RUN, attempts=True)
    found: dict[str, list[Any]] = {}
    async for change in view.changes():
        for row in change.value.get("rows", ()):
            found[row["id"]] = [
                (kind, start / 1000, None if end is None else end / 1000) for kind, start, end, *_ in row["bars"]
            ]
    return found


async def test_a_task_waits_for_its_dependency_its_slot_its_retry_and_an_answer() -> None:
    tasks = (NewTask("a", "A.", (), "fast"), NewTask("b", "{{ a }}", ("a",)))
    found = await bars(
        TaskStarted(at(3), "a", 1, "fast"),
        TaskCompleted(at(6), "a", 1, "A"),
        TaskStarted(at(9), "b", 1, "api"),
        TaskRetried(at(10), "b", 1, "transient", "busy", 5.0),
        TaskStarted(at(16), "b", 2, "api"),
        TaskWaiting(at(18), "b", 2, "How many?", asked="{}"),
        TaskAnswered(at(30), "b", 1),
        TaskStarted(at(33), "b", 3, "api"),
        tasks=tasks,
    )
    assert found == {
        "a": [("slot", 2, 3), ("completed", 3, 6)],
        "b": [
            ("upstream", 2, 6),
            ("slot", 6, 9),
            ("retried", 9, 10),
            ("retry", 10, 15),
            ("slot", 15, 16),
            ("asked", 16, 18),
            ("question", 18, 30),
            ("slot", 30, 33),
            ("running", 33, None),
        ],
    }


async def test_a_refused_attempt_is_followed_by_a_throttled_wait_that_goes_on() -> None:
    refused = TaskRetried(at(4), "a", 1, "rate_limited", "slow down", 600.0)
    assert await bars(TaskStarted(at(3), "a", 1, "api"), refused) == {
        "a": [("slot", 2, 3), ("retried", 3, 4), ("throttled", 4, None)]
    }


@pytest.mark.parametrize(
    ("reported", "throttled"),
    [
        ([(10, at(20), 1, 1)], [(10, 20)]),
        ([(10, at(20), 1, 1), (15, at(30), 1, 1)], [(10, 30)]),
        ([(10, at(20), 1, 1), (14, None, 1, 1)], [(10, 14)]),
        ([(10, at(12), 1, 2), (20, None, 2, 2)], [(10, 20)]),
        ([(10, at(12), 1, 1), (20, at(25), 1, 1)], [(10, 12), (20, 25)]),
        ([(10, None, 2, 2)], []),
        ([(10, at(30), 1, 2)], [(10, NOW)]),
    ],
)
async def test_a_wait_for_a_slot_is_cut_where_the_backend_is_throttled(
    reported: list[tuple[int, str | None, int, int]], throttled: list[tuple[int, int]]
) -> None:
    events = [BackendThrottled(at(when), "api", end, "429", slots, total) for when, end, slots, total in reported]
    found = (await bars(*events))["a"]
    assert [(start, end or NOW) for kind, start, end in found if kind == "throttled"] == throttled
    places = [2, *(place for times in throttled for place in times), NOW]
    assert [start for _, start, _ in found] == [place for place in places if place < NOW]


async def test_only_the_tasks_of_a_backend_are_throttled_with_it() -> None:
    tasks = (NewTask("a", "A."), NewTask("b", "B.", (), "fast"), NewTask("c", "C.", ("b",), None, '{"continues":"b"}'))
    found = await bars(
        TaskStarted(at(3), "b", 1, "fast"),
        TaskCompleted(at(4), "b", 1, "B"),
        BackendThrottled(at(10), "fast", at(20), "429", 1, 1),
        tasks=tasks,
    )
    assert found["a"] == [("slot", 2, None)]
    assert found["c"] == [("upstream", 2, 4), ("slot", 4, 10), ("throttled", 10, 20), ("slot", 20, None)]


async def test_a_resume_ends_the_throttling_of_the_dead_process() -> None:
    found = await bars(
        BackendThrottled(at(10), "api", at(12), "429", 1, 2),
        RunClaimed(at(20), owner("owner-2"), parse_time(at(59))),
        run_becomes(at(21), "running", resumed=True),
    )
    assert found["a"] == [("slot", 2, 10), ("throttled", 10, 21), ("slot", 21, None)]


async def test_nothing_waits_between_a_failure_and_the_person_who_reopens_the_task() -> None:
    found = await bars(
        TaskStarted(at(3), "a", 1, "api"),
        TaskFailed(at(4), "a", 1, "unexpected", "no"),
        run_becomes(at(5), "failed"),
        RunClaimed(at(20), owner("owner-2"), parse_time(at(59))),
        run_becomes(at(21), "running", resumed=True),
        TaskReopened(at(22), "a", 1),
        TaskStarted(at(24), "a", 2, "api"),
    )
    assert found["a"] == [("slot", 2, 3), ("failed", 3, 4), ("slot", 22, 24), ("running", 24, None)]


async def test_a_blocked_task_waits_for_its_dependency_for_good() -> None:
    found = await bars(
        TaskStarted(at(3), "a", 1, "api"),
        TaskFailed(at(4), "a", 1, "unexpected", "no"),
        run_becomes(at(5), "failed"),
        tasks=(NewTask("a", "A."), NewTask("b", "{{ a }}", ("a",))),
    )
    assert found["b"] == [("upstream", 2, None)]
