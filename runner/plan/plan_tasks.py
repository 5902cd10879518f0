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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from plait.backends.backend_specs import FunctionSpec, only_backend
from plait.backends.output_schema import schema_problem
from plait.errors import DAGError, Problem, nearest
from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.dag import DAG, sort_names
from plait.runner.domain.prompt_values import parameter_name, with_arguments
from plait.runner.domain.task_checks import MOST_HINTS, NOUNS, is_not_upstream, line_of, uses_itself
from plait.runner.domain.votes import with_samples
from plait.runner.plan.plan_inputs import FirstRows, files_named
from plait.runner.plan.plan_mistakes import describe, findings
from plait.runner.plan.plan_models import (
    MAX_MADE,
    DefaultsPart,
    FollowUpPart,
    PlanPart,
    StepPart,
    TaskPart,
    approximate_plan,
)
from plait.runner.plan.plan_positions import Source, Where
from plait.runner.prompts.prompt_names import PromptNames
from plait.runner.prompts.prompt_template import check_plain, named_texts, parse_names
from plait.runner.state.task_files import find_file
from plait.task import (
    DEFAULT_RETRY,
    NO_PROMPT,
    TASKS_SCHEMA,
    Call,
    FailureMode,
    GrowthLimits,
    Retry,
    Task,
    TaskFile,
    lacks_prompt,
)

_MOST_FIELDS = 20
_MOST_NAMED = 10
_NOT_WITH_ROWS = ("plan", "loop", "race", "join", "repeat", "output", "cache")
"""What no task of a run has whose rows are read as it goes."""
_UPSTREAM = (("depends_on",), ("continues",))
"""The ends of the paths of a task's dependencies."""


class PlanTasks:
    """The tasks of a plan. Problems are added to `source.problems`.

    After an unknown name the checks continue with the closest known name, so a misspelling is reported only once.
    """

    def __init__(
        self,
        part: PlanPart,
        inputs: dict[str, JsonValue],
        source: Source,
        folder: Path,
        *,
        functions: Mapping[str, Sequence[tuple[str, bool]]] = {},
    ) -> None:
        self.inputs = inputs
        self._pilot: int | None = None
        self._functions = functions
        self._folder = folder
        self._files: dict[Path, TaskFile] = {}
        """The files of tasks by path: each is read once."""
        self._source = source
        self._defaults = part.defaults
        self._parts = part.tasks
        self._plan = part
        self._items: dict[str, list[JsonValue]] = {}
        # The fields of the elements, in order.
        self._fields: dict[str, dict[str, None]] = {}
        self._width, self._first, self._behind = 0, 0, list[str]()
        """Of a file that is read during the run, what RowsFile says of the tasks."""
        self.repaired: Sequence[TaskPart] = ()
        """The tasks of the file, with what each mistake probably means."""
        self.origins: list[tuple[int, bool]] = []
        """For each task of the run: the index in the file, and whether the task is the first of its family."""
        self._by_id = {part.id: part for part in self._parts}
        self._hints = MOST_HINTS
        self._complain = source.complain
        self._lost = {
            path[1] for path in source.wrong if path[:1] == ("tasks",) and path[1:] and path[2:3] in _UPSTREAM
        }
        """Indexes of the tasks with unreadable dependencies."""

    def dag(self, name: str, growth: GrowthLimits | None) -> DAG | None:
        """Return the graph; None with mistakes. The inputs of a pilot are those that its tasks go over."""
        self._pilot = None if growth is None else growth.pilot
        tasks = self._tasks()
        if tasks is None:
            return None
        row_lists = {name: items for name, items in self._items.items() if name in self.inputs}
        inputs, rows_file = {**self.inputs, **row_lists}, None
        for over, items in row_lists.items():
            if isinstance(items, FirstRows):
                del inputs[over]
                rows_file = replace(items.file, width=self._width, first=self._first, behind=self._behind)
        try:
            return DAG(tasks, name=name, inputs=inputs, growth=growth, rows_file=rows_file)
        except DAGError as error:
            for problem in error.problems:
                self._report(problem)
            return None

    def _tasks(self) -> list[Task] | None:
        """Return the tasks of the run; None if there would be far too many."""
        self.repaired = parts = self._checked_parts()
        over = next((name for name, items in self._items.items() if isinstance(items, FirstRows)), None)
        rows = frozenset(part.id for part in parts if over is not None and part.for_each == over)
        families = Families(parts, self._items, rows)
        if over is not None and not self._can_be_read(parts, over, families):
            return None
        if excess := families.excess():
            self._complain(("tasks",), excess)
            return None
        ids = {parameter_name(part.id): part.id for part in parts}
        tasks: list[Task] = []
        for index, part in enumerate(parts):
            made = self._tasks_of(index, part, families, ids)
            if part.id not in rows and not rows.isdisjoint(part.depends_on):
                self._behind += [task.id for task in made]
            tasks += made
        return tasks if over is None else self._row_by_row(tasks, parts, over, rows)

    def _checked_parts(self) -> list[TaskPart]:
        """Return the tasks of the plan as far as they can be used, and complain of the rest."""
        parts = self._with_unique_ids()
        names = {part.id for part in parts}
        parts = [self._repaired(index, part, names) for index, part in enumerate(parts)]
        for index, part in enumerate(parts):
            parts[index] = self._with_prompt(index, self._checked_for_each(index, part))
            check_schema(part.output_schema, ("tasks", index, "output_schema"), self._source)
            if part.role is not None and part.metadata.get("role", part.role) != part.role:
                message = f"the task's role is {part.role!r} already; leave it out here"
                self._complain(("tasks", index, "metadata", "role"), message)
        return parts

    def _tasks_of(self, index: int, part: TaskPart, families: Families, ids: Mapping[str, str]) -> list[Task]:
        """Return the tasks of the plan's task at `index`: one for each element, with its samples. Add their origins."""
        function = None if part.continues else function_of(part, self._plan)
        parameters = self._functions.get(function or "", ())
        takes_values = any(parameter != "prompt" for parameter, _ in parameters)
        if families.splits(part):
            message = f"{part.continues!r} has one conversation for each element; use the same for_each here"
            self._complain(("tasks", index, "continues"), message)
        settings = task_settings(part, self._defaults, _format_of(part, function))
        tasks: list[Task] = []
        for place, fields in enumerate(families.members(part)):
            if part.files:
                fields["files"] = self._found_files(index, part, fields["item"]) or tuple(part.files)
            task = Task(**settings, **fields)
            task = with_arguments(task, parameters, self.inputs, ids) if takes_values else task
            for number, each in enumerate([task] if task.repeat == 1 else with_samples([task])):
                tasks.append(each)
                is_first = number == 0 or each.id == f"{task.id}.judge"  # samples share their mistakes
                self.origins.append((index, place == 0 and is_first))
        return tasks

    def _row_by_row(
        self, tasks: Sequence[Task], parts: Sequence[TaskPart], over: str, rows: Collection[str]
    ) -> list[Task]:
        """Return `tasks` in the order in which a run reads them from a file: those of no row, then row by row."""
        own: tuple[list[int], list[int]] = [], []
        for place, (index, _) in enumerate(self.origins):
            own[parts[index].id in rows].append(place)
        count, (places, of_rows) = len(self._items[over]), own
        self._width, self._first = len(rows), len(places)
        places += [place for number in range(count) for place in of_rows[number::count]]
        self.origins = [self.origins[place] for place in places]
        return [tasks[place] for place in places]

    def _can_be_read(self, parts: Sequence[TaskPart], over: str, families: Families) -> bool:
        """Return whether the tasks of the input `over` can be made during the run, from a file that is not read as a
        whole.
        """
        problems = [*self._problems_of_rows(parts, over, families)]
        for path, message in problems:
            self._complain(path, f"input {over!r} has so many rows that they are read during the run: {message}")
        return not problems

    def _problems_of_rows(
        self, parts: Sequence[TaskPart], over: str, families: Families
    ) -> Iterator[tuple[Where, str]]:
        if self._plan.follow_ups:
            yield ("follow_ups",), "leave 'follow_ups' out"
        for index, part in enumerate(parts):
            path: Where = ("tasks", index)
            is_of_row = part.for_each == over
            if not is_of_row and part.for_each is not None and not isinstance(self.inputs.get(part.for_each), list):
                yield (*path, "for_each"), "no task goes over a list that is not known before the run"
            elif not is_of_row and isinstance(self._items.get(part.for_each or ""), FirstRows):
                yield (*path, "for_each"), "only one list may have so many"
            for name in part.depends_on if is_of_row else ():
                if name not in families.rows and families.rows_above(name):
                    yield (*path, "depends_on"), f"{name!r} waits for all rows, and no row can wait for it"
            if part.continues is not None and is_of_row != (part.continues in families.rows):
                yield (*path, "continues"), "only tasks of one row continue each other"
            above = frozenset[str]() if is_of_row else families.rows_above(part.id)
            for key, _, used in _names_in(part) if above else ():
                for name in sorted((used.names | used.results) & (above | {"results"})):
                    message = f"the {NOUNS[key]} names {name!r}, and would hold the results of all rows; let a"
                    yield (*path, key), f"{message} function go over them as a parameter, or use `plait export`"
            for key in (*_NOT_WITH_ROWS, *(("files",) if is_of_row else ())):
                if getattr(part, key) and _is_given(part, key):
                    yield (*path, key), f"leave {key!r} out"
            if part.cache is None and self._defaults.cache:
                yield ("defaults", "cache"), "leave 'cache' out"
            if {over, "inputs"} & parse_names(part.prompt)[0].names:
                yield (*path, "prompt"), f"the prompt names the whole list; name {{{{ item }}}} instead of {over!r}"

    def _found_files(self, index: int, part: TaskPart, item: JsonValue) -> tuple[TaskFile, ...]:
        files: dict[TaskFile, None] = {}
        for position, pattern in enumerate(part.files):
            try:
                for path in files_named(self._folder, pattern, self.inputs, item):
                    if path not in self._files:
                        self._files[path] = find_file(path)
                    files[self._files[path]] = None
            except ValueError as error:
                self._complain(("tasks", index, "files", position), str(error))
        return tuple(files)

    def _with_prompt(self, index: int, part: TaskPart) -> TaskPart:
        """Return the part with a prompt, with files, or with the name of a function, which may need none."""
        if part.prompt.strip() or part.files or part.run or part.plan or part.loop:
            return part
        if not part.continues and (function := function_of(part, self._plan)) is not None:
            return part.model_copy(update={"backend": function})
        self._complain(("tasks", index, "prompt"), NO_PROMPT)
        return part.model_copy(update={"prompt": part.id})

    def _report(self, problem: Problem) -> None:
        """Report a problem of the graph, unless it follows from one that is reported already."""
        if problem.position is None:
            named = ("inputs", problem.name) if problem.name is not None else (problem.field,) if problem.field else ()
            self._complain(named, problem.message)
            return
        index, first = self.origins[problem.position]
        # Members of a family share prompt and dependencies, and therefore mistakes. Aliases are generated; a wrong
        # alias follows from a mistake already reported. Schemas are checked with their positions.
        follows = problem.field in {"aliases", "output_schema"} or (problem.lacks_dependency and index in self._lost)
        if first and not follows:
            path: Where = ("tasks", index, *((problem.field,) if problem.field else ()))
            if problem.field == "with" and self._parts[index].loop:
                path = ("tasks", index, "loop", "with")
            self._complain(path, self._with_family_name(problem, self._parts[index].id), line=problem.line)

    def _with_family_name(self, problem: Problem, task_id: str) -> str:
        """Return the message with the name of the family. The graph contains only members, while the prompt names the
        family.
        """
        family = self._by_id.get(problem.name or "")
        if family is None or family.for_each not in self._items:
            return problem.message
        noun = NOUNS[problem.field or "prompt"]
        return uses_itself(family.id, noun) if family.id == task_id else is_not_upstream(family.id, noun)

    def _with_unique_ids(self) -> list[TaskPart]:
        first: dict[str, int] = {}
        parts: list[TaskPart] = []
        for index, part in enumerate(self._parts):
            if part.id in first:
                position = self._source.position(("tasks", first[part.id], "id"))
                where = f"in line {position[0]}" if position else f"of task {first[part.id] + 1}"
                self._complain(("tasks", index, "id"), f"id {part.id!r} is used twice; the first is {where}")
                parts.append(part.model_copy(update={"id": f"task-{index}-of-the-plan"}))
            else:
                first[part.id] = index
                parts.append(part)
        return parts

    def _repaired(self, index: int, part: TaskPart, names: set[str]) -> TaskPart:
        depends_on: list[str] = []
        for position, name in enumerate(part.depends_on):
            depends_on += self._known_name(("tasks", index, "depends_on", position), name, names)
        after = self._known_name(("tasks", index, "continues"), part.continues, names) if part.continues else []
        return part.model_copy(update={"depends_on": depends_on, "continues": after[0] if after else None})

    def _known_name(self, path: Where, name: str, names: set[str]) -> list[str]:
        if name in names:
            return [name]
        self._hints -= 1
        close = difflib.get_close_matches(name, names, n=1) if self._hints >= 0 else []
        others = [task_id for task_id in self._by_id if task_id != self._parts[int(path[1])].id]
        hint = nearest(name, close)
        if not hint and 0 < len(others) <= _MOST_NAMED:
            hint = f"; there are {', '.join(map(repr, others))}" if others[1:] else f"; there is {others[0]!r}"
        self._complain(path, f"unknown task {name!r}{hint}")
        return close

    def _checked_for_each(self, index: int, part: TaskPart) -> TaskPart:
        """Return the part, with the input that its `for_each` probably means."""
        name = part.for_each
        if name is None:
            return part
        if name in self._by_id and name not in self.inputs:
            if (over := _list_behind(name, self._by_id, self.inputs)) is None:
                return part
            after = part.depends_on if name in part.depends_on else [*part.depends_on, name]
            if over in self.inputs:
                return part.model_copy(update={"depends_on": after})
            return part.model_copy(update={"for_each": over, "depends_on": after})
        self._check_input_of(index, part, name)
        return part

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
            self._items[name] = value if self._pilot is None else value[: self._pilot]
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
        for key, text, used in _names_in(part):
            for field in sorted(used.item - fields.keys()):
                path = f"item.{field}" if field.isidentifier() else f"item[{field!r}]"
                message = f"the {NOUNS[key]} uses {{{{ {path} }}}}, but no element of input {name!r} has that field"
                line = line_of(path, text)
                where: Where = ("loop", key) if key == "with" and part.loop else (key,)
                self._complain(
                    ("tasks", index, *where), f"{message}; they have {have}{nearest(field, fields)}", line=line
                )

    def written(self) -> list[Task]:
        """Return the tasks as they stand in the file, each with a `for_each` as one task."""
        return [
            _as_written(part, self._defaults, _format_of(part, function_of(part, self._plan))) for part in self.repaired
        ]


def _format_of(part: TaskPart, function: str | None) -> Mapping[str, JsonValue] | None:
    """Return the schema of added tasks for a planner that is a model. What a function returns is checked when its tasks
    are added.
    """
    return TASKS_SCHEMA if part.output == "tasks" and function is None else None


def _as_written(part: TaskPart, defaults: DefaultsPart, asks_for: Mapping[str, JsonValue] | None = None) -> Task:
    settings, depends_on = task_settings(part, defaults, asks_for), tuple(part.depends_on)
    return Task(**settings, id=part.id, depends_on=depends_on, continues=part.continues, for_each=part.for_each)


def _default_of(key: str) -> Any:
    """Return the value of a key of a task that leaves it out."""
    return TaskPart.model_fields[key].get_default(call_default_factory=True)


def _is_given(part: TaskPart, key: str) -> bool:
    """Return whether a task has another value than that of a task that leaves the key out."""
    return bool(getattr(part, key) != _default_of(key))


def _names_in(part: TaskPart) -> Iterator[tuple[str, str, PromptNames]]:
    """Yield each text of the task that may hold names, with its field and the names."""
    check = None if part.check is None else part.check.check()
    yield from ((field, text, names) for field, text, names, _ in named_texts(part, check, call_of(part)))


def function_of(part: TaskPart | StepPart, plan: PlanPart) -> str | None:
    """Return the name of the backend of `part` if the backend is a function; None for any other backend, and for a
    command or a call, which have none.
    """
    if isinstance(part, TaskPart) and (part.run or part.plan or part.loop):
        return None
    name = part.backend or plan.defaults.backend or only_backend(plan.backends)
    return name if name is not None and isinstance(plan.backends.get(name), FunctionSpec) else None


_AS_WRITTEN = (
    *("prompt", "model", "system", "temperature", "max_cost", "weight", "when", "at_most_once"),
    *("cwd", "env", "shared", "join", "race", "repeat"),
)
"""The settings that are the same in a plan file and in a run."""


def task_settings(
    part: TaskPart, defaults: DefaultsPart, asks_for: Mapping[str, JsonValue] | None = None
) -> dict[str, Any]:
    """Return the fields of the tasks of the run that are the same for all that are made from `part` of the plan file.

    `asks_for` is the schema of the answer for a task without a schema.
    """
    return {
        **{name: getattr(part, name) for name in _AS_WRITTEN},
        "failure_mode": FailureMode(part.failure_mode or defaults.failure_mode),
        **common_settings(part, defaults),
        "output_schema": part.output_schema or asks_for,
        "cache": defaults.cache if part.cache is None else part.cache,
        "metadata": part.metadata if part.role is None else {**part.metadata, "role": part.role},
        "adds_tasks": part.output == "tasks",
        "run": tuple(part.run),
        "codes": part.codes if part.codes == "any" else tuple(part.codes),
        "call": call_of(part),
        "check": None if part.check is None else part.check.check(),
        "vote": None if part.vote is None else part.vote.vote(),
    }


def call_of(part: TaskPart) -> Call | None:
    """Return the call of a plan that has been read; None for another task."""
    plan = part.plan if part.loop is None else part.loop.plan
    return plan if isinstance(plan, Call) else None


def called_tasks(call: Call, inputs: Mapping[str, JsonInput], pilot: int | None = None) -> list[Task]:
    """Return the tasks of a plan called with these inputs, for the first `pilot` elements of each list. An input of
    None counts as a list with one element. Raises DAGError.
    """
    items: dict[str, Sequence[JsonValue]] = {}
    for task in call.tasks:
        if (name := task.for_each) is None or name not in inputs:
            continue
        elements = [""] if inputs[name] is None else inputs[name]
        if not isinstance(elements, list) or not elements or None in elements:
            message = f"for_each needs a list with at least one element and no null, but input {name!r} is not"
            raise DAGError([Problem(message, task.id)])
        items[name] = cast("list[JsonValue]", elements)[:pilot]
    families = Families(call.tasks, items)
    if excess := families.excess():
        raise DAGError([Problem(excess)])
    return with_samples(replace(task, **fields) for task in call.tasks for fields in families.members(task))


def common_settings(part: TaskPart | FollowUpPart | StepPart, defaults: DefaultsPart) -> dict[str, Any]:
    """Return the fields that each task of a plan has, a step and a follow-up too, completed by the plan's defaults."""
    retry = DEFAULT_RETRY
    if part.retry is not None or defaults.retry.model_fields_set:
        # Field by field: a task with only `attempts` keeps the other defaults.
        own: dict[str, Any] = part.retry.model_dump(exclude_unset=True) if part.retry else {}
        merged: dict[str, Any] = {**defaults.retry.model_dump(), **own}
        merged["on"] = frozenset(cast(list[str], merged["on"]))
        retry = Retry(**merged)
    timeout = defaults.timeout if part.timeout is None else part.timeout
    return {"backend": part.backend, "retry": retry, "timeout": timeout, "output_schema": part.output_schema}


def check_schema(schema: dict[str, Any] | None, path: Where, source: Source) -> None:
    """Report the problems of the `output_schema` at `path`."""
    if schema is None:
        return
    if (problem := schema_problem(schema)) is not None:
        source.complain((*path, *problem.path), str(problem))


MAX_EDGES = 2_000_000


class Families:
    """The tasks of the run generated from each task of the file.

    `parts` have unique ids and known dependencies; `items` holds the elements of each input named by a `for_each`.
    `rows` are the tasks of rows that are read during the run: what depends on all rows names none of them.
    """

    def __init__(
        self,
        parts: Sequence[TaskPart] | Sequence[Task],
        items: Mapping[str, Sequence[JsonValue]],
        rows: Collection[str] = (),
    ) -> None:
        self._parts: dict[str, TaskPart | Task] = {part.id: part for part in parts}
        self._items = items
        self.rows = frozenset(rows)
        self._families = {part.id: self._family_of(part) for part in parts}
        """The input for whose elements each task is made; None for a single task."""
        self._ids = {part.id: self._member_ids(part) for part in parts}
        self._above = _families_above(self._parts, [part.id for part in parts if not self._is_single(part)])

    def excess(self) -> str | None:
        """Return the message about more tasks or dependencies than are possible."""
        tasks = sum(len(ids) for ids in self._ids.values())
        edges = sum(
            len(self._ids[part.id]) * (1 if self._pairs(part, name) else len(self._ids[name]))
            for part in self._parts.values()
            for name in part.depends_on
        )
        if tasks <= MAX_MADE and edges <= MAX_EDGES:
            return None
        made = f"for_each makes {tasks:,} tasks with {edges:,} dependencies"
        return f"{made}; at most {MAX_MADE:,} and {MAX_EDGES:,} are possible"

    def members(self, part: TaskPart | Task) -> Iterator[dict[str, Any]]:
        """Yield, for each task generated from `part`, one, or one for each element, the fields of the task that depend
        on its place.
        """
        over, above = self._families[part.id], sorted(self._above[part.id])
        elements: Sequence[JsonValue] = [None] if over is None else self._items[over]
        for position, element in enumerate(elements):
            yield {
                "id": self._ids[part.id][position],
                "depends_on": tuple(
                    partner for name in part.depends_on for partner in self._partners(part, name, position)
                ),
                "continues": None if part.continues is None else self._partners(part, part.continues, position)[0],
                "aliases": {
                    name: self._ids[name][position] if self._pairs(part, name) else self._partners(part, name, position)
                    for name in above
                },
                "item": element,
                "for_each": self._list_of(part, position),
            }

    def rows_above(self, name: str) -> frozenset[str]:
        """Return the tasks of rows that are upstream of a task."""
        return self.rows & self._above[name]

    def splits(self, part: TaskPart) -> bool:
        """Return whether `continues` names a family without a single matching partner."""
        if part.continues is None or self._is_single(self._parts[part.continues]):
            return False
        return not self._pairs(part, part.continues)

    def _family_of(self, part: TaskPart | Task) -> str | None:
        """Return the input for whose elements `part` is made, also as a task over the lists of such tasks; None for a
        single task.
        """
        name = _list_behind(part.for_each, self._parts, self._items)
        return name if name in self._items else None

    def _list_of(self, part: TaskPart | Task, position: int) -> str | None:
        """Return the task over whose list the member at `position` goes during the run; None without."""
        if part.for_each in self._items:
            return None
        return part.for_each if self._is_single(part) else self._ids[part.for_each or ""][position]

    def _is_single(self, part: TaskPart | Task) -> bool:
        return self._families[part.id] is None

    def _member_ids(self, part: TaskPart | Task) -> tuple[str, ...]:
        over = self._families[part.id]
        if over is None:
            return (part.id,)
        return tuple(f"{part.id}.{number}" for number in range(1, len(self._items[over]) + 1))

    def _pairs(self, part: TaskPart | Task, name: str) -> bool:
        over = part.for_each
        return (
            over is not None and not self._is_single(self._parts[name]) and over in {self._parts[name].for_each, name}
        )

    def _partners(self, part: TaskPart | Task, name: str, position: int) -> tuple[str, ...]:
        if name in self.rows and part.id not in self.rows:
            return ()
        return (self._ids[name][position],) if self._pairs(part, name) else self._ids[name]


def _list_behind(name: str | None, parts: Mapping[str, TaskPart | Task], inputs: Collection[str]) -> str | None:
    """Return the input, known or not, over whose elements `name` goes: itself, or a task with a `for_each`. None for a
    task without, and in a circle.
    """
    seen: set[str] = set()
    while name is not None and name in parts and name not in inputs and name not in seen:
        seen.add(name)
        name = parts[name].for_each
    return None if name in seen else name


def _families_above(parts: Mapping[str, TaskPart | Task], made: Collection[str]) -> dict[str, set[str]]:
    """Return, for each task of the file, the families upstream, of those in `made`. For tasks in a cycle the sets are
    incomplete.
    """
    dependents: dict[str, list[str]] = {name: [] for name in parts}
    for name, part in parts.items():
        for earlier in (*part.depends_on, *([part.continues] if part.continues else [])):
            dependents[earlier].append(name)
    above: dict[str, set[str]] = {name: set() for name in parts}
    for earlier in sort_names(dependents)[0]:
        own = {earlier} if earlier in made else set[str]()
        for name in dependents[earlier]:
            above[name] |= above[earlier] | own
    return above


_LONGEST_NAME = 64
_REFUSED = ("when", "files", "plan", "loop", "cwd", "env", "shared", "check", "join", "model")
"""Fields of a task that a model must not choose."""


class AddedTasks:
    """The tasks of a reply, as described by `specs`."""

    def __init__(self, specs: Sequence[object]) -> None:
        self._ids = [_id_of(spec) for spec in specs]
        """The id of each task as written in the reply; None if unusable."""
        self._lost: set[int] = set()
        """Positions of the tasks with unreadable dependencies."""
        self.mistakes: list[Problem] = []
        """The problems of the tasks' shape."""
        self.tasks: list[Task] = []
        """The tasks. With `mistakes`, approximations good enough to find further mistakes."""
        for position, part in enumerate(self._parts({"tasks": list(specs)})):
            stands_for_tasks = bool(part.plan or part.loop)
            for field in (*_REFUSED, "race", "repeat", "vote"):
                if field in _REFUSED and _is_given(part, field):
                    self._complain(position, f"an added task has no {field!r} of its own; leave {field!r} out", field)
                setattr(part, field, _default_of(field))
            if not (part.run or stands_for_tasks) and lacks_prompt(part.prompt, part.backend):
                self._complain(position, NO_PROMPT, "prompt")
                part.prompt = "?"
            for field, text in (("prompt", part.prompt), *(("run", word) for word in part.run)):
                if mistake := check_plain(text):
                    self._complain(position, str(mistake), field, mistake.line)
                    part.prompt, part.run = "?", []
            if stands_for_tasks:
                part.prompt = "?"
            self.tasks.append(_as_written(part, DefaultsPart()))

    def _parts(self, plan: Mapping[str, object]) -> Sequence[TaskPart]:
        try:
            return PlanPart.model_validate(plan).tasks
        except ValidationError as error:
            for (_, position, *field), message, _ in findings(error, plan):
                if field and field[0] in {"depends_on", "continues"}:
                    self._lost.add(int(position))
                where = ".".join(map(str, field))
                # Messages about missing or unknown keys contain the key.
                is_named = not field or repr(field[-1]) in message
                self._complain(int(position), message if is_named else f"{where} {message}")
        approximation = approximate_plan(plan)
        return [] if approximation is None else approximation.tasks

    def _complain(self, position: int, message: str, field: str | None = None, line: int | None = None) -> None:
        self.mistakes.append(self._named(Problem(message, None, field, None, position, line)))

    def _named(self, problem: Problem) -> Problem:
        """Return the problem with the id in the reply, in place of the approximation's."""
        if problem.position is None:
            return problem
        task_id = self._ids[problem.position]
        message = problem.message if task_id is not None else f"task {problem.position + 1}: {problem.message}"
        return replace(problem, message=message, task_id=task_id)

    def all_problems(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return `problems`, which begin with the mistakes, without those that only result from the mistakes."""
        if not self.mistakes:
            return list(problems)
        further = [
            self._named(problem)
            for problem in problems[len(self.mistakes) :]
            if not (problem.position in self._lost and problem.lacks_dependency)
        ]
        return [*self.mistakes, *further]


def _id_of(spec: object) -> str | None:
    task_id: object = spec.get("id") if isinstance(spec, dict) else None  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return task_id if isinstance(task_id, str) and 0 < len(task_id) <= _LONGEST_NAME else None
