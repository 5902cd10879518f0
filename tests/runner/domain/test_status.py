"""The status tables from both sides: what is legal, and that all else is refused."""

from __future__ import annotations

import pytest

from plait.persistence import changes, rules
from plait.persistence.records import RUN_ENDS
from plait.runner.domain.status import (
    RUN_DONE,
    RUN_REOPENINGS,
    RUN_TRANSITIONS,
    TASK_DONE,
    TASK_REOPENINGS,
    TASK_TRANSITIONS,
    RunStatus,
    TaskStatus,
    may_follow,
)

LEGAL_TASK = {
    "pending": "running cancelled",
    "running": "pending waiting_input completed failed skipped cancelled",
    "waiting_input": "pending running completed failed skipped cancelled",
}
LEGAL_RUN = {
    "queued": "running cancelled",
    "running": "waiting_input completed failed cancelling cancelled",
    "waiting_input": "running cancelling cancelled",
    "cancelling": "cancelled",
}


@pytest.mark.parametrize("old", TaskStatus)
@pytest.mark.parametrize("new", TaskStatus)
def test_task_transitions(old: TaskStatus, new: TaskStatus) -> None:
    assert may_follow(TASK_TRANSITIONS, old, new) == (new.value in LEGAL_TASK.get(old.value, "").split())


@pytest.mark.parametrize("old", RunStatus)
@pytest.mark.parametrize("new", RunStatus)
def test_run_transitions(old: RunStatus, new: RunStatus) -> None:
    assert may_follow(RUN_TRANSITIONS, old, new) == (new.value in LEGAL_RUN.get(old.value, "").split())


def test_terminal_states() -> None:
    assert {s.value for s in TASK_DONE} == {"completed", "failed", "skipped", "cancelled"}
    assert {s.value for s in RUN_DONE} == {"completed", "failed", "cancelled"}


def test_a_run_ends_with_an_event_of_its_last_status() -> None:
    assert {kind.value for kind in RUN_ENDS} == {f"run_{status.value}" for status in RUN_DONE}


def test_the_stores_keep_the_same_tables() -> None:
    """`persistence` imports nothing of `runner`, so it has tables of its own: they must say the same."""
    reopened = {s.value for s in RUN_REOPENINGS | {RunStatus.COMPLETED}}  # a completed one where results are damaged
    assert {old: set(new) for old, new in rules.RUN_TRANSITIONS.items() if old not in reopened} == {
        old: set(new.split()) for old, new in LEGAL_RUN.items()
    }
    assert reopened == {"failed", "completed"} and all(
        rules.RUN_TRANSITIONS[status] == {"running"} for status in reopened
    )
    becomes = {
        changes.TaskStarted: {"running"},
        changes.TaskCompleted: {"completed"},
        changes.TaskFailed: {"failed", "skipped"},
        changes.TaskRetried: {"pending"},
        changes.TaskInterrupted: {"pending"},
        changes.TaskWaiting: {"waiting_input"},
        changes.TaskAnswered: {"pending"},
        changes.TaskCancelled: {"cancelled"},
    }
    for change, new in becomes.items():
        for old in rules.STATUSES_BEFORE[change]:
            assert all(may_follow(TASK_TRANSITIONS, TaskStatus(old), TaskStatus(status)) for status in new)
    assert rules.STATUSES_BEFORE[changes.TaskReopened] == {s.value for s in TASK_REOPENINGS}
