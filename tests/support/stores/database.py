"""Database files as the tests of the SQLite store need them: filled, tampered with, used by another process."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from plait.persistence import SQLiteStore
from plait.persistence.contract.samples import ANSWER, ASK, DONE_A, OPENING, START_A, Writer
from plait.persistence.old_tables.checksum import content_checksum, row_checksum
from plait.persistence.sqlite import statements as sql
from tests.support.processes.warm import Warm

ROOT = Path(__file__).parents[3]


async def make(path: Path) -> None:
    async with SQLiteStore(path) as store:
        await Writer(store).write(*OPENING, START_A, ASK, ANSWER, DONE_A)


def end_of(task_id: str, change: str) -> str:
    """The statement that changes what is stored of the ends of a task's attempts, its result among it."""
    ids = f"SELECT s.id FROM starts AS s JOIN given_tasks AS t ON t.id = s.task WHERE t.task_id = '{task_id}'"
    return f"UPDATE ends SET {change} WHERE id IN ({ids})"


def edit(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement).fetchall()


def edit_untyped(path: Path, statement: str) -> None:
    """Execute the statement on tables that check neither types nor values, as damage does not check them."""
    tables = "type = 'table' AND name NOT LIKE 'sqlite_%'"
    loose = f"UPDATE sqlite_schema SET sql = replace(sql, ') STRICT', ')') WHERE {tables}"
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
        for *row, _ in connection.execute(sql.LIST_RUNS, (-1,)).fetchall():
            number, run_id = row[:2]
            (settings,) = connection.execute("SELECT settings FROM runs WHERE number = ?", (number,)).fetchone()
            sums = row_checksum(*row), content_checksum(run_id, settings), number
            connection.execute("UPDATE runs SET row_checksum = ?, settings_checksum = ? WHERE number = ?", sums)


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
