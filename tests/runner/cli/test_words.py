"""One word for one thing in what the command prints as JSON, the same that HTTP and the store's history have."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.runner.views.view_models import RunDetail, RunView, TaskView, json_schema
from tests.support.plans.logged import make
from tests.support.processes.command import plait_here

TASKS = """
  - {id: a, prompt: one}
  - {id: x, prompt: knock, backend: fail}
  - {id: y, prompt: "{{ x }}", depends_on: x}
  - {id: q, prompt: which, backend: choose}
"""
CHOOSE = """
from plait.backends import ask


async def choose(prompt):
    return await ask("Which?", schema={"enum": ["red", "blue"]})
"""
COMMANDS = [
    "check plan.yaml",
    "graph last",
    "runs --long",
    "show last",
    "show last a",
    "log last",
    "answer",
    "resume last --dry-run --retry-failed",
    "answer last q red",
    "resume last --quiet",
    "cancel last",
    "gc --keep 0 --dry-run",
]
OTHER_WORDS = {
    "id": "task_id",
    "task": "task_id",
    "run": "run_id",
    "seconds": "duration_s",
    "asked": "asks",
    "deadline": "deadline_at",
}


def fields_of(value: Any) -> set[str]:
    """The names of the fields in `value`, those within what is the user's own left out."""
    if isinstance(value, list):
        return {name for one in value for name in fields_of(one)}
    if not isinstance(value, dict):
        return set()
    plaits = {name: one for name, one in value.items() if name not in {"spec", "settings", "data", "schema", "detail"}}
    return {*value, *(name for one in plaits.values() for name in fields_of(one))}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("words")
    make(folder, TASKS, fail="fail", choose="choose")
    with (folder / "functions.py").open("a") as file:
        file.write(CHOOSE)
    told = {"run plan.yaml": plait_here(folder, "run", "plan.yaml", "--json", "-q").value}
    for words in COMMANDS:
        done = plait_here(folder, *words.split(), "--json")
        assert done.code in {0, 1}, done.err
        lines = done.out.splitlines()
        told[words] = [json.loads(line) for line in lines] if words == "log last" else done.value
    return told


def test_a_thing_has_one_name(told: dict[str, Any]) -> None:
    for words, value in told.items():
        assert not fields_of(value) & OTHER_WORDS.keys(), words


def test_a_run_and_a_task_are_spelt_as_over_http(told: dict[str, Any]) -> None:
    [run] = told["runs --long"]
    assert set(json_schema(RunView)["properties"]) < run.keys()
    assert set(json_schema(RunDetail)["properties"]) < told["show last"].keys()
    for task in told["show last"]["tasks"]:
        assert set(json_schema(TaskView)["properties"]) == task.keys()
    asking = told["show last"]["tasks"][3]
    assert asking["asks"] == {"schema": {"enum": ["red", "blue"]}, "default": None, "deadline_at": None}
    [question] = told["answer"]
    assert {name: question[name] for name in asking["asks"]} == asking["asks"]


def test_attempts_are_a_number_and_their_history_a_list(told: dict[str, Any]) -> None:
    assert [task["attempts"] for task in told["run plan.yaml"]["tasks"]] == [1, 1, 0, 1]
    assert [task["attempts"] for task in told["show last"]["tasks"]] == [1, 1, 0, 1]
    assert (told["show last a"]["attempts"], len(told["show last a"]["history"])) == (1, 1)
