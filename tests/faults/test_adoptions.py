"""Runners and agents killed at any moment (tests/faults/campaigns/adoptions.py): a few cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.backends.process.process_table import HAS_PROC
from tests.faults.campaigns import adoptions
from tests.faults.campaigns.adoption_plans import drawn

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not HAS_PROC, reason="looks for processes through procfs")

SHOWED_A_FAULT = 5
"""A planner whose correction a crash got in the way of was never told what was wrong, and failed."""


@linux
def test_whoever_dies_nothing_is_said_twice_and_nothing_left_alive() -> None:
    assert adoptions.play([0, 1, 2, SHOWED_A_FAULT]) == []


def test_a_violation_names_its_seed_and_how_to_repeat_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adoptions.Case, "play", lambda _: ["the result of a\nis gone"])
    repeat = "(python -m tests.faults.campaigns.adoptions 7)"
    assert adoptions.tell(7, tmp_path) == [f"seed 7: the result of a is gone {repeat}"]


def test_a_seed_is_always_the_same_case() -> None:
    assert [drawn(seed) for seed in range(50)] == [drawn(seed) for seed in range(50)]
    assert len({str(drawn(seed)) for seed in range(50)}) == 50
