"""What makes two answers the same, and what changed where they differ.

Two tasks of two runs of a plan are compared part by part: `describe_change`. An answer for any plan has a key, the
digest of the same parts without the task's place in a plan: `AnswerKeys.key`. Both hold the prompt as rendered, so a
task behind an upstream task that ran again and gave the same text keeps the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import suppress
from itertools import zip_longest
from operator import attrgetter
from typing import cast

from plait.json_form import JsonValue, to_json
from plait.runner.domain.dag import group_of
from plait.runner.domain.prompt_values import named, names_of
from plait.runner.domain.task_checks import is_row_of_texts
from plait.runner.state.run_state import RunState
from plait.safe_text import clean_text
from plait.statuses import TaskStatus
from plait.task import MODEL_SETTINGS, OWN_OPTIONS, Task, TaskFile

_TEXTS = {"run": "command", "codes": "command", "check": "check", "cwd": "folder", "env": "environment"}
"""The templates of a task beside the prompt, and what holds them, in words."""


def _files(task: Task) -> list[list[str]]:
    return [[file.name, file.sha256] for file in task.files if isinstance(file, TaskFile)]


def _model(task: Task) -> list[object]:
    return [] if task.options is OWN_OPTIONS else [getattr(task, name) for name in MODEL_SETTINGS]


_SETTINGS: Mapping[str, Callable[[Task], object]] = {
    "output schema": attrgetter("output_schema"),
    "metadata": attrgetter("metadata"),
    "model, system prompt or temperature": _model,
    "files": _files,
}
"""The settings of a task that determine an answer, beside the prompt and the backend, by their words."""
_NO_SETTINGS: list[object] = []


def settings_of(task: Task) -> list[object]:
    """Return the settings of the task that determine an answer; nothing if it has none."""
    settings = [setting(task) for setting in _SETTINGS.values()]
    return settings if settings[0] is not None or any(settings) else _NO_SETTINGS


class AnswerKeys:
    """What determines the answers of the tasks of one run.

    `backend_keys` are the answer keys of the run's backends, by name; "" is the default backend. Answers of the tasks
    at the positions `excluded` are never shared; None stands for the tasks that asked a person.
    """

    def __init__(
        self, state: RunState, backend_keys: Mapping[str, JsonValue], *, excluded: Collection[int] | None = None
    ) -> None:
        self.state = state
        self.backend_keys = backend_keys
        self.changes: dict[tuple[int, int], str | None] = {}
        """What `describe_change` returned so far, by the positions in both runs."""
        self.same: set[tuple[int, int]] = set()
        """The positions in both runs for which `have_same_answer` returned True so far."""
        self._by_position: dict[int, str | None] = {}
        self._identities: dict[Hashable, list[int]] = {}
        self._excluded = state.answers if excluded is None else excluded

    def with_identity(self, identity: Hashable) -> Collection[int]:
        """Return the positions of the tasks with the `task_identity`."""
        if not self._identities:
            for position in range(len(self.state.dag)):
                self._identities.setdefault(task_identity(self.state, position), []).append(position)
        return self._identities.get(identity, ())

    def key(self, position: int) -> str | None:
        """Return the key of the task's answer for any plan, once all dependencies are done; None if the answer is never
        shared. Each key is worked out once.
        """
        links = [] if position in self._by_position else [position]
        while links and (before := self.continued(links[-1])) is not None and before not in self._by_position:
            links.append(before)  # a conversation may be long, so no recursion
        for link in reversed(links):
            self._by_position[link] = self._new_key(link)
        return self._by_position[position]

    def continued(self, position: int) -> int | None:
        """Return the completed task whose conversation the task continues; None without."""
        before = self.state.dag.tasks[position].continues
        return None if before is None or not self.state.is_completed(before) else self.state.dag.position(before)

    def is_shareable(self, position: int) -> bool:
        """Return whether the task is of a kind whose answers may be taken over, on a backend that allows it."""
        state, dag = self.state, self.state.dag
        task = dag.tasks[position]
        if task.adds_tasks or task.gathers or position in self._excluded or state.has_added(position):
            return False
        if position in dag.behind_rows or (dag.joins_any and self._was_a_matter_of_time(position)):
            return False
        return self.backend_of(position) in self.backend_keys

    def backend_of(self, position: int) -> str:
        """Return the backend that has answered the task, or will: "" for the default one. It may be a spare."""
        return self.state.moved.get(position) or self.state.dag.backend_of(self.state.dag.tasks[position]) or ""

    def _was_a_matter_of_time(self, position: int) -> bool:
        """Return whether the prompt depends on when other tasks completed: with `join: any`, if several dependencies
        did, and behind such a task, if it names a task that may not be done before.
        """
        dag, task = self.state.dag, self.state.dag.tasks[position]
        dependencies = dag.dependencies[position]
        if task.join == "any":
            return sum(self.state.statuses[each] is TaskStatus.COMPLETED for each in dependencies) > 1
        return not {dag.position(name) for name in named(task) if name in dag}.issubset(dag.needed(position))

    def _new_key(self, position: int) -> str | None:
        task, prefix = self.state.dag.tasks[position], None
        if not self.is_shareable(position):
            return None
        if (before := self.continued(position)) is not None:
            if not self.is_shareable(before) or (earlier := self._by_position[before]) is None:
                return None
            prefix = [earlier, self.state.results[before].text]
        texts = self.state.texts(task)
        try:
            prompt, check = clean_text(texts.prompt()), texts.check_key()
            values = texts.argument_values()
        except Exception:  # reported by the attempt
            return None
        backend = self.backend_keys[self.backend_of(position)]
        further: list[object] = [one for one in (check, values) if one]
        determines = [1, [], prompt, settings_of(task), backend, prefix, *further]
        if (judge := _judge_of(task)) is not None:
            determines.append(self.backend_keys.get(judge))
        return hashlib.sha256(to_json(determines).encode()).hexdigest()


def have_same_answer(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> bool:
    """Return whether a task of an earlier run and the same task of another run, all of whose dependencies are done, may
    share an answer: everything that determines it is the same.
    """
    pair: tuple[int, int] | None = (earlier, later)
    checked: list[tuple[int, int]] = []
    while pair is not None and pair not in after.same:  # a conversation may be long, so no recursion
        if not (before.is_shareable(pair[0]) and after.is_shareable(pair[1])):
            return False
        checked.append(pair)
        pair = _both_continue(before, after, *pair)
    is_same = describe_change(before, earlier, after, later) is None
    after.same.update(checked if is_same else ())
    return is_same


def describe_change(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> str | None:
    """Return in a few words what changed from the task at `earlier` in one run to the task at `later` in another. None
    if everything that determines the answer is as before.
    """
    pairs = [(earlier, later)]
    while (pair := _both_continue(before, after, *pairs[-1])) is not None and pair not in after.changes:
        pairs.append(pair)  # a conversation may be long, so no recursion
    for old, new in reversed(pairs):
        after.changes[old, new] = next(_changes(before, old, after, new), None)
    return after.changes[earlier, later]


def _both_continue(before: AnswerKeys, after: AnswerKeys, earlier: int, later: int) -> tuple[int, int] | None:
    """Return the positions of the tasks whose conversations both tasks continue; None if one of them continues none."""
    old, new = before.state.dag.tasks[earlier].continues, after.state.dag.tasks[later].continues
    return None if old is None or new is None else (before.state.dag.position(old), after.state.dag.position(new))


def _changes(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> Iterator[str]:
    old, new = before.state.dag.tasks[earlier], after.state.dag.tasks[later]
    if (change := _text_change(before.state, old, after.state, new)) is not None:
        yield change
    if old.when != new.when:
        yield "condition changed"
    if old is not new and settings_of(old) is not settings_of(new):
        for word, setting in _SETTINGS.items():
            if not _is_equal(setting(old), setting(new)):
                yield f"{word} changed"
    if not _same_backends(before, earlier, after, later):
        name = after.state.dag.backend_of(new)
        yield f"backend{f' {name}' if name else ''} changed"
    pair = _both_continue(before, after, earlier, later)
    if pair is None:
        if old.continues != new.continues:
            yield "continued conversation changed"
    elif after.changes[pair] is not None or _text_of(before, pair[0]) != _text_of(after, pair[1]):
        yield f"upstream {new.continues} changed"
    elif not have_same_identity(before.state, pair[0], after.state, pair[1]):
        yield "continued conversation changed"


def _text_of(keys: AnswerKeys, position: int) -> str | None:
    """Return the answer of a completed task; None for any other."""
    is_completed = keys.state.statuses[position] is TaskStatus.COMPLETED
    return keys.state.results[position].text if is_completed else None


def have_same_identity(before: RunState, earlier: int, after: RunState, later: int) -> bool:
    """Return whether two tasks are the same task of a plan, see `task_identity`."""
    old, new = before.dag.tasks[earlier], after.dag.tasks[later]
    if old.id == new.id:
        if "." not in new.id:  # neither a part nor a task of a called plan
            return True
        are_of_plans = before.added_by(earlier) is None is after.added_by(later)
        if are_of_plans and _is_equal(old.item, new.item):
            return True
    return task_identity(before, earlier) == task_identity(after, later)


def _same_backends(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> bool:
    """Return whether the backends of the tasks are the same, with the judges, and a spare that has answered."""
    old, new = before.state.dag.tasks[earlier], after.state.dag.tasks[later]
    own, judge = before.state.dag.backend_of(old) or "", _judge_of(old)
    if own != (after.state.dag.backend_of(new) or "") or judge != _judge_of(new):
        return False
    moved = before.state.moved.get(earlier)
    return (
        _same_key(before, after, own)
        and (judge is None or _same_key(before, after, judge))
        and (moved is None or _same_key(before, after, moved))
    )


def _same_key(before: AnswerKeys, after: AnswerKeys, name: str) -> bool:
    return _is_equal(before.backend_keys.get(name), after.backend_keys.get(name))


def _judge_of(task: Task) -> str | None:
    return None if task.check is None else task.check.backend


def _text_change(before: RunState, old: Task, after: RunState, new: Task) -> str | None:
    """Return what changed in the texts of the task; None if prompt, arguments and check are the same as rendered. They
    are not rendered if they are the same as written, with nothing in them but the item and inputs of equal values.
    """
    if old.prompt == new.prompt and _has_prompt_alone(old) and _has_prompt_alone(new):
        was, now, names = before.dag.inputs, after.dag.inputs, names_of(new).names - _ITEM
        is_same_item = old is new or _is_equal(old.item, new.item)
        if is_same_item and all(name in was and name in now and _is_equal(was[name], now[name]) for name in names):
            return None
    texts, new_texts = before.texts(old), after.texts(new)
    unnamed = None
    with suppress(Exception):  # reported by the attempt
        if new.call is None:  # a call sends nothing itself
            rendered, new_rendered = (
                [clean_text(one.prompt()), one.argument_values(), one.check_key()] for one in (texts, new_texts)
            )
            if _is_equal(rendered, new_rendered):
                return None
            unnamed = "prompt or check changed"
    if old.prompt != new.prompt:
        return f"prompt changed: line {first_changed_line(old.prompt, new.prompt)}"
    for name, word in _TEXTS.items():
        if getattr(old, name) != getattr(new, name):
            return f"{word} changed"
    values, new_values = texts.values(), new_texts.values()
    for one in (values, new_values):  # each task under `results` stands by its own name
        results = one.pop("results", None)
        one.update(results if isinstance(results, Mapping) else {})
    for name, value in new_values.items():
        if name not in values or values[name] != value:
            return f"{'input' if name == 'inputs' or name in after.dag.inputs else 'upstream'} {name} changed"
    return unnamed


_ITEM = frozenset({"item"})


def _has_prompt_alone(task: Task) -> bool:
    return not (task.run or task.check or task.aliases or task.cwd or task.env or task.continues)


def _is_equal(one: object, other: object) -> bool:
    """Return whether two values have the same JSON. To Python alone, 1 is the same as true and as 1.0."""
    if one is other or type(one) is str:
        return one == other
    if type(one) is not type(other) or one != other:
        return to_json(one) == to_json(other)
    if type(one) is dict:
        old, new = cast("dict[str, object]", one), cast("dict[str, object]", other)
        return [*old] == [*new] and all(map(_is_equal, old.values(), new.values()))
    if type(one) is list or type(one) is tuple:
        return all(map(_is_equal, cast("list[object]", one), cast("list[object]", other)))
    return repr(one) == repr(other)


def task_identity(state: RunState, position: int) -> Hashable:
    """Return the id of the task; for a part of a `for_each` the id of the whole and the element, never the number. For
    a task of a called plan, the identity of the calling task and the rest of the id, if that is such a part.
    """
    task = state.dag.tasks[position]
    name, whole = state.added_by(position) if "." in task.id else None, group_of(task.id, task.item)
    own = task.id if whole is None else (whole, _element(task))
    if name is None or not (caller := state.dag[name]).calls:
        return own
    identity, rest = task_identity(state, state.dag.position(name)), len(caller.id)
    if identity == caller.id:
        return own
    return identity, task.id[rest:] if whole is None else (whole[rest:], _element(task))


def _element(task: Task) -> Hashable:
    """Return the element of a part, a row of texts without the detour of its JSON."""
    return tuple(task.item.items()) if is_row_of_texts(task.item) else to_json(task.item)


def first_changed_line(before: str, after: str) -> int:
    """Return the number of the first line that differs, from 1."""
    lines = zip_longest(before.splitlines(), after.splitlines())
    return next((number for number, (old, new) in enumerate(lines, 1) if old != new), 1)
