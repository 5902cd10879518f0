"""Agents on a Dask cluster outlive their runner, their worker, the nanny and the scheduler, and none is begun twice.

Skipped where distributed is not installed.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from anyio.to_thread import run_sync

pytest.importorskip("distributed")

from plait import RunStatus, TaskStatus, events
from plait.events import HostAway
from tests.support.agents.outliving import RUN
from tests.support.hosts.dask_outliving import DaskWorld
from tests.support.sizes import size

pytestmark = pytest.mark.slow

COUNT = size(4, 8)


@pytest.fixture
def nanny() -> bool:
    """Whether the workers have nannies: each takes two processes then, the second of which starts cold."""
    return False


@pytest.fixture
def world(tmp_path: Path, nanny: bool) -> Generator[DaskWorld]:
    world = DaskWorld(tmp_path, nanny=nanny)
    world.plan(*({"id": f"t{number}", "prompt": f"work {number} [[until go]]"} for number in range(COUNT)))
    world.cluster.start()
    yield world
    world.end()


@pytest.mark.parametrize("with_cluster", [False, True])
async def test_agents_outlive_their_runner_and_the_cluster(world: DaskWorld, with_cluster: bool) -> None:
    await world.killed(COUNT)
    if with_cluster:
        world.restart()
    assert len(world.alive()) == COUNT
    result = await world.resumed(COUNT)
    assert {one.text for one in result.tasks.values()} == {f"re: work {number}" for number in range(COUNT)}
    assert [one.attempts for one in result.tasks.values()] == [1] * COUNT
    assert (len(world.turns), world.alive()) == (COUNT, [])


@pytest.mark.parametrize(("killed", "nanny"), [("worker", True), ("nanny", True), ("scheduler", False), ("all", False)])
async def test_agents_outlive_a_part_of_the_cluster_within_a_run(world: DaskWorld, killed: str) -> None:
    result = await world.run_without(killed, COUNT)
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT, [])
    assert {one.attempts for one in result.tasks.values()} == {1}


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_the_end_of_a_run_ends_the_agents_on_every_worker(world: DaskWorld, how: str) -> None:
    async with world.opened_store() as store, world.runner(store, cancel_grace=0.0).start(world.dag(), RUN) as run:
        opened: set[str] = set()
        async for event in run.events():
            if isinstance(event, events.SessionOpened):
                opened.add(event.task_id)
            if len(opened) == COUNT:
                run.cancel() if how == "cancel" else run.stop()
        result = await run.result()
    assert result.status is (RunStatus.CANCELLED if how == "cancel" else RunStatus.INTERRUPTED)
    assert (world.alive(), len(world.turns)) == ([], COUNT)


async def test_a_task_that_continues_another_goes_to_the_worker_with_the_session(tmp_path: Path) -> None:
    world = DaskWorld(tmp_path, {"m1": 3, "m2": 3}, nanny=False)
    names = [f"t{number}" for number in range(6)]
    world.plan(
        *({"id": name, "prompt": f"first {name} [[until begun]]"} for name in names),
        *({"id": f"{name}-2", "prompt": f"second {name}", "continues": name} for name in names),
    )
    world.cluster.start()
    try:
        await world.cluster.ready()
        places: dict[str, str] = {}
        async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskPlaced):
                    places[event.task_id] = event.place
                    if len(places) == len(names):
                        world.allow("begun")
            result = await run.result()
    finally:
        world.end()
    assert result.status is RunStatus.COMPLETED
    assert Counter(places[name] for name in names) == {"m1": 3, "m2": 3}
    assert {name: places[f"{name}-2"] for name in names} == {name: places[name] for name in names}
    sessions = {turn["prompt"].partition(" [[")[0]: turn["session"] for turn in world.turns}
    assert all(sessions[f"first {name}"] == sessions[f"second {name}"] for name in names)


async def test_a_task_that_continues_another_waits_for_the_worker_with_the_session(tmp_path: Path) -> None:
    world = DaskWorld(tmp_path, {"m1": 1, "m2": 1}, nanny=False)
    world.plan(
        {"id": "a", "prompt": "one [[until both]]"},
        {"id": "c", "prompt": "other [[until go]]"},
        {"id": "b", "prompt": "two", "continues": "a", "depends_on": ["c"]},
    )
    world.cluster.start()
    places: dict[str, str] = {}
    waits: list[str] = []
    try:
        await world.cluster.ready()
        async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskPlaced):
                    places[event.task_id] = event.place
                    if len(places) == 2:
                        world.allow("both")
                if isinstance(event, events.TaskCompleted) and event.task_id == "a":
                    await run_sync(world.cluster.kill, places["a"])
                    world.allow("go")
                if isinstance(event, events.TaskOutput) and event.output == "waiting" and event.task_id == "b":
                    waits.append(event.text)
                    if len(waits) == 1:
                        world.cluster.start_worker(places["a"])
            result = await run.result()
    finally:
        world.end()
    assert (result.status, places["b"]) == (RunStatus.COMPLETED, places["a"])
    assert waits[0].startswith(f"waiting for {places['a']}, away since ")
    sessions = {turn["prompt"].partition(" [[")[0]: turn["session"] for turn in world.turns}
    assert sessions["one"] == sessions["two"]


async def test_a_worker_that_is_away_for_too_long_loses_its_attempts_and_ends_them_when_back(tmp_path: Path) -> None:
    world = DaskWorld(tmp_path, {"m1": 4, "m2": 4}, patience=3.0, nanny=False)  # either has room for all
    world.plan(*({"id": f"t{number}", "prompt": f"work {number} [[until go]]"} for number in range(4)))
    world.cluster.start()
    try:
        await world.cluster.ready()
        async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
            opened: set[str] = set()
            places: dict[str, str] = {}
            lost: list[str] = []
            host = ""
            async for event in run.events():
                if isinstance(event, events.TaskPlaced):
                    places.setdefault(event.task_id, event.place)
                if isinstance(event, events.SessionOpened):
                    opened.add(f"{event.task_id}/{event.attempt}")
                    if len(opened) == 4:
                        host = places["t0"]
                        lost = sorted(task for task, place in places.items() if place == host)
                        await run_sync(world.cluster.kill, host)
                    if lost and len(opened) == 4 + len(lost):
                        assert len(world.alive()) == 4 + len(lost)
                        world.cluster.start_worker(host)
                        await world.until(lambda: len(world.alive()) == 4)
                        world.allow("go")
            result = await run.result()
            away = [json.loads(one.detail) for one in await store.list_events(RUN, kind=HostAway.kind)]
        assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, 4 + len(lost), [])
        assert (away[0]["host"], away[0]["tasks"], away[0]["since"] is None) == (host, lost, False)
        assert (away[-1]["tasks"], away[-1]["since"], away[-1]["reason"] != "") == ([], None, True)
        assert {one.id: one.attempts for one in result.tasks.values()} == {
            task: 2 if task in lost else 1 for task in places
        }
    finally:
        world.end()


async def test_a_person_decides_about_an_at_most_once_attempt_on_a_lost_worker(tmp_path: Path) -> None:
    world = DaskWorld(tmp_path, {"m1": 1, "m2": 1}, patience=1.0, nanny=False)
    world.plan({"id": "pay", "prompt": "pay [[until go]]", "at_most_once": True})
    world.cluster.start()
    try:
        await world.cluster.ready()
        place = ""
        async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskPlaced):
                    place = event.place
                if isinstance(event, events.SessionOpened):
                    await run_sync(world.cluster.kill, place)
            result = await run.result()
            (task,) = await store.list_tasks(RUN)
        assert result["pay"].status is TaskStatus.WAITING_INPUT
        assert (task.question or "").startswith(f"{place} has been away for 1 s")
        assert len(world.turns) == len(world.alive()) == 1
    finally:
        world.end()


async def test_a_time_limit_counts_from_the_beginning_on_the_worker_and_ends_the_agent(tmp_path: Path) -> None:
    world = DaskWorld(tmp_path, {"m1": 1}, nanny=False)
    limited = {"prompt": "work [[until go]]", "timeout": 5.0, "retry_attempts": 1}
    world.plan({"id": "a", **limited}, {"id": "b", **limited})
    world.cluster.start()
    ends: list[str] = []
    try:
        async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskFailed):
                    ends.append(event.error)
                    world.allow("go")  # the other task, which has waited for as long, begins now
                    assert world.turns[0]["pid"] not in world.alive()
            result = await run.result()
        assert ends == ["no answer within the task's timeout of 5 s"]
        assert sorted(one.status for one in result.tasks.values()) == [TaskStatus.COMPLETED, TaskStatus.FAILED]
        assert (len(world.turns), world.alive()) == (2, [])
    finally:
        world.end()
