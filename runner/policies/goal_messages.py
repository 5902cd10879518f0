"""Prompts and answer formats of planner, executors and reflector. Pure.

Templates contain plain names only. Text from models is inserted through `item` and `aliases` and never parsed as a
template. `goal` is an input of the run, and so is `registry`, the text about the workers, if there are any.

The answers of planner and reflector are read into tasks, with all problems described for the model that answered.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from plait.errors import nearest
from plait.json_form import JsonValue, value
from plait.runner.domain.dag import sort_names
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


@value
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


@value
class LoopPrompts:
    """The tasks of the loop, with their prompts."""

    team: Team
    plain: bool
    """As in `LoopLimits`."""

    def plan(self, limit: int, earlier: str | None = None, reasons: str = "") -> Task:
        """Return the first task of the run; with `earlier`, the task of an unusable plan, the second request."""
        prompt = _PLAIN_PLAN if self.plain else _PLAN + self._workers()
        prompt = prompt.replace("{most}", str(min(limit, _MOST_PLAIN) if self.plain else limit))
        schema: dict[str, JsonValue] = {
            "type": "object",
            "properties": {"tasks": self._tasks()},
            "required": ["tasks"],
            "additionalProperties": False,
        }
        first = Task("plan.1", prompt, backend=self.team.planner, output_schema=schema)
        if earlier is None:
            return first
        prompt += _PLAN_AGAIN
        return replace(
            first, id="plan.2", prompt=prompt, depends_on=(earlier,), item=reasons, aliases={"earlier": earlier}
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
        properties: dict[str, JsonValue] = {"done": {"type": "boolean"}, "add": self._tasks()}
        if not self.plain:
            properties["drop"] = {"type": "array", "items": {"type": "string"}}
        schema = {"type": "object", "properties": properties, "required": ["done"], "additionalProperties": False}
        return Task(
            task_id,
            _PLAIN_REFLECT if self.plain else _REFLECT + self._workers(),
            depends_on=tuple(after),
            backend=self.team.reflector,
            output_schema=schema,
            weight=_FIRST,
            item=evidence,
        )

    def answer(self, evidence: str, after: Sequence[str]) -> Task:
        """Return the last task of the run, executed by the planner, the role that works with the whole goal elsewhere
        too.
        """
        prompt = _PLAIN_ANSWER if self.plain else _ANSWER
        return Task(ANSWER_ID, prompt, depends_on=tuple(after), backend=self.team.planner, item=evidence, weight=_FIRST)

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


PREFIX = "do."
_LONGEST_SLUG = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@value
class KnownTasks:
    """The tasks of the run that a plan may refer to."""

    ids: frozenset[str] = frozenset()
    """The ids of all tasks."""
    dead: Mapping[str, str] = field(default_factory=dict[str, str])
    """The tasks that can no longer be waited for, with the reason."""

    def named(self, name: str) -> str | None:
        """Return the id of the task named `name`, with or without the prefix `do.`; None if unknown."""
        return next((candidate for candidate in (name, PREFIX + name) if candidate in self.ids), None)


@value
class ParsedReply:
    """A parsed answer. With `problems`, there are no tasks."""

    tasks: tuple[Task, ...] = ()
    """The tasks to be added, each after its dependencies."""
    problems: tuple[str, ...] = ()
    done: bool = False
    drop: tuple[str, ...] = ()


@dataclass(slots=True)
class _Entry:
    """A task as given in an answer."""

    name: str
    """The name in the answer."""
    text: str
    needs: tuple[str, ...]
    """The names of the dependencies."""
    worker: str | None = None
    """The name of the worker that does the task."""
    id: str = ""


def read_planned(
    answer: JsonValue, task_id: str, prompts: LoopPrompts, run_tasks: KnownTasks, limit: int
) -> ParsedReply:
    """Parse the planner's answer, the result of the task `task_id`."""
    entries = _entries(answer.get("tasks")) if isinstance(answer, dict) else None
    if entries is None:
        return ParsedReply(problems=('it is not of the form {"tasks": [{"id": ..., "prompt": ...}]}',))
    if not entries:
        return ParsedReply(problems=("it has no tasks",))
    if len(entries) > limit:
        return ParsedReply(problems=(f"it has {len(entries)} tasks, and at most {limit} are allowed",))
    return _read_tasks(entries, task_id, prompts, run_tasks)


def read_reflection(
    answer: JsonValue, task_id: str, prompts: LoopPrompts, run_tasks: KnownTasks, droppable: Collection[str]
) -> ParsedReply:
    """Parse the reflector's answer, the result of the task `task_id`. Requests to drop tasks outside `droppable` are
    ignored.
    """
    entries = _entries(answer.get("add", [])) if isinstance(answer, dict) else None
    drop = _texts(answer.get("drop", [])) if isinstance(answer, dict) else None
    if entries is None or drop is None or not isinstance(answer, dict) or not isinstance(answer.get("done"), bool):
        return ParsedReply(problems=('it is not of the form {"done": ..., "add": [...], "drop": [...]}',))
    if answer["done"]:
        return ParsedReply(done=True)
    named = {run_tasks.named(name) for name in drop}
    dropped = tuple(name for name in droppable if name in named)
    dead = {**run_tasks.dead, **dict.fromkeys(dropped, "dropped by the same answer")}
    read = _read_tasks(entries, task_id, prompts, KnownTasks(run_tasks.ids, dead))
    return ParsedReply(read.tasks, read.problems, drop=dropped)


def _entries(answer: JsonValue) -> list[_Entry] | None:
    """Return the tasks of an answer; None if the answer has another form. Backends may return unvalidated answers."""
    if not isinstance(answer, list):
        return None
    entries: list[_Entry] = []
    for number, entry in enumerate(answer, 1):
        fields: Mapping[str, JsonValue] = entry if isinstance(entry, dict) else {"prompt": entry}
        name, text, needs = fields.get("id", str(number)), fields.get("prompt"), _texts(fields.get("depends_on", []))
        worker = fields.get("backend")
        if not isinstance(name, str) or not isinstance(text, str) or needs is None:
            return None
        if worker is not None and not isinstance(worker, str):
            return None
        entries.append(_Entry(name.removeprefix(PREFIX), text, tuple(dict.fromkeys(needs)), worker))
    return entries


def _texts(value: JsonValue) -> list[str] | None:
    fits = isinstance(value, list) and all(isinstance(text, str) for text in value)
    return cast("list[str]", value) if fits else None


def _read_tasks(entries: Sequence[_Entry], task_id: str, prompts: LoopPrompts, run_tasks: KnownTasks) -> ParsedReply:
    named = {entry.name: entry for entry in entries}
    names = [entry.name for entry in entries]
    problems = [
        f"{names.count(name)} tasks have the id {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    problems += [f"task {entry.name!r} has no prompt" for entry in entries if not entry.text.strip()]
    problems += _unknown_workers(entries, prompts.team.registry)
    ids = set(run_tasks.ids)
    for entry in entries:
        entry.id = _safe_id(entry.name, ids)
        ids.add(entry.id)
    needs = {
        entry.name: [_resolve(name, entry, named, run_tasks, problems) for name in entry.needs] for entry in entries
    }
    after: dict[str, list[str]] = {entry.name: [] for entry in entries}
    for entry in entries:
        for name in entry.needs:
            if (needed := _own(name, named)) is not None:
                after[needed.name].append(entry.name)
    order, cycles = sort_names(after)
    problems += (f"these tasks wait for each other: {' -> '.join(cycle)}" for cycle in cycles)
    if problems:
        return ParsedReply(problems=tuple(problems))
    return ParsedReply(
        tuple(
            prompts.work(entry.id, entry.text, list(filter(None, needs[entry.name])), task_id, entry.worker)
            for entry in map(named.__getitem__, order)
        )
    )


def _unknown_workers(entries: Sequence[_Entry], registry: Mapping[str, str]) -> list[str]:
    allowed = f"the registry has {', '.join(registry)}" if registry else "no task may name one; leave it out"
    return [
        f"task {entry.name!r} names backend {entry.worker!r}, and {allowed}{nearest(entry.worker, registry)}"
        for entry in entries
        if entry.worker is not None and entry.worker not in registry
    ]


def _resolve(
    name: str, entry: _Entry, named: Mapping[str, _Entry], run_tasks: KnownTasks, problems: list[str]
) -> str | None:
    """Return the id of the dependency `name` of `entry`; None, with an added problem, if the dependency is
    impossible.
    """
    if (own := _own(name, named)) is not None:
        return own.id
    earlier = run_tasks.named(name)
    if earlier is None:
        problems.append(f"task {entry.name!r} depends on {name!r}, and there is no such task")
    elif earlier in run_tasks.dead:
        problems.append(f"task {entry.name!r} depends on {earlier!r}, which is {run_tasks.dead[earlier]}")
        return None
    return earlier


def _own(name: str, named: Mapping[str, _Entry]) -> _Entry | None:
    """Return the task of the same answer named `name`."""
    return named.get(name) or named.get(name.removeprefix(PREFIX))


def _safe_id(name: str, ids: set[str]) -> str:
    """Return an id not used by any other task or by the loop itself."""
    slug = _UNSAFE.sub("-", name).strip("-")[:_LONGEST_SLUG] or "task"
    number = 1
    while (safe := PREFIX + slug + (f"-{number}" if number > 1 else "")) in ids:
        number += 1
    return safe
