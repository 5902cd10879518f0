"""What the stores on SQLite do beside the contract: errors, missing rows, closing, and the thread of a file."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from plait import failpoints
from plait.errors import Conflict, StoreBusy, StoreError, StoreUnusable
from plait.events import NewTask, SessionOpened
from plait.persistence import MemoryStore, SQLiteStore, sqlite_file, sqlite_store
from tests.contracts.store.samples import ASK, CLAIMED, CREATED, DONE_A, OPENING, RUN, START_A, Writer, at, whole


async def test_a_row_that_is_missing_is_damage_and_nothing_is_written() -> None:
    store = MemoryStore()
    writer = Writer(store)
    await writer.write(*OPENING, START_A)
    store._connection.execute("DELETE FROM tasks WHERE task_id = 'a'")
    before = await whole(store)
    with pytest.raises(StoreError, match=r"^the store is damaged: 1 rows of tasks are missing$"):
        await writer.write(ASK, DONE_A)
    assert await whole(store) == before


async def test_one_row_of_many_that_is_missing_is_damage_and_nothing_is_written() -> None:
    store, ids = MemoryStore(), [f"t{number}" for number in range(40)]
    writer = Writer(store)
    await writer.write(replace(CREATED, tasks=tuple(NewTask(one, "p") for one in ids)), CLAIMED)
    await writer.write(*(replace(START_A, task_id=one) for one in ids))
    store._connection.execute("DELETE FROM tasks WHERE task_id = 't20'")
    before = await whole(store)
    with pytest.raises(StoreError, match=r"^the store is damaged: 1 rows of tasks are missing$"):
        await writer.write(*(replace(DONE_A, task_id=one) for one in ids))
    assert await whole(store) == before


async def test_the_error_of_a_database_in_memory_is_a_store_error() -> None:
    store = MemoryStore()
    store._connection.execute("DROP TABLE notes")
    with pytest.raises(StoreError, match=r"^the store in memory failed: no such table: notes$"):
        await store.list_notes(RUN)


async def test_a_value_of_a_wrong_type_is_damage() -> None:
    store = MemoryStore()
    await Writer(store).write(*OPENING, START_A, SessionOpened(at(4), "a", 1, "session-b"))
    assert await store.session_ids() == {"session-b"}
    store._connection.execute("UPDATE events SET detail = 'none' WHERE kind = 'session_opened'")
    with pytest.raises(StoreError, match=r"^a stored row is damaged: a value has the wrong type \(.*\); restore"):
        await store.session_ids()


async def test_a_cancelled_close_waits_for_the_last_call_and_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    store = SQLiteStore(path)
    await store.__aenter__()
    await Writer(store).write(*OPENING)
    assert Path(f"{path}-wal").exists()  # noqa: ASYNC240
    async with anyio.create_task_group() as group:
        group.start_soon(store._call, lambda _: time.sleep(0.2))
        await anyio.lowlevel.checkpoint()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await store.close()
    assert not Path(f"{path}-wal").exists()  # noqa: ASYNC240 - SQLite removes the log with the last connection


async def test_the_thread_of_a_file_keeps_no_program_from_ending(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    async with SQLiteStore(tmp_path / "runs.db"):
        [thread] = set(threading.enumerate()) - before
        assert thread.daemon


def fails(connection: sqlite3.Connection) -> None:
    connection.execute("SELECT 1 FROM nowhere")


def refuses(_connection: sqlite3.Connection) -> None:
    raise Conflict("no")


async def test_only_after_an_error_of_sqlite_the_connection_is_another(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        first = await store._call(lambda connection: connection)
        with pytest.raises(Conflict):
            await store._call(refuses)
        assert await store._call(lambda connection: connection) is first
        with pytest.raises(StoreError, match=r"runs.db failed: no such table: nowhere$") as failed:
            await store._call(fails)
        assert failed.type is StoreError
        second = await store._call(lambda connection: connection)
        assert second is not first
        assert await store._call(lambda connection: connection) is second


async def test_a_store_that_only_reads_only_reads_over_every_connection(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING)
    async with SQLiteStore(path, mode="read") as store:
        for _ in range(2):
            with pytest.raises(StoreError, match="attempt to write a readonly database; check the permissions"):
                await store._call(lambda connection: connection.execute("CREATE TABLE mine (x)").fetchall())
            assert len(await store.list_runs()) == 1


async def test_a_connection_in_place_of_another_never_makes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[sqlite_file.Mode] = []

    def opened(path: Path, mode: sqlite_file.Mode, **options: bool) -> sqlite3.Connection:
        modes.append(mode)
        return sqlite_file.open_database(path, mode, **options)

    monkeypatch.setattr(sqlite_store, "open_database", opened)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        with pytest.raises(StoreError):
            await store._call(fails)
        await store.list_runs()
    assert modes == ["create", "existing"]


def test_a_mode_or_a_path_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a store's mode is 'create', 'existing' or 'read', not 'write'$"):
        SQLiteStore("runs.db", mode="write")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^a SQLiteStore needs the path of a file, not ':memory:'; see MemoryStore$"):
        SQLiteStore(":memory:")


async def test_a_lock_of_another_process_is_busy_and_leaves_the_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_file, "BUSY_TIMEOUT_S", 0.01)
    path = tmp_path / "runs.db"
    async with SQLiteStore(path) as store:
        connection = await store._call(lambda connection: connection)
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreBusy, match=r"database is locked; another process has been writing for 5 s; try"):
                await Writer(store).write(*OPENING)
        await Writer(store).write(*OPENING)
        assert await store._call(lambda connection: connection) is connection


async def test_bytes_that_are_no_text_damage_their_record_alone(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING, START_A, ASK, DONE_A)
        statement = "UPDATE messages SET content = CAST(x'ff' AS TEXT)"
        await store._call(lambda connection: connection.execute(statement).fetchall())
        [message] = await store.list_messages(RUN, "a")
        assert (message.content, message.damaged) == ("", True)
        assert await store._call(lambda connection: connection.text_factory) is str


def test_a_program_ends_without_closing_its_store(tmp_path: Path) -> None:
    program = """
import asyncio, sys
from plait import SQLiteStore

async def main():
    await SQLiteStore(sys.argv[1]).__aenter__()

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path / "runs.db"], timeout=60, check=False)
    assert done.returncode == 0


async def test_who_opens_a_store_is_told_of_its_damage(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SQLiteStore(path):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE notes")
    with pytest.raises(StoreUnusable, match=r"is damaged \(the definition of notes has changed\)"):
        async with SQLiteStore(path):
            pass


async def test_a_write_passes_the_failpoints_on_both_sides_of_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoints, "on_reach", passed.append)
    writer = Writer(MemoryStore())
    for changes in (OPENING, (START_A, DONE_A)):
        await writer.write(*changes)
    assert passed == ["txn.begun", "txn.before_commit", "txn.after_commit"] * 2
