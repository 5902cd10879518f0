"""Random plans that act, against an oracle, and killed; see tests/faults/campaigns/acts.py."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.faults.campaigns import acts
from tests.support.sizes import size

SHOWING = (3, 8, 9, 13, 21, 27)
"""Plans that show, with the first three, each bug of the campaign."""


@pytest.mark.parametrize("seeds", [range(3), pytest.param(size(SHOWING, range(3, 40)), marks=pytest.mark.slow)])
def test_random_plans_end_as_the_oracle_foretells(seeds: Sequence[int]) -> None:
    assert [problem for seed in seeds for problem in acts.tell(seed)] == []


@pytest.mark.slow
def test_plans_that_are_killed_do_nothing_again_and_lose_nothing() -> None:
    report = acts.run(scale="quick", planted=False)
    assert report.ok, "\n".join(report.violations)
    assert report.figures["deaths"] >= 8
