"""A file of an earlier version: opened, brought up to date once, whole or not at all."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from persistence import SQLiteStore
from persistence.contract.samples import OPENING, RUN, Writer, whole
from tests.support.database import in_child, make

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture
def old(path: Path) -> Path:
    """A copy of the database of version 1."""
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_1.db", path)
    return path


def version(path: Path) -> int:
    with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
        (number,) = connection.execute("PRAGMA user_version").fetchone()
    return number


def schema(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    return found


@pytest.mark.parametrize("mode", ["create", "existing", "read"])
async def test_a_file_of_version_1_reads_as_it_was_written(old: Path, mode: str) -> None:
    async with SQLiteStore(old, mode=mode) as store:
        killed, done = await store.list_runs()
        assert (killed.run_id, killed.status, killed.epoch, killed.last_seq) == ("run-killed", "running", 1, 23)
        assert killed.owner is not None
        assert (killed.owner.host, killed.counts) == (
            "the-host-that-died",
            {"completed": 4, "running": 2, "pending": 2},
        )
        assert (done.run_id, done.status, done.owner, done.counts) == ("run-whole", "completed", None, {"completed": 2})
        tasks = {task.task_id: task for task in await store.list_tasks("run-killed")}
        assert list(tasks) == ["facts", "more", "moons", "unsteady", "broken", "beside", "story", "end"]
        assert [(t.damaged, t.crashes, t.session_confirmed, t.question) for t in tasks.values()] == [
            (False, 0, False, None)
        ] * 8
        assert (tasks["moons"].text, tasks["moons"].data) == ('{"moons": 2}', '{"moons":2}')
        assert (tasks["more"].text, tasks["more"].session_id) == ("Answer to: And more of them.", "session-1")
        assert tasks["end"].depends_on == ("story", "beside")
        attempts = await store.list_attempts("run-killed", "unsteady")
        assert [(a.status, a.error) for a in attempts] == [("retried", "the line was cut"), ("completed", None)]
        messages = await store.list_messages("run-killed", "facts")
        assert [(m.role, m.content, m.damaged) for m in messages] == [
            ("user", "List facts about Mars.", False),
            ("assistant", "Answer to: List facts about Mars.", False),
        ]
        events = await store.list_events("run-killed")
        assert [e.seq for e in events] == sorted(e.seq for e in events)
        assert [e.kind for e in events].count("task_completed") == 4
        assert await store.list_notes("run-killed") == ()
    assert version(old) == (1 if mode == "read" else 3)


async def test_reading_leaves_an_old_file_as_it_is(old: Path) -> None:
    async with SQLiteStore(old, mode="read") as store:
        before = await whole(store, "run-killed")
    assert old.read_bytes() == (FIXTURES / "schema_1.db").read_bytes()
    async with SQLiteStore(old, mode="existing") as store:
        assert await whole(store, "run-killed") == before


async def test_a_migrated_file_has_the_schema_of_a_new_one(old: Path, tmp_path: Path) -> None:
    await make(tmp_path / "new.db")
    async with SQLiteStore(old) as store:
        await Writer(store).write(*OPENING)
        assert (await store.list_tasks(RUN))[0].status == "pending"
    assert schema(old) == schema(tmp_path / "new.db")


OPEN = """
import asyncio, os, signal, sys
from persistence import SQLiteStore, boundaries

def on_reach(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with SQLiteStore(sys.argv[1]):
        pass

boundaries.on_reach = on_reach
asyncio.run(main())
"""


async def test_killed_while_migrating_leaves_the_old_version(old: Path) -> None:
    child = in_child(OPEN, str(old), "schema.before_commit")
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL
    assert version(old) == 1
    async with SQLiteStore(old, mode="read") as store:
        before = await whole(store, "run-killed")
    async with SQLiteStore(old, mode="existing") as store:
        assert await whole(store, "run-killed") == before
    assert version(old) == 3


COUNTED = """
import asyncio, sys
from persistence import SQLiteStore, boundaries

steps = []
boundaries.on_reach = steps.append

async def main():
    async with SQLiteStore(sys.argv[1]) as store:
        print(len(await store.list_runs()))

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


async def test_two_processes_migrate_once(old: Path) -> None:
    children = [in_child(COUNTED, str(old)) for _ in range(2)]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    for child in children:
        output, errors = child.communicate(timeout=30)
        assert (child.returncode, output, errors) == (0, "2\n", "")
    assert version(old) == 3
    async with SQLiteStore(old) as store:
        assert len(await store.list_messages("run-killed", "facts")) == 2
