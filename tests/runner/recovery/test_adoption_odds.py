"""Turns that are taken over where something else has changed meanwhile: never said again, never left at work."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from plait import ParallelRunner, TaskStatus, events
from plait.backends.backend_protocol import ConversationRequest
from plait.backends.process.child_process import sweep
from plait.backends.process.process_table import start_time
from plait.errors import BackendUnavailable
from plait.persistence import SQLiteStore
from plait.results import ResumeAction
from tests.support.agents.detached_backend import Outliver
from tests.support.agents.homes import Home, until
from tests.support.agents.outliving import RUN, World
from tests.support.processes.warm import Warm
from tests.support.stores.database import attempts_of

PARENT = """
import anyio, sys
from pathlib import Path
from plait.persistence import SQLiteStore
from plait import DAG, ParallelRunner, Task
from tests.support.agents.homes import Home

async def main(home):
    task = Task("a", prompt=f"Work. [[tool]] [[until {home.path}/go]] [[say done]]")
    async with SQLiteStore(home.path / "runs.db") as store:
        await ParallelRunner(home.claude(), store=store).run(DAG([task]), "r")

anyio.run(main, Home(Path(sys.argv[1])))
"""


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_turn_needs_no_command_any_more_to_be_taken_over(home: Home, ended: bool) -> None:
    parent = Warm([sys.executable, "-c", PARENT, str(home.path)])
    await until(lambda: home.begun == 2)
    parent.kill()
    parent.wait()
    (home.path / "claude").unlink()
    if ended:
        (home.path / "go").touch()
        await until(lambda: not home.processes)
    async with (
        SQLiteStore(home.path / "runs.db", mode="existing") as store,
        ParallelRunner(home.claude(), store=store).start_resume("r") as run,
    ):
        async for event in run.events():
            if isinstance(event, events.TaskStarted):
                (home.path / "go").touch()
        result = await run.result()
    assert result.text == {"a": "done"}
    assert home.processes == []


class Missing(Outliver):
    """Cannot be had when a turn is to be taken over."""

    def open(self, request: ConversationRequest) -> Any:
        if request.attaches:
            raise BackendUnavailable("it is not installed")
        return super().open(request)


async def test_a_turn_that_no_backend_takes_hold_of_is_ended(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]] [[stray]]"}, {"id": "b", "prompt": "other [[until go]]"})
    await world.killed(2)
    await world.until(lambda: world.strays)
    async with world.store() as store:
        result = await ParallelRunner(Missing(world.folder), store=store).resume(RUN)
    assert {task.error_kind for task in result.tasks.values()} == {"unavailable"}
    assert world.alive() == []


@pytest.mark.parametrize("why", ["failed", "damaged"])
async def test_at_most_once_stays_at_work_whatever_becomes_of_what_it_began_with(world: World, why: str) -> None:
    mode, words = ("soft", " [[error invalid_request]]") if why == "failed" else ("hard", "")
    world.plan(
        {"id": "first", "prompt": f"look{words}", "failure_mode": mode},
        {"id": "pay", "prompt": "pay [[until go]]", "at_most_once": True, "depends_on": ["first"]},
    )
    await world.killed(2)
    if why == "damaged":
        with closing(sqlite3.connect(world.folder / "runs.db")) as database, database:
            database.execute(attempts_of("first", "text = 'other'"))
    async with world.store() as store:
        runner = ParallelRunner(world.backend, store=store)
        for retries in (False, True):
            preview = await runner.runs.preview(RUN, retry_failed=retries)
            assert preview.tasks["pay"].action is ResumeAction.ADOPT
        world.allow("go")
        result = await runner.resume(RUN, retry_failed=True)
    assert (result["pay"].status, result["pay"].attempts) == (TaskStatus.COMPLETED, 1)
    assert world.said.count("pay [[until go]]") == 1
    assert world.said.count(f"look{words}") == 2


async def test_a_sweep_is_not_put_off_by_what_agents_at_work_leave_and_take(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]]"}, {"id": "b", "prompt": "other [[until never]]"})
    await world.killed(2)
    root = world.folder / "runs.db.files" / RUN
    kept, over = root / "a" / "1", threading.Event()

    def scratch() -> None:
        while not over.is_set():
            (kept / "x" / "y" / "z").mkdir(parents=True)
            for name in ("x/y/z", "x/y", "x"):
                (kept / name).rmdir()

    busy = threading.Thread(target=scratch)
    busy.start()
    try:
        for _ in range(200):
            await sweep(root, [kept])
    finally:
        over.set()
        busy.join()
    alive = [turn["prompt"].split()[0] for turn in world.turns if turn["pid"] in world.alive()]
    await sweep(root, [])
    assert (alive, world.alive()) == (["work"], [])


async def test_what_a_child_leaves_in_its_folder_names_nobody(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]]"})
    await world.killed(1)
    folder = world.folder / "runs.db.files" / RUN / "a" / "1"
    stranger = subprocess.Popen(["sleep", "600"], start_new_session=True)  # noqa: ASYNC220
    try:
        (folder / "made").mkdir()
        text = (folder / "child.json").read_text()
        told = {"pid": stranger.pid, "started": start_time(stranger.pid), "marker": "0123456789abcdef"}
        (folder / "made" / "child.json").write_text(json.dumps({**json.loads(text), **told}))
        await sweep(folder.parent.parent, [])
        assert world.alive() == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_a_resume_that_is_cancelled_natively_again_and_again_is_written_down_as_left(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]]"})
    await world.killed(1)
    async with world.store() as store:
        resuming = asyncio.create_task(ParallelRunner(world.backend, store=store).resume(RUN))
        await world.until(lambda: world.backend.requests)
        while not resuming.done():
            resuming.cancel()  # also while what is left of the turn is being ended
            await asyncio.sleep(0)
        record, (task,) = await store.get_run(RUN), await store.list_tasks(RUN)
        assert record is not None
        assert (record.owner, task.status) == (None, "pending")
        world.allow("never")
        assert (await ParallelRunner(world.backend, store=store).resume(RUN)).status.value == "completed"
    assert world.alive() == []
