"""Deleting runs with texts in every place that has texts: no row is left, in no table of any store."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import asyncpg
import pytest

from plait.events import (
    HostAway,
    NewTask,
    NodeStarted,
    PolicyDecided,
    RunReleased,
    SessionOpened,
    TaskAnswered,
    TaskCompleted,
    TaskFailed,
    TaskRetried,
    TasksAdded,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import Note, PostgresStore, SQLiteStore
from tests.contracts.store.samples import CLAIMED, CREATED, RUNNING, Writer, at, message, run_becomes, whole
from tests.support.stores.postgres import empty, worker_dsn

AnyStore = SQLiteStore | PostgresStore
PIECES = ("blobs", "settings_pieces", "texts")
"""The tables of large texts."""
LARGE = 70_000
"""Characters of a text that is stored in a place of its own."""


async def fill(store: AnyStore, run_id: str, size: int) -> None:
    """A run with a text of its own, of at least `size` characters, in each place that has a text."""
    count = 0

    def text() -> str:
        nonlocal count
        count += 1
        return f"{run_id} {count} ".ljust(size, "x")

    tasks = tuple(
        NewTask(name, text(), (), text()[:50], f'{{"metadata": "{text()}"}}') for name in ("done", "failed", "asks")
    )
    writer = Writer(store, run_id)
    await writer.write(replace(CREATED, name=text(), settings=f'"{text()}"', tasks=tasks), CLAIMED, RUNNING)
    await writer.write(TasksAdded(at(3), (NewTask("added", text()),), added_by="done"), PolicyDecided(at(3), text()))
    for name in ("done", "failed", "asks"):
        await writer.write(TaskStarted(at(3), name, 1, "fast", text()[:50]), SessionOpened(at(3), name, 1, text()[:60]))
    await writer.write(
        message(at(4), "done", 1, "user", text()),
        NodeStarted(at(4), "done", 1, text()),
        HostAway(at(4), text(), at(4), text(), ("done",)),
        TaskCompleted(at(4), "done", 1, text(), f'"{text()}"'),
        TaskRetried(at(4), "failed", 1, "transient", text(), 0.5, traceback=text()),
        TaskStarted(at(5), "failed", 2, "fast"),
        TaskFailed(at(5), "failed", 2, "unexpected", text(), traceback=text()),
        TaskWaiting(at(4), "asks", 1, text(), asked=f'"{text()}"'),
        TaskAnswered(at(5), "asks", 1, f'"{text()}"'),
        TaskStarted(at(5), "asks", 2, "fast"),
        TaskCompleted(at(6), "asks", 2, text(), turn=text()),
        TaskStarted(at(6), "added", 1, "fast"),
        TaskCompleted(at(7), "added", 1, text(), turn=text()),
    )
    await writer.write(run_becomes(at(9), "failed", text()), RunReleased(at(9)))
    await store.send(run_id, Note("answer", at(9), "asks", f'"{text()}"'))


async def check(store: AnyStore, rows: Callable[[], Awaitable[dict[str, int]]], size: int) -> None:
    """Fail if a purge leaves a row of a run, or takes a row of another."""
    before = await rows()
    await fill(store, "kept", size)
    kept, rows_of_kept = await whole(store, "kept"), await rows()
    await fill(store, "old", size)
    unfilled = {name for name, count in rows_of_kept.items() if count == before[name]}
    of_no_run = {"plait_store", "accounts"} & before.keys()
    assert unfilled == (of_no_run if size == LARGE else unfilled & {*of_no_run, *PIECES})
    await fill(store, "old", size)
    await store.purge(["old"])
    assert (await whole(store, "kept"), await rows()) == (kept, rows_of_kept)
    await store.purge(["kept"])
    assert await rows() == before


@pytest.mark.parametrize("size", [1, LARGE])
async def test_a_purge_leaves_no_row_in_a_file(tmp_path: Path, size: int) -> None:
    path = tmp_path / "plait.db"

    async def rows() -> dict[str, int]:
        with closing(sqlite3.connect(path)) as database:
            names = database.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite%'")
            return {
                name: database.execute(f"SELECT count(*) FROM {name}").fetchone()[0] for (name,) in names.fetchall()
            }

    async with SQLiteStore(path) as store:
        await check(store, rows, size)


@pytest.mark.parametrize("size", [1, LARGE])
async def test_a_purge_leaves_no_row_on_a_server(size: int) -> None:
    dsn = await asyncio.to_thread(worker_dsn)
    await empty(dsn)

    async def rows() -> dict[str, int]:
        connection = await asyncpg.connect(dsn)
        try:
            names = await connection.fetch("SELECT tablename FROM pg_tables WHERE schemaname = current_schema()")
            return {name: await connection.fetchval(f"SELECT count(*) FROM {name}") for (name,) in names}
        finally:
            await connection.close()

    async with PostgresStore(dsn) as store:
        await check(store, rows, size)
