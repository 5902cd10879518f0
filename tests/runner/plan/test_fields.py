"""Fields of `item` that no element of a list has: told when the plan is loaded, before any task could fail by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.runner.errors import PromptError
from plait.runner.plan import PlanError, PlanProblem, parse_plan
from plait.runner.prompts.render import render
from tests.support.processes.command import plait

TASK = "tasks:\n  - id: t\n    for_each: people\n    prompt: |\n"
LETTER = TASK + '      To {{ item["name"] }}\n      on {{ item.topic }}\n'
NAMES = [{"name": "Ada", "age": 3}, {"name": "Bo"}]


def of_prompt(prompt: str, people: object) -> list[PlanProblem]:
    plan = {"inputs": {"people": people}, "tasks": [{"id": "t", "for_each": "people", "prompt": prompt}]}
    try:
        parse_plan(json.dumps(plan), format="json")
    except PlanError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ("header", "have"),
    [
        ("name, topic", "they have 'name', ' topic'; did you mean ' topic'?"),
        ("name,Topic", "they have 'name', 'Topic'; did you mean 'Topic'?"),
        ("name,place", "they have 'name', 'place'"),
    ],
)
def test_a_column_that_is_not_there_is_a_mistake_of_the_plan(tmp_path: Path, header: str, have: str) -> None:
    (tmp_path / "p.csv").write_text(f"{header}\nAda,x\nBo,y\n")
    (tmp_path / "plan.yaml").write_text(f"inputs: {{people: {{rows: p.csv}}}}\n{LETTER}")
    done = plait(tmp_path, "check", "plan.yaml")
    said = "the prompt uses {{ item.topic }}, but no element of input 'people' has that field; "
    assert (done.code, done.err.rstrip("\n").removeprefix("error: ")) == (
        2,
        f"plan.yaml:7:1: tasks[0].prompt: {said}{have}",
    )


def test_it_is_the_same_for_files_and_for_a_list_in_the_plan(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x")
    (problem,) = of_prompt("{{ item.nam }}", NAMES)
    assert problem.message.endswith("; they have 'name', 'age'; did you mean 'name'?")
    with pytest.raises(PlanError, match=r"they have 'name', 'path', 'text'; did you mean 'text'"):
        parse_plan(f"inputs: {{people: {{files: '*.md'}}}}\n{LETTER.replace('topic', 'texts')}", folder=tmp_path)
    (problem,) = of_prompt("{{ item['first name'] }}", ["Ada", 1])
    assert problem.message == (
        "the prompt uses {{ item['first name'] }}, but no element of input 'people' has that field; they have no fields"
    )
    (problem,) = of_prompt("{{ item.x }}", [{f"column {number}": 1 for number in range(30)}])
    assert problem.message.endswith("'column 18', 'column 19', ...")


def test_fields_that_one_element_has_or_that_nobody_knows_are_left_to_the_run() -> None:
    assert not of_prompt("{{ item.age }}", NAMES)
    tasks = [{"id": "p", "prompt": ""}, {"id": "t", "for_each": "p", "prompt": "{{ item.x }}"}]
    parse_plan(json.dumps({"tasks": tasks}), format="json")


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ item.q | default('x') | upper }}{{ item.q.r | default(item.q) | default('x') }}",
        "{% if item.q is defined %}{{ item.q }}{% endif %}",
        "{% if item.q is undefined or item.q == 'x' %}{% endif %}",
        "{% if item.name == 'Eve' %}{{ item.q }}{% elif item.name == 'Fay' %}{{ item.q }}{% endif %}",
        "{{ item.q if item.name == 'Eve' else item.name }}",
        "{% if item.name == 'Eve' and item.q %}{% endif %}{% if item.name or item.q %}{% endif %}",
        "{% for part in none_here %}{{ item.q }}{% endfor %}",
        "{% for item in others %}{{ item.q }}{% endfor %}",
        "{% if item.q in none_here %}{% endif %}",
        "{{ others[0].q }}",
    ],
)
def test_a_prompt_that_does_without_the_field_is_right(prompt: str) -> None:
    inputs = {"people": NAMES, "none_here": [], "others": [{"q": 1}]}
    plan = {"inputs": inputs, "tasks": [{"id": "t", "for_each": "people", "prompt": prompt}]}
    dag = parse_plan(json.dumps(plan), format="json").dag
    assert all(render(task.prompt, {**inputs, "item": task.item}) is not None for task in dag.tasks)


@pytest.mark.parametrize(
    "prompt",
    [
        "{{ item.q.r | upper | truncate(3) }}",
        "{{ item['q'][0] }}",
        "{% if item.q %}x{% endif %}",
        "{% if not item.q %}x{% else %}y{% endif %}",
        "{% if item.q or true %}x{% endif %}",
        "{% if 1 == item.q %}x{% endif %}",
        "{% if 'a' in item.q %}x{% endif %}",
        "{{ 1 if item.q == 2 else 3 }}",
        "{% for part in item.q | sort %}x{% endfor %}",
    ],
)
def test_what_is_a_mistake_could_not_be_rendered(prompt: str) -> None:
    (problem,) = of_prompt(prompt, NAMES)
    assert "the prompt uses {{ item.q }}, but" in problem.message
    with pytest.raises(PromptError, match="has no field 'q'"):
        render(prompt, {"item": NAMES[0]})
