"""Database files as the tests of the SQLite store need them: filled, tampered with, used by another process."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from plait.persistence import SQLiteStore
from plait.persistence.tables import checksum
from tests.contracts.store.samples import ANSWER, ASK, DONE_A, OPENING, START_A, Writer
from tests.support.processes.warm import Warm

ROOT = Path(__file__).parents[3]


async def make(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING, START_A, ASK, ANSWER, DONE_A)


def attempts_of(task_id: str, change: str) -> str:
    """The statement that changes what is stored of a task's attempts, its result among it."""
    return f"UPDATE attempts SET {change} WHERE position = (SELECT position FROM tasks WHERE task_id = '{task_id}')"


def edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement).fetchall()


def edit_untyped(path: Path, statement: str) -> None:
    """Execute the statement on tables that check neither types nor values, as damage does not check them."""
    tables = "type = 'table' AND name NOT LIKE 'sqlite_%'"
    loose = f"UPDATE sqlite_schema SET sql = replace(replace(sql, 'STRICT, ', ''), 'STRICT', '') WHERE {tables}"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        kept = connection.execute(f"SELECT sql, name FROM sqlite_schema WHERE {tables}").fetchall()
    edit(path, "PRAGMA writable_schema = ON", loose)
    edit(path, "PRAGMA ignore_check_constraints = ON", statement)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.executemany("UPDATE sqlite_schema SET sql = ? WHERE name = ?", kept)


def edit_runs(path: Path, change: str) -> None:
    """Change the rows of all runs as an earlier writer would have left them: with checksums that fit."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(f"UPDATE runs SET {change}")
        for run_id, settings in connection.execute("SELECT run_id, settings FROM runs").fetchall():
            fits = checksum(run_id, settings)
            connection.execute("UPDATE runs SET settings_checksum = ? WHERE run_id = ?", (fits, run_id))


def in_child(code: str, *arguments: str) -> Warm:
    command = [sys.executable, "-c", code, *arguments]
    pipe = subprocess.PIPE
    return Warm(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe)


def steps(connection: sqlite3.Connection, call: Callable[[], object]) -> int:
    """About how many steps of SQLite's machine `call` takes."""
    taken = 0

    def count() -> int:
        nonlocal taken
        taken += 1
        return 0

    connection.set_progress_handler(count, 10)
    call()
    connection.set_progress_handler(None, 0)
    return taken * 10
