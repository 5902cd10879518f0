"""Plan files whose runs grow."""

from __future__ import annotations

from plait.runner.plan import parse_plan
from plait.task import TASKS_SCHEMA


def test_a_model_that_plans_is_told_how_tasks_are_written() -> None:
    text = """
    backends: {model: {kind: openai, model: m}, code: {kind: function, call: "a.py:f"}}
    defaults: {backend: model}
    tasks:
      - {id: a, prompt: plan, output: tasks}
      - {id: b, prompt: plan, output: tasks, backend: code}
      - {id: c, prompt: plan, output: tasks, output_schema: {type: object}}
    """
    a, b, c = parse_plan(text).dag.tasks
    assert (a.adds_tasks, a.output_schema, b.output_schema, c.output_schema) == (
        True,
        TASKS_SCHEMA,
        None,
        {"type": "object"},
    )
