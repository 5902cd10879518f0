"""Workers that are killed, on hosts of their own and on PostgreSQL. SQLite: tests/runner/cli/test_worker_command.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.campaigns import fleet

pytestmark = pytest.mark.slow


def test_the_runs_of_killed_workers_are_taken_over_once(tmp_path: Path) -> None:
    wrong, took = fleet.play("postgres", tmp_path, 8)
    assert wrong == []
    assert took
