"""Planted bugs of a Dask cluster. Without them: tests/runner/recovery/test_adoption_on_dask.py.

A cluster takes seconds to start, so the other bugs are left to `python -m tests.faults.campaigns.cluster --planted`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("distributed")

from tests.faults.campaigns import cluster

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["worker killed", "runner killed"])
def test_a_planted_bug_is_caught(name: str) -> None:
    assert cluster.is_caught(name)
