"""Databases of earlier versions are resumed, as if nothing had changed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from plait.persistence import SQLiteStore
from plait.runner import Action, ParallelRunner, RunStatus
from tests.support.fakes import QuickClock, Talker

FIXTURES = Path(__file__).with_name("fixtures")


@pytest.mark.parametrize(
    ("name", "goes_on"),
    [
        ("schema_1.db", Action.START_OVER),
        ("schema_2.db", Action.CONTINUE),
        ("schema_3.db", Action.CONTINUE),
        ("schema_4.db", Action.CONTINUE),
    ],
    ids=["1", "2", "3", "4"],
)
async def test_a_killed_run_of_an_earlier_version_is_resumed(tmp_path: Path, name: str, goes_on: Action) -> None:
    path = tmp_path / name
    shutil.copy(FIXTURES / name, path)
    backend = Talker(lambda prompt, _: f"Answer to: {prompt}")
    async with SQLiteStore(path, mode="existing") as store:
        before = {task.task_id: task for task in await store.list_tasks("run-killed")}
        # Its owner was on another host, and is watched for a lease.
        runner = ParallelRunner(backend, store=store, clock=QuickClock(), lease=3.0)
        preview = await runner.preview_resume("run-killed")
        assert {"broken": preview.tasks["broken"].action, "beside": preview.tasks["beside"].action} == {
            "broken": goes_on,  # its session was confirmed, which version 1 did not keep
            "beside": Action.START_OVER,
        }
        result = await runner.resume("run-killed")
        assert (await runner.resume("run-whole")).status is RunStatus.COMPLETED
        history = backend.openings[backend.prompts.index(before["story"].prompt)].history
        said = await store.list_messages("run-killed", "facts")
    assert (result.status, result.reused, len(backend.prompts)) == (RunStatus.COMPLETED, 4, 4)
    for task_id in ("facts", "more", "moons", "unsteady"):
        assert result[task_id].text == before[task_id].text
    assert [message.content for message in history[:2]] == [message.content for message in said]
