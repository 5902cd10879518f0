"""How far a run may grow: what its runner allows, and what its DAG or plan does, which is stored with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait import DAG, GrowthLimits, ParallelRunner, RunStatus, Task
from plait.errors import DAGError
from plait.persistence import Store
from plait.runner.plan import PlanError, parse_plan
from tests.support.growth import plan, spec, talker
from tests.support.processes.command import plait_here

PLANNER = Task("plan", prompt="plan", adds_tasks=True)
THREE = plan(*(spec(name) for name in "abc"))


@pytest.mark.parametrize(
    ("of_dag", "of_runner", "most"),
    [
        (GrowthLimits(max_tasks=3), GrowthLimits(), 3),
        (GrowthLimits(max_tasks=50), GrowthLimits(max_tasks=3), 3),
        (None, GrowthLimits(max_tasks=3), 3),
        (GrowthLimits(max_tasks=4), GrowthLimits(max_tasks=9), None),
    ],
)
async def test_the_narrower_one_holds(of_dag: GrowthLimits | None, of_runner: GrowthLimits, most: int | None) -> None:
    runner = ParallelRunner(talker({"plan": THREE, "These": THREE}), growth=of_runner)
    result = await runner.run(DAG([PLANNER], growth=of_dag))
    if most is None:
        assert (result.status, len(result.tasks)) == (RunStatus.COMPLETED, 4)
        return
    assert result["plan"].error is not None
    assert f"3 more tasks would make 4, and max_tasks is {most}; raise max_tasks" in result["plan"].error


async def test_that_of_a_dag_holds_for_whoever_goes_on_with_its_run(store: Store) -> None:
    run_id = await ParallelRunner(talker(), store=store).runs.create(DAG([PLANNER], growth=GrowthLimits(max_tasks=3)))
    result = await ParallelRunner(talker({"plan": THREE, "These": THREE}), store=store).resume(run_id)
    assert (result.status, list(result.tasks)) == (RunStatus.FAILED, ["plan"])


async def test_nobody_may_add_any_at_depth_0() -> None:
    runner = ParallelRunner(talker({"plan": THREE, "These": "[]"}))
    result = await runner.run(DAG([PLANNER], growth=GrowthLimits(max_depth=0)))
    assert (result.status, result["plan"].attempts, list(result.tasks)) == (RunStatus.COMPLETED, 2, ["plan"])


def test_there_cannot_be_more_tasks_than_it_allows() -> None:
    with pytest.raises(DAGError, match=r"there are 2 tasks, and growth allows 1 in all \(max_tasks\)"):
        DAG([Task("a", "a"), Task("b", "b")], growth=GrowthLimits(max_tasks=1))


def test_a_limit_of_depth_alone_says_nothing_about_the_tasks_that_are_given() -> None:
    assert len(DAG([Task(f"t{number}", "x") for number in range(10_001)], growth=GrowthLimits(max_depth=1))) == 10_001


PLAN = """
growth: {growth}
backends: {{code: {{kind: function, call: "code.py:plan"}}}}
tasks:
  - {{id: plan, prompt: plan, output: tasks}}
"""
CODE = """
async def plan(prompt):
    return [{"id": name, "prompt": name} for name in "abc"] if len(prompt) > 1 else prompt
"""


def test_that_of_a_plan_is_stored_with_its_run(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN.format(growth="{max_tasks: 3}"))
    (tmp_path / "code.py").write_text(CODE)
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    (tmp_path / "plan.yaml").write_text(PLAN.format(growth="{max_tasks: 4, max_depth: 1}"))
    again = plait_here(tmp_path, "resume", "last", "--retry-failed")
    assert (again.code, "has changed since this run was stored; a resume" in again.err) == (1, True)
    shown = plait_here(tmp_path, "show", "last", "plan", "--json").value
    assert "and max_tasks is 3; raise max_tasks" in shown["error"]
    assert plait_here(tmp_path, "run", "plan.yaml").code == 0


@pytest.mark.parametrize(
    ("growth", "where", "says"),
    [
        ("{max_tasks: 0}", "growth.max_tasks", "1"),
        ("{max_tasks: 10001}", "growth.max_tasks", "10000"),
        ("{max_depth: -1}", "growth.max_depth", "0"),
        ("{depth: 3}", "growth.depth", "unknown key 'depth'; did you mean 'max_depth'?"),
        ("3", "growth", "mapping"),
    ],
)
def test_mistakes(growth: str, where: str, says: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse_plan(PLAN.format(growth=growth))
    (problem,) = caught.value.problems
    assert (problem.where, says in problem.message) == (where, True), problem.message


def test_a_plan_with_more_tasks_says_where() -> None:
    tasks = "".join(f"  - {{id: t{number}, prompt: x}}\n" for number in range(5))
    with pytest.raises(PlanError) as caught:
        parse_plan(f"growth: {{max_tasks: 4}}\ntasks:\n{tasks}")
    (problem,) = caught.value.problems
    assert (problem.where, problem.line) == ("growth", 1)
    assert problem.message == "there are 5 tasks, and growth allows 4 in all (max_tasks)"


def test_a_plan_without_it_stores_none(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"tasks": [{"id": "a", "prompt": "a"}]}))
    assert parse_plan((tmp_path / "plan.json").read_text(), format="json").dag.growth is None
