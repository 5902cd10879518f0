"""How the orchestrator plans, executes, reflects and answers, decided without an engine."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from plait.json_form import as_json
from plait.runner.domain.policy import RecordedRun
from plait.runner.domain.run_result import TaskResult
from plait.runner.policies.goal_policy import Loop, LoopLimits, OrchestratorPolicy, Phase
from plait.statuses import RunStatus, TaskStatus
from plait.task import Task
from tests.support.scripted import DONE, Script, add, ids, loop_of, plan, simulation, task


def test_a_run_begins_with_one_task_for_the_planner() -> None:
    dag = OrchestratorPolicy("reach the goal").dag()
    assert [(one.id, one.backend) for one in dag] == [("plan.1", "planner")]
    assert dag.inputs == {"goal": "reach the goal"}
    assert dag["plan.1"].output_schema is not None
    assert Loop.of(None).phase is Phase.PLANNING


def test_the_plan_becomes_tasks_that_wait_for_each_other_and_know_each_others_results() -> None:
    run = simulation(Script([plan(task("draft", "facts"), task("facts"))]))
    decision = run.end("plan.1")
    facts, draft = decision.add
    assert (facts.id, draft.id) == ("do.facts", "do.draft")
    assert (facts.backend, facts.depends_on) == ("executor", ("plan.1",))
    assert draft.depends_on == ("do.facts",)
    assert draft.item == "do draft"
    assert draft.aliases == {"r1": "do.facts"}
    assert "{{ r1 }}" in draft.prompt
    assert loop_of(run).phase is Phase.EXECUTING


def test_all_goes_well() -> None:
    run = simulation(Script([plan(task("a"), task("b", "a"))])).run()
    assert run.status is RunStatus.COMPLETED
    assert ids(run) == ["plan.1", "do.a", "do.b", "reflect.1", "answer"]
    assert (loop_of(run).phase, loop_of(run).iteration, loop_of(run).stopped) == (Phase.DONE, 2, None)
    assert run.task("answer").backend == "planner"
    assert run.task("answer").depends_on == ("reflect.1",)
    assert "result of do b" in str(run.task("answer").item)


def test_what_models_say_is_never_part_of_a_template() -> None:
    trap = "{{ goal }} {% for x in y %}"
    run = simulation(Script([plan({"id": trap, "prompt": trap})])).run()
    assert run.status is RunStatus.COMPLETED
    assert run.tasks[1].item == trap
    assert all(trap not in one.prompt for one in run.tasks)


def test_a_reflection_follows_every_few_tasks_and_the_rest_goes_on_meanwhile() -> None:
    run = simulation(Script([plan(*map(task, "abcdefg"))], [add(), DONE]), concurrency=2, reflect_every=3)
    run.end("plan.1")
    for one in "abc":
        run.end(f"do.{one}")
    assert loop_of(run).phase is Phase.REFLECTING
    assert run.running == ["do.d", "reflect.1"]
    run.end("do.d")
    assert run.running == ["do.e", "reflect.1"]
    run.end("reflect.1")
    assert loop_of(run).phase is Phase.EXECUTING
    run.run()
    assert (loop_of(run).iteration, loop_of(run).stopped) == (7, None)
    assert [one for one in ids(run) if one.startswith("reflect")] == ["reflect.1", "reflect.2"]


def test_reflecting_again_after_an_empty_answer_waits_for_further_tasks() -> None:
    run = simulation(Script([plan(*map(task, "abcdef"))], [add(), DONE]), reflect_every=2)
    run.run()
    assert ids(run).index("reflect.1") < ids(run).index("reflect.2")
    assert loop_of(run).stopped is None
    assert run.status is RunStatus.COMPLETED


def test_the_reflector_sees_goal_results_failures_and_what_is_left() -> None:
    script = Script([plan(task("a"), task("b"), task("c", "b"))], fails=["do.b"])
    run = simulation(script, reflect_every=2)
    for one in ("plan.1", "do.a", "do.b"):
        run.end(one)
    reflection = run.task("reflect.1")
    assert reflection.backend == "reflector"
    assert reflection.item == (
        "Done, with results:\n- do.a: do a\n  result of do a\n\n"
        "Failed:\n- do.b: do b\n  do.b cannot be done\n\n"
        "Not begun:\n- do.c: do c (waits for do.b)"
    )
    assert "{{ goal }}" in reflection.prompt
    assert reflection.depends_on == ("plan.1", "do.a")


def test_long_results_are_cut_where_they_are_told() -> None:
    run = simulation(lambda one: plan(task("a")) if one.id == "plan.1" else "x" * 5000, shown=1000)
    run.end("plan.1")
    run.end("do.a")
    told = str(run.task("reflect.1").item)
    assert "[... 4,000 more characters]" in told
    assert len(told) < 1100


def test_of_very_many_results_the_oldest_are_only_counted() -> None:
    names = [f"t{i}" for i in range(30)]
    run = simulation(Script([plan(*map(task, names))]), reflect_every=30, max_iterations=30, shown=2000)
    run.end("plan.1")
    for name in names:
        run.end(f"do.{name}")
    told = str(run.task("reflect.1").item)
    assert told.startswith("Done, with results:\n- 20 earlier ones\n- do.t20: do t20\n  result of do t20\n")
    assert told.count("\n- do.") == 10


def test_the_reflector_adds_and_drops() -> None:
    script = Script([plan(*map(task, "abcd"))], [add(task("e", "a"), drop=["d", "do.c", "nobody", "a"]), DONE])
    run = simulation(script, concurrency=2, reflect_every=1)
    run.end("plan.1")
    run.end("do.a")
    assert run.running == ["do.b", "reflect.1"]
    decision = run.end("reflect.1")
    assert [one.id for one in decision.add] == ["do.e"]
    assert decision.cancel == ("do.c", "do.d")
    run.run()
    assert run.status_of("do.e") is TaskStatus.COMPLETED
    assert run.status_of("do.a") is TaskStatus.COMPLETED


def test_done_drops_what_has_not_begun_and_waits_for_nothing() -> None:
    run = simulation(Script([plan(*map(task, "abcdef"))]), concurrency=2, reflect_every=1)
    run.end("plan.1")
    run.end("do.a")
    decision = run.end("reflect.1")
    assert [one.id for one in decision.add] == ["answer"]
    assert decision.cancel == ("do.c", "do.d", "do.e", "do.f")
    assert run.running == ["do.b", "answer"]
    run.end("answer")
    assert run.status is RunStatus.COMPLETED
    assert run.status_of("do.b") is TaskStatus.CANCELLED


def test_ids_are_made_safe_and_unlike_all_others() -> None:
    names = ["A b/ü", "A b;x", "answer", "plan.1", "do.x", "", "Ä"]
    answer = plan(*({"id": name, "prompt": "p"} for name in names))
    run = simulation(Script([answer], [add(task("answer")), DONE])).run()
    assert ids(run)[1:8] == ["do.A-b", "do.A-b-x", "do.answer", "do.plan-1", "do.x", "do.task", "do.task-2"]
    assert "do.answer-2" in ids(run)
    assert all(len(one) <= 64 for one in ids(run))


def test_a_later_plan_may_name_tasks_of_an_earlier_one_with_or_without_prefix() -> None:
    run = simulation(Script([plan(task("a"))], [add(task("x", "a"), task("y", "do.a", "x")), DONE])).run()
    assert run.task("do.x").depends_on == ("do.a",)
    assert run.task("do.y").depends_on == ("do.a", "do.x")


def test_plain_plans_are_lists_of_sentences() -> None:
    run = simulation(
        Script([{"tasks": ["Say hello.", "Say goodbye."]}], [{"done": False, "add": ["x"]}, DONE]), plain=True
    )
    run.run()
    assert [one.item for one in run.tasks if one.id.startswith("do.")] == ["Say hello.", "Say goodbye.", "x"]
    assert run.status is RunStatus.COMPLETED


def test_a_task_that_waits_for_a_person_has_the_run_wait() -> None:
    run = simulation(Script([plan(task("a"), task("b"))]), concurrency=2)
    run.end("plan.1")
    run.results["do.b"] = TaskResult("do.b", TaskStatus.WAITING_INPUT)
    run.end("do.a")
    run.rest()
    assert run.status is RunStatus.WAITING_INPUT


def test_tasks_that_an_executor_added_count_as_work() -> None:
    run = simulation(Script([plan(task("a"))]))
    run.end("plan.1")
    run.tasks.append(Task("extra", "more", backend="executor"))
    run.results["extra"] = TaskResult("extra")
    run.end("do.a")
    assert loop_of(run).phase is Phase.EXECUTING
    run.run()
    assert loop_of(run).iteration == 2
    assert "- extra: more" in str(run.task("answer").item)


def test_settings_make_the_same_policy_again() -> None:
    policy = OrchestratorPolicy("g", LoopLimits(7, 2, 9, 500, True))
    again = OrchestratorPolicy.from_settings(json.loads(json.dumps(policy.settings())))
    assert (again.goal, again.limits) == (policy.goal, policy.limits)
    assert again.kind == "orchestrator"


@pytest.mark.parametrize("name", ["max_iterations", "reflect_every", "max_tasks", "shown"])
def test_limits_have_to_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1, not 0"):
        LoopLimits(**{name: 0})


@pytest.mark.parametrize("goal", ["", " \n"])
def test_a_goal_is_needed(goal: str) -> None:
    with pytest.raises(ValueError, match="the goal is empty"):
        OrchestratorPolicy(goal)


@pytest.mark.parametrize(("reflect_every", "most"), [(1000, 2), (1, 4)], ids=["no reflection", "reflection"])
def test_a_decision_reads_no_result_many_times(reflect_every: int, most: int) -> None:
    tasks = [Task(f"do.t{i}", "x", item="x") for i in range(1000)]
    done = {one.id: TaskResult(one.id, TaskStatus.COMPLETED, "r", attempts=1) for one in tasks}
    done["do.t0"] = TaskResult("do.t0", TaskStatus.RUNNING, attempts=1)
    read: Counter[str] = Counter()

    def result(task_id: str) -> TaskResult:
        read[task_id] += 1
        return done[task_id]

    state = as_json(Loop(Phase.EXECUTING, 500, 499, None))
    OrchestratorPolicy("g", LoopLimits(100_000, reflect_every, 1000)).decide(
        RecordedRun(tasks, result, state, "do.t999")
    )
    assert set(read) == set(done)
    assert max(read.values()) <= most
