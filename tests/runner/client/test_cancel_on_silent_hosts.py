"""Cancelling a run while a host is silent: connected, or open for connections, and its processes are stopped."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from plait import ParallelRunner, RunStatus, events
from plait.backends.hosts import host_connection, host_session
from tests.support.agents.outliving import RUN
from tests.support.hosts.outliving import HostsWorld

pytestmark = pytest.mark.slow

TASK = {"id": "a", "prompt": "work [[until go]]"}


@pytest.fixture(autouse=True)
def limits(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let only the limit for the end of an attempt end a wait for a host, until the limits are undone."""
    monkeypatch.setattr(host_connection, "END_S", 1.0)
    monkeypatch.setattr(host_session, "END_S", 1.0)
    monkeypatch.setattr(host_connection, "_ANSWER_S", 1000.0)
    return monkeypatch


async def cancelled(runner: ParallelRunner) -> tuple[RunStatus, Mapping[str, Sequence[str]]]:
    """Cancel the run. Return its status, and the tasks left on hosts that cannot be reached."""
    unreached: dict[str, Sequence[str]] = {}
    status = await runner.runs.cancel(RUN, wait=30.0, on_unreached=unreached.update)
    return status, unreached


async def test_a_silent_host_is_named_and_its_agent_ended_by_a_later_cancel(
    tmp_path: Path, limits: pytest.MonkeyPatch
) -> None:
    world = HostsWorld(tmp_path)
    world.plan(TASK, names=["m1"])
    await world.killed(1)
    world.hosts.set_silent("m1")
    async with world.store() as store:
        assert await cancelled(world.runner(store, ["m1"])) == (RunStatus.CANCELLED, {"m1": ("a",)})
        assert len(world.alive()) == 1
        world.hosts.set_back("m1")
        limits.undo()
        assert await cancelled(world.runner(store, ["m1"])) == (RunStatus.CANCELLED, {})
    assert world.alive() == []


async def test_the_owner_of_a_run_does_not_wait_for_a_host_that_falls_silent(
    tmp_path: Path, limits: pytest.MonkeyPatch
) -> None:
    world = HostsWorld(tmp_path)
    world.plan(TASK, names=["m1"])
    async with world.opened_store() as store:
        runner = world.runner(store, ["m1"], cancel_grace=0.0)
        told: list[str] = []
        async with runner.start(world.dag(), RUN) as run:
            async for event in run.events():
                if await world.all_told(event, 1):
                    world.hosts.set_silent("m1")
                    run.cancel()
                if isinstance(event, events.TaskOutput) and event.output == "notice":
                    told.append(event.text)
            assert (await run.result()).status is RunStatus.CANCELLED
        assert told == ["m1 does not answer, so the attempt is not ended yet"]
        assert len(world.alive()) == 1
        world.hosts.set_back("m1")
        limits.undo()
        assert await cancelled(runner) == (RunStatus.CANCELLED, {})
    assert world.alive() == []


@pytest.fixture
def cluster_world(tmp_path: Path) -> Generator[Any]:
    """A world with one worker of Dask. Skips without distributed."""
    pytest.importorskip("distributed")
    from tests.support.hosts.dask_outliving import DaskWorld

    world = DaskWorld(tmp_path, {"m1": 1}, nanny=False)
    world.plan(TASK)
    world.cluster.start()
    yield world
    world.end()


async def test_a_silent_worker_is_named_and_its_agent_ended_by_a_later_cancel(
    cluster_world: Any, limits: pytest.MonkeyPatch
) -> None:
    world = cluster_world
    await world.killed(1)
    world.cluster.suspend("m1")
    async with world.store() as store:
        assert await cancelled(world.runner(store)) == (RunStatus.CANCELLED, {"m1": ("a",)})
        assert len(world.alive()) == 1
        world.cluster.wake("m1")
        limits.undo()
        assert await cancelled(world.runner(store)) == (RunStatus.CANCELLED, {})
    assert world.alive() == []


async def test_the_owner_of_a_run_does_not_wait_for_a_scheduler_that_falls_silent(
    cluster_world: Any, limits: pytest.MonkeyPatch
) -> None:
    limits.setattr("plait.backends.hosts.dask_hosts._POLL_S", 0.0)  # a request is under way
    world = cluster_world
    async with world.opened_store() as store, world.runner(store, cancel_grace=0.0).start(world.dag(), RUN) as run:
        async for event in run.events():
            if await world.all_told(event, 1):
                world.cluster.suspend("scheduler")
                run.cancel()
        assert (await run.result()).status is RunStatus.CANCELLED
