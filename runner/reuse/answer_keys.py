"""What makes two answers the same: the key of an answer, and what changed where two keys differ.

A key is the digest of everything that determines an answer. Two tasks with equal keys may share an answer. The key
holds the prompt as rendered, so a task behind an upstream task that ran again and gave the same text keeps the answer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.dag import group_of
from plait.runner.domain.prompt_values import prompt_values
from plait.runner.state.codec import to_json
from plait.runner.state.run_state import RunState
from plait.safe_text import clean_text
from plait.task import MODEL_SETTINGS, Task, TaskFile

_FIELDS = {
    "when": "condition",
    "output_schema": "output schema",
    "metadata": "metadata",
    "options": "model, system prompt or temperature",
    "continues": "continued conversation",
}


class AnswerKeys:
    """The answer keys of the tasks of one run, each worked out once.

    `backend_keys` are the answer keys of the run's backends, by name; "" is the default backend. Answers of the tasks
    at the positions `excluded` are never shared; None stands for the tasks that asked a person. With `anywhere` a key
    has no part of the plan: neither the id, nor the condition, nor the name of the backend.
    """

    def __init__(
        self,
        state: RunState,
        backend_keys: Mapping[str, JsonValue],
        *,
        excluded: Collection[int] | None = None,
        anywhere: bool = False,
    ) -> None:
        self.state = state
        self.backend_keys = backend_keys
        self.by_position: dict[int, str | None] = {}
        """The keys worked out so far; None for an answer that is never shared."""
        self.prompts: dict[int, str] = {}
        """The rendered prompts behind the keys."""
        self.changes: dict[int, str | None] = {}
        """What `describe_change` returned so far, by position."""
        self._excluded = state.answers if excluded is None else excluded
        self._anywhere = anywhere

    def key(self, position: int) -> str | None:
        """Return the key of the task's answer, once all dependencies are done; None if the answer is never shared."""
        links = [] if position in self.by_position else [position]
        while links and (before := self._continued(links[-1])) is not None and before not in self.by_position:
            links.append(before)  # a conversation may be long, so no recursion
        for link in reversed(links):
            self.by_position[link] = self._new_key(link)
        return self.by_position[position]

    def _continued(self, position: int) -> int | None:
        """Return the completed task whose conversation the task continues; None without."""
        before = self.state.dag.tasks[position].continues
        return None if before is None or not self.state.is_completed(before) else self.state.dag.position(before)

    def _is_shareable(self, position: int) -> bool:
        task = self.state.dag.tasks[position]
        if task.adds_tasks or task.for_each is not None or self.state.has_added(position):
            return False
        return position not in self._excluded

    def _new_key(self, position: int) -> str | None:
        task, prefix = self.state.dag.tasks[position], None
        name = self.state.dag.backend_of(task) or ""
        if name not in self.backend_keys or not self._is_shareable(position):
            return None
        if (before := self._continued(position)) is not None:
            if not self._is_shareable(before) or (earlier := self.by_position[before]) is None:
                return None
            prefix = [earlier, self.state.results[before].text]
        try:
            prompt = clean_text(self.state.prompt(task))
        except Exception:  # reported by the attempt
            return None
        self.prompts[position] = prompt
        place = [] if self._anywhere else [task_identity(self.state, position), task.when, name]
        determines = [1, place, prompt, settings_of(task), self.backend_keys[name], prefix]
        return hashlib.sha256(to_json(determines).encode()).hexdigest()


def settings_of(task: Task) -> list[Any]:
    """Return the settings of the task that determine an answer, beside the prompt and the backend."""
    return [task.output_schema, task.metadata, [getattr(task, name) for name in MODEL_SETTINGS], _files(task)]


def _files(task: Task) -> list[list[str]]:
    return [[file.name, file.sha256] for file in task.files if isinstance(file, TaskFile)]


def task_identity(state: RunState, position: int) -> list[Any]:
    """Return the id of the task; for a part of a `for_each` the id of the whole and the element, never the number."""
    task = state.dag.tasks[position]
    whole = group_of(task.id, task.item)
    return [task.id] if whole is None else [whole, task.item]


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
    values = prompt_values(state.dag.tasks[position], state.dag, state.results)
    results = values.pop("results", None)
    return {**values, **(results if isinstance(results, Mapping) else {})}


def first_changed_line(before: str, after: str) -> int:
    """Return the number of the first line that differs, from 1."""
    lines = zip_longest(before.splitlines(), after.splitlines())
    return next((number for number, (old, new) in enumerate(lines, 1) if old != new), 1)
