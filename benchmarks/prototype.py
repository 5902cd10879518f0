"""A prototype for comparison: stores the starts, messages and completions of a DAG with little code.

A single task writes, with group commit through aiosqlite; each task of the DAG waits for three commits. The prototype
has no resume, no owner, no history and no handling of errors.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiosqlite

from benchmarks import graphs
from benchmarks.gauge import AT_ONCE, body, figures, spent

RUN = "20261121-230116-123-k3f9ab"
AT = "2026-11-21T23:01:16.123Z"
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE tasks (run_id TEXT, task_id TEXT, status TEXT, prompt TEXT, depends_on TEXT, started_at TEXT,
    ended_at TEXT, text TEXT, PRIMARY KEY (run_id, task_id));
CREATE TABLE messages (run_id TEXT, task_id TEXT, seq INTEGER, role TEXT, content TEXT,
    PRIMARY KEY (run_id, task_id, seq));
"""
ADD = "INSERT INTO tasks (run_id, task_id, status, prompt, depends_on) VALUES (?, ?, 'pending', 'work', ?)"
START = "UPDATE tasks SET status = 'running', started_at = ? WHERE run_id = ? AND task_id = ?"
SAY = "INSERT INTO messages (run_id, task_id, seq, role, content) VALUES (?, ?, ?, ?, ?)"
COMPLETE = "UPDATE tasks SET status = 'completed', ended_at = ?, text = ? WHERE run_id = ? AND task_id = ?"

Row = tuple[str, Sequence[object]]


class Writer:
    """Writes queued rows in one transaction, while the next rows are queued."""

    def __init__(self, database: aiosqlite.Connection) -> None:
        self._database = database
        self._waiting: list[tuple[Sequence[Row], asyncio.Future[None]]] = []
        self._wake = asyncio.Event()

    async def write(self) -> None:
        """Write queued rows until cancelled."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            batch, self._waiting = self._waiting, []
            for statement in (START, SAY, COMPLETE):
                rows = [values for work, _ in batch for kind, values in work if kind is statement]
                if rows:
                    await self._database.executemany(statement, rows)
            await self._database.commit()
            for _, written in batch:
                written.set_result(None)

    def put(self, *rows: Row) -> asyncio.Future[None]:
        """Queue the rows. Return a future that completes once the rows are durable."""
        written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, written))
        self._wake.set()
        return written


async def run(edges: graphs.Edges, database: aiosqlite.Connection) -> None:
    """Execute the graph durably."""
    tasks = [(RUN, f"t{i}", json.dumps([f"t{d}" for d in needed])) for i, needed in enumerate(edges)]
    await database.executemany(ADD, tasks)
    await database.commit()
    writer = Writer(database)

    async def node(position: int) -> None:
        name = f"t{position}"
        await writer.put((START, (AT, RUN, name)))
        text = await body("work")
        await writer.put((SAY, (RUN, name, 0, "user", "work")), (SAY, (RUN, name, 1, "assistant", text)))
        await writer.put((COMPLETE, (AT, text, RUN, name)))

    async with asyncio.TaskGroup() as context:
        writing = context.create_task(writer.write())
        await graphs.walk(edges, AT_ONCE, node)
        writing.cancel()


async def durable(edges: graphs.Edges) -> dict[str, float]:
    """Measure `run` with a new database on the disk of the checkout."""
    with tempfile.TemporaryDirectory(dir=Path(__file__).parent) as folder:
        async with aiosqlite.connect(Path(folder) / "prototype.db") as database:
            await database.executescript(SCHEMA)
            before = spent()
            await run(edges, database)
            return figures(before, len(edges))
