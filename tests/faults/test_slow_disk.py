"""A real process on a disk that is slow, or fails, when it is told to sync."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaigns import slow
from tests.support.stores.slow_disk import build, missing

pytestmark = [pytest.mark.slow, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("shim"))


def test_a_slow_disk_neither_holds_the_loop_nor_counts_as_a_failure(shim: Path, tmp_path: Path) -> None:
    # A tenth of what the nightly figure allows for: a busy machine is late by itself.
    seen, wrong = slow.slow(shim, tmp_path / "run", most_lag_ms=100.0)
    assert wrong == [], seen


@pytest.mark.parametrize("count", [1, slow.FOR_EVER], ids=["once", "for ever"])
@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_disk_that_fails_is_told_and_leaves_whole_results(shim: Path, tmp_path: Path, place: int, count: int) -> None:
    assert slow.broken(shim, tmp_path / "run", place, count) == []


@pytest.mark.parametrize("place", [1, 3, 5])
def test_a_process_that_dies_after_a_failed_sync_leaves_whole_results(shim: Path, tmp_path: Path, place: int) -> None:
    assert slow.killed(shim, tmp_path / "run", place) == []
