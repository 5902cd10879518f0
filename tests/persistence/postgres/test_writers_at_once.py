"""Former owners, and processes that write to one run at the same time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import anyio
import asyncpg
import pytest

from plait import PostgresStore, failpoints
from plait.errors import Conflict, Fenced
from plait.events import Event, LeaseRenewed, RunClaimed, RunReleased, TaskReopened, TaskRetried
from plait.persistence import Batch, Note
from plait.persistence.tables import Reading
from plait.usage import Usage
from tests.contracts.store.samples import (
    CREATED,
    DONE_A,
    OPENING,
    RUN,
    RUNNING,
    START_A,
    Writer,
    at,
    owner,
    run_becomes,
    whole,
)

LATE: dict[str, tuple[Event, ...]] = {
    "a start": (START_A,),
    "two changes of one task, which are two statements": (START_A, DONE_A),
    "a change that would not follow": (DONE_A,),
    "a renewal": (LeaseRenewed(at(9), 2000.0),),
}
OTHER = RunClaimed(at(9), owner("other"), 9.0)


@pytest.fixture
async def other(store: PostgresStore, dsn: str) -> AsyncGenerator[PostgresStore]:
    """The store of another process."""
    async with PostgresStore(dsn) as other:
        yield other


async def in_database(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


@pytest.mark.parametrize("late", LATE)
async def test_a_former_owner_writes_nothing(store: PostgresStore, other: PostgresStore, late: str) -> None:
    await store.write(Batch(RUN, 0, 1, OPENING))
    await other.write(Batch(RUN, 1, 4, (OTHER,)))
    before = await whole(other)
    for _ in range(2):  # by the one statement, then the exact way
        with pytest.raises(Fenced, match="has another owner"):
            await store.write(Batch(RUN, 1, 4, LATE[late]))
    assert await whole(other) == before
    await other.write(Batch(RUN, 2, 5, LATE["a start"]))


@pytest.mark.parametrize("late", LATE)
async def test_an_owner_whose_claim_a_failover_lost_to_another_writes_nothing(
    store: PostgresStore, dsn: str, late: str
) -> None:
    """The other owner has the same epoch, at the same number of changes."""
    await store.write(Batch(RUN, 0, 1, OPENING))
    await in_database(dsn, """UPDATE runs SET owner_id = 'other', claims = '[[2, "other"]]'""")
    before = await whole(store)
    for _ in range(2):  # by the one statement, then the exact way
        with pytest.raises(Fenced, match="has another owner"):
            await store.write(Batch(RUN, 1, 4, LATE[late], "owner-1"))
    assert await whole(store) == before


async def test_of_two_processes_that_claim_a_run_at_once_one_wins(store: PostgresStore, other: PostgresStore) -> None:
    await store.write(Batch(RUN, 0, 1, (CREATED,)))
    claims = [RunClaimed(at(5), owner(name), 2000.0) for name in ("left", "right")]
    written = [one.write(Batch(RUN, 0, 2, (claim,))) for one, claim in zip((store, other), claims, strict=True)]
    outcomes = await asyncio.gather(*written, return_exceptions=True)
    run = await store.get_run(RUN)
    assert run is not None
    assert (outcomes.count(None), [type(one) for one in outcomes if one is not None]) == (1, [Fenced])
    assert (run.epoch, run.owner) == (1, claims[outcomes.index(None)].owner)


async def test_two_processes_that_create_a_run_at_once_create_it_once(
    store: PostgresStore, other: PostgresStore
) -> None:
    await asyncio.gather(store.write(Batch(RUN, 0, 1, OPENING)), other.write(Batch(RUN, 0, 1, OPENING)))
    assert len(await store.list_tasks(RUN)) == len(CREATED.tasks)
    different = Batch("second", 0, 1, (CREATED,)), Batch("second", 0, 1, (replace(CREATED, settings="[]"),))
    written = [one.write(batch) for one, batch in zip((store, other), different, strict=True)]
    outcomes = await asyncio.gather(*written, return_exceptions=True)
    [refused] = [one for one in outcomes if one is not None]
    assert isinstance(refused, Conflict)
    assert "exists already" in str(refused)


async def test_a_run_that_another_process_is_about_to_commit_is_created_once(
    store: PostgresStore, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The insert waits for the other transaction, and is refused after that has committed."""
    inserted = threading.Event()

    async def create() -> None:
        async with PostgresStore(dsn) as other:
            await other.write(Batch(RUN, 0, 1, OPENING))

    async def look() -> None:
        watcher = await asyncpg.connect(dsn)
        try:
            while not await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                await watcher.execute("SELECT pg_sleep(0.01)")
        finally:
            await watcher.close()

    def hold(name: str) -> None:
        if name == "txn.before_commit" and threading.current_thread() is creator:
            inserted.set()
            watcher = threading.Thread(target=asyncio.run, args=[look()])
            watcher.start()
            watcher.join(20)

    creator = threading.Thread(target=asyncio.run, args=[create()])
    monkeypatch.setattr(failpoints, "on_reach", hold)
    creator.start()
    assert await asyncio.to_thread(inserted.wait, 20)
    await store.write(Batch(RUN, 0, 1, OPENING))
    await asyncio.to_thread(creator.join)
    assert [task.task_id for task in await store.list_tasks(RUN)] == [task.task_id for task in CREATED.tasks]


async def test_notes_that_are_sent_at_once_are_numbered_one_after_the_other(
    store: PostgresStore, other: PostgresStore
) -> None:
    await store.write(Batch(RUN, 0, 1, OPENING))
    await asyncio.gather(*(one.send(RUN, Note("cancel", at(5))) for one in (store, other) for _ in range(5)))
    assert [note.number for note in await store.list_notes(RUN)] == list(range(1, 11))


async def test_a_run_that_is_claimed_beside_its_purge_stays(store: PostgresStore, dsn: str) -> None:
    await store.write(Batch(RUN, 0, 1, (*OPENING, run_becomes(at(8), "failed"), RunReleased(at(8)))))
    claimer = await asyncpg.connect(dsn)
    watcher = await asyncpg.connect(dsn)
    try:
        async with claimer.transaction():
            await claimer.execute("UPDATE runs SET owner_id = 'other', owner_host = 'host', status = 'running'")
            purge = asyncio.ensure_future(store.purge([RUN]))
            with anyio.fail_after(60):
                while not await watcher.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
                    await watcher.execute("SELECT pg_sleep(0.01)")
        with pytest.raises(Conflict, match="nothing was deleted"):
            await purge
        assert await store.get_run(RUN) is not None
    finally:
        await claimer.close()
        await watcher.close()


async def test_a_task_that_ends_and_begins_in_one_batch_is_stored_in_that_order(store: PostgresStore) -> None:
    writer = Writer(store)
    await writer.write(CREATED, OTHER, RUNNING)
    reopened = TaskReopened(at(5), "a", 1, damaged=True)
    again = replace(START_A, attempt=2), replace(DONE_A, attempt=2, text="2")
    await writer.write(START_A, DONE_A, reopened, *again)
    [task] = await store.list_tasks(RUN, "a")
    assert (task.status, task.attempt, task.text) == ("completed", 2, "2")
    assert [one.status for one in await store.list_attempts(RUN, "a")] == ["completed", "completed"]


async def test_of_the_statements_of_a_batch_none_stays_if_the_last_is_refused(store: PostgresStore) -> None:
    writer = Writer(store)
    await writer.write(*OPENING)
    before = await whole(store)
    too_large = TaskRetried(at(4), "a", 1, "transient", "reset", 0.5, usage=Usage(2**70))
    with pytest.raises(Conflict, match=r"^a value cannot be stored: "):
        await writer.write(START_A, too_large)
    assert await whole(store) == before


async def test_a_read_of_several_statements_sees_one_state(store: PostgresStore, dsn: str) -> None:
    await Writer(store).write(*OPENING)

    def reading() -> Reading[list[Any]]:
        seen: list[Any] = []
        for name in ("first", "second"):
            for (found,) in (yield "SELECT name FROM runs", ()):
                seen.append(found)
            thread = threading.Thread(target=asyncio.run, args=[in_database(dsn, f"UPDATE runs SET name = '{name}'")])
            thread.start()
            thread.join()
        return seen

    assert await store._read(reading) == [CREATED.name, CREATED.name]  # pyright: ignore[reportPrivateUsage]
    assert await store._read(reading) == ["second", "second"]  # pyright: ignore[reportPrivateUsage]
