"""What the SQLite store makes of full disks, damage, and errors that escape."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait.events import NewTask, SessionOpened, TaskInterrupted
from plait.persistence import (
    Change,
    Conflict,
    MessageAppended,
    SQLiteStore,
    StoreBusy,
    StoreError,
    StoreUnusable,
    TaskCompleted,
    TaskFailed,
    TaskStarted,
)
from plait.persistence.contract.samples import ASKED, CLAIMED, CREATED, DONE_A, OPENING, RUN, START_A, Writer, at, whole
from plait.persistence.sqlite import connection as opening
from tests.support.stores.database import edit, edit_untyped, end_of, in_child, make

ROOT = Path(__file__).parent.parent.parent.parent


async def on_database(store: SQLiteStore, sql: str) -> int:
    """Run one statement on the store's own connection, where the page limit lives."""
    thread = store._thread
    assert thread is not None
    return await thread.run(lambda connection: connection.execute(sql).fetchone()[0])


async def test_a_full_disk_undoes_the_batch_and_the_same_batch_goes_in_later(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        tasks = tuple(NewTask(f"t{number}", "p") for number in range(300))
        await writer.write(replace(CREATED, tasks=tasks), CLAIMED)
        await on_database(store, f"PRAGMA max_page_count = {await on_database(store, 'PRAGMA page_count') + 5}")
        before = await whole(store)
        starts = [TaskStarted(at(3), task.task_id, 1, "fast") for task in tasks]
        turns = [MessageAppended(at(3), task.task_id, 1, "user", "x" * 500) for task in tasks]
        with pytest.raises(StoreError, match="full; free some space"):
            await writer.write(*starts, *turns)
        # The limit was the connection's, and what comes next has another connection.
        assert await whole(store) == before
        await writer.write(*starts, *turns)
        run = await store.get_run(RUN)
        assert run is not None
        assert run.counts == {"running": 300}
    async with SQLiteStore(path, mode="existing") as store:
        assert len(await store.list_attempts(RUN)) == 300


async def test_a_locked_database_is_an_error_that_goes_away(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING)
        await on_database(store, "PRAGMA busy_timeout = 10")
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusy, match=r"locked.*try again"):
                await writer.write(START_A)
            other.execute("ROLLBACK")
        await writer.write(START_A)


async def test_a_database_that_another_process_has_locked_cannot_be_opened(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await make(path)
    monkeypatch.setattr(opening, "BUSY_TIMEOUT_S", 0.01)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StoreUnusable, match=r"cannot be opened: .*another process has locked it; try again"):
            async with SQLiteStore(path):
                pass
        other.execute("ROLLBACK")
    async with SQLiteStore(path, mode="existing") as store:
        assert len(await store.list_runs()) == 1


DAMAGE = {
    "text": end_of("a", "text = 'The Sun.'"),
    "data": end_of("a", "data = NULL"),
    "checksum": end_of("a", "checksum = NULL"),
    "not utf-8": end_of("a", "text = CAST(x'ff00fe' AS TEXT)"),
    "lost": end_of("a", "text = NULL, data = NULL, checksum = NULL"),
    "made up": end_of("b", "text = 'never said'"),
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_result_is_told_and_not_given(path: Path, kind: str) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        writer.next_seq, writer.epoch = 8, 1
        await writer.write(replace(START_A, task_id="b"), TaskFailed(at(5), "b", 1, "failed", "auth", "no key"))
    edit(path, DAMAGE[kind])
    async with SQLiteStore(path, mode="existing") as store:
        tasks = await store.list_tasks(RUN)
        damaged = tasks[1 if kind == "made up" else 0]
        assert [task.damaged for task in tasks].count(True) == 1
        assert (damaged.damaged, damaged.text, damaged.data) == (True, None, None)


async def test_a_result_moved_to_another_task_is_told(path: Path) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        writer.next_seq, writer.epoch = 8, 1
        await writer.write(replace(START_A, task_id="c"), replace(DONE_A, task_id="c", text="Other.", data=None))
    columns = "text, data, checksum"
    edit(path, end_of("c", f"({columns}) = (SELECT {columns} FROM tasks WHERE task_id = 'a')"))
    async with SQLiteStore(path) as store:
        assert [task.damaged for task in await store.list_tasks(RUN)] == [False, False, True]


@pytest.mark.parametrize("value", ["'The Sun.'", "CAST(x'ff' AS TEXT)"], ids=["another text", "not utf-8"])
async def test_a_damaged_message_is_told_and_not_given(path: Path, value: str) -> None:
    await make(path)
    edit(path, f"UPDATE other_messages SET content = {value} WHERE role = 'assistant'")
    async with SQLiteStore(path) as store:
        messages = await store.list_messages(RUN, "a")
        assert [(m.content, m.damaged) for m in messages] == [("First.", False), ("", True)]


RENEWED: dict[str, tuple[tuple[Change, ...], str, Change]] = {
    "a start": ((START_A,), "UPDATE starts SET session_confirmed = x'30'", SessionOpened(at(5), "a", 1, "other")),
    "a task": ((START_A,), "UPDATE given_tasks SET crashes = x'30'", TaskInterrupted(at(5), "a", 1, "x", crashed=True)),
    "an end": ((START_A, ASKED), "UPDATE ends SET input_tokens = x'30'", TaskCompleted(at(5), "a", 1, "Done.")),
}
"""What was written, the damage, and a change that renews the checksum of the damaged row."""


@pytest.mark.parametrize("row", RENEWED)
async def test_a_number_of_another_type_in_a_row_that_changes_is_told_as_damage(path: Path, row: str) -> None:
    before, damage, change = RENEWED[row]
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        await writer.write(*OPENING, *before)
        edit_untyped(path, damage)  # opening the file would find the damage
        with pytest.raises(StoreError, match=r"run 'run-1' is damaged: .* does not fit its checksum; restore") as told:
            await writer.write(change)
        assert not isinstance(told.value, Conflict)


async def test_a_damaged_status_is_not_counted(path: Path) -> None:
    await make(path)
    async with SQLiteStore(path, mode="read") as store:
        edit_untyped(path, "UPDATE ends SET status = 'complgted'")
        with pytest.raises(StoreError, match="run 'run-1' is damaged: the status of a task does not fit"):
            await store.get_run(RUN)
        assert [run.damaged for run in await store.list_runs()] == [True]


async def test_pages_damaged_by_hand_are_refused(path: Path) -> None:
    await make(path)
    content = bytearray(path.read_bytes())
    content[8192 * 3 : 8192 * 3 + 200] = b"\xa5" * 200
    path.write_bytes(content)
    with pytest.raises(StoreUnusable, match="damaged"):
        async with SQLiteStore(path, mode="existing"):
            pass
    assert path.read_bytes() == content


ESCAPES = """
import asyncio, sys
from plait.persistence import SQLiteStore

async def main(path, how):
    if how == "forgotten":
        store = await SQLiteStore(path).__aenter__()
        globals()["kept"] = store
        raise RuntimeError("escaped")
    async with SQLiteStore(path) as store:
        if how == "exit":
            sys.exit("escaped")
        if how == "interrupt":
            raise KeyboardInterrupt("escaped")
        raise RuntimeError("escaped")

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("how", ["raise", "exit", "interrupt", "forgotten"])
def test_a_process_ends_when_an_error_escapes(path: Path, how: str) -> None:
    child = in_child(ESCAPES, str(path), how)
    _, errors = child.communicate(timeout=20)
    assert child.returncode != 0
    assert "escaped" in errors


async def test_cancelled_while_opening_and_while_closing(path: Path) -> None:
    for steps in range(6):
        async with anyio.create_task_group() as group:

            async def use() -> None:
                async with SQLiteStore(path) as store:
                    await store.list_runs()

            group.start_soon(use)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    await make(path)
    async with SQLiteStore(path, mode="existing") as store:
        assert isinstance(await whole(store), tuple)
