"""Processes under one limit of an account; see tests/faults/campaigns/accounts.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.sizes import size

pytestmark = pytest.mark.slow


def played(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.campaigns.accounts", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


ONE_HOST, A_SERVER, UNEQUAL = ("--tasks", "100"), ("--tasks", "100", "--postgres"), ("--tasks", "60", "--unequal")
"""The bookings of a server are those of a file, tests/runner/engine/test_stored_ledger.py."""


@pytest.mark.parametrize("words", size((ONE_HOST, UNEQUAL), (ONE_HOST, A_SERVER, UNEQUAL)), ids=" ".join)
def test_processes_share_an_allowance(words: tuple[str, ...]) -> None:
    done = played(*words)
    assert done.returncode == 0, done.stdout + done.stderr
