"""The rules of a batch, without a store: what is skipped, what is refused, and what a change makes of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import Conflict, Fenced
from plait.events import (
    LeaseRenewed,
    NewTask,
    PolicyDecided,
    RunCancelled,
    RunFailed,
    RunReleased,
    RunStarted,
    TasksAdded,
)
from plait.persistence import Batch, RunRecord
from plait.persistence.write_rules import advance_head, check_added, conflict, count_applied
from tests.contracts.store.samples import CLAIMED, CREATED, RUN, RUNNING, START_A, at

QUEUED = RunRecord(RUN, CREATED.name, "queued", CREATED.at, settings=CREATED.settings, last_seq=1)


@pytest.mark.parametrize("other", [{"at": at(9)}, {"name": "another"}, {"settings": "{}"}])
def test_another_run_of_the_same_id_is_refused_before_any_claim(other: dict[str, str]) -> None:
    assert count_applied(Batch(RUN, 0, 1, (CREATED, CLAIMED)), QUEUED) == 1
    with pytest.raises(Conflict, match=f"exists already, created at {CREATED.at}; resume it"):
        count_applied(Batch(RUN, 0, 1, (replace(CREATED, **other), CLAIMED)), QUEUED)


def test_the_same_run_claimed_by_another_exists_already() -> None:
    claimed = replace(advance_head(QUEUED, CLAIMED, 2), last_seq=2)
    assert count_applied(Batch(RUN, 0, 1, (CREATED, CLAIMED, RUNNING)), claimed) == 2
    another = replace(CLAIMED, owner=replace(CLAIMED.owner, owner_id="owner-2"))
    with pytest.raises(Conflict, match="exists already"):
        count_applied(Batch(RUN, 0, 1, (CREATED, another)), claimed)


def test_before_the_first_claim_of_a_writer_no_owner_is_compared() -> None:
    claimed = replace(advance_head(QUEUED, CLAIMED, 2), last_seq=2)
    assert count_applied(Batch(RUN, 0, 1, (CREATED, CLAIMED), "another"), claimed) == 2


def test_a_claim_in_a_batch_is_compared_although_its_writer_was_the_owner_before() -> None:
    claimed = replace(advance_head(QUEUED, CLAIMED, 2), last_seq=2)
    left, right = (replace(CLAIMED, owner=replace(CLAIMED.owner, owner_id=name)) for name in ("left", "right"))
    taken = replace(advance_head(claimed, left, 3), last_seq=3)
    assert count_applied(Batch(RUN, 1, 3, (left,), "owner-1"), taken) == 1
    with pytest.raises(Fenced):
        count_applied(Batch(RUN, 1, 3, (right,), "owner-1"), taken)


def test_a_run_that_is_cancelled_before_its_start_was_never_started() -> None:
    ended = advance_head(QUEUED, RunCancelled(at(5), RUN), 2)
    assert (ended.started_at, ended.ended_at) == (None, at(5))


def test_a_decision_is_the_last_state_of_the_policy() -> None:
    decided = advance_head(QUEUED, PolicyDecided(at(3), '{"tries":2}'), 2)
    assert (decided.policy_state, decided.policy_seq) == ('{"tries":2}', 2)
    assert advance_head(decided, LeaseRenewed(at(4), 9.0), 3) == replace(decided, lease_expires_at=9.0)


def test_the_first_start_counts() -> None:
    first = advance_head(QUEUED, RunStarted(at(3), RUN), 2)
    assert (first.started_at, first.ended_at) == (at(3), None)
    failed = advance_head(first, RunFailed(at(5), RUN, "no"), 3)
    assert (failed.started_at, failed.ended_at, failed.error) == (at(3), at(5), "no")


def test_a_refused_change_is_told_with_what_is_stored() -> None:
    absent = f"run '{RUN}': TaskStarted names task 'a', which the run does not have"
    assert str(conflict(RUN, START_A, None)) == absent
    late = f"run '{RUN}': TaskStarted of task 'a' (attempt 1) does not follow: the task is completed, attempt 2"
    assert str(conflict(RUN, START_A, ("completed", 2))) == late


@pytest.mark.parametrize(
    ("tasks", "added_by", "said"),
    [
        ([NewTask("a", "p")], None, "adds task 'a', which the run has already"),
        ([NewTask("d", "p"), NewTask("d", "p")], None, "adds task 'd', which the run has already"),
        ([NewTask("d", "p", ("e",))], None, "adds task 'd', which depends on 'e'; the run has no such task"),
        ([NewTask("d", "p")], "e", "names 'e' as the adding task; the run has no such task"),
        ([NewTask("d", "p", ("a", "e")), NewTask("e", "p", ("d",))], "a", None),
    ],
)
def test_tasks_are_added_once_and_behind_tasks_of_the_run(
    tasks: list[NewTask], added_by: str | None, said: str | None
) -> None:
    added = TasksAdded(at(3), tuple(tasks), added_by)
    if said is None:
        check_added(RUN, added, {"a"})
    else:
        with pytest.raises(Conflict) as refused:
            check_added(RUN, added, {"a"})
        assert str(refused.value) == f"run '{RUN}': TasksAdded {said}"


def test_who_releases_a_run_leaves_the_time_from_which_it_goes_on() -> None:
    claimed = advance_head(QUEUED, CLAIMED, 2)
    released = advance_head(claimed, RunReleased(at(3), 99.0), 3)
    assert released == replace(claimed, owner=None, lease_expires_at=99.0)
    assert advance_head(claimed, RunReleased(at(3)), 3) == replace(claimed, owner=None, lease_expires_at=None)


def test_a_run_is_created_by_its_first_change_alone() -> None:
    assert advance_head(QUEUED, CREATED, 1) is QUEUED
    with pytest.raises(Conflict, match=r"^run 'run-1': RunCreated can only be change 1, not change 2$"):
        advance_head(QUEUED, CREATED, 2)
