"""Comparison of two stored runs, task by task."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from difflib import SequenceMatcher
from typing import Any, Literal, TypedDict

from plait.errors import PromptError
from plait.persistence.store_protocol import Store
from plait.runner.reuse.answer_keys import AnswerKeys, describe_change, task_identity
from plait.runner.reuse.earlier_answers import stored_answer_keys
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.views.read_views import run_view, task_view
from plait.runner.views.view_models import RunView, TaskView, view


@view
class TaskDifference:
    """The same task in both runs, its prompt as rendered, or as written if it cannot be rendered. At most one side is
    null: then the task is in the other run only.
    """

    task_id: str
    """The id of the task in the second run, or in the first if the second lacks the task."""
    changed: tuple[str, ...]
    """The names of the parts that differ: `prompt`, `result`, `status`; `task` if only one run has the task."""
    why: str | None
    """The first reason for another prompt or result, in a few words; null without a reason in plan and upstream."""
    a: TaskView | None
    b: TaskView | None
    words: Mapping[str, Any]
    """For a changed `prompt` and `result`, its kept, removed and added words: a list of `Piece`."""


@view
class RunComparison:
    """Two runs compared. Tasks in only one run are differences too."""

    a: RunView
    b: RunView
    diverged: str | None
    """The first task that differs; null if all are the same."""
    same: int
    """The number of tasks that do not differ."""
    tasks: tuple[TaskDifference, ...]
    """The tasks that differ, in the topological order of the second run, then those that only the first run has."""


async def compare_runs(store: Store | None, before: str, after: str) -> RunComparison:
    """Return the differences from run `before` to run `after`. Raises StoreRequired, RunNotFound, StoreError."""
    one, other = await stored_run(store, before), await stored_run(store, after)
    tasks = [_difference(_side(one, place), _side(other, position), why) for place, position, why in _pairs(one, other)]
    differ = tuple([task for task in tasks if task.changed])
    return RunComparison(
        a=run_view(one.record),
        b=run_view(other.record),
        diverged=differ[0].task_id if differ else None,
        same=len(tasks) - len(differ),
        tasks=differ,
    )


def _pairs(one: StoredRun, other: StoredRun) -> Iterator[tuple[int | None, int | None, str | None]]:
    """Yield the positions of each task in both runs, and the first reason for another prompt or result."""
    before, after = (AnswerKeys(run.state, stored_answer_keys(run)) for run in (one, other))
    earlier: defaultdict[Hashable, deque[int]] = defaultdict(deque)
    for position in range(len(one.tasks)):
        earlier[task_identity(one.state, position)].append(position)
    for position in other.state.dag.order:
        places = earlier[task_identity(other.state, position)]
        if places:
            place = places.popleft()
            yield place, position, describe_change(before, place, after, position)
        else:
            yield None, position, "new task"
    for place in sorted(place for places in earlier.values() for place in places):
        yield place, None, "task removed"


def _side(run: StoredRun, position: int | None) -> TaskView | None:
    if position is None:
        return None
    shown = task_view(run.tasks[position])
    try:
        return replace(shown, prompt=run.state.texts(run.state.dag.tasks[position]).prompt())
    except PromptError:
        return shown


def _difference(a: TaskView | None, b: TaskView | None, why: str | None) -> TaskDifference:
    if a is None or b is None:
        (side,) = (one for one in (a, b) if one is not None)
        return TaskDifference(task_id=side.task_id, changed=("task",), why=why, a=a, b=b, words={})
    texts = {"prompt": (a.prompt, b.prompt), "result": (a.text or "", b.text or "")}
    differs = {"prompt": a.prompt != b.prompt, "result": a.text != b.text, "status": a.status != b.status}
    words = {name: word_changes(*texts[name]) for name in texts if differs[name]}
    changed = tuple(name for name, value in differs.items() if value)
    return TaskDifference(task_id=b.task_id, changed=changed, why=why, a=a, b=b, words=words)


_WORD = re.compile(r"\s*\S+|\s+")


class Piece(TypedDict):
    """A stretch of one or both texts, white space included."""

    change: Literal["kept", "removed", "added"]
    text: str


def word_changes(before: str, after: str) -> list[Piece]:
    """Return the pieces that make `after` out of `before`. White space alone is no difference between two words."""
    old, new = _WORD.findall(before), _WORD.findall(after)
    matcher = SequenceMatcher(None, [word.strip() for word in old], [word.strip() for word in new])
    pieces: list[Piece] = []
    for change, start, end, first, last in matcher.get_opcodes():
        if change == "equal":
            pieces.append({"change": "kept", "text": "".join(new[first:last])})
            continue
        if start < end:
            pieces.append({"change": "removed", "text": "".join(old[start:end])})
        if first < last:
            pieces.append({"change": "added", "text": "".join(new[first:last])})
    return pieces
