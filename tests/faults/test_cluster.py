"""A planted bug of a Dask cluster. Without it: tests/runner/recovery/test_adoption_on_dask.py.

A cluster takes seconds to start, so the other bugs are left to `python -m tests.faults.campaigns.cluster --planted`.
"""

from __future__ import annotations

import pytest

pytest.importorskip("distributed")

from tests.faults.campaigns import cluster


def test_a_planted_bug_is_caught() -> None:
    assert cluster.is_caught("runner killed")
