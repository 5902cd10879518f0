"""Validation of tasks: all mistakes at once, for a new graph and for tasks added to an existing graph. Pure."""

from __future__ import annotations

import json
import operator
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from operator import attrgetter
from typing import Any, TypeAlias, TypeGuard, cast

from plait.backends.output_schema import schema_problem
from plait.errors import Problem, PromptError, nearest
from plait.json_form import JsonInput, value
from plait.runner.domain.votes import is_decided
from plait.runner.prompts.prompt_names import RESERVED_NAMES, PromptNames
from plait.runner.prompts.prompt_template import ANSWER, TextField, named_texts, parse_names, paths_used
from plait.task import MAX_FILES, MAX_REPEAT, PREVIOUS, SUCCESS, Check, Retry, Task, TaskFile

MOST_HINTS = 20
"""The number of unknown names per graph for which the closest known name is searched."""
_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_OPTION = re.compile(r"--[A-Za-z][\w-]*=")
_VARIABLE = re.compile(r"(?!PLAIT_)[A-Za-z_]\w*", re.ASCII)
_PART_ID = re.compile(r"\.\d+$")
_LONGEST_ID_WITH_PARTS = 58
"""The maximum length of the id of a `for_each` task. Parts append a dot and a number."""


@value
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


def called_id_clashes(tasks: Collection[Task]) -> Iterator[Problem]:
    """Yield a problem for each task whose id begins like those of the tasks that another task's called plan adds."""
    calls = {task.id for task in tasks if task.call is not None}
    for position, task in enumerate(tasks if calls else ()):
        ends = [end for end, letter in enumerate(str(task.id)) if letter == "."]
        if (before := next((task.id[:end] for end in ends if task.id[:end] in calls), None)) is not None:
            message = f"id {task.id!r} is reserved for a task of the plan that {before!r} calls; choose another id"
            yield Problem(message, task.id, "id", None, position)


def part_id_clashes(tasks: Iterable[Task], lists: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each task whose id is the id of a generated part (`<id>.<n>`) of a `for_each` task in
    `lists`.
    """
    if not lists:
        return
    for position, task in enumerate(tasks):
        before, _, number = str(task.id).rpartition(".")
        if before in lists and number.isascii() and number.isdecimal() and number[0] != "0":
            message = f"id {task.id!r} is reserved for a part of {before!r}, which has for_each; choose another id"
            yield Problem(message, task.id, "id", None, position)


def unpaired_continues(tasks: Iterable[Task], lists: Mapping[str, str]) -> Iterator[Problem]:
    """Yield a problem for each task that continues a `for_each` task in `lists` without being paired with it.

    A `for_each` task itself has no conversation; only its parts do.
    """
    for position, task in enumerate(tasks):
        continued = task.continues
        if continued is None or continued not in lists or lists[continued] == task.for_each:
            continue
        message = (
            f"continues {continued!r}, which has for_each: each part of {continued!r} has its own conversation; "
            f"give this task the same for_each, so that each part continues one conversation, "
            f"or use depends_on instead ({{{{ {continued} }}}} is the list of results)"
        )
        yield Problem(message, task.id, "continues", None, position)


NOUNS = {
    "prompt": "prompt",
    "when": "condition",
    "run": "command",
    "cwd": "cwd",
    "env": "environment",
    "check": "check",
    "with": "value",
    "backend": "function",
}
"""The fields with names, as messages call them."""


@value
class _Text:
    """The prompt, the condition, a word of the command or the check, a value for the called plan, or the arguments of a
    new task.
    """

    task: Task
    position: int
    """The position of the task among the new tasks."""
    field: TextField

    @property
    def noun(self) -> str:
        return NOUNS[self.field]

    def problem(self, message: str, line: int | None = None, name: str | None = None) -> Problem:
        return Problem(
            message, self.task.id, field=self.field, index=None, position=self.position, line=line, name=name
        )


class Checks:
    """Validation of the tasks from position `start` on. Positions in problems count from `start`.

    `ids` enters the new tasks into `positions`, and `link` appends their entries to `dependencies`.
    """

    def __init__(
        self,
        start: int,
        *,
        tasks: Sequence[Task],
        inputs: Mapping[str, JsonInput],
        positions: dict[str, int],
        dependencies: list[tuple[int, ...]],
        dependents: Sequence[Sequence[int]],
    ) -> None:
        self._start = start
        self._all_tasks = tasks
        self._tasks = tasks[start:] if start else tasks
        self._inputs = inputs
        self._positions = positions
        self._dependencies = dependencies
        self._dependents = dependents
        self._hints = MOST_HINTS
        self._faulty: set[tuple[int, str]] = set()
        """The fields with a mistake of their own, by the position of their task; what they name is not checked."""
        self._schemas: dict[int, str | None] = {}
        self.named: list[tuple[int, int]] = []
        """Pairs of positions: the prompt of the second task names the first, an indirect upstream task. Filled by
        `prompts`.
        """

    def ids(self) -> list[Problem]:
        """Assign a position to every new task. Return the problems of the ids."""
        problems: list[Problem] = []
        positions, start = self._positions, self._start
        for position, task in enumerate(self._tasks):
            if message := self._id_problem(task.id, task.for_each):
                problems.append(Problem(message, task.id, "id", None, position))
            if task.id in positions:
                other = positions[task.id] - start
                where = f"task {other + 1} of the list has the same id"
                where = where if other >= 0 else "the run has a task with this id"
                problems.append(Problem(f"id {task.id!r} is used twice; {where}", task.id, "id", None, position))
            else:
                positions[task.id] = start + position
        return problems

    def _id_problem(self, task_id: str, for_each: str | None) -> str | None:
        if not isinstance(task_id, str) or not _ID.fullmatch(task_id):  # pyright: ignore[reportUnnecessaryIsInstance]
            written = repr(str(task_id)[:80])
            return f"id {written} must have 1 to 64 letters, digits, '.', '_' or '-', and not begin with '.'"
        if for_each is not None and len(task_id) > _LONGEST_ID_WITH_PARTS:
            room = f"{_LONGEST_ID_WITH_PARTS}, to leave room for the part numbers"
            return f"id {task_id!r} has {len(task_id)} characters; the id of a task with for_each may have {room}"
        if task_id in RESERVED_NAMES:
            return f"id {task_id!r} is reserved for templates; choose another id"
        if self._start and task_id in self._inputs:
            return f"id {task_id!r} is the name of an input; call the task something else"
        return None

    def link(self, *, checked: bool) -> list[Problem]:
        """Resolve names to positions. Return the problems of all fields but ids, aliases, prompts and conditions; of
        `checked` tasks, only the unknown names.
        """
        problems: list[Problem] = []
        lists = [one for one in self._inputs.values() if isinstance(one, list)]  # see `inputs`
        element_ids = {id(element) for elements in lists for element in elements}
        items = () if checked else [task.item for task in self._tasks if id(task.item) not in element_ids]
        items_fit = why_no_json(items) is None
        right: tuple[Any, ...] = ()  # the settings of the last task, without a problem: those of a list are the same
        for position, task in enumerate(self._tasks):
            upstream: dict[int, None] = {}
            for index, name in enumerate(task.upstream):
                other = self._positions.get(name)
                if other is None:
                    problems.append(self._unknown(task, position, index, name))
                else:
                    upstream[other] = None
            if not checked:
                if not items_fit and (reason := why_no_json(task.item)):
                    problems.append(Problem(_NO_JSON.format("item", reason), task.id, "item", None, position))
                settings = _settings(task)
                if not right or not all(map(operator.is_, settings, right)):
                    faults = [*self._field_problems(task)]
                    problems += (Problem(message, task.id, field, None, position) for field, message in faults)
                    self._faulty.update((position, field) for field, _ in faults)
                    # Of a task with `for_each` the id counts, too.
                    right = () if faults or task.for_each is not None else settings
            self._dependencies.append(tuple(upstream))
        return problems

    def _hint(self, name: str, names: Iterable[str]) -> str:
        """Return a hint at the closest known name, for the first mistakes only: the search is slower than the rest of
        the check.
        """
        self._hints -= 1
        return nearest(name, names) if self._hints >= 0 else ""

    def _unknown(self, task: Task, position: int, index: int, name: str) -> Problem:
        message = f"unknown task {name!r}{self._hint(name, self._positions)}"
        if index < len(task.depends_on):
            return Problem(message, task.id, "depends_on", index, position)
        return Problem(message, task.id, "continues" if name == task.continues else "for_each", None, position)

    def _field_problems(self, task: Task) -> Iterator[tuple[str, str]]:
        """Yield the field and the message of each problem of a task by itself, but of its item, and of the backend of
        `continues`.
        """
        for (field, is_right, rule), default, setting in zip(_RULES, _DEFAULTS, _ruled(task), strict=True):
            if setting is not default and not is_right(setting):
                yield field, f"{field} must be {rule}, not {setting!r}"
        for field in ("metadata", "output_schema"):
            value = getattr(task, field)
            if value and (reason := why_no_json(value)):
                yield field, _NO_JSON.format(field, reason)
            elif field == "output_schema" and value and (message := self._schema_problem(value)):
                yield field, message
        unusable = next((name for name in task.files if not isinstance(name, TaskFile) and not _is_word(name)), None)
        if unusable is not None:
            yield "files", f"files must be paths in text, not {unusable!r}"
        if len(task.files) > MAX_FILES:
            yield "files", f"a task may have {MAX_FILES} files, this one has {len(task.files)}; leave some out"
        if task.run:
            yield from (("run", message) for message in _command_problems(task))
        for name, text in task.env.items():
            if not _VARIABLE.fullmatch(name) or not _is_text(text):
                yield "env", f'env must have texts by the names of variables, such as CI: "1", not {name!r}: {text!r}'
        if task.codes != SUCCESS and not task.run:
            yield "codes", "only a command has exit codes; leave `codes` out"
        values = None if task.call is None else [task.call.values, task.call.inputs, task.call.returns]
        if values and (reason := why_no_json(values)):
            yield "call", f"call has to be JSON, to be stored with the task: {reason}"
        if task.check is not None:
            yield from (("check", message) for message in _check_problems(task, task.check))
        has_item = task.item is not None and not _PART_ID.search(task.id)
        if task.for_each is not None and (has_item or task.adds_tasks):
            other = "item" if has_item else "adds_tasks"
            yield "for_each", f"a task with for_each cannot have {other} as well"
        if task.repeat != 1 or (task.vote is not None and not is_decided(task)):
            yield from _repeat_problems(task)
        if task.continues in self._positions and self._all_tasks[self._positions[task.continues]].vote is not None:
            yield "continues", f"{task.continues!r} has no conversation of its own; continue one of its samples"
        if task.join != "all" or task.race:
            yield from _join_problems(task)
        if task.continues is None or task.backend is None or task.continues not in self._positions:
            return
        earlier = self._all_tasks[self._positions[task.continues]].backend
        # If the earlier task names no backend, only the runner can decide: see `backend_names`.
        if earlier is not None and earlier != task.backend:
            yield (
                "backend",
                f"continues {task.continues!r}, which runs on backend {earlier!r}, "
                f"but names backend {task.backend!r}; a conversation stays on its backend, so leave `backend` out",
            )

    def _schema_problem(self, schema: Mapping[str, object]) -> str | None:
        """Return the problem of a schema, which many tasks may share; None if the schema can be used."""
        if id(schema) not in self._schemas:
            problem = schema_problem(schema)
            self._schemas[id(schema)] = None if problem is None else problem.with_place
        return self._schemas[id(schema)]

    def inputs(self) -> Iterator[Problem]:
        """Yield the problems of the graph's inputs."""
        # JSON beyond doubt need not be written to be sure of it: a list may have 100,000 rows of texts.
        unsure = {
            name: [one for one in value if not is_row_of_texts(one)] if isinstance(value, list) else value
            for name, value in self._inputs.items()
        }
        if reason := why_no_json(unsure):
            yield Problem(f"inputs have to be JSON, to be stored with the run: {reason}", None, "inputs")
        for name in self._inputs:
            if name in RESERVED_NAMES or name in self._positions:
                owner = "a reserved template name" if name in RESERVED_NAMES else "the id of a task"
                yield Problem(f"input {name!r} is also {owner}; rename the input", None, "inputs", name=name)

    def prompts(self, has_cycles: bool) -> list[Problem]:
        """Return the problems of the new tasks' prompts and aliases. Cycles make upstream relations undefined: no
        checks then.
        """
        findings = [*self._in_aliases(), *self._in_prompts()]
        if has_cycles:
            return [self._with_line(finding) for finding in findings if isinstance(finding, Problem)]
        graph = self._dependencies, self._dependents
        apart = not_upstream(*graph, (finding.pair for finding in findings if isinstance(finding, _Unless)))
        unrelated = not_upstream(*graph, ((second, first) for first, second in apart))
        problems: list[Problem] = []
        for finding in findings:
            if isinstance(finding, Problem):
                problems.append(self._with_line(finding))
            elif finding.pair in apart:
                is_behind = finding.pair[::-1] not in unrelated
                problems.append(self._with_line(finding.behind if is_behind else finding.problem))
            elif finding.used:
                self.named.append(finding.pair)
        if self.named and any(task.join != "all" for task in self._all_tasks):
            self.named = self._surely_done()
        return problems

    def _surely_done(self) -> list[tuple[int, int]]:
        """Return the pairs in `named` whose first task is always done before the second: behind a task with `join` it
        may not be.
        """
        waits = [task.join == "all" for task in self._all_tasks]
        above = [needed if all_of else () for needed, all_of in zip(self._dependencies, waits, strict=True)]
        below = [[after for after in dependents if waits[after]] for dependents in self._dependents]
        unsure = not_upstream(above, below, self.named)
        return [pair for pair in self.named if pair not in unsure]

    def _with_line(self, problem: Problem) -> Problem:
        """Return the problem with the line of its name in the prompt or the condition."""
        if problem.name is None or problem.position is None or problem.field not in {"prompt", "when"}:
            return problem
        text: str = getattr(self._tasks[problem.position], problem.field)
        return replace(problem, line=line_of(problem.name, text))

    def _in_prompts(self) -> Iterator[Problem | _Unless]:
        for position, task in enumerate(self._tasks):
            for field, text, names, mistakes in named_texts(task, task.check, task.call):
                is_items = field == "prompt" and task.item is not None and names.names == _ITEM
                if is_items and not (names.results or names.inputs or mistakes):
                    continue  # as most prompts of parts
                if (position, field) in self._faulty:
                    continue
                yield from self._text_problems(_Text(task, position, field), text, names, mistakes)
            for name in task.arguments:
                yield from self._name_problem(_Text(task, position, "backend"), name)

    def _text_problems(
        self, text: _Text, words: str, names: PromptNames, mistakes: Sequence[PromptError]
    ) -> Iterator[Problem | _Unless]:
        for mistake in mistakes:
            yield text.problem(str(mistake), mistake.line)
        for name in sorted(names.names):
            yield from self._name_problem(text, name)
        for name in sorted(names.results):
            if name not in text.task.aliases:
                yield from self._task_name_problem(text, name)
        inputs = text.task.inputs or self._inputs
        for name in sorted(names.inputs - inputs.keys()):
            yield text.problem(f"unknown input {name!r}{self._hint(name, inputs)}")
        task_of = answers_for(text.task, inputs, self._task, text.task if text.field == "check" else None)
        if any(map(task_of, (ANSWER, *names.names, *names.results))):
            for path, message in missing_fields(words, task_of):
                yield text.problem(f"{uses(path, text.noun)}, {message}", name=path)

    def _task(self, name: str) -> Task | None:
        position = self._positions.get(name)
        return None if position is None else self._all_tasks[position]

    def _in_aliases(self) -> Iterator[Problem | _Unless]:
        for position, task in enumerate(self._tasks):
            if task.aliases:
                texts = [names for _, _, names, _ in named_texts(task, task.check, task.call)]
                texts.append(PromptNames(frozenset(task.arguments)))
                all_results = any("results" in names.names and not names.results for names in texts)
                for alias, target in task.aliases.items():
                    used = all_results or any(alias in names.names or alias in names.results for names in texts)
                    yield from self._alias_problems(position, alias, target, used)

    def _alias_problems(self, position: int, alias: str, target: object, used: bool) -> Iterator[Problem | _Unless]:
        def problem(message: str, lacks_dependency: bool = False) -> Problem:
            message = f"alias {alias!r} {message}"
            return Problem(
                message, self._tasks[position].id, "aliases", None, position, lacks_dependency=lacks_dependency
            )

        if not isinstance(target, str | list | tuple):
            yield problem(f"must be the id of a task or a list of ids, not {target!r}")
            return
        for name in cast("Sequence[object]", (target,) if isinstance(target, str) else target):
            if not isinstance(name, str) or name not in self._positions:
                hint = self._hint(name, self._positions) if isinstance(name, str) else ""
                yield problem(f"refers to the unknown task {name!r}{hint}")
                continue
            pair = self._positions[name], self._start + position
            if pair[0] not in self._dependencies[pair[1]]:
                apart = problem(f"refers to {name!r}, which is not upstream{ADD_IT}", lacks_dependency=True)
                behind = problem(f"refers to {name!r}, which depends on this task; {_REVERSE}")
                yield _Unless(pair, apart, behind, used)

    def _name_problem(self, text: _Text, name: str) -> Iterator[Problem | _Unless]:
        task = text.task
        if name in task.aliases or name in (task.inputs or self._inputs) or name in {"inputs", "results"}:
            return
        if name == PREVIOUS and text.field == "with" and task.call is not None and task.call.is_loop:
            return
        if name == "item":
            if task.item is None and task.for_each is None:
                subject = f"{uses(name, text.noun)}, which" if text.field == "backend" else "{{ item }}"
                yield text.problem(f"{subject} has a value only in a task with for_each")
            return
        yield from self._task_name_problem(text, name)

    def _task_name_problem(self, text: _Text, name: str) -> Iterator[Problem | _Unless]:
        task = text.task
        if name not in self._positions:
            names = [*task.upstream, *task.aliases, *(task.inputs or self._inputs), "results", "inputs"]
            names += [ANSWER] if text.field == "check" else []
            message = f"{uses(name, text.noun)}, which is neither a task nor an input{self._hint(name, names)}"
            yield text.problem(message, name=name)
            return
        if name == task.id:
            yield text.problem(uses_itself(name, text.noun), name=name)
            return
        pair = self._positions[name], self._start + text.position
        if pair[0] not in self._dependencies[pair[1]]:
            message = f"{uses(name, text.noun)}, but {name!r} depends on this task; {_REVERSE}"
            behind = text.problem(message, name=name)
            apart = replace(behind, message=is_not_upstream(name, text.noun), lacks_dependency=True)
            yield _Unless(pair, apart, behind)


ADD_IT = "; add it to depends_on"
_REVERSE = "reverse one of the two dependencies"


def uses(name: str, noun: str) -> str:
    """Return the words for a text, or a function, called `noun`, that uses `name`."""
    return f"the {noun} has the parameter {name!r}" if noun == "function" else f"the {noun} uses {{{{ {name} }}}}"


def uses_itself(name: str, noun: str = "prompt") -> str:
    """Return the message for a text, called `noun`, that uses the result of its own task."""
    own = "the result of its own task, which does not exist before the task ends"
    return f"{uses(name, noun)}, {own}; name another task"


def is_not_upstream(name: str, noun: str = "prompt") -> str:
    """Return the message for a prompt or a condition that uses the result of a task that need not be done before."""
    return f"{uses(name, noun)}, but {name!r} is not upstream{ADD_IT}"


TaskOf: TypeAlias = Callable[[str], Task | None]
"""The task whose answer a name stands for; None for a name that stands for anything else."""


def answers_for(task: Task, inputs: Collection[str], task_of: TaskOf, answer: Task | None = None) -> TaskOf:
    """Return the tasks for whose answers names in a text of `task` stand, in a run with these `inputs`. `task_of` finds
    a task by its id, and `answer` is the task of the checked answer.
    """

    def found(name: str) -> Task | None:
        if answer is not None and name == ANSWER:
            return answer
        target = task.aliases.get(name, None if name in (task.inputs or inputs) else name)
        return task_of(target) if isinstance(target, str) else None

    return found


def missing_fields(text: str, task_of: TaskOf) -> Iterator[tuple[str, str]]:
    """Yield the fields that a prompt or a condition reads, and that the answer can never have, each with the end of the
    sentence. `task_of` returns the task for a name, if there is one.
    """
    for path, (name, *keys) in paths_used(text):
        task = task_of(str(name))
        if task is None or not keys or task.gathers or task.adds_tasks:
            continue
        there, key = _lacks_field(task, keys)
        if key is not None:
            hint = nearest(key, there) or f"; it has {', '.join(there)}"
            answer = "answer" if name == ANSWER else f"answer of {name!r}"
            yield path, f"but the {answer} has no field {key!r}{hint}"


def answer_schema(task: Task) -> Any:
    """Return the schema of the answer of `task`, of a command that of its result; None without."""
    schema = task.output_schema or (task.check.output_schema if task.check else None)
    if not task.run:
        return schema
    code = {} if task.codes == "any" else {"enum": list(task.codes)}
    return {"properties": {"code": code, "stdout": {}, "stderr": {}, "data": schema or {}}}


_OPEN = frozenset({"$ref", "allOf", "anyOf", "oneOf", "if", "patternProperties", "additionalProperties"})
"""The keywords of a schema by which an object may have other fields than its `properties`."""


def _lacks_field(task: Task, keys: Sequence[str | int]) -> tuple[Sequence[str], str | None]:
    """Return the fields of the answer and the first of `keys` that is none of them; None if all may be there."""
    schema = answer_schema(task)
    for place, key in enumerate(keys):
        if not isinstance(schema, Mapping):
            break
        fields = cast("Mapping[str, Any]", schema)
        if isinstance(key, int):
            schema = fields.get("items")
            continue
        properties = fields.get("properties")
        if not isinstance(properties, Mapping) or any(fields.get(one, False) is not False for one in _OPEN):
            break
        if key == "data" and place == 0 and key not in properties:
            continue  # the name of the whole answer: see `prompt_names.structured`
        if key not in properties:
            return [*cast("Mapping[str, Any]", properties)], key
        schema = cast("Mapping[str, Any]", properties)[key]
    return (), None


def line_of(name: str, text: str) -> int | None:
    """Return the line with the first use of `name` in the prompt or the condition `text`, from 1."""
    use = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)
    return text.count("\n", 0, use.start()) + 1 if use else None


def _word_problems(run: Sequence[str]) -> Iterator[str]:
    """Yield the problems of the words of a command. A value may begin with a dash, or be read as code, unless `--` or
    the name of an option stands before.
    """
    if not all(map(_is_text, run)) or not run[0].strip():
        yield f"run must be a list of texts, the program first, not {list(run)!r}"
        return
    for place, word in enumerate(run):
        names, mistakes = parse_names(word)
        if not (names.names or mistakes):
            continue
        if place == 0:
            yield f"the program cannot come from a name, as in {word!r}; write its name"
        elif "--" not in run[1:place] and not _OPTION.match(word):
            yield (
                f"a value could be read as an option, or as code, in {word!r}; put the word behind the word '--', "
                "write --option={{ name }}, or put the value into the prompt, which is the standard input"
            )


def _command_problems(task: Task) -> Iterator[str]:
    yield from _word_problems(task.run)
    if task.check is not None:
        yield "a command passes by its exit code; leave `check` out, or run it as a task of its own"
    if task.files:
        yield "a command opens its files itself; name them in `run`, and leave `files` out"
    if task.continues is not None:
        yield f"a command has no conversation to continue; name {task.continues!r} in depends_on"


def _check_problems(task: Task, check: Check) -> Iterator[str]:
    if check.run:
        yield from _word_problems(check.run)
    if check.output_schema is not None and (reason := why_no_json(check.output_schema)):
        yield f"the output_schema of a check has to be JSON: {reason}"
    elif check.output_schema is not None and (problem := schema_problem(check.output_schema)) is not None:
        yield problem.with_place
    if check.output_schema is not None and task.output_schema is not None:
        yield "the answer has an output_schema already; leave out that of the task or that of the check"
    if task.for_each is None and task.adds_tasks:
        yield "a task that adds tasks has no check; its tasks are checked when they are added"


def _repeat_problems(task: Task) -> Iterator[tuple[str, str]]:
    if task.repeat == 1:
        yield "vote", "a vote decides between samples; write `repeat` beside it, or leave `vote` out"
    elif not isinstance(task.repeat, int) or not 1 < task.repeat <= MAX_REPEAT:  # pyright: ignore[reportUnnecessaryIsInstance]
        yield "repeat", f"repeat must be a number of samples from 1 to {MAX_REPEAT}, not {task.repeat!r}"
    elif task.for_each is not None or task.adds_tasks:
        key = "adds_tasks" if task.adds_tasks else "for_each over the list of a task"
        yield "repeat", f"a task with {key} cannot have repeat as well"
    else:
        yield "repeat", "a task that is added during a run has no samples; add several tasks"


def _join_problems(task: Task) -> Iterator[tuple[str, str]]:
    if task.race and task.join != "any":
        yield "race", "a race is won by the first dependency that completes; write `join: any` beside it"
    if task.join == "all":
        return
    if not task.depends_on:
        yield "join", f"nothing is there to be joined with {task.join!r}; name tasks in depends_on"
    if task.for_each is not None:
        message = f"a task over the list of {task.for_each!r} starts with the list; leave `join` out"
        yield "join", f"{message}, and join in a task of its own before or behind"
    if task.join == "any" and task.call is not None:
        yield "join", "a called plan begins with all its values; leave `join` out, and join in a task of its own before"
    if task.join == "any" and task.continues is not None:
        message = f"the conversation of {task.continues!r} might not be there yet"
        yield "join", f"{message}; leave `join` out, or name {task.continues!r} in depends_on in place of continues"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def _is_text(text: object) -> bool:
    try:
        return isinstance(text, str) and (text.isascii() or bool(text.encode()))
    except UnicodeEncodeError:
        return False


def _is_word(text: object) -> bool:
    return _is_text(text) and bool(text)


def _is_age(value: Any) -> bool:
    return isinstance(value, bool) or (_is_number(value) and value > 0)


_RULES: Sequence[tuple[str, Callable[[Any], bool], str]] = (
    ("prompt", _is_text, "text without lone surrogates"),
    ("when", lambda value: value is None or _is_text(value), "a condition in text"),
    ("model", lambda value: value is None or _is_word(value), "a text"),
    ("cwd", lambda value: value is None or _is_word(value), "the path of a folder"),
    ("system", lambda value: value is None or _is_word(value), "a text"),
    ("temperature", lambda value: value is None or (_is_number(value) and value >= 0), "a number from 0 up"),
    ("timeout", lambda value: value is None or (_is_number(value) and value > 0), "more than 0 seconds"),
    ("max_cost", lambda value: value is None or (_is_number(value) and value >= 0), "US dollars from 0 up"),
    ("weight", lambda value: _is_number(value) and value >= 0, "a number from 0 up"),
    ("retry", lambda value: isinstance(value, Retry), "a Retry or a number of retries from 0 up"),
    ("cache", _is_age, "true, false or a number of seconds above 0"),
    ("join", lambda value: value in {"all", "any", "done"}, "all, any or done"),
)
"""What the value of a field must be: the test, and the words for it."""
_ruled = attrgetter(*(name for name, _, _ in _RULES))
_ITEM = frozenset({"item"})
_NO_JSON = "{} has to be JSON, to be stored with the task: {}"
_OWN = frozenset({"id", "item", "depends_on", "aliases", "arguments", "inputs"})
_settings = attrgetter(*(one.name for one in fields(Task) if one.name not in _OWN))
"""What `Checks.link` looks at, beside what is each task's own."""
_DEFAULTS = [{one.name: one.default for one in fields(Task)}[name] for name, _, _ in _RULES]


_encode = json.JSONEncoder(allow_nan=False).encode
"""Made once: `json.dumps` makes an encoder for each value."""


def is_row_of_texts(value: JsonInput) -> TypeGuard[dict[str, str]]:
    """Return whether `value` is a row of a file, such as a CSV, all of whose values are texts: JSON beyond doubt."""
    return isinstance(value, dict) and {*map(type, chain.from_iterable(value.items()))} == {str}


def why_no_json(value: object) -> str | None:
    """Return the reason why `value` cannot be stored as JSON; None if it can."""
    try:
        _encode(value)
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
