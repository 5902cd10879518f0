"""Prompts and answer formats of planner, executors and reflector. Pure.

Templates contain plain names only. Text from models is inserted through `item` and `aliases` and never parsed as a
template. `goal` is an input of the run, and so is `registry`, the text about the workers, if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from plait.json_form import JsonValue
from plait.task import Task

PLANNER, EXECUTOR, REFLECTOR = "planner", "executor", "reflector"
ANSWER_ID = "answer"
INPUTS = frozenset({"goal", "registry"})
"""The inputs of a run that the prompts use."""
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
_WORKERS = """
A task may name the worker that does it, by its name in "backend". There are:
{{ registry }}
A task without "backend" goes to a general worker. A task with a worker has this form:
{"id": "facts", "prompt": "...", "backend": "NAME"}
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

_TASK: Mapping[str, JsonValue] = {
    "id": {"type": "string"},
    "prompt": {"type": "string"},
    "depends_on": {"type": "array", "items": {"type": "string"}},
}
_MOST_PLAIN = 5
# Bounded, because small models may not find an end.
_PLAIN_TASKS: Mapping[str, JsonValue] = {
    "type": "array",
    "items": {"type": "string", "minLength": 1, "maxLength": 120},
    "maxItems": _MOST_PLAIN,
}


@dataclass(frozen=True, slots=True)
class Team:
    """The backends of an orchestration, by name; None for the default backend of the runner."""

    planner: str | None = PLANNER
    """Plans the tasks and writes the answer."""
    executor: str | None = EXECUTOR
    """Runs the tasks that name no worker."""
    reflector: str | None = REFLECTOR
    """Judges the results."""
    registry: Mapping[str, str] = field(default_factory=dict[str, str])
    """The workers that a planned task may name as its backend: name and description, both presented to the planner and
    to the reflector. No other backend can be named.
    """

    def backends(self) -> frozenset[str | None]:
        """Return the names of all backends."""
        return frozenset({self.planner, self.executor, self.reflector, *self.registry})

    def inputs(self) -> dict[str, str]:
        """Return the inputs of a run for the prompts about workers; none without a registry."""
        workers = (f"- {name}: {' '.join(about.split())}" for name, about in self.registry.items())
        return {"registry": "\n".join(workers)} if self.registry else {}


@dataclass(frozen=True, slots=True)
class LoopPrompts:
    """The tasks of the loop, with their prompts."""

    team: Team
    plain: bool
    """As in `LoopLimits`."""

    def plan(self, most: int) -> Task:
        """Return the first task of the run."""
        prompt = self._first_prompt(most)
        return Task("plan.1", prompt, backend=self.team.planner, output_schema=self._plan_schema())

    def plan_again(self, earlier: str, task_id: str, reasons: str, most: int) -> Task:
        """Return the second request for a plan, after the plan of `earlier` was unusable."""
        return Task(
            task_id,
            self._first_prompt(most) + _PLAN_AGAIN,
            depends_on=(earlier,),
            backend=self.team.planner,
            output_schema=self._plan_schema(),
            item=reasons,
            aliases={"earlier": earlier},
        )

    def work(self, task_id: str, text: str, needs: Sequence[str], after: str, worker: str | None) -> Task:
        """Return a task for `worker`, or for the executor: `text` with the results of `needs`. `after` is the task that
        added it.
        """
        names = {f"r{number}": name for number, name in enumerate(needs, 1)}
        results = "".join(f"\nResult of {name}:\n{{{{ {alias} }}}}\n" for alias, name in names.items())
        return Task(
            task_id,
            (_PLAIN_WORK if self.plain else _WORK) + results,
            depends_on=tuple(needs) or (after,),
            backend=self.team.executor if worker is None else worker,
            item=text,
            aliases=names,
        )

    def reflect(self, task_id: str, evidence: str, after: Sequence[str]) -> Task:
        """Return a reflection on `evidence`. `after` are the tasks under review."""
        return Task(
            task_id,
            _PLAIN_REFLECT if self.plain else _REFLECT + self._workers(),
            depends_on=tuple(after),
            backend=self.team.reflector,
            output_schema=self._reflect_schema(),
            weight=_FIRST,
            item=evidence,
        )

    def answer(self, evidence: str, after: Sequence[str]) -> Task:
        """Return the last task of the run, executed by the planner, the role that works with the whole goal elsewhere
        too.
        """
        prompt = _PLAIN_ANSWER if self.plain else _ANSWER
        return Task(ANSWER_ID, prompt, depends_on=tuple(after), backend=self.team.planner, item=evidence, weight=_FIRST)

    def _first_prompt(self, most: int) -> str:
        prompt = _PLAIN_PLAN if self.plain else _PLAN + self._workers()
        return prompt.replace("{most}", str(min(most, _MOST_PLAIN) if self.plain else most))

    def _workers(self) -> str:
        return _WORKERS if self.team.registry else ""

    def _tasks(self) -> JsonValue:
        """Return the schema of the tasks in an answer. A name outside the registry is reported with the other mistakes
        of the answer, so the schema accepts any name.
        """
        if self.plain:
            return dict(_PLAIN_TASKS)
        fields = {**_TASK, "backend": {"type": "string"}} if self.team.registry else dict(_TASK)
        shape = {"type": "object", "properties": fields, "required": ["id", "prompt"], "additionalProperties": False}
        return {"type": "array", "items": cast("JsonValue", shape)}

    def _plan_schema(self) -> Mapping[str, JsonValue]:
        tasks = self._tasks()
        return {"type": "object", "properties": {"tasks": tasks}, "required": ["tasks"], "additionalProperties": False}

    def _reflect_schema(self) -> Mapping[str, JsonValue]:
        properties: dict[str, JsonValue] = {"done": {"type": "boolean"}, "add": self._tasks()}
        if not self.plain:
            properties["drop"] = {"type": "array", "items": {"type": "string"}}
        return {"type": "object", "properties": properties, "required": ["done"], "additionalProperties": False}
