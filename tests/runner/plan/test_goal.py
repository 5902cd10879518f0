"""`orchestrate` in plan files: the policy and the first task that it makes, and every mistake in it with its place."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema_rs import Validator

from plait.backends.backend_specs import BackendSpec, LocalSpec, OpenAISpec
from plait.orchestration import LoopLimits, OrchestratorPolicy
from plait.runner.plan import Plan, PlanError, parse_plan
from plait.runner.policies.goal_policy import Team

FULL = """
name: bicycles
inputs: {what: bicycle, for: {town: Oslo}}
defaults: {backend: main}
growth: {max_tasks: 50}
backends:
  main: {kind: function, call: "team.py:main"}
  wise: {kind: function, call: "team.py:wise"}
  archive: {kind: function, call: "team.py:archive"}
orchestrate:
  goal: Which {{ what }} fits {{ inputs["for"].town }}? Mind {{ '{{' }}.
  max_iterations: 7
  reflect_every: 2
  max_tasks: 9
  reflector: wise
  registry: {archive: "Searches the archive, {{ what }} or not."}
"""
GOAL = "orchestrate: {goal: Know a}\n"


def policy_of(plan: Plan) -> OrchestratorPolicy:
    assert isinstance(plan.policy, OrchestratorPolicy)
    return plan.policy


def test_a_goal_becomes_the_policy_and_the_first_task_of_the_run() -> None:
    plan = parse_plan(FULL)
    policy = policy_of(plan)
    assert (policy.goal, policy.limits) == ("Which bicycle fits Oslo? Mind {{.", LoopLimits(7, 2, 9))
    assert policy.team == Team(None, None, "wise", {"archive": "Searches the archive, {{ what }} or not."})
    assert (plan.name, plan.default_backend, [task.id for task in plan.dag]) == ("bicycles", "main", ["plan.1"])
    assert plan.dag.growth is not None and plan.dag.growth.max_tasks == 50
    assert plan.dag.inputs == {
        "what": "bicycle",
        "for": {"town": "Oslo"},
        "goal": policy.goal,
        "registry": "- archive: Searches the archive, {{ what }} or not.",
    }


def test_what_is_left_out_is_as_in_python() -> None:
    policy = policy_of(parse_plan(GOAL))
    assert (policy.limits, policy.team) == (LoopLimits(), Team(None, None, None))
    assert parse_plan(GOAL).dag.name == "Know a"


def test_a_goal_may_be_given_with_the_run() -> None:
    text = "inputs: {topic: {required: true}}\norchestrate: {goal: 'Compare {{ topic }}'}"
    assert policy_of(parse_plan(text, overrides={"topic": "lamps {{ x }}"})).goal == "Compare lamps {{ x }}"


def test_a_small_local_model_is_asked_for_short_answers() -> None:
    plan = parse_plan(GOAL)
    fitted = plan.fitted_to({"default": LocalSpec(kind="local", context=1000, max_tokens=200)}, "default")
    assert policy_of(fitted).limits == LoopLimits(shown=1600, plain=True)
    assert "List the steps" in fitted.dag["plan.1"].prompt and fitted.dag.inputs == plan.dag.inputs
    big: dict[str, BackendSpec] = {"default": OpenAISpec(kind="openai"), "unused": LocalSpec(kind="local")}
    assert policy_of(plan.fitted_to(big, "default")).limits == LoopLimits()


MISTAKES = {
    "no goal": ("orchestrate: {max_iterations: 3}", 1, "orchestrate.goal", "'goal' is missing; add it"),
    "an empty goal": ("orchestrate: {goal: ' '}", 1, "orchestrate.goal", "the goal is empty"),
    "a goal of names that are empty": (
        "inputs: {a: ''}\norchestrate: {goal: '{{ a }}'}",
        2,
        "orchestrate.goal",
        "the goal is empty",
    ),
    "a long goal": (f"orchestrate: {{goal: {'x' * 20_001}}}", 1, "orchestrate.goal", "at most 20000 characters"),
    "a goal that its inputs make long": (
        f"inputs: {{a: {'x' * 10_000}}}\norchestrate: {{goal: '{{{{ a }}}}{{{{ a }}}}{{{{ a }}}}'}}",
        2,
        "orchestrate.goal",
        "the goal has 30,000 characters with its inputs, and 20,000 are allowed",
    ),
    "an unknown name": (
        "inputs: {a: x}\norchestrate: {goal: '{{ b }}'}",
        2,
        "orchestrate.goal",
        "unknown name 'b'; the prompt may use a",
    ),
    "a template": (
        "orchestrate: {goal: '{% for x in y %}{% endfor %}'}",
        1,
        "orchestrate.goal",
        "no other template syntax; two braces as they are: {{ '{{' }}",
    ),
    "too many iterations": (
        "orchestrate: {goal: a, max_iterations: 1001}",
        1,
        "orchestrate.max_iterations",
        "must be at most 1000, not 1001",
    ),
    "no iteration": ("orchestrate: {goal: a, max_iterations: 0}", 1, "orchestrate.max_iterations", "at least 1"),
    "too many tasks": ("orchestrate: {goal: a, max_tasks: 1001}", 1, "orchestrate.max_tasks", "at most 1000"),
    "a misspelt key": (
        "orchestrate: {goal: a, max_iteration: 3}",
        1,
        "orchestrate.max_iteration",
        "did you mean 'max_iterations'?",
    ),
    "no mapping": ("orchestrate: Know a", 1, "orchestrate", "must be a mapping, not 'Know a'"),
    "an unknown planner": (
        "orchestrate: {goal: a, planner: p}",
        1,
        "orchestrate.planner",
        "unknown backend 'p'; name it under 'backends'",
    ),
    "an unknown worker": (
        "backends: {archive: {kind: person}}\norchestrate: {goal: a, registry: {archiv: x}}",
        2,
        "orchestrate.registry.archiv",
        "unknown backend 'archiv'; did you mean 'archive'?",
    ),
    "a worker without a description": (
        "backends: {w: {kind: person}}\norchestrate: {goal: a, registry: {w: 1}}",
        2,
        "orchestrate.registry.w",
        "must be text, not the number 1",
    ),
    "too many workers": (
        f"backends: {{{', '.join(f'w{number}: {{kind: person}}' for number in range(101))}}}\n"
        f"orchestrate: {{goal: a, registry: {{{', '.join(f'w{number}: x' for number in range(101))}}}}}",
        2,
        "orchestrate.registry",
        "has 101 entries, and at most 100 are allowed",
    ),
    "a long description": (
        f"backends: {{w: {{kind: person}}}}\norchestrate: {{goal: a, registry: {{w: {'x' * 1001}}}}}",
        2,
        "orchestrate.registry.w",
        "at most 1000 characters",
    ),
    "an input that the prompts use": (
        f"inputs: {{goal: x}}\n{GOAL}",
        1,
        "inputs.goal",
        "the prompts of `orchestrate` use the name 'goal' themselves; rename the input",
    ),
    "defaults without an effect": (
        f"defaults: {{timeout: 2m}}\n{GOAL}",
        1,
        "defaults.timeout",
        "the tasks of `orchestrate` are planned later; leave it out",
    ),
    "tasks as well": (
        f"{GOAL}tasks: [{{id: a, prompt: b}}]",
        1,
        "orchestrate",
        "a plan has one of tasks, orchestrate, workflow, and this plan has 'tasks' already; leave one out",
    ),
    "follow-ups as well": (
        f"{GOAL}follow_ups: [{{after: coder}}]",
        2,
        "follow_ups",
        "'follow_ups' follow 'tasks', and this plan has none; leave them out",
    ),
}


@pytest.mark.parametrize(("text", "line", "where", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_once_with_its_place(text: str, line: int, where: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_plan(text)
    [problem] = refused.value.problems
    assert (problem.line, problem.where) == (line, where)
    assert message in problem.message


def test_all_mistakes_are_reported_at_once() -> None:
    text = "defaults: {backend: x}\norchestrate: {gaol: '{{ a }}', planner: p, max_tasks: no}\ninputs: {registry: 1}"
    with pytest.raises(PlanError) as refused:
        parse_plan(text)
    found = {problem.where for problem in refused.value.problems}
    assert {"defaults.backend", "orchestrate.gaol", "orchestrate.planner", "orchestrate.max_tasks"} <= found
    assert "inputs.registry" in found


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        ({"orchestrate": {"goal": "a"}}, True),
        ({"orchestrate": {"goal": "a", "planner": None}, "tasks": None, "workflow": None}, True),
        ({"orchestrate": {"goal": ""}}, False),
        ({"orchestrate": {}}, False),
        ({"orchestrate": {"goal": "a", "max_iterations": 1001}}, False),
        ({"orchestrate": {"goal": "a"}, "tasks": [{"id": "a", "prompt": "x"}]}, False),
        ({"workflow": [{"name": "a", "prompt": "x"}]}, True),
        ({"workflow": [{"name": "a"}]}, False),
        ({"workflow": []}, False),
        ({"workflow": [{"name": "a", "prompt": "x", "on_error": "never"}]}, False),
        ({"name": "x"}, False),
        ({}, False),
    ],
)
def test_the_schema_agrees_with_the_reader(schema: Validator, value: dict[str, Any], fits: bool) -> None:
    assert schema.is_valid(value) is fits
    if fits:
        parse_plan(json.dumps(value), format="json")
    else:
        with pytest.raises(PlanError):
            parse_plan(json.dumps(value), format="json")
