"""What the orchestrator does with answers that it cannot use, with failures, and at its limits."""

from __future__ import annotations

from typing import Any

import pytest

from plait.runner.domain.policy import RecordedRun
from plait.runner.policies.goal_policy import Phase, Stop
from plait.statuses import RunStatus, TaskStatus
from plait.task import Task
from tests.support.scripted import DONE, Script, add, ids, loop_of, plan, simulation, task


@pytest.mark.parametrize(
    ("tasks", "reason"),
    [
        ([task("a"), task("a")], "2 tasks have the id 'a'"),
        ([task("a", "b")], "task 'a' depends on 'b', and there is no such task"),
        ([task("a", "b"), task("b", "a")], "wait for each other"),
        ([task("a", "a")], "wait for each other"),
        ([task(str(i)) for i in range(5)], "it has 5 tasks, and at most 4 are allowed"),
        ([{"id": "a", "prompt": " "}], "task 'a' has no prompt"),
        ([], "it has no tasks"),
        ([{"id": 1}], "it is not of the form"),
        ("a", "it is not of the form"),
    ],
)
def test_a_plan_that_cannot_be_used_goes_back_once(tasks: Any, reason: str) -> None:
    bad = {"tasks": tasks}
    run = simulation(Script([bad, plan(task("a"))]), max_tasks=4)
    run.end("plan.1")
    assert loop_of(run).phase is Phase.PLANNING
    again = run.task("plan.2")
    assert reason in str(again.item)
    assert again.aliases == {"earlier": "plan.1"}
    assert run.run().status is RunStatus.COMPLETED
    failed = simulation(Script([bad]), max_tasks=4).run()
    assert failed.status is RunStatus.FAILED
    assert failed.error is not None
    assert reason in failed.error
    assert ids(failed) == ["plan.1", "plan.2"]


def test_text_that_is_no_json_is_a_plan_that_cannot_be_used() -> None:
    run = simulation(Script(["I would start with a draft."]))
    assert "not of the form" in str(run.end("plan.1").add[0].item)


def test_a_reflection_that_cannot_be_used_goes_back_once() -> None:
    bad = add(task("x", "nobody"))
    run = simulation(Script([plan(task("a"))], [bad, DONE])).run()
    assert run.status is RunStatus.COMPLETED
    assert "there is no such task" in str(run.task("reflect.2").item)
    failed = simulation(Script([plan(task("a"))], [bad])).run()
    assert failed.status is RunStatus.FAILED
    assert failed.error is not None
    assert "there is no such task" in failed.error


@pytest.mark.parametrize(
    ("needs", "why"), [("b", "do.b', which is failed"), ("c", "do.c', which is waiting for one that failed")]
)
def test_nothing_new_may_wait_for_what_never_comes(needs: str, why: str) -> None:
    script = Script([plan(task("b"), task("c", "b"))], [add(task("x", needs)), DONE], fails=["do.b"])
    run = simulation(script).run()
    assert why in str(run.task("reflect.2").item)


@pytest.mark.parametrize(
    ("needs", "why"), [("c", "do.c', which is dropped by the same answer"), ("d", "do.d', which is waiting for one")]
)
def test_nothing_new_may_wait_for_what_the_same_answer_drops(needs: str, why: str) -> None:
    script = Script([plan(*map(task, "abc"), task("d", "c"))], [add(task("x", needs), drop=["c"]), DONE])
    run = simulation(script, reflect_every=1).run()
    assert why in str(run.task("reflect.2").item)


def test_a_failed_task_blocks_its_dependents_until_the_reflector_decides() -> None:
    script = Script(
        [plan(task("a"), task("b", "a"))],
        [add(task("a2"), task("b2", "a2"), drop=["do.b"]), DONE],
        fails=["do.a"],
    )
    run = simulation(script).run()
    assert run.status is RunStatus.COMPLETED
    assert run.status_of("do.b") is TaskStatus.CANCELLED
    assert run.status_of("do.b2") is TaskStatus.COMPLETED
    assert loop_of(run).iteration == 3
    assert loop_of(run).stopped is None


def test_the_planner_failing_fails_the_run() -> None:
    run = simulation(lambda _: RuntimeError("no planner")).run()
    assert run.status is RunStatus.FAILED
    assert ids(run) == ["plan.1"]


def test_the_reflector_failing_lets_the_rest_end_and_fails_the_run() -> None:
    script = Script([plan(*map(task, "abc"))], [RuntimeError("no reflector")])
    run = simulation(script, reflect_every=1).run()
    assert run.status is RunStatus.FAILED
    assert run.status_of("do.c") is TaskStatus.COMPLETED
    assert [one for one in ids(run) if one.startswith("reflect")] == ["reflect.1"]


def test_it_stops_at_max_iterations_and_answers_from_what_is_there() -> None:
    run = simulation(Script([plan(*map(task, "abcdef"))], [add()]), concurrency=2, max_iterations=3)
    assert run.end("plan.1").cancel == ("do.d", "do.e", "do.f")
    for one in "ab":
        assert loop_of(run).stopped is None
        run.end(f"do.{one}")
    decision = run.end("do.c")
    assert loop_of(run).stopped is Stop.MAX_ITERATIONS
    assert [one.id for one in decision.add] == ["answer"]
    run.run()
    assert run.status is RunStatus.COMPLETED
    assert run.status_of("do.e") is TaskStatus.CANCELLED
    assert loop_of(run).iteration == 3
    assert "result of do c" in str(run.task("answer").item)


def test_a_task_that_waits_for_a_failed_one_takes_no_place_of_the_limit() -> None:
    tasks = [task("a"), task("b", "a"), task("c")]
    run = simulation(Script([plan(*tasks)], [add(task("e"))], fails=["do.a"]), concurrency=8, max_iterations=3)
    assert run.end("plan.1").cancel == ()
    run.end("do.a")
    run.run()
    assert run.status_of("do.e") is TaskStatus.COMPLETED


def test_of_what_a_reflector_adds_no_more_begins_than_the_limit_has_left() -> None:
    script = Script([plan(task("a"), task("b"))], [add(task("x"), task("y"), task("z", "y")), DONE])
    run = simulation(script, concurrency=8, max_iterations=3, reflect_every=1)
    run.end("plan.1")
    run.end("do.a")
    decision = run.end("reflect.1")
    assert ([one.id for one in decision.add], decision.cancel) == (["do.x", "do.y", "do.z"], ("do.y", "do.z"))
    run.run()
    assert run.status_of("do.z") is TaskStatus.CANCELLED
    assert (loop_of(run).iteration, loop_of(run).stopped) == (3, Stop.MAX_ITERATIONS)


def test_the_last_iteration_is_reflected_on_and_may_still_be_called_done() -> None:
    script = Script([plan(task("a"), task("b"))])
    assert loop_of(simulation(script, max_iterations=2).run()).stopped is None
    more = Script([plan(task("a"), task("b"))], [add(task("c"))])
    run = simulation(more, max_iterations=2).run()
    assert loop_of(run).stopped is Stop.MAX_ITERATIONS
    assert "do.c" not in ids(run)


def test_it_stops_at_max_iterations_while_it_reflects() -> None:
    script = Script([plan(*map(task, "abcdefgh"))], [add(task("x"))])
    run = simulation(script, concurrency=4, reflect_every=1, max_iterations=3)
    run.end("plan.1")
    run.end("do.a")
    run.end("do.b")
    run.end("do.c")
    assert loop_of(run).stopped is Stop.MAX_ITERATIONS
    run.run()
    assert "do.x" not in ids(run)
    assert run.status is RunStatus.COMPLETED
    assert ids(run)[-1] == "answer"


def test_it_stops_at_max_tasks_once_what_is_planned_is_done() -> None:
    script = Script([plan(*map(task, "abc"))], [add(task("x"), task("y"))])
    run = simulation(script, reflect_every=1, max_tasks=4).run()
    assert loop_of(run).stopped is Stop.MAX_TASKS
    assert "do.x" not in ids(run)
    assert run.status_of("do.c") is TaskStatus.COMPLETED
    assert run.status is RunStatus.COMPLETED


def test_it_stops_when_the_reflector_knows_no_way_on() -> None:
    run = simulation(Script([plan(task("a"), task("b", "a"))], [add()], fails=["do.a"])).run()
    assert loop_of(run).stopped is Stop.NO_PROGRESS
    assert run.status is RunStatus.COMPLETED
    assert run.status_of("do.b") is TaskStatus.CANCELLED


def test_it_stops_when_the_same_is_planned_again_on_the_same_evidence() -> None:
    # The task is added under another id each time; what it is to do, and what comes of it, is the same.
    script = Script([plan(task("a"))], [add(task("b")), add({"id": "c", "prompt": "do  b"})])
    run = simulation(lambda one: "again" if one.id.startswith("do.") else script(one)).run()
    assert loop_of(run).stopped is Stop.NO_PROGRESS
    assert ids(run) == ["plan.1", "do.a", "reflect.1", "do.b", "reflect.2", "do.c", "reflect.3", "answer"]


def test_new_evidence_is_progress() -> None:
    def script(one: Task) -> Any:
        if one.id.startswith(("plan", "answer")):
            return plan(task("a"))
        return add(task("a")) if one.id.startswith("reflect") else f"result {one.id}"

    run = simulation(script, max_iterations=6).run()
    assert loop_of(run).stopped is Stop.MAX_ITERATIONS
    assert loop_of(run).iteration == 6


def test_what_ended_during_a_reflection_is_reflected_on_before_giving_up() -> None:
    run = simulation(Script([plan(task("a"), task("b"))], [add(), DONE]), concurrency=2, reflect_every=1)
    run.end("plan.1")
    run.end("do.a")
    run.end("do.b")
    decision = run.end("reflect.1")
    assert [one.id for one in decision.add] == ["reflect.2"]
    assert loop_of(run.run()).stopped is None


def test_a_goal_that_was_reached_stays_reached_while_the_last_tasks_end() -> None:
    script = Script([plan(*map(task, "abcd"))], [DONE])
    run = simulation(script, concurrency=4, reflect_every=1, max_iterations=3)
    assert run.end("plan.1").cancel == ("do.d",)
    for one in ("do.a", "reflect.1", "do.b", "do.c"):
        run.end(one)
    assert (loop_of(run).iteration, loop_of(run).stopped, loop_of(run).ended_by) == (3, None, "goal_reached")
    assert loop_of(run.run()).ended_by == "goal_reached"


def test_a_refused_run_that_is_resumed_fails_for_the_same_reason() -> None:
    run = simulation(Script([plan()])).run()
    view = RecordedRun(tuple(run.tasks), run.results.__getitem__, run.state, None)
    assert run.policy.decide(view) == run.decisions[-1]
