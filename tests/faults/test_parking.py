"""A plan under two limits and SIGKILLs, with nobody there; see tests/faults/campaigns/parking.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def played(*words: str) -> subprocess.CompletedProcess[str]:
    """Play in a process of its own: the campaign forks, which needs a process without threads."""
    command = [sys.executable, "-m", "tests.faults.campaigns.parking", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_plan_with_two_limits_is_completed_with_nobody_there() -> None:
    done = played("--count", "1")
    assert done.returncode == 0, done.stdout + done.stderr
