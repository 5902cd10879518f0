"""The tables: what can be asked of them, and what they refuse."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait.events import LeaseRenewed, NewTask, SessionOpened, TaskCompleted, TaskStarted
from plait.persistence import Batch, SQLiteStore, Store, tables
from plait.persistence.sql_store import get_run, list_runs
from plait.persistence.sqlite_file import open_database
from plait.persistence.sqlite_store import read_on, write_batch
from plait.persistence.tables import Write, for_each_row
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
)
from tests.support.stores.database import edit, make

SESSION = SessionOpened(at(4), "a", 1, "session-b")
ROOT = Path(__file__).parent.parent.parent.parent


PAGE = ROOT / "docs" / "guides" / "stores.md"


@pytest.mark.parametrize("sql", re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL))
async def test_documented_queries_find_something(path: Path, sql: str) -> None:
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        row = NewTask("letter.1", "p", spec='{"item":{"name":"Ada"}}')
        tasks = (NewTask("facts", "p"), NewTask("bad", "p"), NewTask("after", "p", ("facts", "bad")), row)
        await writer.write(replace(CREATED, tasks=tasks), CLAIMED)
        for change in (START_A, ASK, DONE_A):
            await writer.write(replace(change, task_id="facts"))
        await writer.write(*(replace(change, task_id="bad") for change in AT_START["failed"]))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute(sql).fetchall()


async def test_updates_find_their_rows_by_key(path: Path) -> None:
    """A scan of the tasks for each of them would make cost grow with the run."""
    await make(path)
    updates = [one for one in vars(tables).values() if isinstance(one, Write) and one.key]
    assert len(updates) > 10
    with closing(sqlite3.connect(path)) as connection:
        for update in updates:
            for count in (1, 3):
                values = (None,) * (len(update.columns) + len(update.key)) * count
                plan = connection.execute(f"EXPLAIN QUERY PLAN {for_each_row(update, count)}", values).fetchall()
                steps = [row[3].split()[:2] for row in plan]
                assert ["SEARCH", update.table if count == 1 else "t"] in steps, update.table
                assert not [step for step in steps if step[0] == "SCAN" and step[1] not in {"u", "3"}], update.table


def test_a_large_batch_takes_few_statements(tmp_path: Path) -> None:
    """Each statement has to win the interpreter lock back from the event loop."""
    ids = [f"t{number}" for number in range(300)]
    created = replace(CREATED, tasks=tuple(NewTask(task_id, "p") for task_id in ids))
    changes = [replace(c, task_id=task_id) for task_id in ids for c in (START_A, ASK, SESSION, ANSWER, DONE_A)]
    with closing(open_database(tmp_path / "runs.db", "create")) as connection:
        write_batch(connection, Batch(RUN, 0, 1, (created, CLAIMED)), {})
        statements_seen: list[str] = []
        connection.set_trace_callback(statements_seen.append)
        write_batch(connection, Batch(RUN, 1, 3, tuple(changes)), {})
    kinds = {re.sub(r"'[^']*'|\d+", "?", statement) for statement in statements_seen}
    assert len(kinds) < 20
    assert sum(one.startswith("INSERT INTO events") for one in statements_seen) < len(changes) / 30


def test_large_inputs_of_a_run_are_not_read_or_written_with_each_batch_and_each_list(tmp_path: Path) -> None:
    """Else a run over a file of rows costs its square: each row is a task, and each task a few writes."""
    settings = json.dumps({"inputs": {"rows": "x" * 4_000_000}})
    with closing(open_database(tmp_path / "runs.db", "create")) as connection:
        write_batch(connection, Batch(RUN, 0, 1, (replace(CREATED, settings=settings), CLAIMED)), {})
        allowed = connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)  # for each row and value that is touched
        write_batch(connection, Batch(RUN, 1, 3, (START_A, LeaseRenewed(at(9), 2000.5))), {})
        assert [
            (run.settings, run.lease_expires_at) for run in read_on(connection, list_runs, tables.LIST_RUNS, 1)
        ] == [("", 2000.5)]
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, allowed)
        whole = read_on(connection, get_run, RUN)
        assert whole is not None
        assert whole.settings == settings


async def test_a_store_is_a_store(path: Path) -> None:
    store: Store = SQLiteStore(path)
    assert isinstance(store, SQLiteStore)


async def test_the_schema_refuses_statuses_that_are_none(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING, *AT_START["retried"], TaskStarted(at(5), "a", 2, "fast"))
    for table, column, status in [
        ("runs", "status", "interrupted"),
        ("tasks", "status", "done"),
        ("attempts", "status", "pending"),
    ]:
        with pytest.raises(sqlite3.IntegrityError, match="CHECK"):
            edit(path, f"UPDATE {table} SET {column} = '{status}'")


async def test_the_tables_show_every_attempt_and_the_history(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store).write(
            *OPENING, *AT_START["retried"], replace(START_A, attempt=2), replace(DONE_A, attempt=2, turn="First.")
        )
    with closing(sqlite3.connect(path)) as connection:
        attempts = connection.execute("SELECT attempt, status, backend, prompt, text FROM attempts").fetchall()
        kinds = connection.execute("SELECT seq, kind, task_id FROM events ORDER BY seq").fetchall()
    assert attempts == [(1, "retried", "fast", None, None), (2, "completed", "fast", "First.", "The Moon.")]
    assert kinds == [
        (1, "run_created", None),
        (3, "run_started", None),
        (4, "task_started", "a"),
        (5, "task_retried", "a"),
        (6, "task_started", "a"),
        (7, "task_completed", "a"),
    ]


async def test_a_large_result_list_reads_back(path: Path) -> None:
    ids = [f"t{number}" for number in range(1000)]
    async with SQLiteStore(path) as store:
        writer = Writer(store)
        tasks = tuple(NewTask(task_id, "p", tuple(ids[max(0, n - 3) : n])) for n, task_id in enumerate(ids))
        await writer.write(replace(CREATED, tasks=tasks), CLAIMED)
        await writer.write(*(TaskStarted(at(3), task_id, 1, "fast") for task_id in ids))
        await writer.write(*(TaskCompleted(at(4), task_id, 1, task_id) for task_id in ids))
        stored = await store.list_tasks(RUN)
        assert [(task.text, task.depends_on) for task in stored] == [(t.task_id, t.depends_on) for t in tasks]
