"""Notices under SIGKILLs and with a receiver that is away; see tests/faults/campaigns/notice_kills.py."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.sizes import size

pytestmark = pytest.mark.slow


def played(*words: str) -> subprocess.CompletedProcess[str]:
    """Play in a process of its own: the campaign forks, which needs a process without threads."""
    command = [sys.executable, "-m", "tests.faults.campaigns.notice_kills", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_each_event_is_told_at_least_once_with_its_id_and_nothing_else() -> None:
    done = played("--count", size("3", "6"))
    assert done.returncode == 0, done.stdout + done.stderr
