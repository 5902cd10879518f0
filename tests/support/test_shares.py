"""No file is left out when each worker finds only its share of them."""

from __future__ import annotations

import pytest

from tests.support.shares import TESTS, has_no_test, shares_of


@pytest.mark.parametrize("marks", ["slow", "not slow", ""])
@pytest.mark.parametrize("workers", [1, 4, 7])
def test_every_file_with_tests_is_in_the_share_of_a_worker(workers: int, marks: str) -> None:
    shares = shares_of(workers, marks)
    assert set(shares.values()) == set(range(workers))
    assert {file for file in TESTS.rglob("test_*.py") if not has_no_test(file, marks)} == shares.keys()
