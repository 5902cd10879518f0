"""`plait doctor` on a server: damaged rows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from plait import DAG, ParallelRunner, PostgresStore, Retry, RunStatus, Task
from plait.errors import BackendError, ErrorKind
from plait.persistence import Note, sql_store
from tests.support.fakes import QuickClock, Talker
from tests.support.processes.command import plait_here
from tests.support.stores.postgres import empty, worker_dsn

pytestmark = pytest.mark.slow

LARGE = "x" * 70_000
DAMAGE = {
    "a result": ("UPDATE attempts SET text = 'other' WHERE text = 'short'", "r/a"),
    "a large result": ("UPDATE texts SET content = 'other'", "r/b"),
    "a prompt of an attempt": ("UPDATE attempts SET prompt = 'other' WHERE text = 'short'", "r/a"),
    "a task": ("UPDATE tasks SET prompt = 'other' WHERE task_id = 'b'", "run 'r' is damaged: task 'b' "),
    "a note": ("UPDATE notes SET body = 'other'", "run 'r' is damaged: note 1 "),
    "settings": ("UPDATE runs SET settings = '{}' WHERE run_id = 'r'", "run 'r' is damaged: the text of its settings"),
}


async def fill(dsn: str) -> None:
    """Store a run `r` with a large and a short result, a failed attempt and a note, and a run `s` with a session."""
    failed = set[str]()

    async def say(prompt: str) -> str:
        if prompt == "two" and not failed:
            failed.add(prompt)
            raise BackendError(ErrorKind.TRANSIENT, "later")
        return "short" if prompt == "one" else LARGE

    await empty(dsn)
    async with PostgresStore(dsn) as store:
        dag = DAG([Task("a", "one"), Task("b", "two", retry=Retry(attempts=2, base_delay=0))])
        result = await ParallelRunner(say, store=store, clock=QuickClock()).run(dag, "r")
        assert result.status is RunStatus.COMPLETED
        await store.send("r", Note("answer", "2026-11-21T23:00:00.000Z", "a", "{}"))
        await ParallelRunner(Talker(), store=store).run(DAG([Task("c", "three")]), "s")


async def damage(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        assert await connection.execute(statement) != "UPDATE 0"
    finally:
        await connection.close()


@pytest.fixture
def dsn() -> str:
    dsn = worker_dsn()
    asyncio.run(fill(dsn))
    return dsn


def checksums(tmp_path: Path, dsn: str, code: int) -> dict[str, Any]:
    done = plait_here(tmp_path, "doctor", "--json", "--store", dsn)
    assert (done.code, done.err) == (code, "")
    [found] = [one for one in done.value["checks"] if one["check"] == "checksums"]
    return found


def test_rows_without_damage_are_counted(tmp_path: Path, dsn: str) -> None:
    found = checksums(tmp_path, dsn, 0)
    assert (found["verdict"], found["found"]) == ("ok", "all fit (results: 3, messages: 6)")


@pytest.mark.parametrize("part", DAMAGE)
def test_each_damaged_part_is_named(tmp_path: Path, dsn: str, part: str) -> None:
    statement, named = DAMAGE[part]
    asyncio.run(damage(dsn, statement))
    found = checksums(tmp_path, dsn, 3)
    assert found["verdict"] == "bad"
    assert found["found"].startswith(f"damaged: {named}"), found["found"]


def test_a_server_that_goes_away_meanwhile_is_no_damage(
    tmp_path: Path, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def goes_away(_run_id: str, _after: int) -> Generator[tuple[str, tuple[()]]]:
        yield "SELECT pg_terminate_backend(pg_backend_pid())", ()

    monkeypatch.setattr(sql_store, "list_notes", goes_away)
    done = plait_here(tmp_path, "doctor", "--json", "--store", dsn)
    bad = {one["check"]: one["found"] for one in done.value["checks"] if one["verdict"] == "bad"}
    assert done.code == 3
    assert bad.keys() == {"store"}
    assert re.search("connection (is|was) closed", bad["store"])
