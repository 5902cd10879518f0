"""The table of transitions: what is legal, and that all else is refused."""

from __future__ import annotations

import pytest

from plait.events import RUN_ENDS
from plait.statuses import RUN_DONE, RUN_TRANSITIONS, TASK_DONE, TASK_TRANSITIONS, RunStatus, TaskStatus

LEGAL_TASK = {
    "pending": "running cancelled",
    "running": "pending waiting_input completed failed skipped cancelled",
    "waiting_input": "pending completed failed skipped cancelled",
    "failed": "pending",
}
LEGAL_RUN = {
    "queued": "running cancelled",
    "running": "running waiting_input completed failed cancelling cancelled",
    "waiting_input": "running cancelling cancelled",
    "cancelling": "cancelled",
    "completed": "running",
    "failed": "running",
}


@pytest.mark.parametrize("old", TaskStatus)
def test_task_transitions(old: TaskStatus) -> None:
    after = {move.after for move in TASK_TRANSITIONS.values() if old in move.before}
    assert after == set(LEGAL_TASK.get(old, "").split())


@pytest.mark.parametrize("old", RunStatus)
def test_run_transitions(old: RunStatus) -> None:
    after = {move.after for move in RUN_TRANSITIONS.values() if old in move.before}
    assert after == set(LEGAL_RUN.get(old, "").split())


def test_only_a_queued_run_starts_and_only_one_that_began_is_resumed() -> None:
    starts, resumes = RUN_TRANSITIONS["run_started"], RUN_TRANSITIONS["run_resumed"]
    assert starts.after is resumes.after is RunStatus.RUNNING
    assert (starts.before, starts.before & resumes.before) == ({RunStatus.QUEUED}, set())


def test_what_has_ended_goes_on_only_if_a_person_asks() -> None:
    assert {s.value for s in TASK_DONE} == {"completed", "failed", "skipped", "cancelled"}
    assert {s.value for s in RUN_DONE} == {"completed", "failed", "cancelled"}
    assert {kind for kind, move in TASK_TRANSITIONS.items() if move.before & TASK_DONE} == {"task_reopened"}
    assert {kind for kind, move in RUN_TRANSITIONS.items() if move.before & RUN_DONE} == {"run_resumed"}


def test_a_run_ends_with_an_event_of_its_last_status() -> None:
    assert set(RUN_ENDS) == {f"run_{status.value}" for status in RUN_DONE}
