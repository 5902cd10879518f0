"""The registry of an orchestration: the workers that its planner and its reflector may name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.runner.policies.goal_policy import LoopLimits, OrchestratorPolicy, Stop, Team
from plait.runner.prompts.prompt_template import render
from plait.statuses import RunStatus
from tests.support.scripted import DONE, Script, add, ids, loop_of, plan, task
from tests.support.simulated import Simulation

TEAM = Team(registry={"archive": "Searches\nthe {{ archive }}.", "coder": "Writes code."})


def on(name: str, worker: Any, *needs: str) -> dict[str, Any]:
    return {**task(name, *needs), "backend": worker}


def simulation(script: Script, team: Team = TEAM, **limits: Any) -> Simulation:
    policy = OrchestratorPolicy("reach the goal", LoopLimits(**limits), team)
    return Simulation(policy, policy.dag(), script, 1)


def test_planner_and_reflector_receive_the_registry_and_a_task_runs_on_the_worker_it_names() -> None:
    run = simulation(Script([plan(on("a", "archive"), task("b"))], [add(on("c", "coder", "a")), DONE])).run()
    assert run.status is RunStatus.COMPLETED
    backends = {one.id: one.backend for one in run.tasks}
    assert backends | {"do.a": "archive", "do.b": "executor", "do.c": "coder"} == backends
    policy = OrchestratorPolicy("g", team=TEAM)
    assert policy.dag().inputs == {
        "goal": "g",
        "registry": "- archive: Searches the {{ archive }}.\n- coder: Writes code.",
    }
    for name in ("plan.1", "reflect.1"):
        prompt = render(run.task(name).prompt, {**policy.dag().inputs, "item": ""})
        assert "\n- archive: Searches the {{ archive }}.\n- coder: Writes code.\n" in prompt
        assert '"backend": {"type": "string"}' in json.dumps(run.task(name).output_schema)
    assert "- do.a (archive): do a\n" in str(run.task("reflect.1").item)
    assert "- do.b: do b\n" in str(run.task("reflect.1").item)


def test_without_a_registry_nobody_reads_of_workers() -> None:
    run = simulation(Script([plan(task("a"))]), Team()).run()
    assert all("backend" not in one.prompt + json.dumps(one.output_schema) for one in run.tasks)
    assert OrchestratorPolicy("g").dag().inputs == {"goal": "g"}


@pytest.mark.parametrize(
    ("team", "worker", "reason"),
    [
        (TEAM, "archiv", "task 'a' names backend 'archiv', and the registry has archive, coder; did you mean"),
        (TEAM, "planner", "task 'a' names backend 'planner', and the registry has archive, coder"),
        (Team(), "executor", "task 'a' names backend 'executor', and no task may name one; leave it out"),
    ],
)
def test_a_name_outside_is_reported_to_the_planner_and_to_the_reflector(team: Team, worker: str, reason: str) -> None:
    wrong = on("a", worker)
    run = simulation(Script([plan(wrong), plan(task("b"))], [add(wrong), DONE]), team).run()
    assert run.status is RunStatus.COMPLETED
    assert f"- {reason}" in str(run.task("plan.2").item)
    assert f"Your last answer could not be used:\n- {reason}" in str(run.task("reflect.2").item)
    assert "do.a" not in ids(run)
    run = simulation(Script([plan(wrong)]), team).run()
    assert (run.status, reason in (run.error or "")) == (RunStatus.FAILED, True)


@pytest.mark.parametrize("worker", [7, ["archive"], {}])
def test_a_worker_that_is_no_name_is_another_form(worker: Any) -> None:
    run = simulation(Script([plan(on("a", worker)), plan(task("b"))])).run()
    assert "it is not of the form" in str(run.task("plan.2").item)


@pytest.mark.parametrize(("third", "stopped"), [("coder", None), ("archive", Stop.NO_PROGRESS)])
def test_the_same_task_for_another_worker_is_progress(third: str, stopped: Stop | None) -> None:
    reflections = [add(on("b", "archive")), add(on("b", "archive")), add(on("b", third)), DONE]
    script = Script([plan(task("a"))], reflections)
    run = Simulation(
        OrchestratorPolicy("reach the goal", team=TEAM),
        OrchestratorPolicy("reach the goal", team=TEAM).dag(),
        lambda one: RuntimeError("nothing found") if one.id.startswith("do.b") else script(one),
        1,
    ).run()
    assert (loop_of(run).stopped, "do.b-3" in ids(run)) == (stopped, stopped is None)


def test_other_names_for_the_roles() -> None:
    team = Team("p", None, "r")
    run = simulation(Script([plan(task("a"))]), team).run()
    backends = {one.id: one.backend for one in run.tasks}
    assert backends == {"plan.1": "p", "do.a": None, "reflect.1": "r", "answer": "p"}
    policy = OrchestratorPolicy("g", team=team)
    assert policy.backends() == {"p", None, "r"}
    assert OrchestratorPolicy("g", team=TEAM).backends() == {"planner", "executor", "reflector", "archive", "coder"}


def test_settings_keep_the_team() -> None:
    settings = json.loads(json.dumps(OrchestratorPolicy("g", team=TEAM).settings()))
    assert OrchestratorPolicy.from_settings(settings).team == TEAM


def test_each_circle_is_reported_with_the_names_of_the_answer() -> None:
    answer = plan(task("a", "b"), task("b", "do.a"), task("c", "c"), task("d", "c"), task("e"))
    run = simulation(Script([answer, plan(task("x"))])).run()
    reasons = str(run.task("plan.2").item).splitlines()
    assert reasons == ["- these tasks wait for each other: a -> b -> a", "- these tasks wait for each other: c -> c"]
