"""Whatever stands in a plan, reading it ends in a plan or in PlanError."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.runner.plan import PlanError, PlanProblem, parse_plan
from plait.runner.plan.plan_models import PlanPart, TaskPart
from tests.support.sizes import size

GOOD = """\
name: good
inputs: {topic: rivers, names: [a, b]}
defaults: {failure_mode: soft, retry: {attempts: 2}, timeout: 90s}
backends:
  fast: {kind: openai, model: m}
tasks:
  - id: facts
    prompt: "Facts about {{ topic }}"
    backend: fast
  - id: each
    for_each: names
    prompt: "{{ item }} {{ facts }}"
    depends_on: facts
  - id: end
    depends_on: [each]
    continues: facts
    prompt: |
      {% for one in each %}{{ one }}{% endfor %}
    output_schema: {type: object, properties: {label: {enum: [a, b]}}}
"""


def only_plan_errors(text, kind="yaml"):
    try:
        parse_plan(text, format=kind)
    except PlanError as error:
        problems = error.problems
    else:
        return
    assert problems
    assert all(isinstance(problem, PlanProblem) and "\n" not in str(problem) for problem in problems)


def test_the_good_plan_is_good():
    assert len(parse_plan(GOOD).dag) == 4


@given(st.text(), st.sampled_from(["yaml", "json", "toml"]))
def test_arbitrary_text(text, kind):
    only_plan_errors(text, kind)


@given(st.data())
def test_mutated_plans(data):
    text = GOOD
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        length = data.draw(st.integers(0, 12))
        text = (
            text[:start]
            + data.draw(st.text(st.sampled_from("ab{}[]:,-\n \"'&*!|>#%3.$"), max_size=5))
            + text[start + length :]
        )
    only_plan_errors(text)


KEYS = st.sampled_from(
    (*PlanPart.model_fields, *TaskPart.model_fields, "kind", "files", "rows", "required", "type", "$ref")
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | KEYS,
    lambda part: st.lists(part, max_size=4) | st.dictionaries(KEYS, part, max_size=4),
    max_leaves=20,
)


@pytest.mark.slow
@settings(max_examples=size(25, 100))
@given(
    st.fixed_dictionaries(
        {"tasks": st.lists(st.dictionaries(KEYS, VALUES))}, optional={"inputs": VALUES, "backends": VALUES}
    )
)
def test_plans_of_the_wrong_shape(value):
    only_plan_errors(json.dumps(value), "json")
