"""Agents on hosts (tests/faults/campaigns/hosts.py): a round in which all die at once, and two planted bugs.

The other two are left to `python -m tests.faults.campaigns.hosts --planted`. The tests of test_adoption_on_hosts.py and
test_takeover_on_hosts.py, in tests/runner/recovery, fail with either.
"""

from __future__ import annotations

import pytest

from plait.backends.process.process_table import HAS_PROC
from tests.faults.campaigns import hosts

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not HAS_PROC, reason="looks for processes through procfs")


@linux
def test_agents_that_are_being_started_are_begun_once() -> None:
    assert hosts.play("all", 1, 8)[0] == []


@linux
@pytest.mark.parametrize("bug", ["no attempt kept", "a broken connection taken for the end"])
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert hosts.is_caught(bug)
