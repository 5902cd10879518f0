"""Validation of tasks: all mistakes at once, for a new graph and for tasks added to an existing graph. Pure."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

from plait.backends.output_schema import schema_problem
from plait.errors import Problem, PromptError, nearest
from plait.json_form import JsonInput
from plait.runner.prompts.prompt_names import RESERVED_NAMES, PromptNames
from plait.runner.prompts.prompt_template import condition_names, parse_names
from plait.task import MAX_FILES, Retry, Task, TaskFile

MOST_HINTS = 20
"""The number of unknown names per graph for which the closest known name is searched."""
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_LONGEST_ID_WITH_PARTS = 58
"""The maximum length of the id of a `for_each` task. Parts append a dot and a number."""


@dataclass(frozen=True, slots=True)
class _Unless:
    """A problem, unless the second task of `pair` depends, directly or indirectly, on the first."""

    pair: tuple[int, int]
    """The positions of the two tasks."""
    problem: Problem
    """The problem if neither task depends on the other."""
    behind: Problem
    """The problem if the first task depends on the second."""
    used: bool = True
    """True if the prompt needs the result of the first task."""


def for_each_targets(tasks: Iterable[Task]) -> dict[str, str]:
    """Return the `for_each` target of each task that has one, by task id."""
    return {task.id: task.for_each for task in tasks if task.for_each is not None}


def part_id_clashes(tasks: Iterable[Task], lists: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each task whose id is the id of a generated part (`<id>.<n>`) of a `for_each` task in
    `lists`.
    """
    if not lists:
        return
    for place, task in enumerate(tasks):
        before, _, number = str(task.id).rpartition(".")
        if before in lists and number.isascii() and number.isdecimal() and number[0] != "0":
            message = f"id {task.id!r} is reserved for a part of {before!r}, which has for_each; choose another id"
            yield Problem(message, task.id, "id", None, place)


def unpaired_continues(tasks: Iterable[Task], lists: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each task that continues a `for_each` task in `lists` without being paired with it.

    A `for_each` task itself has no conversation; only its parts do.
    """
    for place, task in enumerate(tasks):
        before = task.continues
        if before is None or before not in lists or lists[before] == task.for_each:
            continue
        message = (
            f"continues {before!r}, which has for_each: each part of {before!r} has its own conversation; "
            f"give this task the same for_each, so that each part continues one conversation, "
            f"or use depends_on instead ({{{{ {before} }}}} is the list of results)"
        )
        yield Problem(message, task.id, "continues", None, place)


@dataclass(frozen=True, slots=True)
class DagParts:
    """The parts of a DAG used by its validation. Validation fills in the entries of new tasks."""

    tasks: Sequence[Task]
    inputs: Mapping[str, JsonInput]
    positions: dict[str, int]
    """The position of each task by id. `Checks.ids` adds the new tasks."""
    dependencies: list[tuple[int, ...]]
    """For each task, the positions of its dependencies. `Checks.link` appends the entries of the new tasks."""
    dependents: Sequence[Sequence[int]]
    """For each task, the positions of its dependents."""


@dataclass(frozen=True, slots=True)
class _Text:
    """The prompt or the condition of a new task."""

    task: Task
    place: int
    """The position of the task among the new tasks."""
    field: Literal["prompt", "when"]

    @property
    def noun(self) -> str:
        return "condition" if self.field == "when" else "prompt"

    def problem(self, message: str, line: int | None = None) -> Problem:
        return Problem(message, self.task.id, self.field, None, self.place, line)


class Checks:
    """Validation of the tasks of `graph` from position `start` on. Positions in problems count from `start`."""

    def __init__(self, graph: DagParts, start: int) -> None:
        self._graph = graph
        self._tasks = graph.tasks[start:] if start else graph.tasks
        self._start = start
        self._positions = graph.positions
        self._hints = MOST_HINTS
        self._schemas: dict[int, str | None] = {}
        self.named: list[tuple[int, int]] = []
        """Pairs of positions: the prompt of the second task names the first, an indirect upstream task. Filled by
        `prompts`.
        """

    def ids(self) -> list[Problem]:
        """Assign a position to every new task. Return the problems of the ids."""
        problems: list[Problem] = []
        positions, start = self._positions, self._start
        for place, task in enumerate(self._tasks):
            wrong = self._id_problem(task.id, task.for_each)
            if wrong:
                problems.append(Problem(wrong, task.id, "id", None, place))
            if task.id in positions:
                other = positions[task.id] - start
                where = (
                    f"task {other + 1} of the list has the same id" if other >= 0 else "the run has a task with this id"
                )
                problems.append(Problem(f"id {task.id!r} is used twice; {where}", task.id, "id", None, place))
            else:
                positions[task.id] = start + place
        return problems

    def _id_problem(self, task_id: str, for_each: str | None) -> str | None:
        if not isinstance(task_id, str) or not _ID.fullmatch(task_id):  # pyright: ignore[reportUnnecessaryIsInstance]
            found = repr(str(task_id)[:80])
            return f"id {found} must have 1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'"
        if for_each is not None and len(task_id) > _LONGEST_ID_WITH_PARTS:
            room = f"{_LONGEST_ID_WITH_PARTS}, to leave room for the part numbers"
            return f"id {task_id!r} has {len(task_id)} characters; the id of a task with for_each may have {room}"
        if task_id in RESERVED_NAMES:
            return f"id {task_id!r} is reserved for templates; choose another id"
        if self._start and task_id in self._graph.inputs:
            return f"id {task_id!r} is the name of an input; call the task something else"
        return None

    def link(self) -> list[Problem]:
        """Resolve names to positions. Return the problems of `depends_on`, `continues`, `for_each` and numbers."""
        problems: list[Problem] = []
        for place, task in enumerate(self._tasks):
            found: dict[int, None] = {}
            for index, name in enumerate(task.upstream):
                position = self._positions.get(name)
                if position is None:
                    problems.append(self._unknown(task, place, index, name))
                else:
                    found[position] = None
            problems += self._field_problems(task, place)
            self._graph.dependencies.append(tuple(found))
        return problems

    def _hint(self, name: str, known: Iterable[str]) -> str:
        """Return a hint at the closest known name, for the first mistakes only: the search is slower than the rest of
        the check.
        """
        self._hints -= 1
        return nearest(name, known) if self._hints >= 0 else ""

    def _unknown(self, task: Task, place: int, index: int, name: str) -> Problem:
        message = f"unknown task {name!r}{self._hint(name, self._positions)}"
        if index < len(task.depends_on):
            return Problem(message, task.id, "depends_on", index, place)
        return Problem(message, task.id, "continues" if name == task.continues else "for_each", None, place)

    def _field_problems(self, task: Task, place: int) -> Iterator[Problem]:
        if task.timeout is not None and not (_is_number(task.timeout) and task.timeout > 0):
            yield Problem(f"timeout must be more than 0 seconds, not {task.timeout!r}", task.id, "timeout", None, place)
        if not isinstance(task.retry, Retry):
            message = f"retry must be a Retry or a number of retries from 0 up, not {task.retry!r}"
            yield Problem(message, task.id, "retry", None, place)
        for name in ("item", "metadata", "output_schema"):
            if (kept := getattr(task, name)) and (why := why_no_json(kept)):
                yield Problem(f"{name} has to be JSON, to be stored with the task: {why}", task.id, name, None, place)
            elif name == "output_schema" and kept and (wrong := self._schema_problem(kept)):
                yield Problem(wrong, task.id, name, None, place)
        if not _is_text(task.prompt):
            yield Problem("the prompt has to be text, without lone surrogates", task.id, "prompt", None, place)
        yield from _setting_problems(task, place)
        if not (_is_number(task.weight) and task.weight >= 0):
            yield Problem(f"weight must be a number from 0 up, not {task.weight!r}", task.id, "weight", None, place)
        if task.for_each is not None and (task.item is not None or task.adds_tasks):
            other = "item" if task.item is not None else "adds_tasks"
            yield Problem(f"a task with for_each cannot have {other} as well", task.id, "for_each", None, place)
        before = self._positions.get(task.continues) if task.continues is not None else None
        if before is None or task.backend is None:
            return
        theirs = self._graph.tasks[before].backend
        # If the earlier task names no backend, only the runner can decide: see `backend_names`.
        if theirs is not None and theirs != task.backend:
            yield Problem(
                f"continues {task.continues!r}, which runs on backend {theirs!r}, "
                f"but names backend {task.backend!r}; a conversation stays on its backend, so leave `backend` out",
                task.id,
                "backend",
                None,
                place,
            )

    def _schema_problem(self, schema: Mapping[str, object]) -> str | None:
        """Return the problem of a schema, which many tasks may share; None if the schema can be used."""
        if id(schema) not in self._schemas:
            problem = schema_problem(schema)
            self._schemas[id(schema)] = None if problem is None else problem.with_place
        return self._schemas[id(schema)]

    def inputs(self) -> Iterator[Problem]:
        """Yield the problems of the graph's inputs."""
        inputs = self._graph.inputs
        if why := why_no_json(dict(inputs)):
            yield Problem(f"inputs have to be JSON, to be stored with the run: {why}", None, "inputs")
        for name in inputs:
            if name in RESERVED_NAMES or name in self._positions:
                owner = "a reserved template name" if name in RESERVED_NAMES else "the id of a task"
                yield Problem(f"input {name!r} is also {owner}; rename the input", None, "inputs")

    def prompts(self, has_cycles: bool) -> list[Problem]:
        """Return the problems of the new tasks' prompts and aliases. Cycles make upstream relations undefined: no
        checks then.
        """
        found = [*self._in_aliases(), *self._in_prompts()]
        if has_cycles:
            return [one for one in found if isinstance(one, Problem)]
        waits, waiting = self._graph.dependencies, self._graph.dependents
        apart = not_upstream(waits, waiting, (one.pair for one in found if isinstance(one, _Unless)))
        aside = not_upstream(waits, waiting, ((second, first) for first, second in apart))
        problems: list[Problem] = []
        for one in found:
            if isinstance(one, Problem):
                problems.append(one)
            elif one.pair in apart:
                problems.append(one.problem if one.pair[::-1] in aside else one.behind)
            elif one.used:
                self.named.append(one.pair)
        return problems

    def _in_prompts(self) -> Iterator[Problem | _Unless]:
        for place, task in enumerate(self._tasks):
            if _is_text(task.prompt) and "{" in task.prompt:
                yield from self._text_problems(_Text(task, place, "prompt"), *parse_names(task.prompt))
            if _is_text(task.when):
                yield from self._text_problems(_Text(task, place, "when"), *condition_names(task.when or ""))

    def _text_problems(
        self, text: _Text, used: PromptNames, mistakes: Sequence[PromptError]
    ) -> Iterator[Problem | _Unless]:
        for mistake in mistakes:
            yield text.problem(str(mistake), mistake.line)
        for name in sorted(used.names):
            yield from self._name_problem(text, name)
        for name in sorted(used.results):
            if name not in text.task.aliases:
                yield from self._task_name_problem(text, name)
        for name in sorted(used.inputs - self._graph.inputs.keys()):
            yield text.problem(f"unknown input {name!r}{self._hint(name, self._graph.inputs)}")

    def _in_aliases(self) -> Iterator[Problem | _Unless]:
        for place, task in enumerate(self._tasks):
            if task.aliases:
                direct = frozenset(self._graph.dependencies[self._start + place])
                used = [parse_names(task.prompt)[0] if _is_text(task.prompt) else PromptNames()]
                used += [condition_names(task.when or "")[0]] if _is_text(task.when) else []
                whole = any("results" in one.names and not one.results for one in used)  # uses all results
                for alias, names in task.aliases.items():
                    is_used = whole or any(alias in one.names or alias in one.results for one in used)
                    yield from self._alias_problems(place, alias, names, direct, is_used)

    def _alias_problems(
        self, place: int, alias: str, names: object, direct: frozenset[int], used: bool
    ) -> Iterator[Problem | _Unless]:
        def problem(message: str) -> Problem:
            return Problem(f"alias {alias!r} {message}", self._tasks[place].id, "aliases", None, place)

        if not isinstance(names, str | list | tuple):
            yield problem(f"must be the id of a task or a list of ids, not {names!r}")
            return
        for name in cast("Sequence[object]", (names,) if isinstance(names, str) else names):
            if not isinstance(name, str) or name not in self._positions:
                hint = self._hint(name, self._positions) if isinstance(name, str) else ""
                yield problem(f"stands for the unknown task {name!r}{hint}")
            elif (target := self._positions[name]) not in direct:
                apart = problem(f"stands for {name!r}, which is not upstream; add it to depends_on")
                behind = problem(
                    f"stands for {name!r}, which depends on this task; reverse one of the two dependencies"
                )
                yield _Unless((target, self._start + place), apart, behind, used)

    def _name_problem(self, text: _Text, name: str) -> Iterator[Problem | _Unless]:
        task = text.task
        if name in task.aliases or name in self._graph.inputs or name in {"inputs", "results"}:
            return
        if name == "item":
            if task.item is None and task.for_each is None:
                yield text.problem("{{ item }} has a value only in a task with for_each")
            return
        yield from self._task_name_problem(text, name)

    def _task_name_problem(self, text: _Text, name: str) -> Iterator[Problem | _Unless]:
        task, uses = text.task, f"the {text.noun} uses {{{{ {name} }}}}"
        if name not in self._positions:
            known = [*task.upstream, *task.aliases, *self._graph.inputs, "results", "inputs"]
            yield text.problem(f"{uses}, which is neither a task nor an input{self._hint(name, known)}")
        elif name == task.id:
            yield text.problem(uses_itself(name, text.noun))
        elif (target := self._positions[name]) not in self._graph.dependencies[self._start + text.place]:
            apart = text.problem(f"{uses}, but {name!r} is not upstream; add it to depends_on")
            behind = f"{uses}, but {name!r} depends on this task; reverse one of the two dependencies"
            pair = target, self._start + text.place
            yield _Unless(pair, apart, replace(apart, message=behind))


def uses_itself(name: str, noun: str = "prompt") -> str:
    """Return the message for a prompt or a condition, as `noun` says, that uses the result of its own task."""
    own = "the result of its own task, which does not exist before the task ends"
    return f"the {noun} uses {{{{ {name} }}}}, {own}; name another task"


def _setting_problems(task: Task, place: int) -> Iterator[Problem]:
    if task.when is not None and not _is_text(task.when):
        yield Problem(f"when must be a condition in text, not {task.when!r}", task.id, "when", None, place)
    if not (isinstance(task.cache, bool) or (_is_number(task.cache) and task.cache > 0)):
        message = f"cache must be true, false or a number of seconds above 0, not {task.cache!r}"
        yield Problem(message, task.id, "cache", None, place)
    wrong = next((one for one in task.files if not isinstance(one, TaskFile) and not (_is_text(one) and one)), None)
    if wrong is not None:
        yield Problem(f"files must be paths in text, not {wrong!r}", task.id, "files", None, place)
    if len(task.files) > MAX_FILES:
        message = f"a task may have {MAX_FILES} files, this one has {len(task.files)}; leave some out"
        yield Problem(message, task.id, "files", None, place)
    for name, text in (("model", task.model), ("system", task.system)):
        if text is not None and not (_is_text(text) and text):
            yield Problem(f"{name} must be a text, not {text!r}", task.id, name, None, place)
    if task.temperature is not None and not (_is_number(task.temperature) and task.temperature >= 0):
        message = f"temperature must be a number from 0 up, not {task.temperature!r}"
        yield Problem(message, task.id, "temperature", None, place)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def _is_text(text: object) -> bool:
    try:
        return isinstance(text, str) and (text.isascii() or bool(text.encode()))
    except UnicodeEncodeError:
        return False


def why_no_json(value: object) -> str | None:
    """Return the reason why `value` cannot be stored as JSON; None if it can."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return None


Neighbours: TypeAlias = Sequence[Sequence[int]]
"""For each position, the positions of the dependencies, or of the dependents."""

_NEAR = 100
"""The number of steps of an upward search before the search from the other task downward takes over."""


def not_upstream(
    dependencies: Neighbours, dependents: Neighbours, pairs: Iterable[tuple[int, int]]
) -> set[tuple[int, int]]:
    """Return the pairs `(target, position)` whose second task does not depend, directly or indirectly, on the first.

    Most pairs are close together, so a short upward search comes first. The remaining pairs with the same first task
    share a single downward search, and nothing is cached between searches.
    """
    apart: set[tuple[int, int]] = set()
    far: dict[int, set[int]] = {}
    for target, position in pairs:
        near = _is_near_above(dependencies, target, position)
        if near is None:
            far.setdefault(target, set()).add(position)
        elif not near:
            apart.add((target, position))
    for target, positions in far.items():
        apart |= {(target, position) for position in _not_reached(dependents, target, positions)}
    return apart


def _is_near_above(dependencies: Neighbours, target: int, position: int) -> bool | None:
    """Return whether `target` is upstream of `position`; None if undecided after `_NEAR` steps."""
    steps, seen, waiting = 0, {position}, deque([position])
    while waiting:
        needed = dependencies[waiting.popleft()]
        if target in needed:
            return True
        steps += 1 + len(needed)
        if steps > _NEAR:
            return None
        waiting += [earlier for earlier in needed if earlier not in seen]
        seen.update(needed)
    return False


def _not_reached(dependents: Neighbours, start: int, positions: Iterable[int]) -> set[int]:
    """Return the `positions` that are not downstream of `start`."""
    missing, seen, waiting = set(positions), {start}, deque([start])
    while waiting and missing:
        for dependent in dependents[waiting.popleft()]:
            if dependent not in seen:
                seen.add(dependent)
                missing.discard(dependent)
                waiting.append(dependent)
    return missing
