"""The rules of a batch, without a store: what is skipped, what is refused, and what a change makes of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from plait.errors import Conflict, Fenced
from plait.events import LeaseRenewed, PolicyDecided, RunCancelled, RunFailed, RunStarted
from plait.persistence import Batch, RunRecord
from plait.persistence.write_rules import advance_head, count_applied
from tests.contracts.store.samples import CLAIMED, CREATED, RUN, RUNNING, at

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
