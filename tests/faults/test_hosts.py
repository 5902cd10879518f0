"""Agents on hosts (tests/faults/campaigns/hosts.py): a round in which all die at once."""

from __future__ import annotations

import pytest

from plait.backends.process.process_table import HAS_PROC
from tests.faults.campaigns import hosts

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not HAS_PROC, reason="looks for processes through procfs")


@linux
def test_agents_that_are_being_started_are_begun_once() -> None:
    assert hosts.play("all", 1, 8)[0] == []
