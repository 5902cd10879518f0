"""Prompts and answer formats of planner, executors and reflector. Pure.

Templates contain plain names only. Text from models is inserted through `item` and `aliases` and never parsed as a
template. `goal` is an input of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.backends.protocol import JsonValue
from plait.runner.domain.task import Task

PLANNER, EXECUTOR, REFLECTOR = "planner", "executor", "reflector"
ANSWER_ID = "answer"
_FIRST = 1000.0
"""The weight of the loop's own tasks. A reflection scheduled after all pending tasks would come too late."""

_PLAN = """\
You plan how a goal is reached. Others carry your tasks out, several at the same time.

Goal:
{{ goal }}

Split the goal into at most {most} tasks. The one who does a task is told the goal, the task's prompt, and the results \
of the tasks that it depends on, nothing else. Answer with JSON of this form, where depends_on may be left out:
{"tasks": [{"id": "facts", "prompt": "..."}, {"id": "draft", "prompt": "...", "depends_on": ["facts"]}]}
"""
_PLAIN_PLAN = """\
Goal:
{{ goal }}

List the steps that lead to this goal, at most {most}, each as one short sentence. Answer with JSON of this form:
{"tasks": ["...", "..."]}
"""
_PLAN_AGAIN = """
Your plan was:
{{ earlier }}

It cannot be used:
{{ item }}

Give the whole plan again, with that put right.
"""
_WORK = """\
You do one of several tasks that lead to a goal. Do this task, no other.

Goal:
{{ goal }}

Task:
{{ item }}
"""
_PLAIN_WORK = """\
The goal is: {{ goal }}

Do only this, in one or two sentences: {{ item }}
"""
_REFLECT = """\
You judge how far a goal is reached, while others carry out the tasks that lead to it.

Goal:
{{ goal }}

{{ item }}

How is it to go on? If what is done is enough for the goal, "done" is true, and what has not begun is dropped. Else \
"add" holds the tasks that the goal needs beside those above; they may depend on those above and on each other. "drop" \
holds the ids of tasks that have not begun and no longer matter. What waits for a failed task never begins: drop it, \
and add what can take its place. Answer with JSON of this form, where all but "done" may be left out:
{"done": false, "add": [{"id": "check", "prompt": "...", "depends_on": ["do.facts"]}], "drop": ["do.draft"]}
"""
_PLAIN_REFLECT = """\
Goal:
{{ goal }}

{{ item }}

Is this enough for the goal? Then answer {"done": true}. Else answer {"done": false, "add": ["..."]} with what is left \
to be done, each as one short sentence.
"""
_ANSWER = """\
The tasks that lead to a goal have been carried out. Make one answer of their results.

Goal:
{{ goal }}

{{ item }}

Answer with what was asked for, for the one who set the goal, and say what is missing, if anything is.
"""
_PLAIN_ANSWER = """\
{{ goal }}

Use these notes:
{{ item }}

Answer in three sentences at most.
"""

_TASKS: Mapping[str, JsonValue] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "prompt": {"type": "string"},
            "depends_on": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["id", "prompt"],
        "additionalProperties": False,
    },
}
_MOST_PLAIN = 5
# Bounded, because small models may not find an end.
_PLAIN_TASKS: Mapping[str, JsonValue] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 120},
    "maxItems": _MOST_PLAIN,
}


def plan_task(most: int, plain: bool) -> Task:
    """Return the first task of the run."""
    prompt = _first_prompt(most, plain)
    return Task("plan.1", prompt, backend=PLANNER, output_schema=_plan_schema(plain))


def plan_again(earlier: str, task_id: str, reasons: str, most: int, plain: bool) -> Task:
    """Return the second request for a plan, after the plan of `earlier` was unusable."""
    return Task(
        task_id,
        _first_prompt(most, plain) + _PLAN_AGAIN,
        depends_on=(earlier,),
        backend=PLANNER,
        output_schema=_plan_schema(plain),
        item=reasons,
        aliases={"earlier": earlier},
    )


def work_task(task_id: str, text: str, needs: Sequence[str], after: str, plain: bool) -> Task:
    """Return a task for the executor: `text` with the results of `needs`. `after` is the task that added it."""
    names = {f"r{number}": name for number, name in enumerate(needs, 1)}
    results = "".join(f"\nResult of {name}:\n{{{{ {alias} }}}}\n" for alias, name in names.items())
    return Task(
        task_id,
        (_PLAIN_WORK if plain else _WORK) + results,
        depends_on=tuple(needs) or (after,),
        backend=EXECUTOR,
        item=text,
        aliases=names,
    )


def reflect_task(task_id: str, evidence: str, after: Sequence[str], plain: bool) -> Task:
    """Return a reflection on `evidence`. `after` are the tasks under review."""
    return Task(
        task_id,
        _PLAIN_REFLECT if plain else _REFLECT,
        depends_on=tuple(after),
        backend=REFLECTOR,
        output_schema=_reflect_schema(plain),
        weight=_FIRST,
        item=evidence,
    )


def answer_task(evidence: str, after: Sequence[str], plain: bool) -> Task:
    """Return the last task of the run, executed by the planner, the role that works with the whole goal elsewhere
    too.
    """
    prompt = _PLAIN_ANSWER if plain else _ANSWER
    return Task(ANSWER_ID, prompt, depends_on=tuple(after), backend=PLANNER, item=evidence, weight=_FIRST)


def _first_prompt(most: int, plain: bool) -> str:
    return (_PLAIN_PLAN if plain else _PLAN).replace("{most}", str(min(most, _MOST_PLAIN) if plain else most))


def _plan_schema(plain: bool) -> Mapping[str, JsonValue]:
    tasks = dict(_PLAIN_TASKS if plain else _TASKS)
    return {"type": "object", "properties": {"tasks": tasks}, "required": ["tasks"], "additionalProperties": False}


def _reflect_schema(plain: bool) -> Mapping[str, JsonValue]:
    properties: dict[str, JsonValue] = {"done": {"type": "boolean"}, "add": dict(_PLAIN_TASKS if plain else _TASKS)}
    if not plain:
        properties["drop"] = {"type": "array", "items": {"type": "string"}}
    return {"type": "object", "properties": properties, "required": ["done"], "additionalProperties": False}
