"""Turns that outlive their runner: followed, collected, gone on with or ended by the next one, and never said twice."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from plait import ParallelRunner, Run, RunStatus, TaskStatus, events
from plait.backends import Usage
from plait.clock_and_ids import Clock
from plait.results import ResumeAction
from plait.runner.domain.run_result import ResumeSummary
from plait.runner.engine.attempt import INTERRUPTED
from tests.support.agents.adopting import allow_once_adopted, foretold, history, is_adopted, resumed, said_in
from tests.support.agents.outliving import RUN, World, moving


@pytest.fixture
async def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("ended", [False, True])
async def test_a_turn_that_outlived_its_runner_is_not_said_again(world: World, ended: bool) -> None:
    world.plan({"id": "a", "prompt": "work [[until go]]"}, {"id": "b", "prompt": "use {{ a }}", "depends_on": ["a"]})
    await world.killed(1)
    (pid,) = world.alive()
    if ended:
        world.allow("go")
        await world.until(lambda: not world.alive())
    (a, b) = (await foretold(world)).tasks.values()
    finished = "the agent has finished, and its answer can be read"
    reason = f"{finished if ended else 'the agent is still running'} (outliver, pid {pid})"
    assert (a.action, a.reason, a.possibly_billed_twice) == (ResumeAction.ADOPT, reason, False)
    assert b.action is ResumeAction.START
    result, told = await resumed(world, allow_once_adopted(world, "go"))
    assert result.text == {"a": "re: work", "b": "re: use re: work"}
    assert result.resume_summary == ResumeSummary(reused=0, ran=1, repeated=0, adopted=1)
    assert world.said == ["work [[until go]]", "use re: work"]
    assert [request.attaches for request in world.backend.requests] == [True, False]
    first = world.backend.requests[0]
    assert (first.session_id, first.resume, first.resumes_interrupted) == (world.turns[0]["session"], False, False)
    assert is_adopted(told[1])
    assert (told[1].task_id, told[1].attempt, told[1].session_id) == ("a", 1, first.session_id)
    kinds = await history(world)
    assert [kinds.count(f"task_{what}") for what in ("started", "adopted", "interrupted")] == [2, 1, 0]
    assert await said_in(world, "a") == [(1, "user", "work [[until go]]"), (1, "assistant", "re: work")]
    async with world.store() as store:
        task = (await store.list_tasks(RUN))[0]
        run = await store.get_run(RUN)
    assert (task.attempt, task.crashes, task.usage.input_tokens, task.usage.output_tokens) == (1, 0, 10, 7)
    assert run is not None and (run.status, run.usage.cost_usd) == ("completed", 1.0)
    assert world.alive() == []


@pytest.mark.parametrize("others", [0, 1])
async def test_a_turn_that_continues_another_task_is_adopted_as_one_that_does(world: World, others: int) -> None:
    """In the session of the other task, or forked from it if further tasks continue it."""
    more = [{"id": f"c{number}", "prompt": "more", "continues": "a"} for number in range(others)]
    world.plan({"id": "a", "prompt": "work"}, {"id": "b", "prompt": "then [[until go]]", "continues": "a"}, *more)
    await world.killed(2 + others)
    result, _ = await resumed(world, allow_once_adopted(world, "go"))
    assert result.text["b"] == "re: then"
    request = next(one for one in world.backend.requests if one.attaches)
    first = world.turns[0]["session"]
    assert (request.resume, request.fork_of) == ((True, None) if not others else (False, first))


@pytest.mark.parametrize("ended", [False, True])
async def test_a_turn_of_a_spare_that_outlived_its_runner_is_not_said_again(world: World, ended: bool) -> None:
    a, b = {"id": "a", "prompt": "work [[until go]]"}, {"id": "b", "prompt": "and then", "continues": "a"}
    world.plan(a, b, moves=True)
    await world.killed(1)
    if ended:
        world.allow("go")
        await world.until(lambda: not world.alive())
    assert (await foretold(world, **moving())).tasks["a"].action is ResumeAction.ADOPT
    result, told = await resumed(world, allow_once_adopted(world, "go"), **moving())
    assert result.text == {"a": "re: work", "b": "re: and then"}
    assert world.said == ["work [[until go]]", "and then"]
    adopted = [(one.task_id, one.attempt, one.backend) for one in told if is_adopted(one)]
    assert adopted == [("a", 2, "default")]
    assert [request.attaches for request in world.backend.requests] == [True, False]
    assert world.backend.requests[1].session_id == world.turns[0]["session"], "it goes on in the session of the spare"


async def test_a_cut_turn_of_a_spare_goes_on_there(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until x]]"}, moves=True)
    await world.killed(1)
    world.kill_turn(0)
    assert (await foretold(world, **moving())).tasks["a"].action is ResumeAction.CONTINUE
    world.allow("x")
    result, _ = await resumed(world, **moving())
    assert result.status is RunStatus.COMPLETED
    assert world.said[1:] == [INTERRUPTED]
    assert world.turns[1]["session"] == world.turns[0]["session"]
    async with world.store() as store:
        attempts = [one.backend for one in await store.list_attempts(RUN)]
    assert attempts == ["api", "default", "default"], "the closed backend is not asked again"


@pytest.mark.parametrize("known", ["stored", "only in its files", "nowhere"])
async def test_a_turn_that_was_cut_goes_on_if_its_session_is_known_anywhere(world: World, known: str) -> None:
    words = {
        "stored": "[[until x]]",
        "only in its files": "[[hush tell]] [[until x]]",
        "nowhere": "[[silent]] [[until x]]",
    }
    world.plan({"id": "a", "prompt": f"work {words[known]}"})
    await world.killed(1, confirmed=known == "stored")
    if known == "only in its files":
        world.allow("tell")
        await world.until(lambda: (world.folder / "runs.db.files/r/a/1/stdout").stat().st_size)
    world.kill_turn(0)
    session = world.turns[0]["session"]
    step = (await foretold(world)).tasks["a"]
    goes_on = known != "nowhere"
    assert step.action is (ResumeAction.CONTINUE if goes_on else ResumeAction.START_OVER)
    assert step.possibly_billed_twice
    world.allow("x")
    result, told = await resumed(world)
    assert result.status is RunStatus.COMPLETED
    assert world.said[1:] == ([INTERRUPTED] if goes_on else world.said[:1])
    assert (world.turns[1]["session"] == session) == goes_on
    assert [event.confirmed for event in told if isinstance(event, events.TaskStarted)] == [goes_on]
    kinds = await history(world)
    assert kinds.index("task_interrupted") > max(n for n, kind in enumerate(kinds) if kind == "run_resumed")
    # What only the files knew is stored with the take-over, so that another crash right behind it loses nothing.
    learned = kinds[kinds.index("run_resumed") : kinds.index("task_interrupted")]
    assert ("session_opened" in learned) == (known == "only in its files")


@pytest.mark.parametrize("cut", [False, True])
async def test_at_most_once_is_adopted_and_only_asked_about_once_it_is_dead(world: World, cut: bool) -> None:
    world.plan({"id": "pay", "prompt": "pay [[until go]]", "at_most_once": True})
    await world.killed(1)
    if cut:
        world.kill_turn(0)
    assert (await foretold(world)).tasks["pay"].action is (ResumeAction.ASK if cut else ResumeAction.ADOPT)
    result, _ = await resumed(world, allow_once_adopted(world, "go"))
    assert result["pay"].status is (TaskStatus.WAITING_INPUT if cut else TaskStatus.COMPLETED)
    assert len(world.turns) == 1


async def test_no_crash_is_held_against_a_turn_that_outlives_it(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until go]]"})
    for _ in range(3):
        await world.killed(1)
    result, _ = await resumed(world, allow_once_adopted(world, "go"))
    assert (result.text["a"], result["a"].attempts, len(world.turns)) == ("re: work", 1, 1)


async def test_nothing_starts_before_fewer_are_at_work_than_may_be(world: World) -> None:
    names = [f"t{number}" for number in range(7)]
    world.plan(*({"id": name, "prompt": f"{name} [[until {name}]]"} for name in names), concurrency=5)
    await world.killed(5)
    at_work = {turn["prompt"].split()[0] for turn in world.turns}
    assert len(at_work) == 5
    alive_at_start: list[int] = []

    def on_event(event: events.Event, _run: Run) -> None:
        if is_adopted(event) and event.task_id == max(at_work):
            world.allow(min(at_work))
        if isinstance(event, events.TaskCompleted):
            done.add(event.task_id)
            for name in sorted(at_work - done)[:1] or names:
                world.allow(name)
        if isinstance(event, events.TaskStarted) and not isinstance(event, events.TaskAdopted):
            alive_at_start.append(len(at_work - done))

    done: set[str] = set()
    result, told = await resumed(world, on_event, concurrency=2)
    assert result.status is RunStatus.COMPLETED
    assert (result.resume_summary.adopted, result.resume_summary.ran, len(world.turns)) == (5, 2, 7)
    started = [type(event) for event in told if isinstance(event, events.TaskStarted)]
    assert started == [events.TaskAdopted] * 5 + [events.TaskStarted] * 2
    assert max(alive_at_start) <= 1


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_an_adopted_turn_is_cut_like_any_other(world: World, how: str) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]] [[stray]]"})
    await world.killed(1)

    def on_event(event: events.Event, run: Run) -> None:
        if is_adopted(event):
            getattr(run, how)()

    result, _ = await resumed(world, on_event)
    assert world.alive() == []
    if how == "cancel":
        assert result["a"].status is TaskStatus.CANCELLED
        return
    assert result.status is RunStatus.INTERRUPTED
    world.allow("never")
    assert (await foretold(world)).tasks["a"].action is ResumeAction.CONTINUE
    again, _ = await resumed(world)
    assert (again.status, world.said[1:]) == (RunStatus.COMPLETED, [INTERRUPTED])


async def test_a_run_that_is_stopped_before_it_takes_hold_leaves_nothing(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]]"}, {"id": "b", "prompt": "more [[until never]]"})
    await world.killed(2)
    async with world.store() as store:
        run = ParallelRunner(world.backend, store=store).start_resume(RUN)
        run.stop()
        async with run:
            pass
        assert (await run.result()).status is RunStatus.INTERRUPTED
        assert [task.status for task in await store.list_tasks(RUN)] == ["pending", "pending"]
    assert world.backend.requests == []
    assert world.alive() == []


async def test_a_turn_that_itself_took_up_another_is_known_as_such(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until never]] [[later go]]"})
    await world.killed(1)
    world.kill_turn(0)
    await world.killed(2)
    assert [turn["goes_on"] for turn in world.turns] == [False, True]
    result, _ = await resumed(world, allow_once_adopted(world, "go"))
    assert (result.text["a"], result["a"].attempts) == ("went on with work", 2)
    (request,) = world.backend.requests
    assert (request.attaches, request.resume, request.resumes_interrupted) == (True, True, True)
    assert await said_in(world, "a") == [
        (2, "user", "work [[until never]] [[later go]]"),
        (2, "user", INTERRUPTED),
        (2, "assistant", "went on with work"),
    ]


async def test_a_turn_that_said_an_answer_is_known_as_such(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[ask Where?]]"})
    async with world.opened_store() as store:
        waiting = await ParallelRunner(world.backend, store=store).run(world.dag(), RUN)
        assert waiting.status is RunStatus.WAITING_INPUT
        await ParallelRunner(store=store).runs.answer(RUN, "a", "Rome [[until go]]")
    await world.killed(2)
    world.backend.requests.clear()
    result, _ = await resumed(world, allow_once_adopted(world, "go"))
    assert result.text["a"] == "re: Rome"
    (request,) = world.backend.requests
    assert (request.attaches, request.resume, request.answer is not None) == (True, True, True)
    assert [content for _, _, content in await said_in(world, "a")] == [
        "work [[ask Where?]]",
        "Where?",
        "Rome [[until go]]",
        "re: Rome",
    ]


async def test_a_turn_that_corrects_is_known_as_such(world: World) -> None:
    world.plan({"id": "a", "prompt": "plan", "adds_tasks": True})
    await world.killed(2)
    assert world.turns[0]["session"] == world.turns[1]["session"]
    result, _ = await resumed(world, allow_once_adopted(world, "mend"))
    assert (result.status, result["a"].attempts) == (RunStatus.COMPLETED, 2)
    said = [(role, content) for attempt, role, content in await said_in(world, "a") if attempt == 2]
    assert said == [("user", "plan"), ("assistant", "re: plan"), ("user", world.said[1]), ("assistant", "[]")]


async def test_an_adopted_turn_that_fails_is_settled_like_any_other(world: World) -> None:
    world.plan(
        {"id": "a", "prompt": "work [[until go]] [[error transient]]", "retry_attempts": 2},
        {"id": "b", "prompt": "more [[until go]] [[kept overloaded]]", "retry_attempts": 2},
        {"id": "c", "prompt": "rest [[until never]]"},
    )
    await world.killed(3)
    third = next(number for number, turn in enumerate(world.turns) if turn["prompt"].startswith("rest"))

    def on_event(event: events.Event, _run: Run) -> None:
        if is_adopted(event) and event.task_id == "c":
            world.allow("go")
            world.kill_turn(third)

    result, told = await resumed(world, on_event)
    assert (result["a"].error_kind, result["a"].attempts) == ("transient", 2)
    assert (result.text["b"], result["b"].attempts) == ("went on with more", 2)
    assert (result.text["c"], result["c"].attempts) == ("went on with rest", 2)
    retried = {
        event.task_id: (event.error_kind, event.continues_session)
        for event in told
        if isinstance(event, events.TaskRetried)
    }
    assert retried == {"a": ("transient", False), "b": ("overloaded", True), "c": ("crashed", True)}


class Later(Clock):
    """The real clock, a hundred seconds on."""

    def wall(self) -> float:
        return super().wall() + 100


@pytest.mark.parametrize("ended", [False, True])
async def test_the_time_of_a_turn_counts_from_its_start(world: World, ended: bool) -> None:
    world.plan({"id": "a", "prompt": "work [[until go]]", "timeout": 60, "retry_attempts": 1})
    await world.killed(1)
    if ended:
        world.allow("go")
        await world.until(lambda: not world.alive())
    with anyio.fail_after(60):
        result, _ = await resumed(world, clock=Later())
    assert world.alive() == []
    if ended:
        assert (result.text["a"], result["a"].duration_s < 50) == ("re: work", True)
    else:
        assert (result["a"].error_kind, result["a"].duration_s > 100) == ("timeout", True)


async def test_usage_is_counted_once(world: World) -> None:
    world.plan({"id": "a", "prompt": "work [[until go]]"})
    for _ in range(2):
        await world.killed(1)
    result, _ = await resumed(world, allow_once_adopted(world, "go"))
    assert result.usage == Usage(10, 7, 0.5)
