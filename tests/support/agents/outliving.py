"""A world of agents that outlive their runner (detached_backend.py), and a runner in a process of its own to be killed.

`python -m tests.support.agents.outliving FOLDER` runs the tasks of `plan.json` there, or resumes the run where it is
stored; with TASK and MESSAGE behind it, a person goes on with that task's conversation.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio

from plait import DAG, FailureMode, ParallelRunner, Retry, Task, events
from plait.backends.process.process_table import start_time
from plait.errors import BackendError, ErrorKind
from plait.persistence import SQLiteStore
from tests.support.agents.detached_backend import Outliver
from tests.support.processes.warm import Warm

RUN = "r"
_PATIENCE = 120.0
"""Seconds after which what a test waits for is taken not to come."""


class World:
    """A folder in which runs are begun, killed and resumed."""

    module = "tests.support.agents.outliving"
    """The program that runs or resumes the plan."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = Outliver(folder)
        self._opened: set[str] = set()
        """The tasks with a session, by the events that `all_told` has seen."""

    def plan(self, *tasks: Mapping[str, Any], concurrency: int = 8, moves: bool = False) -> None:
        """What `killed` runs; a task is the fields of `Task`, those of its retry policy with `retry_` before them. The
        agent is a spare if the plan `moves`: see `moving`.
        """
        plan = {"concurrency": concurrency, "tasks": tasks, "moves": moves}
        (self.folder / "plan.json").write_text(json.dumps(plan))

    def dag(self) -> DAG:
        """The plan's tasks."""
        return dag_of(self.folder)

    def allow(self, name: str) -> None:
        """Let the turns go on that wait for this."""
        (self.folder / name).touch()

    @property
    def turns(self) -> list[dict[str, Any]]:
        """What was said, to whom, and by which process it was heard."""
        log = self.folder / "turns"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]  # a process may be writing the last one

    @property
    def told(self) -> set[int]:
        """The processes that have said which session they have."""
        log = self.folder / "told"
        return {int(line) for line in log.read_text().splitlines()} if log.exists() else set()

    async def all_told(self, event: events.Event, count: int) -> bool:
        """Return whether the event opens a session, and `count` tasks have one; then wait until `told` has them all."""
        if isinstance(event, events.SessionOpened):
            self._opened.add(event.task_id)
            if len(self._opened) == count:
                await self.until(lambda: len(self.told) >= count)  # a process notes it a moment after it has told
                return True
        return False

    @property
    def said(self) -> list[str]:
        return [turn["prompt"] for turn in self.turns]

    @property
    def strays(self) -> list[int]:
        log = self.folder / "strays"
        return [int(line) for line in log.read_text().splitlines()] if log.exists() else []

    def alive(self) -> list[int]:
        """The processes of all turns so far that live."""
        return [pid for pid in [*(turn["pid"] for turn in self.turns), *self.strays] if start_time(pid) is not None]

    async def until(self, what: Any) -> None:
        """Until other processes have made it true."""
        with anyio.fail_after(_PATIENCE):
            while not what():  # noqa: ASYNC110 - it is another process's doing
                await anyio.sleep(0.005)

    def opened_store(self) -> SQLiteStore:
        """The store, made if it is not there."""
        return SQLiteStore(self.folder / "runs.db")

    def store(self) -> SQLiteStore:
        """The store, once a run was begun."""
        return SQLiteStore(self.folder / "runs.db", mode="existing")

    async def killed(self, turns: int, *person: str, confirmed: bool = True, asked: str | None = None) -> None:
        """Run the plan in a process of its own, or resume it, or say what a `person` says (task, message), and SIGKILL
        it once so many turns have begun in all, and, if `confirmed`, each session is stored as confirmed,
        and the task that `asked` waits.
        """
        command = [sys.executable, "-m", self.module, str(self.folder), *person]
        with (self.folder / "stderr").open("ab") as stderr, Warm(command, stdout=stderr, stderr=stderr) as process:
            try:
                await self.until(lambda: len(self.turns) >= turns or process.poll() is not None)
                while confirmed and not await self._all_heard(asked):  # noqa: ASYNC110 - it is another process's doing
                    await anyio.sleep(0.005)
                assert process.poll() is None, (self.folder / "stderr").read_text()
            finally:
                process.kill()
        assert process.returncode == -signal.SIGKILL

    async def _all_heard(self, asked: str | None) -> bool:
        async with SQLiteStore(self.folder / "runs.db", mode="read") as store:
            tasks = await store.list_tasks(RUN)
        waiting = {task.task_id for task in tasks if task.question is not None}
        heard = all(task.session_confirmed or task.status != "running" for task in tasks)
        return heard and (asked is None or asked in waiting)

    def kill_turn(self, number: int) -> None:
        """SIGKILL of the agent of that turn, and of it alone; returns once it is gone."""
        pid = self.turns[number]["pid"]
        os.kill(pid, signal.SIGKILL)
        while start_time(pid) is not None:
            pass


def dag_of(folder: Path) -> DAG:
    return DAG(task_of(fields) for fields in json.loads((folder / "plan.json").read_text())["tasks"])


def task_of(fields: Mapping[str, Any]) -> Task:
    retry = {name.removeprefix("retry_"): value for name, value in fields.items() if name.startswith("retry_")}
    rest = {name: value for name, value in fields.items() if not name.startswith("retry_")}
    if "failure_mode" in rest:
        rest["failure_mode"] = FailureMode(rest["failure_mode"])
    return Task(**rest, retry=Retry(**{"base_delay": 0.0, **retry}))


def moving() -> dict[str, Any]:
    """Return the options of a runner whose tasks move to the agent, because their own backend is closed for hours."""

    async def api(_prompt: str) -> str:
        raise BackendError(ErrorKind.RATE_LIMITED, "weekly limit reached", retry_after=90_000.0)

    return {"backends": {"api": api}, "default": "api", "or_else": {"api": ["default"]}}


async def run(folder: Path, *person: str) -> None:
    """Run or resume the plan, or say in a task's conversation what a person says."""
    plan = json.loads((folder / "plan.json").read_text())
    async with SQLiteStore(folder / "runs.db") as store:
        options = moving() if plan["moves"] else {}
        runner = ParallelRunner(Outliver(folder), store=store, concurrency=plan["concurrency"], **options)
        if person:
            await runner.runs.continue_task(RUN, *person)
            return
        first = await store.get_run(RUN) is None
        print(await (runner.run(dag_of(folder), RUN) if first else runner.resume(RUN)), file=sys.stderr)


if __name__ == "__main__":
    anyio.run(run, Path(sys.argv[1]), *sys.argv[2:])
