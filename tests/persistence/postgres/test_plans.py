"""The server finds the rows of a task and of a batch by their keys, however many there are."""

from __future__ import annotations

from dataclasses import replace

import anyio
import asyncpg
import pytest

from plait.events import NewTask, TaskCompleted, TaskReopened, TaskStarted
from plait.persistence import Batch, PostgresStore
from tests.contracts.store.samples import CREATED, OPENING, Writer, at

TASKS = 2000


async def fill(store: PostgresStore) -> Writer:
    """Write a run whose tasks are all completed but the last."""
    names = [f"t{number}" for number in range(TASKS)]
    writer = Writer(store)
    await writer.write(replace(CREATED, tasks=tuple(NewTask(name, "p") for name in names)), *OPENING[1:])
    await writer.write(*(TaskStarted(at(3), name, 1, "fast") for name in names))
    await writer.write(*(TaskCompleted(at(4), name, 1, "answer", turn="p") for name in names[:-1]))
    return writer


async def rows_read(dsn: str) -> dict[str, int]:
    """Return how many rows of each table the server has read. It counts what a connection read when that has ended."""
    connection = await asyncpg.connect(dsn)
    others = """SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'"""
    read = "SELECT relname, seq_tup_read + coalesce(idx_tup_fetch, 0) FROM pg_stat_user_tables"
    try:
        with anyio.fail_after(60):
            while await connection.fetchval(others):
                await connection.execute("SELECT pg_sleep(0.01)")
        return {row[0]: row[1] for row in await connection.fetch(read)}
    finally:
        await connection.close()


async def know_small_runs(store: PostgresStore, dsn: str) -> None:
    """Let the server gather its statistics from runs of one task."""
    for number in range(30):
        small = Writer(store, f"small-{number}")
        await small.write(
            *OPENING, TaskStarted(at(3), "a", 1, "fast"), TaskCompleted(at(4), "a", 1, "answer", turn="p")
        )
    connection = await asyncpg.connect(dsn)
    await connection.execute("ANALYZE")
    await connection.close()


@pytest.mark.parametrize("knows_small_runs", [False, True])
async def test_the_rows_of_one_task_are_found_by_their_keys(
    store: PostgresStore, dsn: str, knows_small_runs: bool
) -> None:
    if knows_small_runs:
        await know_small_runs(store, dsn)
    writer = await fill(store)
    await store.close()
    before = await rows_read(dsn)
    async with PostgresStore(dsn) as again:
        await again.list_tasks(writer.run_id, "t7")
        await again.list_attempts(writer.run_id, "t7")
        assert len(await again.list_messages(writer.run_id, "t7")) == 2
        writer.store = again
        await writer.write(TaskCompleted(at(5), f"t{TASKS - 1}", 1, "answer", turn="p"))
        await writer.write(TaskReopened(at(6), "t3", 1, damaged=True))
    after = await rows_read(dsn)
    read = {table: after[table] - before[table] for table in ("tasks", "attempts", "messages", "events")}
    read["tasks"] -= TASKS  # once, for an owner who goes on
    assert all(count < 20 for count in read.values()), read


async def test_batches_of_an_owner_who_goes_on_are_one_round_trip(store: PostgresStore, dsn: str) -> None:
    await Writer(store, "r").write(CREATED)
    async with PostgresStore(dsn) as again:
        await again.write(Batch("r", 0, 2, OPENING[1:]))
        for seq, task in enumerate(CREATED.tasks, 4):
            await again.write(Batch("r", 1, seq, (TaskStarted(at(3), task.task_id, 1, "fast"),)))
        assert (again.batches["all"], again.batches["single"]) == (1 + len(CREATED.tasks), len(CREATED.tasks))
