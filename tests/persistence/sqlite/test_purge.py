"""Deleting runs so that no byte of them is left, and what runs hold."""

from __future__ import annotations

import sqlite3
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from plait.errors import Conflict, StoreError
from plait.events import NewTask, PolicyDecided, RunReleased, SessionOpened, TaskAnswered, TaskReopened, TaskWaiting
from plait.persistence import Note, SQLiteStore, sqlite_store
from tests.contracts.store.samples import (
    ANSWER,
    ASK,
    AT_START,
    CLAIMED,
    CREATED,
    DONE_A,
    OPENING,
    RUN,
    START_A,
    Writer,
    at,
    reworded,
    run_becomes,
    whole,
)

CANARY = "canary-7f3a"
LARGE = "more than enough " * 5000
ENDS = (run_becomes(at(9), "completed"), RunReleased(at(9)))


async def fill(store: SQLiteStore, run_id: str, canary: str = "", *, large: str = "", ends: bool = True) -> Writer:
    """A run with `canary` in every text that a run has."""
    writer = Writer(store, run_id)
    tasks = tuple(replace(task, prompt=f"{task.prompt}{canary}") for task in CREATED.tasks)
    answer, done = reworded(ANSWER, f"{canary} {large}"), replace(DONE_A, text=f"{canary} {large}")
    await writer.write(replace(CREATED, tasks=tasks, settings=f'{{"x":"{canary} {large}"}}'), *OPENING[1:])
    for change in (START_A, reworded(ASK, canary), answer, replace(done, data_json=f'"{canary}"')):
        await writer.write(change)
    retried = [replace(change, task_id="c") for change in AT_START["retried"]]  # type: ignore[call-arg]
    await writer.write(*retried, replace(START_A, task_id="c", attempt=2), *(ENDS if ends else ()))
    await store.send(run_id, Note("cancel", at(9), body=f'"{canary}"'))
    return writer


def found(path: Path, text: str) -> list[str]:
    """The files that hold `text`. Another process looks: closing a file here would drop SQLite's locks on it."""
    grep = subprocess.run(["grep", "-rlF", text, str(path.parent)], capture_output=True, text=True, check=False)
    return grep.stdout.splitlines()


def tables(path: Path) -> dict[str, set[str]]:
    names = ("runs", "tasks", "attempts", "messages", "events", "notes")
    with closing(sqlite3.connect(path)) as connection:
        return {n: {row[0] for row in connection.execute(f"SELECT run_id FROM {n}")} for n in names}


@pytest.mark.parametrize("large", ["", LARGE], ids=["small texts", "large texts"])
async def test_no_byte_of_a_purged_run_is_left(path: Path, large: str) -> None:
    async with SQLiteStore(path) as store:
        await fill(store, "old", CANARY, large=large)
        await fill(store, "kept", large=large)
        kept = await whole(store, "kept")
        assert found(path, CANARY)
        async with SQLiteStore(path, mode="read"):  # open, but not reading
            purged = await store.purge(["old", "unknown"])
        assert (purged.run_ids, purged.remains) == (("old",), None)
        assert found(path, CANARY) == []
        assert await store.get_run("old") is None
        assert await whole(store, "kept") == kept
        await fill(store, "new", large=large)
    assert found(path, CANARY) == []
    assert tables(path) == {name: {"kept", "new"} for name in tables(path)}


async def test_no_run_gets_the_number_of_one_that_is_gone(path: Path) -> None:
    """Else what is kept of that one, such as how its tasks stand, would be taken for the new one's."""
    async with SQLiteStore(path) as store:
        await fill(store, "gone")
        await store.purge(["gone"])
        await fill(store, "new")
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT number FROM runs").fetchall() == [(2,)]


async def test_a_result_thrown_away_earlier_is_gone_as_well(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = await fill(store, "old", CANARY, large=LARGE, ends=False)
        await writer.write(TaskReopened(at(9), "a", 1, damaged=True), *ENDS)
        await store.purge(["old"])
        assert found(path, CANARY) == []


async def test_a_large_text_stays_as_long_as_a_run_holds_it(path: Path) -> None:
    async with SQLiteStore(path) as store:
        for run_id in ("one", "two"):
            await fill(store, run_id, "same", large=LARGE)
        purged = await store.purge(["one"])
        assert purged.freed_bytes == 0
        assert (await store.list_tasks("two"))[0].text == f"same {LARGE}"
        purged = await store.purge(["two"])
        assert purged.freed_bytes > len(LARGE)
        assert found(path, "more than enough") == []


async def test_runs_that_go_on_are_refused_and_named(path: Path) -> None:
    async with SQLiteStore(path) as store:
        for run_id in ("done", "live"):
            await fill(store, run_id, ends=run_id == "done")
        await Writer(store, "claimed").write(*OPENING, run_becomes(at(9), "failed"), CLAIMED)
        with pytest.raises(Conflict, match=r"nothing was deleted: run 'live' is running.*run 'claimed' is in use by"):
            await store.purge(["done", "live", "claimed"])
        assert len(await store.list_runs()) == 3
        async with SQLiteStore(path, mode="read") as reader:
            with pytest.raises(StoreError, match="for reading only"):
                await reader.purge(["done"])


async def test_the_sessions_of_deleted_runs_are_forgotten(path: Path) -> None:
    async with SQLiteStore(path) as store:
        for run_id in ("one", "two"):
            writer = Writer(store, run_id)
            await writer.write(*OPENING, replace(START_A, session_id=f"session-{run_id}"))
            await writer.write(*(SessionOpened(at(4), "a", 1, f"{run_id}-{n}") for n in range(2)), *ENDS)
        of_two = {"two-0", "two-1"}
        assert await store.session_ids() == {"one-0", "one-1"} | of_two
        await store.purge(["one"])
        assert await store.session_ids() == of_two


GOING_ON = {
    "queued": (CREATED,),
    "running": (*OPENING, RunReleased(at(9))),
    "waiting_input": (*OPENING, run_becomes(at(9), "waiting_input"), RunReleased(at(9))),
    "cancelling": (*OPENING, run_becomes(at(9), "cancelling"), RunReleased(at(9))),
}


@pytest.mark.parametrize("status", GOING_ON)
async def test_a_run_without_an_owner_that_has_not_ended_is_kept(path: Path, status: str) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store, "it").write(*GOING_ON[status])
        before = await whole(store, "it")
        with pytest.raises(Conflict, match=f"nothing was deleted: run 'it' is {status}: resume or cancel it first"):
            await store.purge(["it"])
        assert await whole(store, "it") == before


@pytest.mark.parametrize("status", ["completed", "failed", "cancelled"])
async def test_a_run_that_has_ended_is_deleted(path: Path, status: str) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store, "it").write(*OPENING, run_becomes(at(9), status), RunReleased(at(9)))
        assert (await store.purge(["unknown", "it"])).run_ids == ("it",)
        assert await store.list_runs() == ()


async def test_somebody_who_reads_is_told_of_and_purging_again_makes_up_for_it(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await fill(store, "old", CANARY)
        await store._call(lambda connection: connection.execute("PRAGMA busy_timeout = 10").fetchall())
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN")
            assert other.execute("SELECT count(*) FROM runs").fetchone() == (1,)
            purged = await store.purge(["old"])
            assert purged.run_ids == ("old",)
            assert purged.remains is not None
            assert "another process is still reading" in purged.remains
            assert await store.list_runs() == ()
        assert (await store.purge([])).remains is None
        assert found(path, CANARY) == []


async def test_somebody_who_writes_keeps_the_file_from_being_written_anew(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await fill(store, "old", CANARY)

        def while_another_writes(connection: sqlite3.Connection) -> str | None:
            connection.execute("PRAGMA busy_timeout = 10").fetchall()
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                return wipe(connection)

        wipe = sqlite_store.wipe
        with mock.patch.object(sqlite_store, "wipe", while_another_writes):
            purged = await store.purge(["old"])
        assert purged.remains is not None
        assert "locked" in purged.remains
        await store.purge(["old"])
        assert found(path, CANARY) == []


async def test_an_unexpected_failure_to_write_the_file_anew_is_an_error_and_the_texts_are_gone(path: Path) -> None:
    """SQLite attaches a second database for VACUUM. Deletion itself overwrites what it deletes."""
    async with SQLiteStore(path) as store:
        await fill(store, "kept")
        await fill(store, "old", CANARY)
        await store._call(lambda connection: connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0))
        with pytest.raises(StoreError, match="too many attached databases"):
            await store.purge(["old"])
        assert [run.run_id for run in await store.list_runs()] == ["kept"]
    assert found(path, CANARY) == []  # closing has emptied the WAL


async def test_purging_a_large_run_does_not_take_for_ever(path: Path) -> None:
    """Each row that goes is looked for in the tables that refer to it."""
    tasks = tuple(NewTask(f"t{n}", "p", (f"t{n - 1}",) if n else ()) for n in range(5000))
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(replace(CREATED, tasks=tasks), *OPENING[1:])
        for change in (START_A, ASK, ANSWER, DONE_A):
            await writer.write(*(replace(change, task_id=task.task_id) for task in tasks))
        await writer.write(*ENDS)
        await store.purge(["run-1"])
        assert await store.list_runs() == ()


async def test_run_sizes_count_questions_answers_and_decisions(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING, START_A)
        before = (await store.run_sizes())[RUN]
        await writer.write(TaskWaiting(at(4), "a", 1, "\u00e9?", asked='{"x":1}'))
        asked = len("\u00e9?".encode()) + len('{"x":1}')
        assert (await store.run_sizes())[RUN] == before + asked
        await writer.write(
            TaskAnswered(at(5), "a", 1, '["yes"]'), PolicyDecided(at(5), "123"), PolicyDecided(at(5), "12")
        )
        # An answered question is gone; of a policy's states the last one stays alone.
        assert (await store.run_sizes())[RUN] == before + len('["yes"]') + 2


async def test_run_sizes_are_bytes_of_text(path: Path) -> None:
    async with SQLiteStore(path) as store:
        assert await store.run_sizes() == {}
        for run_id in ("one", "two"):
            await fill(store, run_id, "é", large=LARGE)
        text, data = len(f"é {LARGE}".encode()), len('"é"'.encode())
        prompts = sum(len(f"{task.prompt}é".encode()) + len(task.spec) for task in CREATED.tasks)
        size = text + data + prompts + len(f'{{"x":"é {LARGE}"}}'.encode()) + len("é".encode())
        errors = len("reset") + len('"é"'.encode())  # the note's body
        assert await store.run_sizes() == {"one": size + errors, "two": size + errors}
    async with SQLiteStore(path, mode="read") as store:
        assert set(await store.run_sizes()) == {"one", "two"}
