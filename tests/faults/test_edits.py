"""Random edits of random plans: what runs again is what the oracle says, and what the preview said."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.errors import RunNotFound
from plait.persistence import MemoryStore
from plait.runner.client import run_estimate
from tests.faults.campaigns.edit_bugs import BUGS, older_run_preferred
from tests.faults.campaigns.edits import shows, violations
from tests.runner.engine.test_cache import test_the_newest_answer_is_taken as newest_is_taken
from tests.runner.engine.test_reuse import (
    test_a_deleted_parent_is_missed_by_no_run_that_took_its_answers_over as deleted_parent_is_not_missed,
)
from tests.support.sizes import size


# The twenty plans from 2 on show every bug of edit_bugs.py that the first forty show.
@pytest.mark.slow
@pytest.mark.parametrize("first", size([2], range(0, 100, 20)))
async def test_the_calls_are_those_of_the_oracle_and_of_the_preview(first: int) -> None:
    found = [one for seed in range(first, first + 20) for one in await violations(seed)]
    assert found == []


@pytest.mark.parametrize("bug", [*BUGS][:2])  # all of them: the campaign, with --planted
async def test_a_planted_bug_is_seen(bug: str) -> None:
    assert await shows(BUGS[bug]) is not None


async def test_an_older_run_preferred_by_the_cache_is_seen() -> None:
    with older_run_preferred(), pytest.raises(AssertionError, match="old"):
        await newest_is_taken(MemoryStore())


async def test_a_deleted_parent_that_is_missed_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class UnraisedError(Exception):
        pass

    monkeypatch.setattr(run_estimate, "RunNotFound", UnraisedError)
    with pytest.raises(RunNotFound):
        await deleted_parent_is_not_missed(tmp_path)
