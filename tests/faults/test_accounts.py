"""Processes under one limit of an account; see tests/faults/campaigns/accounts.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def played(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.campaigns.accounts", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("words", [(), ("--postgres",), ("--unequal",)], ids=["one host", "a server", "unequal"])
def test_processes_share_an_allowance(words: tuple[str, ...]) -> None:
    done = played("--tasks", "100", *words)
    assert done.returncode == 0, done.stdout + done.stderr
