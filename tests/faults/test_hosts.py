"""Agents on hosts (tests/faults/campaigns/hosts.py): a round in which all die at once, and the planted bugs."""

from __future__ import annotations

import pytest

from plait.backends.process.proctable import HAS_PROC
from tests.faults.campaigns import hosts

linux = pytest.mark.skipif(not HAS_PROC, reason="looks for processes through procfs")


@linux
def test_agents_that_are_being_started_are_begun_once() -> None:
    assert hosts.play("all", 1, 8)[0] == []


@linux
@pytest.mark.parametrize("bug", hosts.SHOWN)
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert hosts.is_caught(bug)
