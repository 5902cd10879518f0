"""A fork that is killed at a durable boundary goes on without calling a task that it keeps."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.processes import warm

_SCRIPT = """
import asyncio, os, signal, sys
from contextlib import asynccontextmanager
from plait import DAG, ParallelRunner, Reply, SQLiteStore, Task
from tests.support.fakes import QuickClock

class Agent:
    session_id = None
    def new_session_id(self):
        return None
    @asynccontextmanager
    async def open(self, request):
        self.said = [message.content for message in request.history]
        yield self
    async def send(self, prompt):
        with open("log", "a") as file:
            file.write(" | ".join([*self.said, prompt]) + "\\n")
        return Reply(f"<{prompt}>")

def dag():
    after = Task("e", "e {{ b }}", ["b"])
    talk = Task("t", "more", ["e"], continues="a")
    paid = [Task(f"p{n}", f"p{n}", at_most_once=True) for n in range(int(os.environ.get("PAID", 0)))]
    return DAG([Task("a", "a"), Task("b", "b {{ a }}", ["a"]), Task("d", "d"), after, talk, *paid])

async def main():
    async with SQLiteStore("plait.db") as store:
        runner = ParallelRunner(Agent(), store=store, clock=QuickClock())
        if sys.argv[1] == "first":
            await runner.run(dag(), "first")
        elif sys.argv[1] == "fork":
            fork = await runner.runs.fork("first", "e", results={"d": "mine"})
            async with runner.runs.start_fork(fork):
                pass
        else:
            if sys.argv[1] == "orphan":
                await store.purge(["first"])
            newest = (await store.list_runs(1))[0].run_id
            if newest == "first":
                sys.exit(3)
            result = await runner.resume(newest)
            assert result.text["d"] == "mine", result

if len(sys.argv) > 2:
    from plait import failpoints
    left = int(sys.argv[3])

    def die(name):
        global left
        left -= name == sys.argv[2]
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.on_reach = die
from plait.runner.engine import checkpointer
checkpointer.BATCH_LIMIT = int(os.environ.get("LIMIT", checkpointer.BATCH_LIMIT))
asyncio.run(main())
"""


def _go(folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    program = "import runpy; runpy.run_path('script.py', run_name='__main__')"
    return warm.run([sys.executable, "-c", program, *words], cwd=folder, env={**os.environ, **env}, timeout=60)


def _prepared(folder: Path, **env: str) -> None:
    (folder / "script.py").write_text(_SCRIPT)
    done = _go(folder, "first", **env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("place", ["txn.before_commit", "txn.after_commit", "events.published", "attempt.after_call"])
def test_a_killed_fork_calls_only_its_cone(tmp_path: Path, place: str) -> None:
    _prepared(tmp_path)
    cuts = 0
    for number in range(1, 6):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path, folder, ignore=lambda _, names: [name for name in names if name.isdigit()])
        (folder / "log").write_text("")
        if _go(folder, "fork", place, str(number)).returncode == 0:
            break  # the run has fewer boundaries
        cuts += 1
        done = _go(folder, "resume")
        if done.returncode == 3:  # nothing was stored
            assert _go(folder, "fork").returncode == 0
        else:
            assert done.returncode == 0, done.stderr
        made = (folder / "log").read_text().splitlines()
        assert set(made) == {"e <b <a>>", "a | <a> | more"}
        assert len(made) <= 3  # at most one call more for one kill
    assert cuts >= 2


def test_a_fork_that_had_not_begun_is_refused_once_its_parent_is_deleted(tmp_path: Path) -> None:
    _prepared(tmp_path)
    assert _go(tmp_path, "fork", "txn.after_commit", "1").returncode < 0
    (tmp_path / "log").write_text("")
    done = _go(tmp_path, "orphan")
    assert "RunNotResumable" in done.stderr
    assert "which is deleted" in done.stderr
    assert (tmp_path / "log").read_text() == ""


@pytest.mark.parametrize("limit", [5, 6])
@pytest.mark.parametrize("verb", ["resume", "orphan"])
def test_a_fork_killed_between_two_batches_of_kept_tasks_calls_none_of_them(
    tmp_path: Path, limit: int, verb: str
) -> None:
    """A batch ends after a kept task, or between its start and its end: then the end belongs to the batch."""
    few = {"PAID": "6", "LIMIT": str(limit)}
    _prepared(tmp_path, PAID="6")
    cuts = 0
    for number in range(1, 9):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path, folder, ignore=lambda _, names: [name for name in names if name.isdigit()])
        (folder / "log").write_text("")
        if _go(folder, "fork", "txn.after_commit", str(number), **few).returncode == 0:
            break
        kept = _statuses(folder)
        done = _go(folder, verb, **few)
        made = (folder / "log").read_text().splitlines()
        assert set(made) <= {"e <b <a>>", "a | <a> | more"}
        if kept == {"completed"} or verb == "resume":
            assert done.returncode == 0, done.stderr
        else:
            cuts += kept == {"completed", "pending"}
            assert "which is deleted" in done.stderr
    assert cuts >= 2 or verb == "resume"


def _statuses(folder: Path) -> set[str]:
    """The statuses of the tasks that the fork keeps."""
    with closing(sqlite3.connect(folder / "plait.db")) as database:
        found = database.execute(
            "SELECT t.status FROM tasks AS t JOIN runs AS r ON r.run_id = t.run_id "
            "WHERE r.number = (SELECT max(number) FROM runs) AND t.task_id NOT IN ('e', 't')"
        )
        return {status for (status,) in found}
