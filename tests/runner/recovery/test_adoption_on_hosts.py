"""Attempts on other hosts outlive their runner and their host process, and none is begun twice."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from plait import RunStatus, TaskStatus, events
from plait.backends.hosts.host_process import Slots, slots_folder
from plait.events import TaskPlaced
from plait.results import ResumeAction
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.agents.outliving import RUN
from tests.support.hosts.outliving import SLOTS, HostsWorld, busy_hosts
from tests.support.sizes import size

pytestmark = pytest.mark.slow

COUNT = size(5, 8)
"""More than a host has slots."""


@pytest.fixture
def world(tmp_path: Path) -> HostsWorld:
    world = HostsWorld(tmp_path)
    world.plan(*({"id": f"t{number}", "prompt": f"work {number} [[until go]]"} for number in range(COUNT)))
    return world


async def resumed(world: HostsWorld) -> None:
    """Resume the run, let the agents go on once all are adopted, and check that none was begun twice."""
    adopted: set[str] = set()
    async with world.store() as store, world.runner(store).start_resume(RUN) as run:
        async for event in run.events():
            if isinstance(event, events.TaskStarted):
                assert isinstance(event, events.TaskAdopted)
                adopted.add(event.task_id)
            if len(adopted) == COUNT:
                adopted.clear()
                await world.followed(COUNT, epoch=2)
                assert len(world.alive()) == COUNT
                world.allow("go")
        result = await run.result()
    assert {one.text for one in result.tasks.values()} == {f"re: work {number}" for number in range(COUNT)}
    assert [one.attempts for one in result.tasks.values()] == [1] * COUNT
    assert len(world.turns) == COUNT
    assert world.alive() == []


@pytest.mark.parametrize("with_hosts", [False, True])
async def test_agents_outlive_their_runner_and_their_host_processes(world: HostsWorld, with_hosts: bool) -> None:
    await world.killed(COUNT)
    if with_hosts:
        world.kill_hosts()
    assert len(world.alive()) == COUNT
    async with world.store() as store:
        foretold = await world.runner(store).runs.preview(RUN)
        assert {step.action for step in foretold.tasks.values()} == {ResumeAction.ADOPT}
        assert "was placed on m" in foretold.tasks["t0"].reason
    await resumed(world)


async def test_agents_outlive_their_host_process_within_a_run(world: HostsWorld) -> None:
    cut = False
    async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
        async for event in run.events():
            if not cut and await world.all_told(event, COUNT):
                cut = True
                world.kill_hosts()
                await world.followed(COUNT, epoch=1)
                assert len(world.alive()) == COUNT
                world.allow("go")
        result = await run.result()
    assert cut
    assert (result.status, len(world.turns), world.alive()) == (RunStatus.COMPLETED, COUNT, [])
    assert {one.attempts for one in result.tasks.values()} == {1}


def newer_version(_package: str) -> str:
    return "9.9.9"


def has_turns(world: HostsWorld, count: int) -> bool:
    return len(world.turns) == count


async def test_a_host_that_is_away_for_too_long_loses_its_attempts_and_ends_them_when_back(world: HostsWorld) -> None:
    told: list[events.Event] = []
    async with world.opened_store() as store, world.runner(store, patience=0.3).start(world.dag(), RUN) as run:
        lost, away, name = list[str](), "", ""
        async for event in run.events():
            told.append(event)
            if not lost and await world.all_told(event, COUNT):
                placed = busy_hosts(await store.list_events(RUN, kind=TaskPlaced.kind))
                away = name = next(iter(placed))
                lost = placed[away]
                world.hosts.set_away(away)
                world.hosts.kill(away)
            again = [one for one in told if isinstance(one, events.TaskStarted) and one.attempt == 2]
            if lost and away and len(again) == len(lost):
                both = COUNT + len(lost)
                await world.until(partial(has_turns, world, both))
                assert len(world.alive()) == COUNT + len(lost)
                world.hosts.set_back(away)
                away = ""
                await world.until(lambda: len(world.alive()) == COUNT)
                world.allow("go")
        result = await run.result()
    assert (result.status, world.alive()) == (RunStatus.COMPLETED, [])
    assert len(world.turns) == COUNT + len(lost)
    assert {one.id: one.attempts for one in result.tasks.values() if one.attempts > 1} == dict.fromkeys(lost, 2)
    waits = [one.text for one in told if isinstance(one, events.TaskOutput) and one.output == "waiting"]
    assert any(text.startswith(f"waiting for {name}, away since ") for text in waits)
    begun, *_, given_up = [one for one in told if isinstance(one, events.HostAway)]
    assert (begun.host, sorted(begun.tasks), begun.since is None) == (name, sorted(lost), False)
    assert (given_up.tasks, given_up.since, given_up.reason != "") == ((), None, True)
    retried = [one for one in told if isinstance(one, events.TaskRetried)]
    assert {one.error_kind for one in retried} == {"crashed"}
    assert f"{name} has been away for 0.3 s" in retried[0].error


async def test_a_task_that_continues_a_conversation_waits_for_the_host_that_has_it(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    other = {"id": "c", "prompt": "other [[until go]]"}
    world.plan(
        {"id": "a", "prompt": "one [[until both]]"},
        other,
        {"id": "b", "prompt": "two", "continues": "a", "depends_on": ["c"]},
    )
    places: dict[str, str] = {}
    waits: list[tuple[str, ...]] = []
    async with world.opened_store() as store, world.runner(store, slots=1).start(world.dag(), RUN) as run:
        async for event in run.events():
            if isinstance(event, events.TaskPlaced):
                places[event.task_id] = event.place
                if len(places) == 2:  # on two hosts, each with one slot
                    world.allow("both")
            if isinstance(event, events.TaskCompleted) and event.task_id == "a":
                world.hosts.set_away(places["a"])
                world.hosts.kill(places["a"])
                world.allow("go")
            if isinstance(event, events.HostAway):
                waits.append(event.tasks)
                if event.tasks:
                    assert event.host == places["a"]
                    world.hosts.set_back(places["a"])
        result = await run.result()
    assert (result.status, places["b"]) == (RunStatus.COMPLETED, places["a"])
    assert waits == [("b",), ()]


async def test_a_person_decides_about_an_at_most_once_attempt_on_a_lost_host(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    world.plan({"id": "pay", "prompt": "pay [[until go]]", "at_most_once": True})
    async with world.opened_store() as store, world.runner(store, ["m1"], patience=0.2).start(world.dag(), RUN) as run:
        async for event in run.events():
            if isinstance(event, events.SessionOpened):
                world.hosts.set_away("m1")
                world.hosts.kill("m1")
        result = await run.result()
        async with world.store() as read:
            (task,) = await read.list_tasks(RUN)
    assert result["pay"].status is TaskStatus.WAITING_INPUT
    assert (task.question or "").startswith("m1 has been away for 0.2 s")
    assert len(world.turns) == 1
    os.kill(world.alive()[0], signal.SIGKILL)


async def test_an_agent_that_ended_with_its_host_process_goes_on_in_its_session_there(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    world.plan({"id": "a", "prompt": "work [[until go]]"})
    await world.killed(1)
    world.kill_turn(0)
    world.allow("go")
    async with world.store() as store:
        result = await world.runner(store).resume(RUN)
        placed = busy_hosts(await store.list_events(RUN, kind=TaskPlaced.kind))
        (task,) = await store.list_tasks(RUN)
    assert (result["a"].attempts, world.said) == (2, ["work [[until go]]", INTERRUPTED])
    assert {turn["session"] for turn in world.turns} == {world.turns[0]["session"]}
    assert list(placed.values()) == [["a", "a"]]
    assert task.session_id == f"{world.turns[0]['session']}@{next(iter(placed))}"


async def test_a_task_that_continues_another_goes_to_the_host_with_the_session(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    names = [f"t{number}" for number in range(6)]
    world.plan(
        *({"id": name, "prompt": f"first {name}"} for name in names),
        *({"id": f"{name}-2", "prompt": f"second {name}", "continues": name} for name in names),
    )
    async with world.opened_store() as store:
        result = await world.runner(store).run(world.dag(), RUN)
        placed = busy_hosts(await store.list_events(RUN, kind=TaskPlaced.kind))
    assert result.status is RunStatus.COMPLETED
    for tasks in placed.values():
        assert {task.removesuffix("-2") for task in tasks} == {task for task in tasks if not task.endswith("-2")}
    sessions = {turn["prompt"]: turn["session"] for turn in world.turns}
    assert all(sessions[f"first {name}"] == sessions[f"second {name}"] for name in names)


async def test_an_attempt_that_is_followed_takes_a_slot_once_there_is_one(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    world.plan({"id": "a", "prompt": "work [[hush told]] [[until go]]"}, names=["m1"])
    await world.killed(1, confirmed=False)
    world.kill_hosts()
    taken = Slots(slots_folder(tmp_path / "hosts" / "m1" / "plait" / "hosts"), {"slots": SLOTS})
    for number in range(SLOTS):
        await world.until(partial(taken.take, f"another/{number}", {"slots": 1}))
    async with world.store() as store, world.runner(store, ["m1"]).start_resume(RUN) as run:
        async for event in run.events():
            if isinstance(event, events.TaskStarted):
                world.allow("told")
            if isinstance(event, events.SessionOpened):  # so the attempt is followed
                for number in range(SLOTS):
                    taken.free(f"another/{number}")
                await world.followed(1, epoch=2)
                world.allow("go")
        result = await run.result()
    assert (result.status, result["a"].attempts, len(world.turns)) == (RunStatus.COMPLETED, 1, 1)


def kept_files(world: HostsWorld) -> list[Path]:
    """The folders of attempts on all hosts."""
    return [path.parent for path in world.hosts.folder.glob("*/plait/hosts/*/*/*/*/stdout")]


async def test_hosts_keep_the_files_of_attempts_until_the_run_is_over(world: HostsWorld) -> None:
    await world.killed(COUNT)
    world.kill_hosts()
    world.allow("go")
    await world.until(lambda: not world.alive())
    assert len(kept_files(world)) == COUNT
    async with world.store() as store:
        result = await world.runner(store).resume(RUN)
    assert [one.attempts for one in result.tasks.values()] == [1] * COUNT  # collected from the files
    await world.until(lambda: not kept_files(world))
    assert list(world.hosts.folder.glob("*/plait/hosts/*/*/fence.json"))


async def test_the_files_of_a_run_that_was_stopped_are_kept_until_it_is_over(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    world.plan({"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two [[until go]]", "depends_on": ["a"]})
    async with world.opened_store() as store, world.runner(store).start(world.dag(), RUN) as run:
        async for event in run.events():
            if isinstance(event, events.SessionOpened) and event.task_id == "b":
                run.stop()
        await run.result()
    assert len(kept_files(world)) == 2
    world.allow("go")
    async with world.store() as store:
        await world.runner(store).resume(RUN)
    await world.until(lambda: not kept_files(world))


async def test_a_cancelled_run_leaves_no_files_of_attempts_that_had_ended(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    world.plan({"id": "a", "prompt": "one"}, {"id": "b", "prompt": "two [[ask Where?]]"})
    async with world.opened_store() as store:
        runner = world.runner(store)
        assert (await runner.run(world.dag(), RUN)).status is RunStatus.WAITING_INPUT
        assert len(kept_files(world)) == 2
        assert await runner.runs.cancel(RUN) is RunStatus.CANCELLED
    await world.until(lambda: not kept_files(world))


def store_files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("runs.db*") if path.is_file()]


async def test_an_attempt_that_the_store_has_lost_makes_room_on_its_host(tmp_path: Path) -> None:
    world = HostsWorld(tmp_path)
    world.plan(
        {"id": "a", "prompt": "one [[until go]]"}, {"id": "b", "prompt": "two [[until end]]", "depends_on": ["a"]}
    )
    await world.killed(1)
    saved = {path: path.read_bytes() for path in store_files(tmp_path)}
    world.allow("go")
    async with world.store() as store, world.runner(store).start_resume(RUN) as run:
        async for event in run.events():
            if isinstance(event, events.SessionOpened) and event.task_id == "b":
                run.stop()
        await run.result()
    for path, content in saved.items():  # as an older backup of the store
        path.write_bytes(content)
    world.allow("end")
    async with world.store() as store:
        result = await world.runner(store).resume(RUN)
    assert (result.text["b"], result["b"].attempts, len(world.turns)) == ("re: two", 1, 3)


@pytest.mark.parametrize("how", ["cancel", "stop"])
async def test_the_end_of_a_run_ends_the_agents_on_every_host(world: HostsWorld, how: str) -> None:
    async with world.opened_store() as store, world.runner(store, cancel_grace=0.0).start(world.dag(), RUN) as run:
        async for event in run.events():
            if await world.all_told(event, COUNT):
                run.cancel() if how == "cancel" else run.stop()
        result = await run.result()
    assert result.status is (RunStatus.CANCELLED if how == "cancel" else RunStatus.INTERRUPTED)
    assert (world.alive(), len(world.turns)) == ([], COUNT)
    assert len(kept_files(world)) == (0 if how == "cancel" else COUNT)


async def test_another_version_is_refused_by_name(world: HostsWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.hosts.host_connection.version", newer_version)
    async with world.opened_store() as store:
        result = await world.runner(store).run(world.dag(), RUN)
    assert {one.error_kind for one in result.tasks.values()} == {"unavailable"}
    assert "m1: plait 0.1.0 is installed there, and 9.9.9 here; install the same version" in (result["t0"].error or "")
