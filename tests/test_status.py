"""The status tables from both sides: what is legal, and that all else is refused."""

from __future__ import annotations

import pytest

from runner.status import (
    RUN_DONE,
    RUN_TRANSITIONS,
    TASK_DONE,
    TASK_TRANSITIONS,
    RunStatus,
    TaskStatus,
    may_follow,
)

LEGAL_TASK = {
    "pending": "running cancelled",
    "running": "pending waiting_input completed failed skipped cancelled",
    "waiting_input": "pending running completed failed cancelled",
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
