"""A file of the version before that others use, that is damaged, or large."""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore, StoreUnusable
from plait.persistence.sqlite import connection as opening
from plait.persistence.sqlite import reader as reading
from tests.support.stores.database import edit, steps, version

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


async def test_a_file_is_left_as_it_is_while_an_older_plait_is_at_work_on_it(path: Path) -> None:
    """It could write to none of the tables any more."""
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_4.db", path)
    edit(path, f"UPDATE runs SET lease_expires_at = {time.time() + 30} WHERE run_id = 'run-killed'")
    with pytest.raises(
        StoreUnusable, match=r"run 'run-killed' is in use by process 4711 on the-host-that-died.*wait 3?\d s"
    ):
        async with SQLiteStore(path):
            pass
    assert version(path) == 4
    async with SQLiteStore(path, mode="read") as store:
        assert len(await store.list_runs()) == 6
    edit(path, f"UPDATE runs SET lease_expires_at = {time.time() - 1} WHERE run_id = 'run-killed'")
    async with SQLiteStore(path):
        pass
    assert version(path) == 5


async def test_a_large_text_that_is_gone_hinders_nobody(path: Path) -> None:
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_4.db", path)
    edit(path, "DELETE FROM blobs WHERE sha256 IN (SELECT text_sha256 FROM tasks)")
    async with SQLiteStore(path) as store:
        assert [task.damaged for task in await store.list_tasks("run-again")] == [True]
        assert not any(task.damaged for task in await store.list_tasks("run-killed"))


async def test_who_finds_the_file_in_use_is_told_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_4.db", path)
    monkeypatch.setattr(opening, "BUSY_TIMEOUT_S", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnusable, match="another process writes to it, or brings it up to date; try again"):
            async with SQLiteStore(path):
                pass
        other.execute("ROLLBACK")


def test_a_page_of_an_older_file_costs_what_its_run_has(tmp_path: Path) -> None:
    """Not its square, nor what the other runs have."""
    cost = list[int]()
    for name, runs, count in [("one", 1, 400), ("many", 4, 400), ("large", 1, 1600)]:
        path = tmp_path / f"{name}.db"
        shutil.copy(FIXTURES / "schema_4.db", path)
        fill_version_4(path, runs, count)
        with closing(opening.open_database(path, "read")) as connection:
            cost.append(steps(connection, lambda: reading.list_events(connection, "r0", 10, 10)))
            assert len(reading.list_events(connection, "r0", 0, 10_000)) == 2 * count
    assert cost[1] < 1.2 * cost[0]
    assert cost[2] < 5 * cost[0]


def fill_version_4(path: Path, runs: int, tasks: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN")
        for run in range(runs):
            connection.execute(
                "INSERT INTO runs (run_id, name, status, created_at, last_seq, epoch, claims, settings) "
                "VALUES (?, '', 'completed', '2026', ?, 0, '[]', '{}')",
                (f"r{run}", 2 * tasks),
            )
            rows = [(f"r{run}", f"t{n}", n, 2 * n + 1, 2 * n + 2) for n in range(tasks)]
            connection.executemany(
                "INSERT INTO tasks (run_id, task_id, position, status, attempt, attempt_status, attempt_backend, "
                "started_at, started_seq, ended_at, ended_seq, depends_on, spec, prompt) "
                "VALUES (?, ?, ?, 'completed', 1, 'completed', 'fast', '2026', ?, '2026', ?, '[]', '{}', '')",
                rows,
            )
        connection.execute("COMMIT")
