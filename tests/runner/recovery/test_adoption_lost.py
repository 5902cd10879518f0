"""Turns whose session was lost, so that they began a fresh one, and that are taken over there."""

from __future__ import annotations

import sys

import anyio
import pytest

from plait import ParallelRunner, events
from plait.persistence import SQLiteStore
from plait.results import ResumeAction
from tests.support.agents.homes import Home, until
from tests.support.processes.warm import Warm

PARENT = """
import anyio, sys
from pathlib import Path
from plait.persistence import SQLiteStore
from plait import DAG, ParallelRunner, Task
from tests.support.agents.homes import Home

async def main(home):
    async with SQLiteStore(home.path / "runs.db") as store:
        tasks = [
            Task("a", "First."),
            Task("b", f"Forget. [[until {home.path}/forgotten]]"),
            Task("c", f"Second. [[until {home.path}/go]] [[say two]]", ["b"], continues="a"),
        ]
        await ParallelRunner(home.acp(), store=store).run(DAG(tasks), "r")

anyio.run(main, Home(Path(sys.argv[1])))
"""


def _of(home: Home, word: str) -> list[str]:
    """The sessions in which the model has heard that word last."""
    return [call["session"] for call in home.calls if word in call["said"][-1][1]]


@pytest.mark.parametrize("ended", [False, True])
async def test_it_is_followed_where_it_went_on(home: Home, ended: bool) -> None:
    parent = Warm([sys.executable, "-c", PARENT, str(home.path)])
    await until(lambda: _of(home, "First.") and _of(home, "Forget."))
    (home.path / "sessions" / f"{_of(home, 'First.')[0]}.json").unlink()
    (home.path / "forgotten").touch()
    await until(lambda: _of(home, "Second."))
    async with SQLiteStore(home.path / "runs.db", mode="existing") as store:
        with anyio.fail_after(60):
            while not (await store.list_tasks("r"))[2].session_confirmed:  # noqa: ASYNC110 - it is another process's
                await anyio.sleep(0.01)
        parent.kill()
        parent.wait()
        if ended:
            (home.path / "go").touch()
        runner = ParallelRunner(home.acp(), store=store)
        expected = "has finished" if ended else "is still running"
        step = (await runner.runs.preview("r")).tasks["c"]
        with anyio.fail_after(60):
            while expected not in step.reason:
                step = (await runner.runs.preview("r")).tasks["c"]
        assert step.action is ResumeAction.ADOPT
        async with runner.start_resume("r") as run:
            async for event in run.events():
                if isinstance(event, events.TaskStarted):
                    (home.path / "go").touch()
            result = await run.result()
    assert (result.text["c"], result["c"].attempts) == ("two", 1)
    assert len(_of(home, "Second.")) == 1
    assert home.processes == []
