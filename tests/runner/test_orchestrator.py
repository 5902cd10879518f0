"""The orchestrator on the real engine: with each store and without one, to its end, stopped and resumed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import anyio
import pytest

from plait import Orchestrator, ParallelRunner, Run, RunStatus, Task, TaskStatus, events
from plait.backends import ConversationRequest, Reply, ask
from plait.errors import RunNotFound, StoreError
from plait.orchestration import OrchestratorResult, Phase
from plait.persistence import Store
from plait.runner.domain.dag import DAG
from plait.runner.policies.goal_policy import Loop, Stop
from tests.support.fakes import Talker
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write
from tests.support.team import ANSWER, CALLS, CONTEXT, GOAL, TASKS, LoopState, Team, loop_state


def orchestrator(team: Team, store: Store | None = None, run_id: str | None = None, **options: Any) -> Orchestrator:
    options = {"reflect_every": 2, "concurrency": 1, **options}
    return Orchestrator(GOAL, 10, team.backends, store=store, run_id=run_id, **options)


def check(result: OrchestratorResult) -> None:
    assert (result.status, result.phase, result.stopped) == (RunStatus.COMPLETED, Phase.DONE, None)
    assert result.answer == ANSWER
    assert result.context == CONTEXT
    assert result.iteration == 4
    assert result.error is None


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_it_works_without_a_store(concurrency: int) -> None:
    made = orchestrator(Team(), concurrency=concurrency)
    assert (made.phase, made.iteration, made.context) == (Phase.PLANNING, 0, {})
    check(await made.run())
    assert (made.phase, made.iteration) == (Phase.DONE, 4)
    assert made.context == CONTEXT


async def test_it_is_stored(store: Store) -> None:
    calls: list[str] = []
    result = await orchestrator(Team(calls.append), store, "r").run()
    check(result)
    assert calls == CALLS
    assert result.run_id == "r"
    assert await loop_state(store, "r") == (Phase.DONE, 4, ())
    tasks = await store.list_tasks("r")
    assert {task.task_id for task in tasks} == set(TASKS)
    assert (await store.list_messages("r", "do.b"))[0].content.endswith("Result of do.a:\nfound a\n")


async def test_one_backend_for_all_is_enough() -> None:
    team = Team()

    async def all_in_one(prompt: str) -> Any:
        if prompt.startswith("You do"):
            return await team.execute(prompt)
        return await (team.reflect(prompt) if prompt.startswith("You judge") else team.plan(prompt))

    check(await Orchestrator(GOAL, backends=all_in_one, reflect_every=2).run())


@pytest.mark.parametrize(("planned", "added", "dropped"), [(6, 0, 4), (1, 6, 5)])
async def test_no_more_tasks_are_begun_than_the_limit_says(
    store: Store, planned: int, added: int, dropped: int
) -> None:
    """With places for all of them, whether the planner brings them in or an executor's reply."""

    async def planner(prompt: str) -> Any:
        plan = {"tasks": [{"id": f"t{n}", "prompt": f"t{n}"} for n in range(planned)]}
        return plan if prompt.startswith("You plan") else "the answer"

    def execute(_prompt: str, _opening: ConversationRequest) -> Reply:
        more = range(added if len(executor.prompts) == 1 else 0)
        return Reply("done", tasks=tuple({"id": f"more{n}", "prompt": "x"} for n in more))

    executor = Talker(execute)
    backends = {"planner": planner, "executor": executor, "reflector": Talker()}
    result = await Orchestrator(GOAL, 2, backends, store=store, run_id="r").run()
    assert (len(executor.prompts), result.iteration, result.stopped) == (2, 2, Stop.MAX_ITERATIONS)
    assert (result.status, result.answer) == (RunStatus.COMPLETED, "the answer")
    statuses = Counter(task.status for task in await store.list_tasks("r"))
    assert statuses == {"completed": 4, "cancelled": dropped}


async def test_phase_iteration_and_context_can_be_read_while_it_runs(store: Store) -> None:
    seen: list[tuple[Phase, int, list[str], LoopState]] = []

    class Watched(Team):
        async def reflect(self, prompt: str) -> Any:
            seen.append((made.phase, made.iteration, list(made.context), await loop_state(store, "r")))
            return await super().reflect(prompt)

    made = orchestrator(Watched(), store, "r")
    check(await made.run())
    first, second = seen
    assert first == (Phase.REFLECTING, 2, ["do.a", "do.c"], (Phase.REFLECTING, 2, ("reflect.1",)))
    assert second[:2] == (Phase.REFLECTING, 4)


@pytest.mark.parametrize("place", range(len(CALLS)))
async def test_stopped_anywhere_it_goes_on_from_there(store: Store, place: int) -> None:
    calls: list[str] = []
    reached = anyio.Event()

    async def hang() -> None:
        reached.set()
        await anyio.sleep_forever()

    class Hanging(Team):
        async def plan(self, prompt: str) -> Any:
            return await self._or_hang(await super().plan(prompt))

        async def execute(self, prompt: str) -> str:
            return str(await self._or_hang(await super().execute(prompt)))

        async def reflect(self, prompt: str) -> Any:
            return await self._or_hang(await super().reflect(prompt))

        async def _or_hang(self, answer: Any) -> Any:
            if len(calls) == place + 1:
                await hang()
            return answer

    async with anyio.create_task_group() as group:
        group.start_soon(orchestrator(Hanging(calls.append), store, "r").run)
        await reached.wait()
        group.cancel_scope.cancel()
    calls_before = len(calls)
    resumed = await Orchestrator.resume("r", store=store, backends=Team(calls.append).backends, concurrency=1)
    assert (resumed.goal, resumed.limits.reflect_every) == (GOAL, 2)
    assert resumed.iteration == sum(call.startswith("find") for call in CALLS[:place])
    assert len(resumed.context) == resumed.iteration
    check(await resumed.run())
    assert calls[calls_before:] == CALLS[place:]  # what was under way is asked again, and nothing else


async def test_a_finished_one_comes_back_at_once(store: Store) -> None:
    await orchestrator(Team(), store, "r").run()
    calls: list[str] = []
    resumed = await Orchestrator.resume("r", store=store, backends=Team(calls.append).backends)
    assert (resumed.phase, resumed.iteration, resumed.context) == (Phase.DONE, 4, CONTEXT)
    check(await resumed.run())
    assert calls == []


async def test_failures_are_told_to_the_reflector_and_the_run_goes_on() -> None:
    class Judge(Team):
        async def reflect(self, prompt: str) -> Any:
            assert "- do.a: find a\n  RuntimeError: cannot find a" in prompt
            assert "- do.b: find b (waits for do.a)" in prompt
            return {"done": True}

    result = await orchestrator(Judge(fails=("find a",))).run()
    assert result.status is RunStatus.COMPLETED
    assert result.context == {"do.c": "found c"}
    assert result.iteration == 2
    assert {name: (task.status, task.text) for name, task in result.tasks.items()} == {
        "do.a": (TaskStatus.FAILED, ""),
        "do.c": (TaskStatus.COMPLETED, "found c"),
    }
    assert (result.tasks["do.a"].error or "").startswith("RuntimeError: cannot find a")
    assert (result.questions, result.degraded) == ({}, ())


async def test_the_result_names_the_tasks_that_ask_and_their_questions(store: Store) -> None:
    async def executor(prompt: str) -> object:
        return await ask("Which colour?") if "find a" in prompt else prompt

    team = {**Team().backends, "executor": executor}
    result = await Orchestrator(GOAL, backends=team, store=store, run_id="r").run()
    assert (result.status, result.questions) == (RunStatus.WAITING_INPUT, {"do.a": "Which colour?"})
    assert "do.a" not in result.tasks and result.tasks["do.c"].status is TaskStatus.COMPLETED
    resumed = await Orchestrator.resume("r", store=store, backends=Team().backends, answers={"do.a": "red"})
    assert (await resumed.run()).questions == {}


async def test_the_result_names_a_question_of_the_planner_too() -> None:
    async def planner(_prompt: str) -> object:
        return await ask("Which bicycle?")

    result = await Orchestrator(GOAL, backends={**Team().backends, "planner": planner}).run()
    assert (result.status, result.questions) == (RunStatus.WAITING_INPUT, {"plan.1": "Which bicycle?"})


async def test_the_result_names_the_failures_of_the_store(store: Store) -> None:
    failing = FaultyStore(store, on_write(lambda number: Fault.BEFORE if number in {3, 4} else None))
    result = await orchestrator(Team(), failing, "r").run()
    check(result)
    assert result.degraded != () and result.degraded[0].until is not None
    failing = FaultyStore(store, on_write(lambda number: Fault.BEFORE if number == 3 else None))
    with pytest.raises(StoreError):
        await orchestrator(Team(), failing, "strict", strict=True).run()
    failing = FaultyStore(store, on_write(lambda number: Fault.BEFORE if number == 2 else None))
    resumed = await Orchestrator.resume("strict", store=failing, backends=Team().backends, strict=True)
    with pytest.raises(StoreError):
        await resumed.run()


async def test_the_properties_of_a_started_one_are_never_behind_its_events(store: Store) -> None:
    phases: list[Phase] = []
    made = orchestrator(Team(), store, "r")
    async with made.start() as run:
        assert (run.run_id, run.status, made.phase) == ("r", RunStatus.QUEUED, Phase.PLANNING)
        async for event in run.events():
            if isinstance(event, events.PolicyDecided):
                loop = Loop.of(event.state)
                assert made.iteration >= loop.iteration and len(made.context) >= loop.iteration
                phases.append(made.phase)
        assert run.status is RunStatus.COMPLETED
        check(await made.result())
    assert Phase.REFLECTING in phases and phases[-1] is Phase.DONE
    assert await made.result() == await made.result()


async def test_the_first_reader_gets_every_event_and_each_reader_the_same() -> None:
    async with orchestrator(Team()).start() as run:
        first, second = run.events(), run.events()
        kinds = [event.kind async for event in first]
        assert kinds == [event.kind async for event in second]
    assert kinds[:2] == ["run_created", "run_started"] and kinds[-1] == "run_completed"
    assert kinds.count("task_completed") == len(TASKS)
    async with orchestrator(Team()).start() as late:
        await late.result()
        assert len([event async for event in late.events()]) == len(kinds)
        assert [event async for event in late.events()] == []


async def test_a_stopped_one_goes_on_later(store: Store) -> None:
    made = orchestrator(Team(), store, "r")
    async with made.start() as run:
        async for event in run.events():
            if isinstance(event, events.TaskCompleted) and event.task_id == "do.a":
                run.stop()
    result = await made.result()
    assert (result.status, result.answer) == (RunStatus.INTERRUPTED, "")
    calls: list[str] = []
    resumed = await Orchestrator.resume("r", store=store, backends=Team(calls.append).backends, concurrency=1)
    async with resumed.start() as again:
        kinds = [event.kind async for event in again.events()]
    check(await resumed.result())
    assert (kinds[0], "find a" in calls, "plan" in calls) == ("run_resumed", False, False)


async def test_another_task_stops_or_cancels_the_one_that_runs(store: Store) -> None:
    for end, status in ((Run.stop, RunStatus.INTERRUPTED), (Run.cancel, RunStatus.CANCELLED)):
        started: list[Run] = []

        class Ending(Team):
            async def execute(self, prompt: str) -> str:
                end(started[0])  # noqa: B023 - called within the same turn of the loop
                # A cancelled run waits some seconds for its attempts.
                return "" if end is Run.cancel else await anyio.sleep_forever()  # noqa: B023

        made = orchestrator(Ending(), store, end.__name__)
        started.append(made.start())
        async with started[0]:
            pass
        assert (await made.result()).status is status
    record = await store.get_run("cancel")
    assert record is not None and RunStatus(record.status) is RunStatus.CANCELLED


async def test_an_error_inside_the_block_stops_it(store: Store) -> None:
    made = orchestrator(Team(), store, "r")
    with pytest.raises(KeyError, match="mine"):
        async with made.start():
            raise KeyError("mine")
    assert (await made.result()).status is RunStatus.INTERRUPTED


async def test_it_is_started_once() -> None:
    made = orchestrator(Team())
    with pytest.raises(RuntimeError, match="has not begun"):
        await made.result()
    check(await made.run())
    with pytest.raises(RuntimeError, match="can be started only once"):
        made.start()


async def test_tasks_run_on_the_workers_that_they_name(store: Store) -> None:
    async def planner(prompt: str) -> Any:
        worker = "archiv" if "cannot be used" not in prompt else "archive"
        plan = {"tasks": [{"id": "a", "prompt": "find a", "backend": worker}, {"id": "b", "prompt": "find b"}]}
        return plan if prompt.startswith("You plan") else "the answer"

    async def reflector(prompt: str) -> Any:
        assert "- do.a (archive): find a\n  from the archive\n" in prompt
        return {"done": True}

    archive = Talker(lambda _prompt, _opening: "from the archive")
    team = {"planner": planner, "executor": Team().execute, "reflector": reflector}
    registry = {"archive": "Searches the archive."}
    made = Orchestrator(GOAL, 10, {**team, "archive": archive}, registry=registry, store=store, run_id="r")
    result = await made.run()
    assert result.context == {"do.a": "from the archive", "do.b": "found b"}
    tasks = {task.task_id: task for task in await store.list_tasks("r")}
    assert (tasks["do.a"].backend, len(archive.prompts), "plan.2" in tasks) == ("archive", 1, True)
    with pytest.raises(ValueError, match="there is no backend for archive; give one for each of planner, executor"):
        await Orchestrator.resume("r", store=store, backends=team)
    resumed = await Orchestrator.resume("r", store=store, backends={**team, "archive": archive})
    assert (await resumed.run()).answer == "the answer"


async def test_it_stops_at_its_limits() -> None:
    result = await Orchestrator(GOAL, 2, Team().backends, concurrency=1).run()
    assert (result.status, result.stopped, result.iteration) == (RunStatus.COMPLETED, Stop.MAX_ITERATIONS, 2)
    assert result.answer == "found a; found c"
    result = await orchestrator(Team(), max_tasks=3).run()
    assert (result.status, result.stopped, result.iteration) == (RunStatus.COMPLETED, Stop.MAX_TASKS, 3)


async def test_a_plan_that_cannot_be_used_twice_fails_the_run(store: Store) -> None:
    async def planner(prompt: str) -> Any:
        return {"tasks": [{"id": "a", "prompt": "p", "depends_on": ["b"]}]}

    result = await Orchestrator(GOAL, backends={**Team().backends, "planner": planner}, store=store, run_id="r").run()
    assert result.status is RunStatus.FAILED
    assert "second plan cannot be used either: task 'a' depends on 'b'" in (result.error or "")
    again = await Orchestrator.resume("r", store=store, backends=Team().backends, retry_failed=True)
    assert (await again.run()).status is RunStatus.FAILED


async def test_a_reflector_that_fails_is_asked_again_when_failed_tasks_are_retried(store: Store) -> None:
    async def broken(prompt: str) -> Any:
        raise RuntimeError("not today")

    made = Orchestrator(GOAL, 10, {**Team().backends, "reflector": broken}, store=store, run_id="r", reflect_every=2)
    result = await made.run()
    assert result.status is RunStatus.FAILED
    assert "reflect.1" in (result.error or "")
    assert result.context.keys() == {"do.a", "do.b", "do.c"}
    again = await Orchestrator.resume("r", store=store, backends=Team().backends, retry_failed=True)
    result = await again.run()
    assert result.status is RunStatus.COMPLETED
    assert result.answer == ANSWER


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"goal": " "}, "the goal is empty"),
        ({"max_iterations": 0}, "max_iterations must be at least 1, not 0"),
        ({"max_iterations": -1}, "max_iterations must be at least 1, not -1"),
        ({"reflect_every": 0}, "reflect_every must be at least 1"),
        ({"max_tasks": 0}, "max_tasks must be at least 1"),
        ({"run_id": "r"}, "there is no store"),
        ({"backends": None}, "give backends="),
        ({"registry": {"w": "x"}}, "there is no backend for w; give one for each of planner, executor, reflector, w"),
        ({"backends": Team().plan, "registry": {"w": "x"}}, "registry names w, and there is only one backend"),
        ({"backends": {"planner": Team().plan}}, "no backend for executor, reflector"),
        (
            {"backends": {"planer": Team().plan, "executor": Team().execute, "reflector": Team().reflect}},
            "^there is no backend for planner; backends has 'planer'; did you mean 'planner'\\?$",
        ),
        ({"backends": {"x": Team().plan, "planner": Team().plan}}, "executor, reflector; give one for each of planner"),
    ],
)
def test_what_cannot_work_is_refused_at_once(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Orchestrator(**{"goal": GOAL, "backends": Team().backends, **options})


async def test_only_an_orchestration_can_be_resumed_as_one(store: Store) -> None:
    with pytest.raises(ValueError, match="the store has no run 'nobody'"):
        await Orchestrator.resume("nobody", store=store, backends=Team().backends)
    with pytest.raises(RunNotFound):
        await loop_state(store, "nobody")
    await ParallelRunner(lambda _: "x", store=store).run(DAG([Task("a", "p")]), "plain")
    with pytest.raises(ValueError, match="was not started as an orchestration"):
        await Orchestrator.resume("plain", store=store, backends=Team().backends)
