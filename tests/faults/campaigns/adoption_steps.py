"""What processes of their own do in a case of the adoptions: run, look, answer and talk. All of them are forked."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from plait import ParallelRunner
from plait.errors import RunOwned
from plait.persistence import SQLiteStore
from tests.faults.campaigns.adoption_plans import SAYS
from tests.support.agents.detached_backend import Outliver
from tests.support.agents.outliving import RUN, dag_of
from tests.support.processes.forked import Child

OWNED = "owned"
"""How a runner ends that another one was quicker than."""
_LEASE = 30.0
What: TypeAlias = Callable[[Path], Awaitable[str]]
"""Done in the folder of a case; the text is how that went."""


class Step:
    """A process that does `what`."""

    def __init__(self, folder: Path, what: What) -> None:
        self._child = Child(lambda _: _done(folder, what))

    @property
    def has_ended(self) -> bool:
        return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def outcome(self, limit: float) -> str | None:
        """Wait for its end; None where it raised, or took longer than `limit` seconds and was killed."""
        line = self._child.line(time.monotonic() + limit)
        self.kill()
        return line

    def kill(self) -> None:
        self._child.signal(signal.SIGKILL)
        self._child.wait()


def _done(folder: Path, what: What) -> str:
    log = os.open(folder / "stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    return anyio.run(what, folder)


def work(concurrency: int) -> What:
    """Run the plan, or resume it: the status in which that left the run, or OWNED."""
    return partial(_work, concurrency)


async def _work(concurrency: int, folder: Path) -> str:
    async with SQLiteStore(folder / "runs.db") as store:
        runner = ParallelRunner(Outliver(folder), store=store, concurrency=concurrency, lease=_LEASE)
        try:
            if await store.get_run(RUN) is None:
                return (await runner.run(dag_of(folder), RUN)).status.value
            return (await runner.resume(RUN)).status.value
        except RunOwned:
            return OWNED


async def preview(folder: Path) -> str:
    """Say what a resume would do. That nothing changes is for others to judge."""
    async with SQLiteStore(folder / "runs.db", mode="existing") as store:
        await ParallelRunner(Outliver(folder), store=store).runs.preview(RUN)
    return ""


async def answer(folder: Path) -> str:
    """Answer every open question."""
    async with SQLiteStore(folder / "runs.db", mode="existing") as store:
        runner = ParallelRunner(Outliver(folder), store=store)
        for question in await runner.runs.questions(RUN):
            await runner.runs.answer(RUN, question.task_id, answer_to(question.task_id), wait=0)
    return ""


def answer_to(task_id: str) -> str:
    return f"ans {task_id}"


async def settle(folder: Path) -> str:
    """Say of every task that is not begun again unasked that it is done; which ones they were, as JSON."""
    async with SQLiteStore(folder / "runs.db", mode="existing") as store:
        waiting = [
            one.task_id for one in await store.list_tasks(RUN) if one.status == "waiting_input" and one.asked is None
        ]
        for task_id in waiting:
            await ParallelRunner(Outliver(folder), store=store).runs.settle(RUN, task_id, "done", "settled")
    return json.dumps(waiting)


def talk(which: float) -> What:
    """A person goes on with one of the conversations that are completed; the task's id, "" where there is none."""
    return partial(_talk, which)


async def _talk(which: float, folder: Path) -> str:
    async with SQLiteStore(folder / "runs.db", mode="existing") as store:
        tasks = await store.list_tasks(RUN)
        done = [task.task_id for task in tasks if task.status == "completed" and task.session_id]
        if not done:
            return ""
        task_id = done[int(which * len(done))]
        await ParallelRunner(Outliver(folder), store=store).runs.continue_task(RUN, task_id, SAYS)
        return task_id


@dataclass(frozen=True, slots=True)
class Stock:
    """What is stored of the run. `tasks` and `attempts` are the fields of their records."""

    tasks: list[dict[str, Any]]
    attempts: list[dict[str, Any]]
    cost: float
    sha256: str
    """Over all that the database holds."""

    @property
    def results(self) -> dict[str, tuple[int, str]]:
        """Of the tasks that are completed: the attempt, and what came of it."""
        done = [task for task in self.tasks if task["status"] == "completed"]
        return {task["task_id"]: (task["attempt"], task["text"]) for task in done}


async def look(folder: Path) -> str:
    """The stock as JSON, "" while nothing is stored."""
    try:
        async with SQLiteStore(folder / "runs.db", mode="read") as store:
            run = await store.get_run(RUN)
            tasks, attempts = await store.list_tasks(RUN), await store.list_attempts(RUN)
    except Exception:  # whoever was to make the file may have died half-way
        return ""
    if run is None:
        return ""
    database = sqlite3.connect(f"file:{folder}/runs.db?mode=ro", uri=True)
    try:
        sha256 = hashlib.sha256("\n".join(database.iterdump()).encode()).hexdigest()
    finally:
        database.close()
    fields = "task_id", "attempt", "status", "text", "error_kind", "error", "depends_on"
    told = [{name: getattr(task, name) for name in fields} for task in tasks]
    tried = [{"task_id": one.task_id, "status": one.status, "input_tokens": one.usage.input_tokens} for one in attempts]
    return json.dumps([told, tried, run.usage.cost_usd or 0.0, sha256])
