"""Owners that die, two owners, servers that restart, and addresses that nobody can use."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Literal

import anyio
import anyio.lowlevel
import asyncpg
import pytest

from plait import ParallelRunner, PostgresStore, failpoints
from plait.errors import Conflict, StoreBusy, StoreError, StoreUnusable
from plait.events import RunClaimed, TaskRetried, TaskStarted
from plait.persistence import Batch, Note, postgres_connection, postgres_store
from plait.persistence.sqlite_store import SQLiteStore
from tests.contracts.store.samples import DONE_A, OPENING, RUN, START_A, Writer, at, owner, run_becomes
from tests.persistence.postgres.runs import TASKS, Counted, dag
from tests.support.stores.postgres import in_schema, restart


async def test_a_run_goes_on_after_the_death_of_its_owner(dsn: str, tmp_path: Path) -> None:
    file = tmp_path / "calls"
    process = subprocess.Popen(  # noqa: ASYNC220 - killed, not awaited
        [sys.executable, "-m", "tests.persistence.postgres.runs", dsn, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    async with PostgresStore(dsn) as store:
        done: list[str] = []
        while len(done) < TASKS // 3:
            await anyio.sleep(0.02)
            done = [task.task_id for task in await store.list_tasks(run_id) if task.status == "completed"]
        process.kill()
        process.communicate()
        stored = {task.task_id for task in await store.list_tasks(run_id) if task.status == "completed"}
        result = await ParallelRunner(Counted(file, 0), store=store).resume(run_id)
        attempts = await store.list_attempts(run_id)
    assert len(result.text) == TASKS
    calls = file.read_text().split()
    assert all(calls.count(task_id[1:]) == 1 for task_id in stored)  # completed: never executed again
    assert sum(one.status == "interrupted" for one in attempts) <= 4  # what was under way


async def test_a_server_that_crashes_in_mid_run_loses_nothing(own_server: tuple[str, object]) -> None:
    dsn, server = own_server
    at_calls = 20, 60
    calls, gates = 0, {number: anyio.Event() for number in at_calls}

    async def answer(prompt: str) -> str:
        nonlocal calls
        calls += 1
        for number, gate in gates.items():
            if calls > number:  # under way at the crash; the run goes on once the store has caught up
                await gate.wait()
        return f"re: {prompt}"

    async with PostgresStore(dsn) as store:
        async with ParallelRunner(answer, store=store, concurrency=4).start(dag(100)) as run:
            for number, gate in gates.items():
                while calls <= number:  # noqa: ASYNC110 - the backend counts
                    await anyio.sleep(0.01)
                await asyncio.to_thread(restart, server)
                with anyio.fail_after(60):
                    while await completed(store, run.run_id) < number - 4:  # noqa: ASYNC110 - another process stores
                        await anyio.sleep(0.05)
                gate.set()
            result = await run.result()
        tasks, attempts = await store.list_tasks(run.run_id), await store.list_attempts(run.run_id)
        record = await store.get_run(run.run_id)
    assert len(result.text) == len(tasks) == len(attempts) == calls == 100
    assert {one.status for one in attempts} == {"completed"}
    assert record is not None
    assert record.status == "completed"


async def completed(store: PostgresStore, run_id: str) -> int:
    """Return the number of completed tasks in the store; 0 while the server is away."""
    try:
        return sum(task.status == "completed" for task in await store.list_tasks(run_id))
    except StoreError:
        return 0


async def test_usual_batches_are_one_round_trip(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    writer = Writer(store)
    await writer.write(*OPENING)
    connection = store._writer._connection  # type: ignore[union-attr]  # pyright: ignore
    connection.add_query_logger(lambda record: statements.append(record.query))  # pyright: ignore
    await writer.write(START_A)
    await writer.write(TaskStarted(at(4), "c", 1, "fast"))
    await anyio.lowlevel.checkpoint()  # the driver calls the logger in the next step of the loop
    assert len(statements) == 2
    assert store.batches == {"all": 3, "single": 2}


async def test_an_open_store_that_only_writes_has_one_connection(store: PostgresStore, dsn: str) -> None:
    await Writer(store).write(*OPENING)
    watcher = await asyncpg.connect(dsn)
    try:
        count = (
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'plait'"
        )
        assert await watcher.fetchval(count) == 1
    finally:
        await watcher.close()


async def test_every_write_passes_the_failpoints_on_both_sides_of_its_commit(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[str] = []
    monkeypatch.setattr(failpoints, "on_reach", passed.append)
    writer = Writer(store)
    retried = TaskRetried(at(4), "a", 1, "transient", "reset", 0.5)
    for changes in (OPENING, (START_A,), (retried, replace(START_A, attempt=2), replace(retried, attempt=2))):
        await writer.write(*changes)
    await store.send(RUN, Note("cancel", at(5)))
    await store.purge([])
    assert passed == ["txn.begun", "txn.before_commit", failpoints.SENT, "txn.after_commit"] * 5


async def test_why_the_server_ended_the_connection_is_told(store: PostgresStore, dsn: str) -> None:
    """The driver then fails to leave the transaction, and its error hides that of the server."""
    admin = await asyncpg.connect(dsn)
    try:
        await admin.execute(
            "CREATE FUNCTION end_connection() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NEW; END $$;"
            "CREATE TRIGGER end_connection BEFORE INSERT ON runs FOR EACH ROW EXECUTE FUNCTION end_connection()"
        )
        with pytest.raises(StoreError, match=r"terminating connection due to administrator command$"):
            await Writer(store).write(*OPENING)
    finally:
        await admin.execute("DROP FUNCTION end_connection CASCADE")
        await admin.close()
    await Writer(store).write(*OPENING)


async def test_an_open_store_knows_its_server(store: PostgresStore) -> None:
    assert await store.warnings() == (
        "fsync is off: a crash of the server's machine can damage the whole database",  # as it is for these tests
    )
    assert await store.obstacle() is None
    assert re.fullmatch(r"\d+\.\d+", store.server_version)


async def test_a_batch_behind_which_the_store_is_missing_changes_is_refused(store: PostgresStore) -> None:
    writer = Writer(store)
    await writer.write(*OPENING)
    with pytest.raises(Conflict, match="4 is next"):
        await store.write(Batch(RUN, writer.epoch, 9, (START_A,)))


async def test_a_run_that_another_process_locks_is_busy(
    store: PostgresStore, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Writer(store).write(*OPENING)
    blocker = await asyncpg.connect(dsn)
    monkeypatch.setitem(postgres_connection._SETTINGS, "lock_timeout", "50ms")  # pyright: ignore[reportPrivateUsage]
    try:
        async with blocker.transaction(), PostgresStore(dsn) as impatient:
            await blocker.execute("SELECT 1 FROM runs FOR UPDATE")
            batch = Batch(RUN, 1, 4, (START_A,))
            with pytest.raises(StoreBusy):
                await impatient.write(batch)
        await store.write(batch)
    finally:
        await blocker.close()


async def test_a_note_wakes_the_owner_at_once(store: PostgresStore, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_store, "LONGEST_WAIT_S", 600.0)
    await Writer(store).write(*OPENING)
    await store.wait_for_note(RUN)  # the first returns when it listens
    async with anyio.create_task_group() as group:
        waited = anyio.Event()

        async def wait() -> None:
            await store.wait_for_note(RUN)
            waited.set()

        group.start_soon(wait)
        async with PostgresStore(dsn, mode="existing") as sender:
            await sender.send(RUN, Note("cancel", at(5)))
        with anyio.fail_after(60):
            await waited.wait()
    assert [note.kind for note in await store.list_notes(RUN)] == ["cancel"]


async def test_the_first_wait_for_each_run_returns_at_once(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a run that was not waited for during the waits for as many runs as are kept."""
    monkeypatch.setattr(postgres_store, "KEPT_RUNS", 2)
    monkeypatch.setattr(postgres_store, "LONGEST_WAIT_S", 600.0)
    with anyio.fail_after(60):
        for run_id in ("a", "b", "c", "a"):
            await store.wait_for_note(run_id)  # earlier notes were notified to nobody
        with anyio.move_on_after(0.2) as limit:
            await store.wait_for_note("c")
    assert limit.cancelled_caught


async def test_the_clock_of_the_server_counts_the_silence_of_an_owner(store: PostgresStore, dsn: str) -> None:
    await Writer(store).write(*OPENING)
    assert 0 <= await store.silence(RUN) < 30
    blocker = await asyncpg.connect(dsn)
    await blocker.execute("UPDATE runs SET written_at = written_at - interval '1 hour'")
    await blocker.close()
    assert 3590 < await store.silence(RUN) < 3700
    await store.write(Batch(RUN, 1, 4, (START_A,)))
    assert 0 <= await store.silence(RUN) < 30


async def test_nobody_waits_a_lease_for_an_owner_that_was_silent_for_longer(store: PostgresStore, dsn: str) -> None:
    runner = ParallelRunner(Counted(Path("/dev/null"), 0), store=store, lease=1200)
    run_id = await runner.runs.create(dag(3))
    record = await store.get_run(run_id)
    assert record is not None
    claimed = RunClaimed(at(1), owner(), 9.0), run_becomes(at(2), "running")  # by a process on another host
    await store.write(Batch(run_id, record.epoch, record.last_seq + 1, claimed))
    other = await asyncpg.connect(dsn)
    await other.execute("UPDATE runs SET written_at = written_at - interval '1 hour'")
    await other.close()
    result = await runner.resume(run_id)
    assert result.status == "completed"


PASSWORD = "s3cret-of-mine"


@pytest.mark.parametrize(
    "dsn",
    [
        f"postgresql://me:{PASSWORD}@127.0.0.1:1/x",
        f"postgresql://127.0.0.1:1/x?user=me&password={PASSWORD}",
        f"postgresql://me:{PASSWORD}@127.0.0.1:1/x?sslmode=nonsense",
        f"postgresql://me:{PASSWORD}@[bad/x",
        f"postgresql://127.0.0.1:1/x?user=me&pass%77ord={PASSWORD}",
        f"postgresql://127.0.0.1:1/x?user=me&password=a#{PASSWORD}",
        *(f"postgresql://me:a{one}{PASSWORD}@127.0.0.1:1/x" for one in "/?#@"),
        f"postgresql://me:1/{PASSWORD}@127.0.0.1:1/x",
    ],
)
async def test_no_message_shows_a_password(dsn: str) -> None:
    store = PostgresStore(dsn)
    with pytest.raises(StoreUnusable) as caught:
        await store.__aenter__()
    error: BaseException | None = caught.value
    assert error is not None
    assert PASSWORD not in f"{error} {error!r} {store!r} {store.address}"
    assert str(error).endswith("; check the address, the password, and that the server is running")
    assert error.__cause__ is None
    assert error.__suppress_context__


def test_an_error_that_names_the_password_is_shown_without_it() -> None:
    dsn = f"postgresql://me:{PASSWORD}@127.0.0.1/x"
    shown = str(postgres_connection.explained(dsn, OSError(f"no route to {dsn}")))
    assert PASSWORD not in shown
    assert "no route to postgresql://me:***@" in shown


async def test_the_character_that_stands_for_nul_is_a_character_like_others(store: PostgresStore) -> None:
    text = "\ufdd0 \ufdd00 \ufdd01 \0 \ufdd0"
    for run_id, said in (("with nul", text), ("without", text.replace("\0", ""))):
        await Writer(store, run_id).write(*OPENING, START_A, replace(DONE_A, text=said, turn=said))
        [task] = await store.list_tasks(run_id, "a")
        messages = await store.list_messages(run_id, "a")
        assert [task.text, *(message.content for message in messages)] == [said] * 3


@pytest.mark.parametrize("mode", ["read", "existing"])
async def test_a_database_without_tables_is_not_filled_for_reading(dsn: str, mode: Literal["read", "existing"]) -> None:
    admin = await asyncpg.connect(dsn)
    await admin.execute("DROP SCHEMA IF EXISTS bare CASCADE; CREATE SCHEMA bare")
    try:
        with pytest.raises(StoreUnusable, match=r"^the database .* has no tables of plait; `plait run"):
            async with PostgresStore(in_schema(dsn, "bare"), mode=mode):
                pass
        assert await admin.fetch("SELECT relname FROM pg_class WHERE relnamespace = 'bare'::regnamespace") == []
    finally:
        await admin.execute("DROP SCHEMA bare CASCADE")
        await admin.close()


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (
            "CREATE TABLE plait_store (format BIGINT, store_id TEXT); INSERT INTO plait_store VALUES (3, 'x')",
            r"have format 3, but this plait reads format \d+; name another database$",
        ),
        ("CREATE TABLE tasks (mine TEXT)", "has other tables with names of plait's: .*tasks"),
    ],
    ids=["another format", "another program"],
)
async def test_tables_that_are_not_of_this_plait_are_refused_and_left_alone(dsn: str, made: str, said: str) -> None:
    admin = await asyncpg.connect(dsn)
    listed = "SELECT relname FROM pg_class WHERE relnamespace = 'foreign_tables'::regnamespace"
    try:
        await admin.execute(
            "DROP SCHEMA IF EXISTS foreign_tables CASCADE; CREATE SCHEMA foreign_tables; "
            f"SET search_path = foreign_tables; {made}"
        )
        before = await admin.fetch(listed)
        with pytest.raises(StoreUnusable, match=said):
            async with PostgresStore(in_schema(dsn, "foreign_tables")):
                pass
        assert await admin.fetch(listed) == before
    finally:
        await admin.execute("DROP SCHEMA foreign_tables CASCADE")
        await admin.close()


async def test_stores_that_are_opened_at_once_make_the_tables_once(dsn: str) -> None:
    admin = await asyncpg.connect(dsn)
    await admin.execute("DROP SCHEMA IF EXISTS race CASCADE; CREATE SCHEMA race")
    try:

        async def enter() -> None:
            async with PostgresStore(in_schema(dsn, "race")) as store:
                assert await store.list_runs() == ()

        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(enter)
        assert await admin.fetchval("SELECT count(*) FROM race.plait_store") == 1
    finally:
        await admin.execute("DROP SCHEMA race CASCADE")
        await admin.close()


async def test_the_tables_are_those_of_sqlite(store: PostgresStore, dsn: str, tmp_path: Path) -> None:
    """But for the clock of the server, which judges the leases, and for the table with the format."""
    await Writer(store).write(*OPENING, START_A)
    async with SQLiteStore(tmp_path / "runs.db"):
        pass
    with closing(sqlite3.connect(tmp_path / "runs.db")) as file:
        columns = """SELECT t.name, c.name FROM sqlite_master AS t, pragma_table_info(t.name) AS c
            WHERE t.type = 'table' AND t.name NOT LIKE 'sqlite%'"""
        in_file = set(file.execute(columns))
    reader = await asyncpg.connect(dsn)
    try:
        columns = "SELECT table_name, column_name FROM information_schema.columns WHERE table_schema = 'public'"
        on_server = set(map(tuple, await reader.fetch(columns)))
        tasks = await reader.fetch("SELECT task_id, status, depends_on FROM tasks ORDER BY position")
    finally:
        await reader.close()
    own = {("runs", "written_at"), ("runs", "lease_s"), ("plait_store", "format"), ("plait_store", "store_id")}
    assert on_server == in_file | own
    assert [tuple(row) for row in tasks] == [("a", "running", "[]"), ("b", "pending", '["a"]'), ("c", "pending", "[]")]
