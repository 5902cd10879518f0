"""Conditions of a plan, tried before the run on every answer that the schemas allow: which branch is taken for which
answer, and which conditions can never be true. Pure.

An enum, a constant, true and false, and a few whole numbers are tried one by one. Of any other field each comparison
may go either way. So more is taken for possible than is, and a condition that is true of nothing can never be true in a
run, which evaluates it in the same way. A condition that computes, calls or filters is not tried, nor is one with too
many combinations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, takewhile
from typing import Any, TypeAlias, cast

from plait.errors import PromptError, nearest
from plait.json_form import JsonInput, text_of, value
from plait.runner.domain.dag import DAG, group_of
from plait.runner.domain.task_checks import TaskOf, answer_schema, answers_for
from plait.runner.plan.plan_positions import Source, spell
from plait.runner.plan.plan_tasks import called_tasks
from plait.runner.prompts.prompt_names import NoResult, structured
from plait.runner.prompts.prompt_template import compared, is_true
from plait.task import FailureMode, Task

MOST_TRIES = 500
"""The combinations on which a condition is tried."""
MOST_TRIES_OF_PLAN = 20_000
"""The same for all conditions of a plan: a second."""
_MOST_SHOWN = 6
_MOST_NUMBERS = 100
_MOST_CASES = 20  # with more, a branch is shown by its condition
_ANY: Any = object()
"""Stands for the values of a field that are not known."""
_Choose: TypeAlias = Callable[[int], int]
_FEW: Mapping[str, Sequence[Any]] = {"boolean": [True, False], "null": [None]}


class _Unknown(NoResult):
    """A value that is known during the run alone. Each comparison with it may go either way, as chosen."""

    __slots__ = ("_choose",)
    _choose: _Choose

    def __new__(cls, choose: _Choose) -> _Unknown:
        made = super().__new__(cls, ("", "true")[choose(2)])
        made._choose = choose
        return made

    def __bool__(self) -> bool:
        return bool(self._choose(2))

    def __eq__(self, _other: object) -> bool:
        return bool(self._choose(2))

    __contains__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = NoResult.__hash__


@value
class Played:
    """A condition that was tried on the answers that the schemas allow."""

    fields: Mapping[str, Sequence[Any]]
    """The values of each field that is known, as the condition names it."""
    is_known: bool
    """True if all fields are known, so that each of their values has one outcome."""
    true: Sequence[Mapping[str, JsonInput]]
    """The values for which the condition is true, or may be."""
    error: str | None
    """Why no try had an outcome; None if one had."""
    literals: Sequence[object]
    """The values that the condition compares with."""

    def mistake(self) -> str | None:
        """Return why the condition can never be true, with the remedy, as the end of a sentence; None if it can."""
        if self.true:
            return None
        if self.error is not None:
            return f"it fails with every answer: {self.error}"
        allowed = " and ".join(f"{name} is {_listed(values)}" for name, values in self.fields.items())
        return f"{allowed}{self._remedy()}"

    def _remedy(self) -> str:
        possible = [one for values in self.fields.values() for one in values]
        for literal in self.literals:
            if any(type(one) is type(literal) and one == literal for one in possible):
                continue
            if not isinstance(literal, str):
                if text_of(literal) in possible:
                    return f"; write '{text_of(literal)}' in quotes"
            elif literal in {text_of(one) for one in possible if not isinstance(one, str)}:
                return f"; write {literal} without quotes"
            elif hint := nearest(literal, [one for one in possible if isinstance(one, str)]):
                return hint
        code = next((name for name, values in self.fields.items() if name.endswith(".code") and values == [0]), None)
        if code is not None:
            return f"; a code other than 0 fails {code.removesuffix('.code')!r}: add `codes: any` to it"
        return "; none of that fulfils it: correct the condition, or leave it out"


def _listed(values: Sequence[Any]) -> str:
    words = [as_literal(one) for one in values[:_MOST_SHOWN]]
    if left := len(values) - len(words):
        words.append(f"{left:,} others")
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def as_literal(one: Any) -> str:
    """Return the value of a field as a condition has it."""
    return repr(one) if isinstance(one, str) else "none" if one is None else text_of(one)


class Play:
    """Tries the conditions of a plan, within a number of tries."""

    def __init__(self) -> None:
        self._left = MOST_TRIES_OF_PLAN

    def of(self, condition: str, task_of: TaskOf, may_lack: Callable[[Task], bool] = lambda _: False) -> Played | None:
        """Return how the condition turned out; None if nothing is known. `may_lack` tells the tasks that may have no
        result when the condition is evaluated.
        """
        read = compared(condition)
        if read is None or ["results"] in read[0]:
            return None
        fields, lacking = dict[tuple[str, ...], Sequence[Any]](), dict[str, None]()
        for path in read[0]:
            name, *keys = path[1:] if path[0] == "results" else path
            if (task := task_of(str(name))) is None:
                fields[(str(name),)] = [_ANY]
                continue
            lacking |= {str(name): None} if may_lack(task) else {}
            where, values = _values_of(task, keys)
            fields[(str(name), *where)] = values
        names = {path: spell(path) for path, values in fields.items() if _ANY not in values}
        if not names or any(one[: len(path)] == path for path in fields for one in fields if one != path):
            return None
        true, errors = list[Mapping[str, JsonInput]](), list[str]()
        tries = 0
        for choose in _choices():
            if tries == MOST_TRIES or not self._left:
                return None
            tries, self._left = tries + 1, self._left - 1
            chosen = {path: values[choose(len(values))] for path, values in fields.items()}
            answers = _answers(chosen, [name for name in lacking if choose(2)], choose)
            taken = {name: chosen[path] for path, name in names.items()}
            try:
                if is_true(condition, answers) and taken not in true:
                    true.append(taken)
            except PromptError as error:
                errors.append(str(error))
        return Played(
            {name: fields[path] for path, name in names.items()},
            len(names) == len(fields),
            true,
            errors[0] if len(errors) == tries else None,
            read[1],
        )

    def report(self, dag: DAG, origins: Sequence[tuple[int, bool]], source: Source) -> None:
        """Report each condition of the tasks that can never be true. `origins` as in `PlanTasks`."""
        joins = any(task.join != "all" for task in dag.tasks)
        for task, (index, is_first) in zip(dag.tasks, origins, strict=True):
            passes = task.check.passes if task.check else None
            for condition, path in ((task.when, ("when",)), (passes, ("check", "passes"))):
                if condition is None or not is_first:
                    continue
                own = task if path[0] == "check" else None

                def may_lack(other: Task, own: Task | None = own) -> bool:
                    is_sure = other.when is None and other.failure_mode is FailureMode.HARD
                    return other is not own and (joins or not is_sure)

                played = self.of(condition, _answers_for(task, dag, own), may_lack)
                if played is not None and (reason := played.mistake()):
                    message = f"{'no answer passes' if own else 'this condition is never true'}: {reason}"
                    source.complain(("tasks", index, *path), message)

    def branches(self, dag: DAG, prefix: str = "") -> list[dict[str, Any]]:
        """Return which tasks with a condition run for which values (`if`, `tasks`), those of called plans too; by their
        condition if it has more than a few values.
        """
        rows, groups = list[dict[str, Any]](), dict[tuple[str, ...], dict[str, Played]]()
        # Of a group, the first part stands for all.
        tasks = {group_of(task.id, task.item) or task.id: task for task in reversed(dag.tasks)}
        tasks = dict(reversed(tasks.items()))
        texts = {name: task.when for name, task in tasks.items() if task.when is not None}
        for name, text in texts.items():
            played = self.of(text, _answers_for(tasks[name], dag))
            if played is None or not played.is_known or math.prod(map(len, played.fields.values())) > _MOST_CASES:
                rows.append({"if": text, "tasks": [prefix + name]})
            else:
                groups.setdefault(tuple(sorted(played.fields)), {})[name] = played
        cases: list[dict[str, Any]] = []
        for fields, group in groups.items():
            owners = {field.partition(".")[0] for field in fields}
            others = [text for name, text in texts.items() if name not in group]
            # What none of several conditions takes is worth a line, unless another one may take it.
            is_choice = len(group) > 1 and not any(owner in text for owner in owners for text in others)
            values = next(iter(group.values())).fields
            for chosen in product(*(values[field] for field in fields)):
                case = dict(zip(fields, chosen, strict=True))
                taken = [prefix + name for name, played in group.items() if case in played.true]
                if taken or is_choice:
                    cases.append({"if": {prefix + field: one for field, one in case.items()}, "tasks": taken})
        for name, task in tasks.items():
            if (call := task.call) is not None:
                inputs = {**call.inputs, **dict.fromkeys(call.values)}
                rows += self.branches(DAG(called_tasks(call, inputs), inputs=inputs), f"{prefix}{name}.")
        return cases + rows


def _answers_for(task: Task, dag: DAG, answer: Task | None = None) -> TaskOf:
    return answers_for(task, dag.inputs, lambda name: dag[name] if name in dag else None, answer)  # noqa: SIM401


def _values_of(task: Task, keys: Sequence[str | int]) -> tuple[list[str], Sequence[Any]]:
    """Return the field of the answer that the keys name, as far as they name no element of a list, and its values."""
    schema, names = answer_schema(task), list(map(str, takewhile(lambda key: isinstance(key, str), keys)))
    is_open = len(names) < len(keys) or task.adds_tasks or (task.gathers and task.vote not in {"majority", "best"})
    if names[:1] == ["data"] and "data" not in _properties(schema):
        del names[0]
    for name in names:
        schema = _properties(schema).get(name)
    values = _allowed(schema)
    # The value of an answer that is null is its text.
    return names, [_ANY] if is_open or (None in values and not names) else values


def _rules(schema: object) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}


def _properties(schema: object) -> Mapping[str, Any]:
    return _rules(_rules(schema).get("properties"))


def _allowed(schema: object) -> Sequence[Any]:
    """Return the values that a schema allows, and never fewer."""
    rules = _rules(schema)
    if "const" in rules:
        return [rules["const"]]
    if rules.get("enum"):
        return cast("list[Any]", rules["enum"])
    if any_of := cast("list[Any]", rules.get("anyOf") or rules.get("oneOf") or []):
        return [one for part in any_of for one in _allowed(part)]
    low, high = rules.get("minimum"), rules.get("maximum")
    few = _FEW
    if isinstance(low, int) and isinstance(high, int) and 0 <= high - low <= _MOST_NUMBERS:
        few = {**_FEW, "integer": range(low, high + 1)}
    kinds = cast("list[str]", rules["type"] if isinstance(rules.get("type"), list) else [rules.get("type")])
    return [one for kind in kinds for one in few.get(kind, [_ANY])]


def _answers(chosen: Mapping[tuple[str, ...], Any], lacking: Sequence[str], choose: _Choose) -> dict[str, JsonInput]:
    """Return the values of the names in a condition: answers with the chosen fields."""
    values: dict[str, Any] = {}
    for (*owners, last), each in chosen.items():
        inside = values
        for owner in owners:
            inside = inside.setdefault(owner, {})
        inside[last] = _Unknown(choose) if each is _ANY else each
    values = {name: NoResult() if name in lacking else structured(each) for name, each in values.items()}
    return {**values, "results": values}


def _choices() -> Iterator[_Choose]:
    """Yield, for each try, a function that chooses one of so many possibilities: over all tries, each in turn."""
    made: list[tuple[int, int]] = []
    place = 0

    def choose(count: int) -> int:
        nonlocal place
        if place == len(made):
            made.append((0, count))
        place += 1
        return made[place - 1][0]

    while True:
        place = 0
        yield choose
        while made and made[-1][0] + 1 >= made[-1][1]:
            made.pop()
        if not made:
            return
        made[-1] = made[-1][0] + 1, made[-1][1]
