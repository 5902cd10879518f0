"""What a killed runner has left and nobody takes over: ended by whoever comes next, and nothing else with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, ParallelRunner, PlaitError, RunStatus, Task, TaskStatus
from plait.backends.backend_protocol import ConversationRequest, DetachedTurn, Files
from plait.events import RunClaimed
from plait.persistence import Batch, MemoryStore
from plait.results import ResumeAction
from plait.runner.state.attempt_files import delete_files
from plait.runner.state.stored_run import cancel_note
from tests.support.agents.detached_backend import Outliver
from tests.support.agents.outliving import RUN, World
from tests.support.crashed import Dying, die
from tests.support.fakes import Talker

CUT = {"id": "a", "prompt": "work [[until never]] [[stray]]"}


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


class Watching(Outliver):
    """Notes which processes live whenever a turn is begun."""

    def __init__(self, world: World) -> None:
        super().__init__(world.folder)
        self._world = world
        self.alive: list[list[int]] = []

    def open(self, request: ConversationRequest) -> Any:
        self.alive.append(self._world.alive())
        return super().open(request)


async def test_strays_of_a_cut_turn_are_gone_before_anything_starts(world: World) -> None:
    world.plan(CUT, {"id": "b", "prompt": "other [[until go]]"})
    await world.killed(2)
    number = next(n for n, turn in enumerate(world.turns) if turn["prompt"].startswith("work"))
    kept = world.turns[1 - number]["pid"]
    world.kill_turn(number)
    assert set(world.alive()) == {kept, *world.strays}
    world.allow("never")
    world.allow("go")
    watching = Watching(world)
    async with world.store() as store:
        result = await ParallelRunner(watching, store=store).resume(RUN)
    assert result.status is RunStatus.COMPLETED
    assert (result.resume_summary.adopted, result.resume_summary.ran) == (1, 1)
    assert all(set(alive) <= {kept} for alive in watching.alive[:1])
    assert world.alive() == []


async def test_cancelling_a_dead_owners_run_ends_what_it_left(world: World) -> None:
    world.plan(CUT)
    await world.killed(1)
    assert len(world.alive()) == 2
    async with world.store() as store:
        assert await ParallelRunner(store=store).runs.cancel(RUN) is RunStatus.CANCELLED
    assert world.alive() == []


async def test_a_run_that_was_to_be_cancelled_is_left_by_all(world: World) -> None:
    world.plan(CUT)
    await world.killed(1)
    async with world.store() as store:
        record = await store.get_run(RUN)
        assert record is not None
        await store.send(RUN, cancel_note(record, "2026-11-22T00:00:00.000Z"))
        runner = ParallelRunner(world.backend, store=store)
        assert (await runner.runs.preview(RUN)).tasks["a"].action is ResumeAction.CANCEL
        assert (await runner.resume(RUN)).status is RunStatus.CANCELLED
    assert (world.alive(), world.backend.requests) == ([], [])


async def test_who_settles_one_task_leaves_the_others_at_work(world: World) -> None:
    world.plan({**CUT, "at_most_once": True}, {"id": "b", "prompt": "other [[until go]]"})
    await world.killed(2)
    number = next(n for n, turn in enumerate(world.turns) if turn["prompt"].startswith("work"))
    async with world.store() as store:
        runner = ParallelRunner(world.backend, store=store)
        with pytest.raises(
            PlaitError, match=r"task 'a' of run r needs no answer: the agent is still running \(outliver, pid"
        ):
            await runner.runs.settle(RUN, "a", "done", "it is")
        world.kill_turn(number)
        await runner.runs.settle(RUN, "a", "done", "it is")
        assert world.alive() == [world.turns[1 - number]["pid"]]
        record = await store.get_run(RUN)
        assert record is not None and record.owner is None
        world.allow("go")
        result = await runner.resume(RUN)
    assert result.text == {"a": "it is", "b": "re: other"}
    assert len(world.turns) == 2


async def test_who_answers_a_question_leaves_the_others_at_work(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[ask Where?]]"}, {"id": "b", "prompt": "other [[until go]]"})
    await world.killed(2, asked="a")
    async with world.store() as store:
        runner = ParallelRunner(world.backend, store=store)
        assert await runner.runs.answer(RUN, "a", "Rome")
        (pid,) = world.alive()
        world.allow("go")
        assert (await runner.resume(RUN)).text == {"a": "re: Rome", "b": "re: other"}
    assert [turn["pid"] for turn in world.turns if turn["prompt"].startswith("other")] == [pid]


async def test_a_persons_turn_that_was_killed_is_nobodys(world: World) -> None:
    world.plan({"id": "a", "prompt": "work"}, {"id": "b", "prompt": "other [[until go]]"})
    await world.killed(2)
    person = ("a", "and now? [[until never]] [[stray]]")
    await world.killed(3, *person, confirmed=False)
    await world.until(lambda: len(world.strays) == 1)
    assert len(world.alive()) == 3
    async with world.store() as store:
        reply = await ParallelRunner(world.backend, store=store).runs.continue_task(RUN, "a", "still there?")
        assert reply.text == "re: still there?"
        assert len(world.alive()) == 1  # b's, which is to be adopted
        world.allow("go")
        assert (await ParallelRunner(world.backend, store=store).resume(RUN)).status is RunStatus.COMPLETED


async def test_a_run_that_is_deleted_is_swept_first(world: World) -> None:
    world.plan({"id": "a", "prompt": "work"})
    async with world.opened_store() as store:
        await ParallelRunner(world.backend, store=store).run(world.dag(), RUN)
    await world.killed(2, "a", "and now? [[until never]] [[stray]]", confirmed=False)
    await world.until(lambda: len(world.strays) == 1)
    folder = world.folder / "runs.db.files" / RUN
    assert {path.name for path in folder.glob("a/*")} >= {"1"}
    assert len(world.alive()) == 2
    assert await delete_files(folder.parent, [RUN], []) is None
    assert (world.alive(), folder.exists()) == ([], False)


async def test_an_attempt_that_was_never_stored_makes_room(world: World) -> None:
    """As where the store was away when the process died, or the store is a new one and the files are of the old one."""
    world.plan({"id": "a", "prompt": "work [[until go]]"})
    await world.killed(1)
    for name in ("runs.db", "runs.db-wal", "runs.db-shm"):
        (world.folder / name).unlink(missing_ok=True)
    world.allow("go")
    async with world.opened_store() as store:
        result = await ParallelRunner(world.backend, store=store).run(world.dag(), RUN)
    assert (result.text["a"], len(world.turns)) == ("re: work", 2)
    assert world.alive() == []


async def test_an_owner_that_may_wake_keeps_no_child(world: World) -> None:
    """It would end them when it finds its run taken over: they go on by their sessions instead."""
    world.plan({"id": "a", "prompt": "work [[until never]]"}, {"id": "b", "prompt": "other [[until go]]"})
    await world.killed(2)
    world.allow("go")
    await world.until(lambda: len(world.alive()) == 1)
    async with world.store() as store:
        record = await store.get_run(RUN)
        assert record is not None and record.owner is not None
        asleep = replace(record.owner, owner_id="asleep", pid=1, process_started="")
        claim = RunClaimed("2026-01-01T00:00:00.000Z", asleep, 1.0)
        await store.write(Batch(RUN, record.epoch, record.last_seq + 1, (claim,)))
        runner = ParallelRunner(world.backend, store=store, lease=0.3)
        actions = {name: step.action for name, step in (await runner.runs.preview(RUN)).tasks.items()}
        assert actions == {"a": ResumeAction.CONTINUE, "b": ResumeAction.ADOPT}
        result = await runner.resume(RUN)
    assert result.text == {"a": "went on with work", "b": "re: other"}
    assert world.alive() == []


async def test_what_a_backend_cannot_tell_is_as_nothing(world: World) -> None:
    class Confused(Outliver):
        def inspect(self, files: Files) -> DetachedTurn | None:
            raise OSError("no such luck")

    world.plan({"id": "a", "prompt": "work [[until go]]"})
    await world.killed(1)
    world.allow("go")
    async with world.store() as store:
        runner = ParallelRunner(Confused(world.folder), store=store)
        assert (await runner.runs.preview(RUN)).tasks["a"].action is ResumeAction.CONTINUE
        assert (await runner.resume(RUN)).text["a"] == "went on with work"
    assert world.alive() == []


async def test_nobody_is_asked_where_there_are_no_files() -> None:
    asked: list[Files] = []

    class Asked(Talker):
        def inspect(self, files: Files) -> DetachedTurn | None:
            asked.append(files)
            return None

    store = MemoryStore()
    await die(store, Dying(lambda _: True), DAG([Task("a", prompt="work")]))
    result = await ParallelRunner(Asked(), store=store).resume("r")
    assert (result["a"].status, asked) == (TaskStatus.COMPLETED, [])
