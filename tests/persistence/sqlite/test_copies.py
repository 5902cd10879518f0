"""Texts that a run takes from an earlier run are stored once, and outlive the earlier run."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from plait.events import AttemptId, NewTask
from plait.persistence import RunReleased, RunStatusChanged, SQLiteStore, Store, TaskCompleted, TaskStarted
from plait.persistence.contract.samples import CREATED, OPENING, Writer, at, whole

LONG = "a text of some length " * 40
TASKS = tuple(NewTask(f"t{n}", f"{n} {LONG}", spec='{"weight":2}') for n in range(30))
ENDS = (RunStatusChanged(at(9), "completed"), RunReleased(at(9)))
TEXTS = (
    "SELECT count(*) FROM ends JOIN runs ON number = ends.id >> 32 WHERE run_id = ? AND text IS NOT NULL",
    "SELECT count(*) FROM given_tasks JOIN runs ON number = run WHERE run_id = ? AND prompt IS NOT NULL",
)


async def fill(store: Store, run_id: str, like: str | None = None) -> None:
    """Write a run with a result for each task, taken from `like`."""
    writer = Writer(store, run_id)
    await writer.write(replace(CREATED, tasks=TASKS, like=like), *OPENING[1:])
    for task in TASKS:
        done = TaskCompleted(at(4), task.task_id, 1, f"{task.task_id} {LONG}", '["data"]', prompt=task.prompt)
        taken_from = None if like is None else AttemptId(like, task.task_id, 1)
        await writer.write(TaskStarted(at(3), task.task_id, 1, "fast"), replace(done, taken_from=taken_from))
    await writer.write(*ENDS)


def ask(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement, values).fetchall()


def texts_of(path: Path, run_id: str) -> list[object]:
    """The numbers of results and of prompts that rows of the run hold."""
    return [ask(path, statement, run_id)[0][0] for statement in TEXTS]


async def test_a_copy_holds_no_text_and_refers_to_the_run_that_computed_it(path: Path) -> None:
    async with SQLiteStore(path) as store:
        for run_id, like in (("first", None), ("second", "first"), ("third", "second")):
            await fill(store, run_id, like)
        sizes = await store.run_sizes()
    assert [texts_of(path, run_id) for run_id in ("first", "second", "third")] == [[30, 30], [0, 0], [0, 0]]
    assert sizes["second"] == sizes["third"] < sizes["first"] / 50
    for table in ("ends", "given_tasks"):
        chains = f"SELECT count(*) FROM {table} JOIN {table} AS o ON o.id = {table}.copy_of WHERE o.copy_of IS NOT NULL"
        assert ask(path, chains) == [(0,)]


@pytest.mark.parametrize("purged", [["first"], ["second"], ["first", "second"], ["second", "first"]], ids="-".join)
async def test_a_purge_loses_no_text_of_the_runs_that_stay(path: Path, purged: list[str]) -> None:
    async with SQLiteStore(path) as store:
        for run_id, like in (("first", None), ("second", "first"), ("third", "second"), ("fourth", "first")):
            await fill(store, run_id, like)
        kept = {run_id: await whole(store, run_id) for run_id in ("first", "second", "third", "fourth")}
        await store.purge(purged)
        for run_id in kept.keys() - purged:
            assert await whole(store, run_id) == kept[run_id]
    holders = [run_id for run_id in ("first", "second", "third", "fourth") if texts_of(path, run_id) == [30, 30]]
    assert len(holders) == 1
    assert ask(path, "PRAGMA foreign_key_check") == []


async def test_the_file_refuses_to_lose_a_text_that_a_copy_needs(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await fill(store, "first")
        await fill(store, "second", "first")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA foreign_keys = ON")
        for table in ("ends", "given_tasks"):
            with pytest.raises(sqlite3.IntegrityError, match="FOREIGN KEY"):
                connection.execute(f"DELETE FROM {table} WHERE id >> 32 = 1")


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE ends SET text = text || 'x' WHERE id = (SELECT max(copy_of) FROM ends)",
        "UPDATE ends SET prompt = prompt || 'x' WHERE id = (SELECT max(copy_of) FROM ends)",
        "UPDATE ends SET copy_of = copy_of - 1 WHERE id = (SELECT max(id) FROM ends)",
        "UPDATE ends SET copy_of = copy_of - 2 WHERE id = (SELECT max(id) FROM ends)",
    ],
    ids=["the result", "the prompt", "a reference to no row", "a reference to another row"],
)
async def test_a_damaged_text_or_reference_is_noticed_in_the_copy(path: Path, damage: str) -> None:
    async with SQLiteStore(path) as store:
        await fill(store, "first")
        await fill(store, "second", "first")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        assert connection.execute(damage).rowcount == 1
    async with SQLiteStore(path) as store:
        tasks = await store.list_tasks("second")
        messages = await store.list_messages("second", "t29")
    assert [task.task_id for task in tasks if task.damaged] == ([] if "prompt" in damage else ["t29"])
    assert any(one.damaged for one in messages)
    assert all(task.damaged or task.text == f"{task.task_id} {LONG}" for task in tasks)


async def test_the_views_show_the_texts_of_a_copy(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await fill(store, "first")
        await fill(store, "second", "first")
    for statement in (
        "SELECT task_id, text, data, prompt, spec, depends_on FROM tasks WHERE run_id = ? ORDER BY position",
        "SELECT task_id, role, content FROM messages WHERE run_id = ? ORDER BY task_id, seq, part",
        "SELECT task_id, depends_on FROM dependencies WHERE run_id = ?",
    ):
        assert ask(path, statement, "first") == ask(path, statement, "second")
