"""What the SQLite store makes of full disks, damage, and errors that escape."""
# ruff: noqa: ASYNC240 - the few small files of these tests are read at once

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait.errors import StoreBusy, StoreError, StoreUnusable
from plait.events import NewTask, TaskAnswered, TaskStarted, TaskWaiting
from plait.persistence import Note, SQLiteStore, sqlite_file
from tests.contracts.store.samples import CLAIMED, CREATED, DONE_A, OPENING, RUN, START_A, Writer, at, message, whole
from tests.support.stores.database import attempts_of, edit, edit_untyped, in_child, make

ROOT = Path(__file__).parent.parent.parent.parent


async def on_database(store: SQLiteStore, sql: str) -> int:
    """Run one statement on the store's own connection, where the page limit lives."""
    return await store._call(lambda connection: connection.execute(sql).fetchone()[0])


async def test_a_full_disk_undoes_the_batch_and_the_same_batch_goes_in_later(path: Path) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        tasks = tuple(NewTask(f"t{number}", "p") for number in range(300))
        await writer.write(replace(CREATED, tasks=tasks), CLAIMED)
        await on_database(store, f"PRAGMA max_page_count = {await on_database(store, 'PRAGMA page_count') + 5}")
        before = await whole(store)
        starts = [TaskStarted(at(3), task.task_id, 1, "fast") for task in tasks]
        turns = [message(at(3), task.task_id, 1, "user", "x" * 500) for task in tasks]
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
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.01)
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
    "text": attempts_of("a", "text = 'The Sun.'"),
    "data": attempts_of("a", "data = NULL"),
    "checksum": attempts_of("a", "result_checksum = NULL"),
    "not utf-8": attempts_of("a", "text = CAST(x'ff00fe' AS TEXT)"),
    "lost": attempts_of("a", "text = NULL, data = NULL, result_checksum = NULL"),
}


@pytest.mark.parametrize("kind", DAMAGE)
async def test_a_damaged_result_is_told_and_not_given(path: Path, kind: str) -> None:
    await make(path)
    edit(path, DAMAGE[kind])
    async with SQLiteStore(path, mode="existing") as store:
        tasks = await store.list_tasks(RUN)
        assert [(task.damaged, task.text, task.data) for task in tasks[:2]] == [(True, None, None), (False, None, None)]


async def test_a_result_moved_to_another_task_is_told(path: Path) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        writer.next_seq, writer.epoch = 8, 1
        await writer.write(replace(START_A, task_id="c"), replace(DONE_A, task_id="c", text="Other.", data_json=None))
    columns = "text, data, result_checksum"
    edit(path, attempts_of("c", f"({columns}) = (SELECT {columns} FROM attempts WHERE position = 0)"))
    async with SQLiteStore(path) as store:
        assert [task.damaged for task in await store.list_tasks(RUN)] == [False, False, True]


@pytest.mark.parametrize("value", ["'The Sun.'", "CAST(x'ff' AS TEXT)"], ids=["another text", "not utf-8"])
async def test_a_damaged_message_is_told_and_not_given(path: Path, value: str) -> None:
    await make(path)
    edit(path, f"UPDATE messages SET content = {value} WHERE role = 'assistant'")
    async with SQLiteStore(path) as store:
        messages = await store.list_messages(RUN, "a")
        assert [(m.content, m.damaged) for m in messages] == [("First.", False), ("", True)]


ASKED_OF = {
    "a prompt": "UPDATE tasks SET prompt = 'Say something else.' WHERE position = 0",
    "a spec": "UPDATE tasks SET spec = '{}' WHERE position = 1",
    "the dependencies": "UPDATE tasks SET depends_on = '[]' WHERE position = 1",
    "answers": """UPDATE tasks SET answers = '["no"]' WHERE position = 2""",
    "not utf-8": "UPDATE tasks SET prompt = CAST(x'ff00fe' AS TEXT) WHERE position = 0",
}


@pytest.mark.parametrize("what", ASKED_OF)
async def test_what_was_asked_is_never_given_damaged(path: Path, what: str) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        writer.next_seq, writer.epoch = 8, 1
        asked = TaskWaiting(at(5), "c", 1, "Go on?", asked="{}")
        await writer.write(replace(START_A, task_id="c"), asked, TaskAnswered(at(6), "c", 1, '["yes"]'))
    edit(path, ASKED_OF[what])
    async with SQLiteStore(path, mode="existing") as store:
        with pytest.raises(StoreError, match=r"run 'run-1' is damaged: task '.' .* does not fit its checksum; restore"):
            await store.list_tasks(RUN)


async def test_a_damaged_note_is_told_and_not_given(path: Path) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        await store.send(RUN, Note("answer", at(5), "a", '"yes"'))
        edit(path, """UPDATE notes SET body = '"no"'""")
        with pytest.raises(StoreError, match="note 1 does not fit its checksum"):
            await store.list_notes(RUN)


WRONG_TYPES = {
    "claims": "UPDATE runs SET claims = 3",
    "a kind of event": "UPDATE events SET kind = 'task_startled'",
    "dependencies": "UPDATE tasks SET depends_on = 7",
}


@pytest.mark.parametrize("what", WRONG_TYPES)
async def test_a_value_of_another_type_is_told_as_damage(path: Path, what: str) -> None:
    await make(path)
    async with SQLiteStore(path) as store:
        edit_untyped(path, WRONG_TYPES[what])
        with pytest.raises(StoreError, match="damaged"):
            await whole(store)


async def test_a_damaged_status_is_not_counted(path: Path) -> None:
    await make(path)
    async with SQLiteStore(path, mode="read") as store:
        edit_untyped(path, "UPDATE tasks SET status = 'complgted' WHERE position = 0")
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
    _, errors = child.communicate(timeout=60)
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
