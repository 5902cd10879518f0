"""Conditions of a plan, tried before the run on every answer that the schemas allow: which branch is taken for which
answer, and which conditions can never be true. Pure.

A field with an enum, a constant or true and false has few values. Of a number, those around the literals of the
condition stand for all. Of any other field each comparison may go either way. So more is taken for possible than is,
and a condition that is true of nothing can never be true in a run, which evaluates it in the same way. A condition that
computes, calls or filters is not tried, nor is one with too many combinations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any, TypeAlias, cast

from plait.errors import PromptError, nearest
from plait.json_form import JsonInput, text_of, value
from plait.runner.domain.dag import DAG, group_of
from plait.runner.plan.plan_positions import Source, spell
from plait.runner.plan.plan_tasks import called_tasks
from plait.runner.prompts.prompt_names import NoResult, structured
from plait.runner.prompts.prompt_template import ANSWER, compared, is_true
from plait.task import FailureMode, GrowthLimits, Task

MOST_TRIES = 500
"""The combinations on which a condition is tried."""
MOST_TRIES_OF_PLAN = 20_000
"""The same for all conditions of a plan: a second."""
_MOST_SHOWN = 6
_GREATEST = 2**53

TaskOf: TypeAlias = Callable[[str], Task | None]
"""The task whose answer a name stands for; None for a name that stands for anything else."""


@value
class _Numbers:
    """The numbers of a field; None for no bound."""

    low: float | None
    high: float | None
    whole: bool


_ANY: Any = object()
"""Stands for the values of a field that are not known."""
_Choose: TypeAlias = Callable[[int], int]


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

    def __contains__(self, _part: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        return bool(self._choose(2))

    def __eq__(self, _other: object) -> bool:
        return bool(self._choose(2))

    __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__
    __hash__ = NoResult.__hash__


@value
class Played:
    """A condition that was tried on the answers that the schemas allow."""

    fields: Mapping[str, Sequence[Any]]
    """The values of each field that is known, as the condition names it."""
    is_known: bool
    """True if all fields have few values, so that each has one outcome."""
    true: Sequence[Mapping[str, JsonInput]]
    """The values for which the condition is true, or may be."""
    error: str | None
    """Why no try had an outcome; None if one had."""
    literals: Sequence[object]
    commands: Sequence[str]
    """The commands whose exit code the condition reads, and that complete with one code alone."""

    def mistake(self) -> str | None:
        """Return why the condition can never be true, with the remedy, as the end of a sentence; None if it can."""
        if self.true:
            return None
        if self.error is not None:
            return f"it fails with every answer: {self.error}"
        allowed = " and ".join(f"{name} is {_listed(values)}" for name, values in self.fields.items())
        return f"{allowed}{self._remedy()}"

    def _remedy(self) -> str:
        known = [one for values in self.fields.values() for one in values if not isinstance(one, _Numbers)]
        texts = [one for one in known if isinstance(one, str)]
        for literal in self.literals:
            if any(one is literal or (type(one) is type(literal) and one == literal) for one in known):
                continue
            same = [one for one in known if isinstance(one, str) != isinstance(literal, str)]
            if any(text_of(one) == text_of(literal) for one in same):
                return (
                    f"; write {literal} without quotes"
                    if isinstance(literal, str)
                    else f"; write '{literal}' in quotes"
                )
            if isinstance(literal, str) and (hint := nearest(literal, texts)):
                return hint
        if self.commands:
            return f"; a code other than 0 fails {self.commands[0]!r}: add `codes: any` to it"
        return "; none of that fulfils it: correct the condition, or leave it out"


def _listed(values: Sequence[Any]) -> str:
    words = list(map(as_literal, values[:_MOST_SHOWN]))
    if values[_MOST_SHOWN:]:
        return f"{', '.join(words)} or {len(values) - _MOST_SHOWN:,} others"
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def as_literal(one: Any) -> str:
    """Return the value of a field as a condition has it."""
    if isinstance(one, _Numbers):
        kind = "a whole number" if one.whole else "a number"
        bounds = [f"{word} {bound}" for word, bound in (("from", one.low), ("to", one.high)) if bound is not None]
        return " ".join([kind, *bounds])
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
        fields, lacking, commands = dict[tuple[str, ...], Sequence[Any]](), list[str](), list[str]()
        for path in read[0]:
            name, *keys = path[1:] if path[0] == "results" else path
            task = task_of(str(name))
            if task is None:
                fields[(str(name),)] = [_ANY]
                continue
            if name not in lacking and may_lack(task):
                lacking.append(str(name))
            where, values = _values_of(task, keys)
            fields[(str(name), *where)] = values
            commands += [task.id] if values == [0] and where == ["code"] and task.run else []
        known = {path: values for path, values in fields.items() if _ANY not in values}
        if not known or any(one[: len(path)] == path for path in fields for one in fields if one != path):
            return None
        tried, spelled = _with_numbers(fields, read[1]), {path: spell(path) for path in known}
        true, errors, has_outcome = list[Mapping[str, JsonInput]](), list[str](), False
        for number, choose in enumerate(_choices()):
            if number >= MOST_TRIES or self._left <= 0:
                return None
            self._left -= 1
            chosen = {path: values[choose(len(values))] for path, values in tried.items()}
            answers = _answers(chosen, [name for name in lacking if choose(2)], choose)
            try:
                outcome = is_true(condition, answers)
            except PromptError as error:
                errors.append(str(error))
                continue
            has_outcome = True
            taken = {spelled[path]: chosen[path] for path in known}
            if outcome and taken not in true:
                true.append(taken)
        is_known = all(_ANY not in values and not _is_open(values) for values in fields.values())
        named = {spelled[path]: values for path, values in known.items()}
        return Played(named, is_known, true, None if has_outcome else errors[0], read[1], commands)

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

                played = self.of(condition, answers_for(task, dag, own), may_lack)
                if played is not None and (reason := played.mistake()):
                    message = f"{'no answer passes' if own else 'this condition is never true'}: {reason}"
                    source.complain(("tasks", index, *path), message)

    def branches(self, dag: DAG, prefix: str = "") -> list[dict[str, Any]]:
        """Return which tasks with a condition run for which values (`if`, `tasks`), those of called plans too; by their
        condition if it has more than a few values.
        """
        rows, open_, groups = list[dict[str, Any]](), list[dict[str, Any]](), dict[tuple[str, ...], dict[str, Played]]()
        firsts = {group_of(task.id, task.item) or task.id: task for task in reversed(dag.tasks)}
        texts = {name: task.when for name, task in reversed(firsts.items()) if task.when is not None}
        for name, text in texts.items():
            played = self.of(text, answers_for(firsts[name], dag))
            if played is None or not played.is_known:
                open_.append({"if": text, "tasks": [prefix + name]})
            else:
                groups.setdefault(tuple(sorted(played.fields)), {})[name] = played
        for fields, tasks in groups.items():
            owners = {re.split(r"[.\[]", field)[0] for field in fields}
            others = [text for name, text in texts.items() if name not in tasks]
            is_choice = len(tasks) > 1 and not any(owner in text for owner in owners for text in others)
            played = next(iter(tasks.values()))
            for values in product(*(played.fields[field] for field in fields)):
                case = dict(zip(fields, values, strict=True))
                spelled = {prefix + field: one for field, one in case.items()}
                taken = [prefix + name for name, one in tasks.items() if case in one.true]
                rows += [{"if": spelled, "tasks": taken}] if taken or is_choice else []
        rows += open_
        for name, task in reversed(firsts.items()):
            if (call := task.call) is not None:
                given = cast("dict[str, JsonInput]", call.plan.get("inputs", {})) | dict.fromkeys(call.values)
                rows += self.branches(called_tasks(call, given, GrowthLimits()), f"{prefix}{name}.")
        return rows


def answers_for(task: Task, dag: DAG, answer: Task | None = None) -> TaskOf:
    """Return the tasks for whose answers names in a condition of `task` stand; `answer` is that for its own name."""

    def task_of(name: str) -> Task | None:
        if answer is not None and name == ANSWER:
            return answer
        target = task.aliases.get(name, None if name in (task.inputs or dag.inputs) else name)
        return dag[target] if isinstance(target, str) and target in dag else None

    return task_of


def _values_of(task: Task, keys: Sequence[str | int]) -> tuple[list[str], Sequence[Any]]:
    """Return the field of the answer that the keys name, and its values."""
    names = [key for key in keys if isinstance(key, str)]
    if len(names) < len(keys):  # an element of a list
        return names[: next(place for place, key in enumerate(keys) if isinstance(key, int))], [_ANY]
    if task.adds_tasks or (task.gathers and task.vote not in {"majority", "best"}):
        return names, [_ANY]
    schema = task.output_schema or (task.check.output_schema if task.check else None)
    inner = names
    if task.run:
        if names[:1] == ["code"]:
            return names, [_Numbers(None, None, whole=True)] if task.codes == "any" else list(task.codes)
        if names[:1] != ["data"]:
            return names, [_ANY]
        inner = names[1:]
    elif names[:1] == ["data"] and "data" not in _properties(schema):
        names = inner = names[1:]
    for name in inner:
        schema = _properties(schema).get(name)
    values = _allowed(schema)
    # The value of an answer that is null is its text.
    return names, [_ANY] if None in values and not names else values


def _properties(schema: object) -> Mapping[str, Any]:
    properties = cast("Mapping[str, Any]", schema).get("properties") if isinstance(schema, Mapping) else None
    return cast("Mapping[str, Any]", properties) if isinstance(properties, Mapping) else {}


_FEW: Mapping[str, Sequence[Any]] = {"boolean": [True, False], "null": [None]}


def _allowed(schema: object) -> Sequence[Any]:
    """Return the values that a schema allows, and never fewer."""
    if not isinstance(schema, Mapping):
        return [_ANY]
    rules = cast("Mapping[str, Any]", schema)
    if "const" in rules:
        return [rules["const"]]
    if rules.get("enum"):
        return cast("list[Any]", rules["enum"])
    if any_of := cast("list[Any]", rules.get("anyOf") or rules.get("oneOf") or []):
        return [one for part in any_of for one in _allowed(part)]
    kinds = rules.get("type", "any")
    values: list[Any] = []
    for kind in cast("list[str]", [kinds] if isinstance(kinds, str) else kinds):
        if kind in {"integer", "number"}:
            low, high = (
                next((rules[key] for key in keys if _is_number(rules.get(key))), None)
                for keys in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum"))
            )
            values.append(_Numbers(low, high, whole=kind == "integer"))
        else:
            values += _FEW.get(kind, [_ANY])
    return values


def _is_number(one: object) -> bool:
    return isinstance(one, int | float) and not isinstance(one, bool) and abs(one) < _GREATEST


def _is_open(values: Iterable[object]) -> bool:
    return any(isinstance(one, _Numbers) for one in values)


def _with_numbers(
    fields: Mapping[tuple[str, ...], Sequence[Any]], literals: Sequence[object]
) -> dict[tuple[str, ...], Sequence[Any]]:
    """Return the fields with numbers to try. With two that have bounds alone, or with other literals, any may do."""
    given = [one for values in (literals, *fields.values()) for one in values]
    numbers = [one for one in given if isinstance(one, int | float) and not isinstance(one, bool)]
    is_single = sum(map(_is_open, fields.values())) == 1 and all(map(_is_number, numbers))
    return {
        path: [
            one
            for each in values
            for one in ((_around(numbers, each) if is_single else [_ANY]) if isinstance(each, _Numbers) else [each])
        ]
        for path, values in fields.items()
    }


def _around(numbers: Sequence[float], field: _Numbers) -> list[Any]:
    """Return numbers of the field that compare with `numbers` in each way in which one of the field can."""
    bounds = [bound for bound in (field.low, field.high) if bound is not None]
    points: list[float] = sorted({*numbers, *(-one for one in numbers), *bounds, 0, 1})
    around: set[float]
    if field.whole:
        around = {math.floor(point) + step for point in points for step in (-1, 0, 1)}
    else:
        between = ((one + other) / 2 for one, other in pairwise(points))
        around = {*points, *between, points[0] - 1, points[-1] + 1}
    low, high = (-math.inf if field.low is None else field.low), (math.inf if field.high is None else field.high)
    return sorted(one for one in around if low <= one <= high) or [_ANY]


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
