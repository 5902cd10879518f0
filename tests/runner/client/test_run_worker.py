"""A worker within this process: which runs it takes."""

from __future__ import annotations

import random
from pathlib import Path

import anyio
import pytest

from plait.events import Event, RunEnded
from plait.persistence import SQLiteStore
from plait.runner.client.run_backends import FileOptions
from plait.runner.client.run_worker import Worker
from tests.support.processes.command import plait_here

PLAN = """
backends: {limited: {kind: function, call: "work.py:limited"}, free: {kind: function, call: "work.py:free"}}
tasks: [{id: a, prompt: hello, backend: %s}]
"""
WORK = """
from plait.errors import BackendError, ErrorKind

async def limited(prompt):
    raise BackendError(ErrorKind.RATE_LIMITED, "tomorrow again", retry_after=86_400)

async def free(prompt):
    return "done"
"""


def submit(folder: Path, backend: str) -> str:
    (folder / f"{backend}.yaml").write_text(PLAN % backend)
    (folder / "work.py").write_text(WORK)
    done = plait_here(folder, "run", f"{backend}.yaml", "--queue")
    assert done.code == 0, done.err
    return done.out.strip()


def test_a_run_that_waits_for_a_limit_makes_room_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "sample", lambda oldest, count: oldest[:count])
    first, second = submit(tmp_path, "limited"), submit(tmp_path, "free")
    ended: list[tuple[str, str]] = []

    async def work() -> None:
        async with SQLiteStore(tmp_path / ".plait" / "plait.db") as store:

            def show(run_id: str, event: Event) -> None:
                if isinstance(event, RunEnded):
                    ended.append((run_id, event.status))
                    if run_id == second:
                        worker.stop()

            worker = Worker(store, 1, FileOptions(plans=()), 30.0, show=show, note=print)
            with anyio.fail_after(60):
                await worker.work()

    anyio.run(work)
    assert ended == [(first, "parked"), (second, "completed")]
