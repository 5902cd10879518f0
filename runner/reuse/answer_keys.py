"""What makes two answers the same, and what changed where they differ.

Two tasks of two runs of a plan are compared part by part: `have_same_answer`. An answer for any plan has a key, the
digest of the same parts without the task's place in a plan: `AnswerKeys.key`. Both hold the prompt as rendered, so a
task behind an upstream task that ran again and gave the same text keeps the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Hashable, Iterator, Mapping
from itertools import zip_longest
from typing import Any, cast

from plait.json_form import JsonInput, JsonValue, to_json
from plait.runner.domain.dag import group_of
from plait.runner.domain.prompt_values import TaskTexts, named, names_of
from plait.runner.domain.task_checks import is_row_of_texts
from plait.runner.state.run_state import RunState
from plait.safe_text import clean_text
from plait.statuses import TaskStatus
from plait.task import MODEL_SETTINGS, OWN_OPTIONS, Task, TaskFile

_FIELDS = {
    "when": "condition",
    "output_schema": "output schema",
    "metadata": "metadata",
    "options": "model, system prompt or temperature",
    "continues": "continued conversation",
    "cwd": "folder",
    "env": "environment",
}


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
        self.changes: dict[int, str | None] = {}
        """What `describe_change` returned so far, by position."""
        self.same: dict[tuple[int, int], bool] = {}
        """What `have_same_answer` returned so far for conversations, by the positions in both runs."""
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
    pairs = [(earlier, later)] if after.state.dag.tasks[later].continues is not None else []
    while pairs and (pair := _both_continue(before, after, *pairs[-1])) is not None and pair not in after.same:
        pairs.append(pair)  # a conversation may be long, so no recursion
    for old, new in pairs[:0:-1]:
        is_same = have_same_identity(before.state, old, after.state, new) and _is_same(before, old, after, new)
        after.same[old, new] = is_same
    return _is_same(before, earlier, after, later)


def _both_continue(before: AnswerKeys, after: AnswerKeys, earlier: int, later: int) -> tuple[int, int] | None:
    """Return the completed tasks whose conversations both tasks continue; None if one of them continues none."""
    if (old := before.continued(earlier)) is None or (new := after.continued(later)) is None:
        return None
    return old, new


def _is_same(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> bool:
    if not (before.is_shareable(earlier) and after.is_shareable(later)):
        return False
    old, new = before.state.dag.tasks[earlier], after.state.dag.tasks[later]
    if old is not new and not (_same_condition(old, new) and _is_equal(settings_of(old), settings_of(new))):
        return False
    return (
        _same_backends(before, earlier, after, later)
        and _same_conversation(before, earlier, after, later)
        and _same_prompt(before.state, old, after.state, new)
    )


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


def _same_condition(old: Task, new: Task) -> bool:
    return old.when == new.when


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


def _same_conversation(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> bool:
    old, new = before.continued(earlier), after.continued(later)
    if old is None or new is None:
        return old is new
    return after.same[old, new] and before.state.results[old].text == after.state.results[new].text


def _same_prompt(before: RunState, old: Task, after: RunState, new: Task) -> bool:
    """Return whether prompt, arguments and check are the same as rendered. They are not rendered if they are the same
    as written, with nothing in them but the item and inputs of equal values.
    """
    try:
        is_written_alike = old is new or (
            old.prompt == new.prompt and _is_equal(old.item, new.item) and _has_prompt_alone(old)
        )
        if is_written_alike and _has_prompt_alone(new):
            was, now, names = before.dag.inputs, after.dag.inputs, names_of(new).names - _ITEM
            if not names or all(name in was and name in now and _is_equal(was[name], now[name]) for name in names):
                return True
        texts, new_texts = before.texts(old), after.texts(new)
        if clean_text(texts.prompt()) != clean_text(new_texts.prompt()):
            return False
        if not _is_equal(texts.argument_values(), new_texts.argument_values()):
            return False
        return _is_equal(texts.check_key(), new_texts.check_key())
    except Exception:  # reported by the attempt
        return False


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


_NO_SETTINGS: list[Any] = []


def settings_of(task: Task) -> list[Any]:
    """Return the settings of the task that determine an answer, beside the prompt and the backend."""
    model = [] if task.options is OWN_OPTIONS else [getattr(task, name) for name in MODEL_SETTINGS]
    if task.output_schema is None and not (task.metadata or model or task.files):
        return _NO_SETTINGS
    return [task.output_schema, task.metadata, model, _files(task)]


def _files(task: Task) -> list[list[str]]:
    return [[file.name, file.sha256] for file in task.files if isinstance(file, TaskFile)]


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


def describe_change(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> str | None:
    """Return in a few words what changed from the task at `earlier` in one run to the task at `later` in another. None
    if everything that determines the answer is as before.
    """
    pairs = [(earlier, later)]
    while (pair := _continued_by_both(before, after, *pairs[-1])) is not None and pair[1] not in after.changes:
        pairs.append(pair)  # a conversation may be long, so no recursion
    for old, new in reversed(pairs):
        after.changes[new] = next(_changes(before, old, after, new), None)
    return after.changes[later]


def _continued_by_both(before: AnswerKeys, after: AnswerKeys, earlier: int, later: int) -> tuple[int, int] | None:
    """Return the positions of the task that both tasks continue; None if they continue no task, or two."""
    old, new = before.state.dag.tasks[earlier].continues, after.state.dag.tasks[later].continues
    return None if old is None or old != new else (before.state.dag.position(old), after.state.dag.position(old))


def _changes(before: AnswerKeys, earlier: int, after: AnswerKeys, later: int) -> Iterator[str]:
    old, new = before.state.dag.tasks[earlier], after.state.dag.tasks[later]
    if old.prompt != new.prompt:
        yield f"prompt changed: line {first_changed_line(old.prompt, new.prompt)}"
    if old.run != new.run:
        yield "command changed"
    if old.check != new.check:
        yield "check changed"
    for name, word in _FIELDS.items():
        if getattr(old, name) != getattr(new, name):
            yield f"{word} changed"
    if _files(old) != _files(new):
        yield "files changed"
    was, now = (side.state.dag.backend_of(task) or "" for side, task in ((before, old), (after, new)))
    if was != now or before.backend_keys.get(was) != after.backend_keys.get(now):
        yield f"backend{f' {now}' if now else ''} changed"
    earlier_values, inputs = _values(before.state, earlier), after.state.dag.inputs
    for name, value in _values(after.state, later).items():
        if name not in earlier_values or earlier_values[name] != value:
            yield f"{'input' if name == 'inputs' or name in inputs else 'upstream'} {name} changed"
    pair = _continued_by_both(before, after, earlier, later)
    if pair is not None:
        texts = [side.state.results[place].text if side.state.is_completed(new.continues or "") else None
                 for side, place in zip((before, after), pair, strict=True)]  # fmt: skip
        if texts[0] != texts[1] or after.changes[pair[1]] is not None:
            yield f"upstream {new.continues} changed"


def _values(state: RunState, position: int) -> dict[str, JsonInput]:
    """Return the values in the prompt, with each task under `results` by its own name."""
    values = TaskTexts(state.dag.tasks[position], state.dag, state.results).values()
    results = values.pop("results", None)
    return {**values, **(results if isinstance(results, Mapping) else {})}


def first_changed_line(before: str, after: str) -> int:
    """Return the number of the first line that differs, from 1."""
    lines = zip_longest(before.splitlines(), after.splitlines())
    return next((number for number, (old, new) in enumerate(lines, 1) if old != new), 1)
