"""Conversion of the planner's and reflector's answers into tasks, with all problems described for the answering model.
Pure.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest, sort_names
from plait.runner.policies.goal_messages import LoopPrompts
from plait.task import Task

PREFIX = "do."
_LONGEST_SLUG = 40
_UNSAFE = re.compile(r"[^A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class KnownTasks:
    """The tasks of the run that a plan may refer to."""

    ids: frozenset[str] = frozenset()
    """The ids of all tasks."""
    dead: Mapping[str, str] = field(default_factory=dict[str, str])
    """The tasks that can no longer be waited for, with the reason."""

    def named(self, name: str) -> str | None:
        """Return the id of the task named `name`, with or without the prefix `do.`; None if unknown."""
        return next((one for one in (name, PREFIX + name) if one in self.ids), None)


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A parsed answer. With `problems`, there are no tasks."""

    tasks: tuple[Task, ...] = ()
    """The tasks to be added, each after its dependencies."""
    problems: tuple[str, ...] = ()
    done: bool = False
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to a model."""

    by: str
    """The id of the answering task."""
    prompts: LoopPrompts
    """The prompts of the loop, for the tasks to be added."""


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


def read_plan(answer: JsonValue, asked: ModelRequest, known: KnownTasks, most: int) -> ParsedReply:
    """Parse the planner's answer."""
    entries = _entries(answer.get("tasks")) if isinstance(answer, dict) else None
    if entries is None:
        return ParsedReply(problems=('it is not of the form {"tasks": [{"id": ..., "prompt": ...}]}',))
    if not entries:
        return ParsedReply(problems=("it has no tasks",))
    if len(entries) > most:
        return ParsedReply(problems=(f"it has {len(entries)} tasks, and at most {most} are allowed",))
    return _read_tasks(entries, asked, known)


def read_reflection(
    answer: JsonValue, asked: ModelRequest, known: KnownTasks, droppable: Collection[str]
) -> ParsedReply:
    """Parse the reflector's answer. Requests to drop tasks outside `droppable` are ignored."""
    entries = _entries(answer.get("add", [])) if isinstance(answer, dict) else None
    drop = _texts(answer.get("drop", [])) if isinstance(answer, dict) else None
    if entries is None or drop is None or not isinstance(answer, dict) or not isinstance(answer.get("done"), bool):
        return ParsedReply(problems=('it is not of the form {"done": ..., "add": [...], "drop": [...]}',))
    if answer["done"]:
        return ParsedReply(done=True)
    named = {known.named(name) for name in drop}
    dropped = tuple(name for name in droppable if name in named)
    dead = {**known.dead, **dict.fromkeys(dropped, "dropped by the same answer")}
    read = _read_tasks(entries, asked, KnownTasks(known.ids, dead))
    return ParsedReply(read.tasks, read.problems, drop=dropped)


def _entries(value: JsonValue) -> list[_Entry] | None:
    """Return the tasks of an answer; None if the answer has another form. Backends may return unvalidated answers."""
    if not isinstance(value, list):
        return None
    entries: list[_Entry] = []
    for number, one in enumerate(value, 1):
        given: Mapping[str, JsonValue] = one if isinstance(one, dict) else {"prompt": one}
        name, text, needs = given.get("id", str(number)), given.get("prompt"), _texts(given.get("depends_on", []))
        worker = given.get("backend")
        if not isinstance(name, str) or not isinstance(text, str) or needs is None:
            return None
        if worker is not None and not isinstance(worker, str):
            return None
        entries.append(_Entry(name.removeprefix(PREFIX), text, tuple(dict.fromkeys(needs)), worker))
    return entries


def _texts(value: JsonValue) -> list[str] | None:
    fits = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return cast("list[str]", value) if fits else None


def _read_tasks(entries: Sequence[_Entry], asked: ModelRequest, known: KnownTasks) -> ParsedReply:
    ours = {entry.name: entry for entry in entries}
    problems = [*_duplicates(entries), *(f"task {entry.name!r} has no prompt" for entry in entries if _is_empty(entry))]
    problems += _unknown_workers(entries, asked.prompts.team.registry)
    taken = set(known.ids)
    for entry in entries:
        entry.id = _safe_id(entry.name, taken)
        taken.add(entry.id)
    needs = {entry.name: [_resolve(name, entry, ours, known, problems) for name in entry.needs] for entry in entries}
    order, cycles = _ordered(entries, ours)
    problems += (f"these tasks wait for each other: {' -> '.join(cycle)}" for cycle in cycles)
    if problems:
        return ParsedReply(problems=tuple(problems))
    found = {name: [one for one in each if one is not None] for name, each in needs.items()}
    prompts, by = asked.prompts, asked.by
    return ParsedReply(
        tuple(prompts.work(one.id, one.text, found[one.name], by, one.worker) for one in map(ours.__getitem__, order))
    )


def _duplicates(entries: Sequence[_Entry]) -> list[str]:
    names = [entry.name for entry in entries]
    return [f"{names.count(name)} tasks have the id {name!r}" for name in dict.fromkeys(names) if names.count(name) > 1]


def _unknown_workers(entries: Sequence[_Entry], registry: Mapping[str, str]) -> list[str]:
    allowed = f"the registry has {', '.join(registry)}" if registry else "no task may name one; leave it out"
    return [
        f"task {entry.name!r} names backend {entry.worker!r}, and {allowed}{nearest(entry.worker, registry)}"
        for entry in entries
        if entry.worker is not None and entry.worker not in registry
    ]


def _is_empty(entry: _Entry) -> bool:
    return not entry.text.strip()


def _resolve(
    name: str, entry: _Entry, ours: Mapping[str, _Entry], known: KnownTasks, problems: list[str]
) -> str | None:
    """Return the id of the dependency `name` of `entry`; None, with an added problem, if the dependency is
    impossible.
    """
    if (mine := _own(name, ours)) is not None:
        return mine.id
    theirs = known.named(name)
    if theirs is None:
        problems.append(f"task {entry.name!r} depends on {name!r}, and there is no such task")
    elif theirs in known.dead:
        problems.append(f"task {entry.name!r} depends on {theirs!r}, which is {known.dead[theirs]}")
        return None
    return theirs


def _own(name: str, ours: Mapping[str, _Entry]) -> _Entry | None:
    """Return the task of the same answer named `name`."""
    return ours.get(name) or ours.get(name.removeprefix(PREFIX))


def _ordered(entries: Sequence[_Entry], ours: Mapping[str, _Entry]) -> tuple[list[str], list[list[str]]]:
    """Return the names in topological order, and the cycles."""
    after: dict[str, list[str]] = {entry.name: [] for entry in entries}
    for entry in entries:
        for name in entry.needs:
            if (mine := _own(name, ours)) is not None:
                after[mine.name].append(entry.name)
    return sort_names(after)


def _safe_id(name: str, taken: set[str]) -> str:
    """Return an id not used by any other task or by the loop itself."""
    slug = _UNSAFE.sub("-", name).strip("-")[:_LONGEST_SLUG] or "task"
    number = 1
    while (safe := PREFIX + slug + (f"-{number}" if number > 1 else "")) in taken:
        number += 1
    return safe
