"""Waking runs that are due, over HTTP and MCP: which ones go on, and what is told."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from plait import ParallelRunner, RunStatus, SQLiteStore, Task
from plait.clock_and_ids import Clock
from plait.errors import BackendError, ErrorKind
from plait.runner.client.offered_plans import LocalPlans
from plait.runner.client.run_backends import BackendOptions, BackendSet
from plait.runner.serving.http_routes import ServedRuns
from tests.support.served_backends import set_of


class Late(Clock):
    """The system clock, some days back."""

    def wall(self) -> float:
        return time.time() - 30 * 86_400.0


async def refused(_prompt: str) -> str:
    raise BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=3_600)


async def answer(prompt: str) -> str:
    return prompt


async def park(store: SQLiteStore, run_id: str, **settings: Any) -> None:
    """Leave a run parked, and due by now."""
    runner = ParallelRunner(refused, store=store, clock=Late(), park=True)
    assert (await runner.run([Task("a", "go")], run_id, settings=settings)).status is RunStatus.PARKED


@pytest.mark.parametrize(
    ("backends", "starts", "woken"),
    [(set_of("w"), True, ["mine"]), (None, True, ["mine", "other"]), (set_of("w"), False, [])],
    ids=["posted plans", "the page", "queueing"],
)
async def test_runs_are_woken_over_http(
    tmp_path: Path, backends: BackendSet | None, *, starts: bool, woken: list[str]
) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        await park(store, "mine", posted=True)
        await park(store, "other")
        async with ParallelRunner(answer, store=store).runs as runs:
            told = await ServedRuns(runs, backends, starts=starts).wake()
            await runs.driven_to_end()
            assert (told.woken, told.errors) == (woken, {})
            done = [run.run_id for run in await runs.list(9, statuses=[RunStatus.COMPLETED])]
    assert sorted(done) == woken


async def test_an_agent_wakes_the_runs_of_its_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from plait.runner.serving.mcp_server import RunTools  # loads mcp, which takes a second

    for name in ("PLAIT_RUN", "PLAIT_TASK"):
        monkeypatch.delenv(name, raising=False)
    plan = tmp_path / "plan.yaml"
    plan.write_text("tasks: [{id: a, prompt: go}]")
    async with SQLiteStore(tmp_path / "runs.db") as store:
        await park(store, "mine", plan=str(plan.resolve()))
        await park(store, "other")
        async with ParallelRunner(answer, store=store).runs as runs:
            tools = RunTools(runs, LocalPlans([plan], BackendOptions(), store, runs), Clock())
            assert await tools.wake_runs() == {"runs": [{"run_id": "mine", "error": None}]}
            await runs.driven_to_end()
            assert (await runs.get("mine", tasks=False)).status is RunStatus.COMPLETED
            assert (await runs.get("other", tasks=False)).status is RunStatus.PARKED
