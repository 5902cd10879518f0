"""The tasks of a plan, and those that a reply adds, as `Task`s; mistakes of the graph with their place in the file.

With `for_each` over an input, a task of the file becomes a family: `summary` over five documents becomes `summary.1` to
`summary.5`. A task with the same `for_each` that depends on `summary` is paired with it element by element; any other
dependent depends on the whole family. In prompts, the name `summary` stands for the result of the partner, or for the
list of all results in order. A `for_each` that names a task is left to the run, which goes over the result.

A model writes the tasks of a reply, so their prompts are plain: names and fields without a template language. Nothing
else checks these prompts: a plain prompt is recognised by its text alone, wherever it is stored.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from plait.backends.output_schema import schema_problem
from plait.backends.specs.build_backend import FunctionSpec
from plait.errors import Problem
from plait.json_form import JsonValue
from plait.runner.domain.dag import nearest, sort_names
from plait.runner.domain.task_checks import MOST_HINTS, uses_itself
from plait.runner.plan.plan_inputs import PlanFiles
from plait.runner.plan.plan_mistakes import describe, findings, salvage
from plait.runner.plan.plan_models import MAX_MADE, DefaultsPart, FollowUpPart, PlanPart, StepPart, TaskPart
from plait.runner.plan.plan_positions import Path as Where
from plait.runner.plan.plan_positions import Source
from plait.runner.prompts.prompt_template import check_plain, condition_names, parse_names
from plait.task import DEFAULT_RETRY, NO_PROMPT, TASKS_SCHEMA, FailureMode, Retry, Task, TaskFile, lacks_prompt

_MOST_FIELDS = 20
_MOST_NAMED = 10
_USED = re.compile(r"the (?:prompt|condition) uses \{\{ (\S+) \}\}")


class PlanTasks:
    """The tasks of a plan. Problems are added to `source.problems`.

    After an unknown name the checks continue with the closest known name, so a misspelling is reported only once.
    """

    def __init__(self, part: PlanPart, inputs: dict[str, JsonValue], source: Source, folder: Path) -> None:
        self.inputs = inputs
        self._files = PlanFiles(folder, inputs)
        self._source = source
        self._defaults = part.defaults
        self._parts = part.tasks
        self._plan = part
        self._items: dict[str, list[JsonValue]] = {}
        # The fields of the elements, in order.
        self._fields: dict[str, dict[str, None]] = {}
        # For each task of the run: the index in the file, and whether the task is the first of its family.
        self._origins: list[tuple[int, bool]] = []
        self._by_id = {part.id: part for part in self._parts}
        self._hints = MOST_HINTS

    def tasks(self) -> list[Task] | None:
        """Return the tasks of the run; None if there would be far too many."""
        parts = self._with_unique_ids()
        names = {part.id for part in parts}
        parts = [self._repaired(index, part, names) for index, part in enumerate(parts)]
        for index, part in enumerate(parts):
            parts[index] = self._with_prompt(index, self._checked_for_each(index, part))
            check_schema(part.output_schema, ("tasks", index, "output_schema"), self._source)
            self._check_role(index, part)
        families = Families(parts, self._items)
        if not self._fits(*families.size()):
            return None
        tasks: list[Task] = []
        for index, part in enumerate(parts):
            if families.splits(part):
                message = f"{part.continues!r} has one conversation for each element; use the same for_each here"
                self._complain(("tasks", index, "continues"), message)
            # Models need the format of added tasks. What a function returns is checked when its tasks are added.
            is_planner = part.output == "tasks" and function_of(part, self._plan) is None
            asks_for = TASKS_SCHEMA if is_planner else None
            for member in families.members(part):
                files = self._found_files(index, part, member) or part.files
                tasks.append(make_task(part, member, self._defaults, asks_for=asks_for, files=files))
                self._origins.append((index, member.first))
        return tasks

    def _found_files(self, index: int, part: TaskPart, member: Member) -> tuple[TaskFile, ...]:
        found: dict[TaskFile, None] = {}
        for place, written in enumerate(part.files):
            try:
                found |= dict.fromkeys(self._files.find(written, member.item))
            except ValueError as error:
                path: Where = ("tasks", index, "files", place)
                self._complain(path if path in self._source.values else path[:3], str(error))
        return tuple(found)

    def _with_prompt(self, index: int, part: TaskPart) -> TaskPart:
        """Return the part with a prompt, with files, or with the name of a function, which may need none."""
        if part.prompt.strip() or part.files:
            return part
        if not part.continues and (function := function_of(part, self._plan)) is not None:
            return part.model_copy(update={"backend": function})
        self._complain(("tasks", index, "prompt"), NO_PROMPT)
        return part.model_copy(update={"prompt": part.id})

    def report(self, problems: Iterable[Problem], lost: set[int]) -> None:
        """Add the problems of the graph with their positions. `lost` holds the tasks with unreadable dependencies."""
        for problem in problems:
            if problem.position is None:
                self._complain(*self._place_of_input(problem))
                continue
            index, first = self._origins[problem.position]
            # Members of a family share prompt and dependencies, and therefore mistakes. Aliases are generated; a wrong
            # alias follows from a mistake already reported.
            # Schemas are checked with their positions.
            known = problem.field in {"aliases", "output_schema"}
            if first and not known and not (index in lost and "not upstream" in problem.message):
                path: Where = ("tasks", index, *((problem.field,) if problem.field else ()))
                text = self._parts[index].when if problem.field == "when" else self._parts[index].prompt
                line = problem.line or line_in(text or "", problem.message)
                self._complain(path, self._with_family_name(problem), line=line)

    def _complain(self, path: Where, message: str, *, line: int | None = None) -> None:
        self._source.problems.append(self._source.problem(path, message, line=line))

    def _with_unique_ids(self) -> list[TaskPart]:
        first: dict[str, int] = {}
        parts: list[TaskPart] = []
        for index, part in enumerate(self._parts):
            if part.id in first:
                place = self._source.values.get(("tasks", first[part.id], "id"))
                where = f"in line {place[0]}" if place else f"of task {first[part.id] + 1}"
                self._complain(("tasks", index, "id"), f"id {part.id!r} is used twice; the first is {where}")
                parts.append(part.model_copy(update={"id": f"task-{index}-of-the-plan"}))
            else:
                first[part.id] = index
                parts.append(part)
        return parts

    def _repaired(self, index: int, part: TaskPart, known: set[str]) -> TaskPart:
        depends_on: list[str] = []
        for place, name in enumerate(part.depends_on):
            path: Where = ("tasks", index, "depends_on", place)
            # A single name may appear without a list; TOML has no positions at all.
            single = bool(self._source.values) and path not in self._source.values
            depends_on += self._known_name(path[:3] if single else path, name, known)
        after = self._known_name(("tasks", index, "continues"), part.continues, known) if part.continues else []
        return part.model_copy(update={"depends_on": depends_on, "continues": after[0] if after else None})

    def _known_name(self, path: Where, name: str, known: set[str]) -> list[str]:
        if name in known:
            return [name]
        self._hints -= 1
        close = difflib.get_close_matches(name, known, n=1) if self._hints >= 0 else []
        others = [task_id for task_id in self._by_id if task_id != self._parts[int(path[1])].id]
        hint = nearest(name, close)
        if not hint and 0 < len(others) <= _MOST_NAMED:
            hint = f"; there are {', '.join(map(repr, others))}" if others[1:] else f"; there is {others[0]!r}"
        self._complain(path, f"unknown task {name!r}{hint}")
        return close

    def _checked_for_each(self, index: int, part: TaskPart) -> TaskPart:
        """Return the part, with the input that its `for_each` probably means."""
        name, path = part.for_each, ("tasks", index, "for_each")
        if name is None:
            return part
        if name in self._by_id and name not in self.inputs:
            if (over := self._input_of_family(name)) is None:
                return part
            if over in self.inputs:
                message = f"for_each needs the result of one task, but {name!r} is a task for each element of {over!r}"
                self._complain(path, f"{message}; write for_each: {over} here, and {name!r} into depends_on")
            after = part.depends_on if name in part.depends_on else [*part.depends_on, name]
            return part.model_copy(update={"for_each": over, "depends_on": after})
        self._check_input_of(index, part, name)
        return part

    def _input_of_family(self, name: str) -> str | None:
        """Return the input, known or not, for whose elements the plan makes tasks; None for a single task."""
        seen: set[str] = set()
        while name in self._by_id and name not in self.inputs and name not in seen:
            seen.add(name)
            if (over := self._by_id[name].for_each) is None:
                return None
            name = over
        return None if name in seen else name

    def _check_input_of(self, index: int, part: TaskPart, name: str) -> None:
        path = ("tasks", index, "for_each")
        value = self.inputs.get(name)
        self._items.setdefault(name, [""])
        if name not in self.inputs:
            hint = (
                nearest(name, [*self.inputs, *self._by_id])
                or "; name an input that is a list, or a task that answers one"
            )
            self._complain(path, f"unknown input or task {name!r}{hint}")
        elif isinstance(value, list) and value and None not in value:
            self._items[name] = value
            self._check_fields(index, part, name, value)
        elif isinstance(value, list):
            what = f"element {value.index(None) + 1} of input {name!r} is null" if value else f"input {name!r} is empty"
            self._complain(path, f"for_each needs at least one element and no null, but {what}")
        elif value is not None:  # None: already reported as a mistake of the input
            self._complain(path, f"for_each needs a list, but input {name!r} is {describe(value)}")
        if part.id in self.inputs:
            message = f"input {part.id!r} is also the id of a task; rename the input"
            self._complain(("inputs", part.id), message)

    def _check_fields(self, index: int, part: TaskPart, name: str, elements: list[JsonValue]) -> None:
        """Report fields of `item` that no element has. A field of some elements may be missing from others."""
        if name not in self._fields:
            self._fields[name] = {key: None for element in elements if isinstance(element, dict) for key in element}
        fields = self._fields[name]
        more = ", ..." if len(fields) > _MOST_FIELDS else ""
        have = ", ".join(map(describe, list(fields)[:_MOST_FIELDS])) + more if fields else "no fields"
        texts = [("prompt", "prompt", part.prompt, parse_names(part.prompt)[0])]
        if part.when is not None:
            texts.append(("when", "condition", part.when, condition_names(part.when)[0]))
        for key, noun, text, used in texts:
            for field in sorted(used.item - fields.keys()):
                path = f"item.{field}" if field.isidentifier() else f"item[{field!r}]"
                message = f"the {noun} uses {{{{ {path} }}}}, but no element of input {name!r} has that field"
                line = line_in(text, message)
                self._complain(("tasks", index, key), f"{message}; they have {have}{nearest(field, fields)}", line=line)

    def _check_role(self, index: int, part: TaskPart) -> None:
        if part.role is not None and part.metadata.get("role", part.role) != part.role:
            message = f"the task's role is {part.role!r} already; leave it out here"
            self._complain(("tasks", index, "metadata", "role"), message)

    def _fits(self, tasks: int, edges: int) -> bool:
        if tasks <= MAX_MADE and edges <= MAX_EDGES:
            return True
        message = f"for_each makes {tasks:,} tasks with {edges:,} dependencies; at most {MAX_MADE:,} and {MAX_EDGES:,}"
        self._complain(("tasks",), f"{message} are possible")
        return False

    def _place_of_input(self, problem: Problem) -> tuple[Where, str]:
        for name in self.inputs:
            if problem.field == "inputs" and repr(name) in problem.message:
                return ("inputs", name), problem.message
        return ((problem.field,) if problem.field else ()), problem.message

    def _with_family_name(self, problem: Problem) -> str:
        """Return the message with the name of the family. The graph contains only members, while the prompt names the
        family.
        """
        used, noun = _USED.search(problem.message), "condition" if problem.field == "when" else "prompt"
        named = self._by_id.get(used[1]) if used else None
        if used and named is not None and named.for_each in self._items and "neither a task nor" in problem.message:
            if problem.position is not None and self._parts[self._origins[problem.position][0]].id == used[1]:
                return uses_itself(used[1], noun)
            return f"the {noun} uses {{{{ {used[1]} }}}}, but {used[1]!r} is not upstream; add it to depends_on"
        return problem.message


def function_of(part: TaskPart | StepPart, plan: PlanPart) -> str | None:
    """Return the name of the backend of `part` if the backend is a function; None for any other backend."""
    only = next(iter(plan.backends)) if len(plan.backends) == 1 else None
    name = part.backend or plan.defaults.backend or only
    return name if name is not None and isinstance(plan.backends.get(name), FunctionSpec) else None


def used_name(message: str) -> str | None:
    """Return the name in a prompt that `message` reports."""
    used = _USED.search(message)
    return used[1] if used else None


def line_in(prompt: str, message: str) -> int | None:
    """Return the line of the prompt with the name reported in `message`."""
    used = used_name(message)
    found = re.search(rf"(?<![\w.-]){re.escape(used)}(?![\w-])", prompt) if used else None
    return prompt.count("\n", 0, found.start()) + 1 if found else None


def make_task(
    part: TaskPart,
    member: Member,
    defaults: DefaultsPart,
    *,
    asks_for: Mapping[str, JsonValue] | None = None,
    files: Sequence[str | TaskFile] = (),
) -> Task:
    """Return the task of the run for `part` of the plan file at the place of `member`.

    `asks_for` is the schema of the answer for a task without a schema.
    """
    timeout = defaults.timeout if part.timeout is None else part.timeout
    return Task(
        id=member.id,
        prompt=part.prompt,
        depends_on=member.depends_on,
        backend=part.backend,
        continues=member.continues,
        failure_mode=FailureMode(part.failure_mode or defaults.failure_mode),
        retry=retry_of(part, defaults),
        timeout=timeout,
        output_schema=part.output_schema or asks_for,
        weight=part.weight,
        when=part.when,
        cache=defaults.cache if part.cache is None else part.cache,
        model=part.model,
        system=part.system,
        temperature=part.temperature,
        item=member.item,
        aliases=member.aliases,
        metadata=part.metadata if part.role is None else {**part.metadata, "role": part.role},
        at_most_once=part.at_most_once,
        for_each=member.for_each,
        adds_tasks=part.output == "tasks",
        files=tuple(files),
    )


def retry_of(part: TaskPart | FollowUpPart | StepPart, defaults: DefaultsPart) -> Retry:
    """Return the retry policy of the part, completed by the plan's defaults."""
    if part.retry is None and not defaults.retry.model_fields_set:
        return DEFAULT_RETRY
    # Field by field: a task with only `attempts` keeps the other defaults.
    own: dict[str, Any] = part.retry.model_dump(exclude_unset=True) if part.retry else {}
    merged: dict[str, Any] = {**defaults.retry.model_dump(), **own}
    merged["on"] = frozenset(cast(list[str], merged["on"]))
    return Retry(**merged)


def check_schema(schema: dict[str, Any] | None, path: Where, source: Source) -> None:
    """Report the problems of the `output_schema` at `path`."""
    if schema is None:
        return
    if (problem := schema_problem(schema)) is not None:
        source.problems.append(source.problem((*path, *problem.path), str(problem)))


MAX_EDGES = 2_000_000


@dataclass(frozen=True, slots=True)
class Member:
    """The values of a generated task that depend on its place in the family."""

    id: str
    depends_on: tuple[str, ...]
    continues: str | None
    aliases: Mapping[str, str | Sequence[str]]
    item: JsonValue
    first: bool
    """True for the first member of a family."""
    for_each: str | None = None


class Families:
    """The tasks of the run generated from each task of the file.

    `parts` have unique ids and known dependencies; `items` holds the elements of each input named by a `for_each`.
    """

    def __init__(self, parts: Sequence[TaskPart], items: Mapping[str, Sequence[JsonValue]]) -> None:
        self._parts = {part.id: part for part in parts}
        self._items = items
        self._ids = {part.id: self._member_ids(part) for part in parts}
        self._above = _families_above(self._parts, items)

    def size(self) -> tuple[int, int]:
        """Return the number of tasks and the number of dependencies to be generated."""
        tasks = sum(len(ids) for ids in self._ids.values())
        edges = sum(
            len(self._ids[part.id]) * (1 if self._pairs(part, name) else len(self._ids[name]))
            for part in self._parts.values()
            for name in part.depends_on
        )
        return tasks, edges

    def members(self, part: TaskPart) -> Iterator[Member]:
        """Yield the tasks generated from `part`: one, or one for each element."""
        elements: Sequence[JsonValue] = [None] if self._is_single(part) else self._items[part.for_each or ""]
        for place, element in enumerate(elements):
            yield Member(
                id=self._ids[part.id][place],
                depends_on=tuple(one for name in part.depends_on for one in self._partners(part, name, place)),
                continues=None if part.continues is None else self._partners(part, part.continues, place)[0],
                aliases={
                    name: self._ids[name][place] if self._pairs(part, name) else self._ids[name]
                    for name in sorted(self._above[part.id])
                },
                item=element,
                first=place == 0,
                for_each=part.for_each if self._is_single(part) else None,
            )

    def splits(self, part: TaskPart) -> bool:
        """Return whether `continues` names a family without a single matching partner."""
        if part.continues is None or self._is_single(self._parts[part.continues]):
            return False
        return not self._pairs(part, part.continues)

    def _is_single(self, part: TaskPart) -> bool:
        return part.for_each not in self._items

    def _member_ids(self, part: TaskPart) -> tuple[str, ...]:
        if self._is_single(part):
            return (part.id,)
        return tuple(f"{part.id}.{number}" for number in range(1, len(self._items[part.for_each or ""]) + 1))

    def _pairs(self, part: TaskPart, name: str) -> bool:
        return part.for_each is not None and self._parts[name].for_each == part.for_each

    def _partners(self, part: TaskPart, name: str, place: int) -> tuple[str, ...]:
        return (self._ids[name][place],) if self._pairs(part, name) else self._ids[name]


def _families_above(parts: Mapping[str, TaskPart], items: Mapping[str, object]) -> dict[str, set[str]]:
    """Return, for each task of the file, the families upstream. For tasks in a cycle the sets are incomplete."""
    dependents: dict[str, list[str]] = {name: [] for name in parts}
    for name, part in parts.items():
        for earlier in (*part.depends_on, *([part.continues] if part.continues else [])):
            dependents[earlier].append(name)
    above: dict[str, set[str]] = {name: set() for name in parts}
    for earlier in sort_names(dependents)[0]:
        own = {earlier} if parts[earlier].for_each in items else set[str]()
        for name in dependents[earlier]:
            above[name] |= above[earlier] | own
    return above


_LONGEST_NAME = 64
_REFUSED = {
    "when": "an added task has no condition; leave `when` out, and add the task only if it is to run",
    "files": "an added task has no files; leave `files` out, and insert results of other tasks",
    "model": "an added task has the model of its backend; leave `model` out, and choose among the backends of the run",
}
"""Fields of a task that a model must not choose, with the message."""


@dataclass(frozen=True, slots=True)
class AddedTasks:
    """The tasks of a reply."""

    tasks: Sequence[Task]
    """The tasks. With `mistakes`, approximations good enough to find further mistakes."""
    mistakes: Sequence[Problem] = ()
    """The problems of the tasks' shape."""
    lost: Collection[int] = ()
    """Positions of the tasks with unreadable dependencies."""
    names: Sequence[str | None] = ()
    """The id of each task as written in the reply; None if unusable."""

    def all_problems(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return the mistakes followed by the further `problems` of the tasks, with the names used in the reply.

        Problems that only result from the mistakes are left out.
        """
        if not self.mistakes:
            return list(problems)
        further = problems[len(self.mistakes) :]
        kept = (one for one in further if one.position not in self.lost or "not upstream" not in one.message)
        return [*self.mistakes, *(one if one.position is None else self._named(one, one.position) for one in kept)]

    def _named(self, problem: Problem, position: int) -> Problem:
        return replace(_at(position, self.names, problem.message), field=problem.field, index=problem.index)


def read_added(specs: Sequence[object]) -> AddedTasks:
    """Return the tasks described by `specs`, with all problems of their shape."""
    whole = cast("JsonValue", {"tasks": list(specs)})
    names = [_name(spec) for spec in specs]
    found: list[Problem] = []
    lost: set[int] = set()
    try:
        part: PlanPart | None = PlanPart.model_validate(whole)
    except ValidationError as error:
        found = [_mistake(path, message, names) for path, message, _ in findings(error, whole)]
        part, lost = salvage(whole, error)
    parts = [] if part is None else part.tasks
    for place, one in enumerate(parts):
        if lacks_prompt(one.prompt, one.backend):
            found.append(replace(_at(place, names, NO_PROMPT), field="prompt"))
            one.prompt = "?"
    tasks = list(map(_task, parts))
    for place, task in enumerate(tasks):
        if mistake := check_plain(task.prompt):
            found.append(replace(_at(place, names, str(mistake)), field="prompt", line=mistake.line))
            tasks[place] = replace(task, prompt="?")
        for field, message in _REFUSED.items():
            if getattr(parts[place], field) not in (None, []):
                found.append(replace(_at(place, names, message), field=field))
                tasks[place] = replace(tasks[place], when=None, model=None)
    return AddedTasks(tasks, found, lost, names)


def _task(part: TaskPart) -> Task:
    itself = Member(part.id, tuple(part.depends_on), part.continues, {}, None, first=True, for_each=part.for_each)
    return make_task(part, itself, DefaultsPart())


def _name(spec: object) -> str | None:
    task_id: object = spec.get("id") if isinstance(spec, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return task_id if isinstance(task_id, str) and 0 < len(task_id) <= _LONGEST_NAME else None


def _mistake(path: Sequence[str | int], message: str, names: Sequence[str | None]) -> Problem:
    _tasks, place, *field = path
    where = ".".join(map(str, field))
    # Messages about missing or unknown keys contain the key.
    said = message if not where or repr(field[-1]) in message else f"{where} {message}"
    return _at(int(place), names, said)


def _at(place: int, names: Sequence[str | None], message: str) -> Problem:
    name = names[place]
    return Problem(message if name is not None else f"task {place + 1}: {message}", name, None, None, place)
