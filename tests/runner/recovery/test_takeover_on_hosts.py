"""An owner that sleeps past its lease while another host takes its run over: by ssh, and on a Dask cluster."""

from __future__ import annotations

import importlib
import os
import platform
import signal
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import cast

import anyio
import anyio.abc
import pytest

from plait import ParallelRunner, RunResult, RunStatus, events
from plait.backends.hosts.host_backend import HostGroup
from plait.persistence import SQLiteStore
from plait.runner.engine.run_lifecycle import run_on_hosts
from tests.support.agents.outliving import RUN
from tests.support.hosts.outliving import LEASE, HostsWorld, PlacedWorld
from tests.support.sizes import size

pytestmark = pytest.mark.slow

COUNT = size(4, 8)


@pytest.fixture(params=["ssh", "dask"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[PlacedWorld]:
    """Hosts, with a run of COUNT tasks."""
    tasks = [{"id": f"t{number}", "prompt": f"work {number} [[until go]]"} for number in range(COUNT)]
    if request.param == "ssh":
        world = HostsWorld(tmp_path)
        world.plan(*tasks)
        yield world
        return
    pytest.importorskip("distributed")
    on_dask = importlib.import_module("tests.support.hosts.dask_outliving").DaskWorld(
        tmp_path, {"m1": 4, "m2": 4}, nanny=False
    )
    on_dask.plan(*tasks)
    on_dask.cluster.start()
    try:
        anyio.run(on_dask.cluster.ready)
        yield on_dask
    finally:
        on_dask.end()


async def test_an_owner_that_slept_past_its_lease_neither_ends_nor_begins_an_agent(
    world: PlacedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", world.module, str(world.folder)]
    with (world.folder / "stderr").open("wb") as stderr:
        process = await anyio.open_process(command, stdout=stderr, stderr=stderr)
    async with process:
        try:
            await world.until(lambda: len(world.told) == COUNT)
            await world.suspend(process.pid)
            monkeypatch.setattr(platform, "node", lambda: "another-machine")
            result = await taken_over(world, process)
        finally:
            if process.returncode is None:
                process.kill()
    assert b"was taken over by another process" in (world.folder / "stderr").read_bytes()
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT, [])
    assert {one.attempts for one in result.tasks.values()} == {1}


def runner(world: PlacedWorld, store: SQLiteStore) -> ParallelRunner:
    return ParallelRunner(world.placed(), store=store, concurrency=COUNT, lease=LEASE)


async def taken_over(world: PlacedWorld, sleeping: anyio.abc.Process) -> RunResult:
    """Resume the run, and wake the `sleeping` owner while the agents are at work. Return the result."""
    adopted: set[str] = set()
    async with world.store() as store, runner(world, store).start_resume(RUN) as run:
        async for event in run.events():
            if isinstance(event, events.TaskStarted):
                assert isinstance(event, events.TaskAdopted)
                adopted.add(event.task_id)
            if len(adopted) == COUNT:
                adopted.clear()
                await world.followed(COUNT, epoch=2)
                os.kill(sleeping.pid, signal.SIGCONT)
                assert await sleeping.wait() != 0
                assert await refusals(world) == ["fenced"] * len(list(world.states.glob("*/plait")))
                assert len(world.alive()) == COUNT
                world.allow("go")
        return await run.result()


async def refusals(world: PlacedWorld) -> Sequence[str | None]:
    """Connect to the hosts with the claim of the first owner. Return why each host refuses."""
    async with world.store() as store:
        record = await store.get_run(RUN)
    assert record is not None
    hosts = cast("HostGroup", world.placed().hosts)
    async with hosts.connected(run_on_hosts(RUN, record.created_at, 1)) as stale:
        await stale.reached()
        return [one.refusal for one in stale.connections.values()]
