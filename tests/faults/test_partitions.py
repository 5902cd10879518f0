"""The planted bug of the partitions. A partition without it: tests/backends/hosts/test_partitions.py."""

from __future__ import annotations

import pytest

from tests.faults.campaigns import partitions
from tests.support.hosts.namespaces import needs_namespaces
from tests.support.hosts.sshd import needs_sshd

pytestmark = pytest.mark.slow


@needs_sshd
@needs_namespaces
@pytest.mark.parametrize("bug", partitions.SHOWN)
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert partitions.is_caught(bug)
