"""Runs within a budget under SIGKILLs and raises; see tests/faults/campaigns/money.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.sizes import size

pytestmark = pytest.mark.slow

SEEDS = ("0", "4", "5")
"""A run alone, one within the limit of a day, and two at once. They show what the first eight show."""


def played(*words: str) -> subprocess.CompletedProcess[str]:
    """Play in a process of its own: the campaign forks, which needs a process without threads."""
    command = [sys.executable, "-m", "tests.faults.campaigns.money", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_no_run_spends_beyond_its_budget_and_nothing_stays_reserved() -> None:
    done = played(*size(SEEDS, ("--count", "8")))
    assert done.returncode == 0, done.stdout + done.stderr
