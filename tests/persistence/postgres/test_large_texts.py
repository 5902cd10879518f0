"""Texts of more than 64 KiB are stored once in PostgreSQL, and stay as long as a run says them."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import anyio
import asyncpg
import pytest

from plait import failpoints
from plait.events import NewTask, RunReleased, TaskCompleted, TaskStarted
from plait.persistence import MemoryStore, Note, PostgresStore, Store
from tests.contracts.store.samples import ASK, CREATED, DONE_A, OPENING, START_A, Writer, at, run_becomes, whole
from tests.support.stores.postgres import new_store, worker_dsn

LARGE = tuple(f"{n} {'a large text ' * 6000}" for n in range(8))
ENDED = run_becomes(at(9), "completed"), RunReleased(at(9))


async def write(store: Store, run_id: str, texts: tuple[str, ...] = LARGE) -> None:
    """Write a run that was asked each text, and answered with it."""
    writer, tasks = Writer(store, run_id), tuple(NewTask(f"t{n}", text) for n, text in enumerate(texts))
    await writer.write(replace(CREATED, tasks=tasks), *OPENING[1:])
    await writer.write(*(TaskStarted(at(3), task.task_id, 1, "fast") for task in tasks))
    await writer.write(*(TaskCompleted(at(4), one.task_id, 1, one.prompt, turn=one.prompt) for one in tasks))
    await writer.write(*ENDED)


async def purge_elsewhere(run_id: str) -> None:
    async with PostgresStore(worker_dsn()) as store:
        await store.purge([run_id])


def until_it_waits(thread: threading.Thread) -> None:
    """Wait, without the event loop, until the thread waits for a lock of the server, or has ended."""

    async def look() -> None:
        connection = await asyncpg.connect(worker_dsn())
        try:
            while thread.is_alive() and not await connection.fetchval(
                "SELECT count(*) FROM pg_locks WHERE NOT granted"
            ):
                await connection.execute("SELECT pg_sleep(0.01)")
        finally:
            await connection.close()

    watcher = threading.Thread(target=asyncio.run, args=[look()])
    watcher.start()
    watcher.join(60)


async def in_database(statement: str) -> str:
    connection = await asyncpg.connect(worker_dsn())
    try:
        done: str = await connection.execute(statement)
        return done
    finally:
        await connection.close()


async def test_one_batch_may_say_a_new_text_again_and_again() -> None:
    async with new_store() as store:
        writer = Writer(store)
        await writer.write(*OPENING, *(TaskStarted(at(3), name, 1, "fast") for name in "ac"))
        await writer.write(*(TaskCompleted(at(4), name, 1, LARGE[0], turn=LARGE[0]) for name in "ac"))
        assert [(await store.list_tasks(writer.run_id, name))[0].text for name in "ac"] == [LARGE[0]] * 2
        assert await in_database("SELECT FROM texts") == "SELECT 1"


async def test_a_purge_takes_the_texts_that_no_other_run_says() -> None:
    async with new_store() as store:
        await write(store, "first")
        await write(store, "second", LARGE[4:])
        kept = await whole(store, "second")
        purged = await store.purge(["first", "unknown"])
        assert (purged.run_ids, purged.freed_bytes) == (("first",), 0)
        assert str(purged.remains).startswith("the runs are deleted; the log, the backups and pages before the next")
        assert (await store.purge(["unknown"])).remains is None
        assert await whole(store, "second") == kept
        assert await in_database("SELECT FROM texts") == "SELECT 4"
        await store.purge(["second"])
        assert await in_database("SELECT FROM texts") == "SELECT 0"


async def test_sizes_sessions_and_checks_are_those_of_the_store_in_memory() -> None:
    in_memory = MemoryStore()
    async with new_store() as store:
        for one in (store, in_memory):
            await write(one, "large")
            await Writer(one, "small").write(*OPENING, START_A, ASK, DONE_A)
            await one.send("small", Note("answer", at(5), "a", '"é"'))
        assert await store.run_sizes() == await in_memory.run_sizes()
        assert await store.session_ids() == await in_memory.session_ids() == {"session-a"}
        assert await store.check_rows() == await in_memory.check_rows() == ([], 9, 17)
        await in_database("UPDATE messages SET content = 'other'")
        assert await store.check_rows() == (["small/a"], 9, 17)


async def test_a_purge_waits_for_a_batch_that_says_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with new_store() as store, PostgresStore(worker_dsn()) as other:
        await write(store, "old", LARGE[:1])
        writer = Writer(store)
        await writer.write(*OPENING)
        threads: list[threading.Thread] = []

        def purge_before_the_commit(name: str) -> None:
            if name == "txn.before_commit" and not threads:
                threads.append(threading.Thread(target=asyncio.run, args=[purge_elsewhere("old")]))
                threads[0].start()
                until_it_waits(threads[0])

        monkeypatch.setattr(failpoints, "on_reach", purge_before_the_commit)
        again = TaskStarted(at(3), "a", 1, "fast"), TaskCompleted(at(4), "a", 1, LARGE[0])
        await writer.write(*again)  # two changes of one task: a transaction of two statements
        monkeypatch.undo()
        await asyncio.to_thread(threads[0].join)
        assert await other.get_run("old") is None
        task = (await store.list_tasks(writer.run_id))[0]
        assert (task.text, task.damaged) == (LARGE[0], False)


async def test_two_runs_that_store_the_same_texts_in_another_order_do_not_wait_for_each_other() -> None:
    async with new_store() as store, PostgresStore(worker_dsn()) as other:
        with anyio.fail_after(60):
            for number in range(4):
                texts = tuple(f"{number} {text}" for text in LARGE)
                await asyncio.gather(write(store, f"a{number}", texts), write(other, f"b{number}", texts[::-1]))


@pytest.mark.parametrize("harm", ["UPDATE texts SET content = 'other'", "DELETE FROM texts"])
async def test_a_damaged_text_is_told_and_mended_by_whoever_says_it_again(harm: str) -> None:
    async with new_store() as store:
        writer = Writer(store)
        await writer.write(*OPENING, TaskStarted(at(3), "a", 1, "fast"), TaskCompleted(at(4), "a", 1, LARGE[0]))
        await in_database(harm)
        assert ((await store.list_tasks(writer.run_id))[0]).damaged
        await write(store, "again", LARGE[:1])
        task = (await store.list_tasks(writer.run_id))[0]
        assert (task.text, task.damaged) == (LARGE[0], False)
