"""`workflow` in plan files: the policy and the first task that it makes, and every mistake in it with its place."""

from __future__ import annotations

import pytest

from plait import Retry, Step, Workflow
from plait.runner.plan import PlanError, parse_plan

FULL = """
name: review
inputs: {design: a bicycle}
defaults: {backend: fast, timeout: 2m, retry: {attempts: 2, max_delay: 5}}
backends:
  fast: {kind: function, call: "tools.py:fast"}
  deep: {kind: function, call: "tools.py:deep"}
workflow:
  - name: find
    prompt: "Name the weak points of {{ design }}."
    backend: deep
    on_error: retry
    max_tries: 2
    timeout: 10
    retry: {attempts: 1}
    output_schema: {type: object, properties: {points: {type: array}}, required: [points]}
  - {name: sort, prompt: The worst first., continues: true, on_error: go_on}
  - {name: sum_up, prompt: "Sum up {{ find.points }} and {{ sort }} of {{ design }}."}
"""
TWO = "workflow:\n- {name: a, prompt: one}\n"


def test_steps_become_the_policy_and_the_first_task_of_the_run() -> None:
    plan = parse_plan(FULL)
    schema = {"type": "object", "properties": {"points": {"type": "array"}}, "required": ["points"]}
    retry = Retry(attempts=2, max_delay=5)
    assert isinstance(plan.policy, Workflow)
    assert plan.policy.steps() == (
        Step(
            "find",
            "Name the weak points of {{ design }}.",
            "deep",
            "retry",
            2,
            schema,
            retry=Retry(attempts=1, max_delay=5),
            timeout=10,
        ),
        Step("sort", "The worst first.", on_error="go_on", continues=True, retry=retry, timeout=120),
        Step("sum_up", "Sum up {{ find.points }} and {{ sort }} of {{ design }}.", retry=retry, timeout=120),
    )
    assert (plan.name, [task.id for task in plan.dag]) == ("review", ["find.1"])
    assert plan.dag.inputs == {"design": "a bicycle"}


MISTAKES = {
    "no step": ("workflow: []", 1, "workflow", "there are no steps; add at least one"),
    "too many steps": (
        "workflow:" + "".join(f"\n- {{name: s{number}, prompt: x}}" for number in range(201)),
        2,
        "workflow",
        "has 201 entries, and at most 200 are allowed",
    ),
    "no list": ("workflow: {name: a}", 1, "workflow", "must be a list, not a mapping"),
    "no name": ("workflow:\n- {prompt: a}", 2, "workflow[0].name", "'name' is missing"),
    "no prompt": ("workflow:\n- {name: a}", 2, "workflow[0].prompt", "'prompt' is missing"),
    "a reserved name": ("workflow:\n- {name: item, prompt: a}", 2, "workflow[0].name", "must be none of"),
    "a name that does not fit": ("workflow:\n- {name: a b, prompt: a}", 2, "workflow[0].name", "'a b' does not fit"),
    "a name twice": (TWO + "- {name: a, prompt: two}", 3, "workflow[1].name", "two steps are called 'a'"),
    "a misspelt key": (TWO + "- {name: b, prompt: x, on_eror: end}", 3, "workflow[1].on_eror", "mean 'on_error'?"),
    "a misspelt reaction": (
        "workflow:\n- {name: a, prompt: x, on_error: go on}",
        2,
        "workflow[0].on_error",
        "must be one of retry, go_on, end, not 'go on'",
    ),
    "nothing to continue": ("workflow:\n- {name: a, prompt: x, continues: true}", 2, "workflow[0].continues", "first"),
    "a later step": (
        "workflow:\n- {name: a, prompt: '{{ b }}'}\n- {name: b, prompt: x}",
        2,
        "workflow[0].prompt",
        "the prompt uses {{ b }}, which is a later step; a step can use inputs and earlier steps",
    ),
    "an unknown name": (TWO + "- {name: b, prompt: '{{ c }}'}", 3, "workflow[1].prompt", "neither a task nor"),
    "an unknown backend": (TWO + "- {name: b, prompt: x, backend: y}", 3, "workflow[1].backend", "unknown backend 'y'"),
    "a schema that is none": (
        "workflow:\n- {name: a, prompt: x, output_schema: {type: 3}}",
        2,
        "workflow[0].output_schema.type",
        "not a valid JSON Schema",
    ),
    "an input called as a step": (f"inputs: {{a: 1}}\n{TWO}", 1, "inputs.a", "'a'"),
    "a default without an effect": (
        f"defaults: {{failure_mode: soft}}\n{TWO}",
        1,
        "defaults.failure_mode",
        "a step of `workflow` has on_error",
    ),
    "a blank prompt": ("workflow: [{name: a, prompt: ' '}]", 1, "workflow[0].prompt", "there is no prompt; write one"),
    "a goal as well": (f"orchestrate: {{goal: a}}\n{TWO}", 2, "workflow", "this plan has 'orchestrate' already"),
    "follow-ups as well": (f"{TWO}follow_ups: [{{after: coder}}]", 3, "follow_ups", "this plan has none"),
}


@pytest.mark.parametrize(("text", "line", "where", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_reported_once_with_its_place(text: str, line: int, where: str, message: str) -> None:
    with pytest.raises(PlanError) as refused:
        parse_plan(text)
    [problem] = refused.value.problems
    assert (problem.line, problem.where) == (line, where)
    assert message in problem.message
