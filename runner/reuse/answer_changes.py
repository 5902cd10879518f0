"""The reason for which a task of a new run has another answer than the same task of an earlier run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from plait.json_form import JsonInput, JsonValue
from plait.runner.domain.prompt_values import prompt_values
from plait.runner.state.run_state import ReadableState
from plait.task import Task, TaskFile

_FIELDS = {
    "when": "condition",
    "output_schema": "output schema",
    "metadata": "metadata",
    "options": "model, system prompt or temperature",
    "continues": "continued conversation",
}


@dataclass(frozen=True, slots=True)
class RunSide:
    """One of two runs that are compared."""

    state: ReadableState
    backend_keys: Mapping[str, JsonValue]
    """The answer keys of the backends, by name."""
    described: dict[int, str | None] = field(default_factory=dict[int, "str | None"])
    """The changes found so far, by position, for the tasks that continue a conversation."""


def describe_change(before: RunSide, earlier: int, after: RunSide, later: int) -> str | None:
    """Return in a few words what changed from the task at `earlier` in `before` to the task at `later` in `after`. None
    if everything that determines the answer is as before.
    """
    waiting = [(earlier, later)]
    while (pair := _continued(before, after, *waiting[-1])) is not None and pair[1] not in after.described:
        waiting.append(pair)  # a conversation may be long, so no recursion
    for old, new in reversed(waiting):
        after.described[new] = next(_changes(before, old, after, new), None)
    return after.described[later]


def _continued(before: RunSide, after: RunSide, earlier: int, later: int) -> tuple[int, int] | None:
    """Return the positions of the task that both tasks continue; None if the tasks continue no task, or two."""
    old, new = before.state.dag.tasks[earlier].continues, after.state.dag.tasks[later].continues
    if old is None or old != new:
        return None
    return before.state.dag.position(old), after.state.dag.position(old)


def _changes(before: RunSide, earlier: int, after: RunSide, later: int) -> Iterator[str]:
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
    yield from _changed_values(before, earlier, after, later)
    pair = _continued(before, after, earlier, later)
    if pair is not None:
        differ = _answer(before.state, old.continues) != _answer(after.state, new.continues)
        if differ or after.described[pair[1]] is not None:
            yield f"upstream {new.continues} changed"


def _files(task: Task) -> list[tuple[str, str]]:
    return [(file.name, file.sha256) for file in task.files if isinstance(file, TaskFile)]


def _changed_values(before: RunSide, earlier: int, after: RunSide, later: int) -> Iterator[str]:
    """Yield each name in the prompt whose value changed."""
    old, new = (_values(side.state, position) for side, position in ((before, earlier), (after, later)))
    for name, value in new.items():
        if name in old and old[name] == value:
            continue
        yield f"{'input' if name == 'inputs' or name in after.state.dag.inputs else 'upstream'} {name} changed"


def _values(state: ReadableState, position: int) -> dict[str, JsonInput]:
    """Return the values in the prompt, with each task under `results` by its own name."""
    values = prompt_values(state.dag.tasks[position], state.dag, state.results)
    results = values.pop("results", None)
    return {**values, **(results if isinstance(results, Mapping) else {})}


def _answer(state: ReadableState, task_id: str | None) -> str | None:
    """Return the text of a completed task; None without."""
    if task_id is None or not state.is_completed(task_id):
        return None
    return state.results[state.dag.position(task_id)].text


def first_changed_line(before: str, after: str) -> int:
    """Return the number of the first line that differs, from 1."""
    lines = zip_longest(before.splitlines(), after.splitlines())
    return next((number for number, (old, new) in enumerate(lines, 1) if old != new), 1)
