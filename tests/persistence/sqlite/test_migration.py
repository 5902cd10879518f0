"""A file of an earlier version: opened, brought up to date once, whole or not at all."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import json
import shutil
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore
from plait.persistence.contract.samples import OPENING, RUN, Writer, whole
from plait.persistence.sqlite.connection import Mode
from tests.support.stores.database import in_child, make, version

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


EARLIER = (1, 2, 3, 4)
CURRENT = 5
KILLED_SEQ = {1: 23, 2: 24, 3: 26, 4: 24}
MODEL = {4: "small-1"}
"""The one that answered, from the version on that keeps it."""
RUNS = {
    1: ["run-killed", "run-whole"],
    2: ["run-killed", "run-asked", "run-again", "run-whole"],
    3: ["run-killed", "run-grown", "run-asked", "run-again", "run-whole"],
    4: ["run-killed", "run-mixed", "run-grown", "run-asked", "run-again", "run-whole"],
}


@pytest.fixture(params=EARLIER)
def made_by(request: pytest.FixtureRequest) -> int:
    made_by: int = request.param
    return made_by


@pytest.fixture
def old(path: Path, made_by: int) -> Path:
    """A copy of the database of an earlier version."""
    path.parent.mkdir()
    shutil.copy(FIXTURES / f"schema_{made_by}.db", path)
    return path


def schema(path: Path) -> list[tuple[str, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT type, name, tbl_name, sql FROM sqlite_schema ORDER BY name").fetchall()
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    return found


MODES = pytest.mark.parametrize("mode", ["create", "existing", "read"])


@MODES
async def test_an_earlier_file_reads_as_it_was_written(old: Path, made_by: int, mode: Mode) -> None:
    async with SQLiteStore(old, mode=mode) as store:
        runs = await store.list_runs()
        assert [run.run_id for run in runs] == RUNS[made_by]
        killed, done = runs[0], runs[-1]
        assert (killed.status, killed.epoch, killed.last_seq) == ("running", 1, KILLED_SEQ[made_by])
        assert killed.owner is not None
        assert (killed.owner.host, killed.counts) == (
            "the-host-that-died",
            {"completed": 4, "running": 2, "pending": 2},
        )
        assert (done.run_id, done.status, done.owner, done.counts) == ("run-whole", "completed", None, {"completed": 2})
        tasks = {task.task_id: task for task in await store.list_tasks("run-killed")}
        assert list(tasks) == ["facts", "more", "moons", "unsteady", "broken", "beside", "story", "end"]
        assert [(t.damaged, t.crashes, t.question, t.asked, t.answers, t.added_by) for t in tasks.values()] == [
            (False, 0, None, None, None, None)
        ] * 8
        assert [t.task_id for t in tasks.values() if t.session_confirmed] == ([] if made_by == 1 else ["broken"])
        assert {(run.policy_state, run.policy_seq) for run in runs} == {(None, 0)}
        assert (tasks["moons"].text, tasks["moons"].data) == ('{"moons": 2}', '{"moons":2}')
        assert (tasks["more"].text, tasks["more"].session_id) == ("Answer to: And more of them.", "session-1")
        assert tasks["end"].depends_on == ("story", "beside")
        attempts = await store.list_attempts("run-killed", "unsteady")
        assert [(a.status, a.error, a.model) for a in attempts] == [
            ("retried", "the line was cut", "small-0" if made_by == 4 else None),
            ("completed", None, MODEL.get(made_by)),
        ]
        assert {task.model for task in tasks.values()} == {None, MODEL.get(made_by)}
        messages = await store.list_messages("run-killed", "facts")
        assert [(m.role, m.content, m.damaged) for m in messages] == [
            ("user", "List facts about Mars.", False),
            ("assistant", "Answer to: List facts about Mars.", False),
        ]
        events = await store.list_events("run-killed")
        assert [e.seq for e in events] == sorted(e.seq for e in events)
        assert [e.kind for e in events].count("task_completed") == 4
        assert [e.kind for e in events if "run_" in e.kind] == ["run_created", "run_started"]
        assert await store.list_events("run-killed", after=events[3].seq, limit=3) == events[4:7]
        assert await store.list_notes("run-killed") == ()
    assert version(old) == (made_by if mode == "read" else CURRENT)


@MODES
async def test_what_version_2_could_hold_is_still_there(path: Path, mode: Mode) -> None:
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_2.db", path)
    async with SQLiteStore(path, mode=mode) as store:
        (again,) = await store.list_tasks("run-again")
        assert (again.text, again.damaged, again.attempt) == ("large " * 12000, False, 2)
        assert [(a.status, a.error) for a in await store.list_attempts("run-again")] == [
            ("failed", "no key"),
            ("completed", None),
        ]
        assert [(e.seq, e.kind) for e in await store.list_events("run-again")] == [
            (1, "run_created"),
            (2, "run_started"),
            (4, "task_started"),
            (6, "task_failed"),
            (7, "run_failed"),
            (10, "run_resumed"),
            (11, "task_reopened"),
            (12, "task_started"),
            (15, "task_completed"),
            (16, "run_completed"),
        ]
        asked = await store.get_run("run-asked")
        send, after = await store.list_tasks("run-asked")
        assert asked is not None
        assert (asked.status, send.status, send.crashes, after.depends_on) == (
            "waiting_input",
            "waiting_input",
            1,
            ("send",),
        )
        assert (send.question or "").startswith("attempt 1 was under way when its process ended")
        (note,) = await store.list_notes("run-whole")
        assert (note.kind, note.body) == ("cancel", '{"seq": 3}')


@MODES
async def test_what_version_3_could_hold_is_still_there(path: Path, mode: Mode) -> None:
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_3.db", path)
    async with SQLiteStore(path, mode=mode) as store:
        plan, total, pick = await store.list_tasks("run-grown")
        assert (plan.added_by, total.added_by, pick.added_by) == (None, None, "plan")
        assert (pick.status, pick.question) == ("waiting_input", "Which one?")
        assert json.loads(pick.asked or "")["schema"] == {"enum": ["this", "that"]}
        assert [(a.task_id, a.status) for a in await store.list_attempts("run-grown")] == [
            ("plan", "completed"),
            ("sum", "completed"),
            ("pick", "asked"),
        ]


async def test_reading_leaves_an_old_file_as_it_is(old: Path, made_by: int) -> None:
    async with SQLiteStore(old, mode="read") as store:
        before = await whole(store, "run-killed")
    assert old.read_bytes() == (FIXTURES / f"schema_{made_by}.db").read_bytes()
    async with SQLiteStore(old, mode="existing") as store:
        assert await whole(store, "run-killed") == before


async def test_who_reads_an_old_file_reads_on_while_another_brings_it_up_to_date(old: Path) -> None:
    async with SQLiteStore(old, mode="read") as reader:
        before = await whole(reader, "run-killed"), await reader.list_runs()
        async with SQLiteStore(old, mode="existing"):
            pass
        assert version(old) == CURRENT
        assert (await whole(reader, "run-killed"), await reader.list_runs()) == before
        assert set(await reader.run_sizes()) == {run.run_id for run in before[1]}


@MODES
async def test_what_version_4_could_hold_is_still_there(path: Path, mode: Mode) -> None:
    path.parent.mkdir()
    shutil.copy(FIXTURES / "schema_4.db", path)
    async with SQLiteStore(path, mode=mode) as store:
        mixed = await store.get_run("run-mixed")
        assert mixed is not None
        assert (mixed.status, mixed.counts) == (
            "cancelled",
            {"cancelled": 4, "failed": 2, "skipped": 1, "completed": 1},
        )
        assert (mixed.input_tokens, mixed.output_tokens, mixed.cost_usd) == (28, 11, 0.75)
        tasks = {task.task_id: task for task in await store.list_tasks("run-mixed")}
        asks, behind, late = tasks["asks"], tasks["behind"], tasks["long"]
        assert (asks.status, asks.attempt, asks.question, asks.asked) == ("cancelled", 2, None, None)
        assert json.loads(asks.answers or "")[0]["value"] is True
        assert (behind.status, behind.attempt, behind.started_at) == ("cancelled", 0, None)
        assert (late.status, late.input_tokens, late.cost_usd, late.model) == ("cancelled", 7, 0.5, "small-1")
        assert [(t.error_kind, t.error) for t in tasks.values() if t.error] == [("auth", "no key")] * 3
        assert [(a.task_id, a.attempt, a.status) for a in await store.list_attempts("run-mixed")] == [
            ("soft", 1, "failed"),
            ("hard", 1, "failed"),
            ("asks", 1, "asked"),
            ("skips", 1, "skipped"),
            ("on", 1, "completed"),
            ("asks", 2, "cancelled"),
            ("long", 1, "cancelled"),
        ]
        again = await store.get_run("run-again")
        assert again is not None
        assert json.loads(again.settings)["inputs"] == {"big": "y" * 70_000}
        assert (await store.list_tasks("run-again"))[0].text == "large " * 12_000


async def test_a_migrated_file_has_the_schema_of_a_new_one(old: Path, tmp_path: Path) -> None:
    await make(tmp_path / "new.db")
    async with SQLiteStore(old) as store:
        await Writer(store).write(*OPENING)
        assert (await store.list_tasks(RUN))[0].status == "pending"
    assert schema(old) == schema(tmp_path / "new.db")


OPEN = """
import asyncio, os, signal, sys
from plait.persistence import SQLiteStore, boundaries

def on_reach(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with SQLiteStore(sys.argv[1]):
        pass

boundaries.on_reach = on_reach
asyncio.run(main())
"""


async def test_killed_while_migrating_leaves_the_old_version(old: Path, made_by: int) -> None:
    child = in_child(OPEN, str(old), "schema.before_commit")
    child.communicate(timeout=30)
    assert child.returncode == -signal.SIGKILL
    assert version(old) == made_by
    async with SQLiteStore(old, mode="read") as store:
        before = await whole(store, "run-killed")
    async with SQLiteStore(old, mode="existing") as store:
        assert await whole(store, "run-killed") == before
    assert version(old) == CURRENT


COUNTED = """
import asyncio, sys
from plait.persistence import SQLiteStore, boundaries

steps = []
boundaries.on_reach = steps.append

async def main():
    async with SQLiteStore(sys.argv[1]) as store:
        print(len(await store.list_runs()))

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
"""


async def test_two_processes_migrate_once(old: Path, made_by: int) -> None:
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
        assert (child.returncode, output, errors) == (0, f"{len(RUNS[made_by])}\n", "")
    assert version(old) == CURRENT
    async with SQLiteStore(old) as store:
        assert len(await store.list_messages("run-killed", "facts")) == 2
