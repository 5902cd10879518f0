"""Comparison of two stored runs, task by task."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from typing import Any, Literal, TypedDict

from plait.errors import PromptError, RunNotFound
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord
from plait.runner.reuse.answer_keys import AnswerKeys, describe_change, task_identity
from plait.runner.reuse.earlier_answers import KEPT, REUSED, ReuseFrom, stored_answer_keys
from plait.runner.state.codec import to_json
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.views.view_models import UsageView, usage_fields, view


@view
class ComparedRun(UsageView):
    """One of the two runs."""

    run_id: str
    name: str
    status: str
    started_at: str | None
    ended_at: str | None


@view
class ComparedTask(UsageView):
    """A task in one of the two runs."""

    task_id: str
    status: str
    prompt: str
    """The prompt as rendered; the template if the prompt cannot be rendered."""
    text: str | None
    error_kind: str | None
    error: str | None
    duration_s: float | None


@view
class TaskDifference:
    """The same task in both runs. At most one side is null: then the task is in the other run only."""

    task_id: str
    """The id of the task in the second run, or in the first if the second lacks the task."""
    changed: tuple[str, ...]
    """The names of the parts that differ: `prompt`, `result`, `status`; `task` if only one run has the task."""
    why: str | None
    """The first reason for another prompt or result, in a few words; null without a reason in plan and upstream."""
    a: ComparedTask | None
    b: ComparedTask | None
    words: Mapping[str, Any]
    """For a changed `prompt` and `result`, its kept, removed and added words: a list of `Piece`."""


@view
class RunComparison:
    """Two runs compared. Tasks in only one run are differences too."""

    a: ComparedRun
    b: ComparedRun
    parted: str | None
    """The first task that differs; null if all are the same."""
    same: int
    """The number of tasks that do not differ."""
    tasks: tuple[TaskDifference, ...]
    """The tasks that differ, in the topological order of the second run, then those that only the first run has."""


async def compare_runs(store: Store | None, before: str, after: str) -> RunComparison:
    """Return the differences from run `before` to run `after`. Raises StoreRequired, RunNotFound, StoreError."""
    one, other = await stored_run(store, before), await stored_run(store, after)
    tasks = list(_differences(one, other))
    differ = tuple([task for task in tasks if task.changed])
    return RunComparison(
        a=_compared_run(one.record),
        b=_compared_run(other.record),
        parted=differ[0].task_id if differ else None,
        same=len(tasks) - len(differ),
        tasks=differ,
    )


def _compared_run(run: RunRecord) -> ComparedRun:
    return ComparedRun(
        run_id=run.run_id,
        name=run.name,
        status=run.status,
        started_at=run.started_at,
        ended_at=run.ended_at,
        **usage_fields(run.usage),
    )


async def cut_offs(store: Store | None, run_id: str) -> list[str]:
    """Return the tasks of a run that were called although an earlier run had their answer, gave the same answer, and so
    cut off the calls behind: a task behind took its answer over. Raises StoreRequired, RunNotFound, StoreError.
    """
    run = await stored_run(store, run_id)
    reuse = ReuseFrom.of_settings(json.loads(run.record.settings))
    if reuse is None:
        return []
    try:
        parent = await stored_run(store, reuse.like)
    except RunNotFound:
        return []
    attempts = await run.store.list_attempts(run_id)
    taken = {one.task_id for one in attempts if one.backend.startswith((REUSED, KEPT))}
    texts = {to_json(task_identity(parent.state, place)): task.text for place, task in enumerate(parent.tasks)}
    called = {one.task_id for one in attempts} - taken
    return [
        task.task_id
        for place, task in enumerate(run.tasks)
        if task.task_id in called
        and task.text is not None
        and texts.get(to_json(task_identity(run.state, place))) == task.text
        and any(run.state.dag.tasks[one].id in taken for one in run.state.dag.needed_by(place))
    ]


def _differences(one: StoredRun, other: StoredRun) -> Iterator[TaskDifference]:
    before, after = (AnswerKeys(run.state, stored_answer_keys(run)) for run in (one, other))
    earlier: defaultdict[str, deque[int]] = defaultdict(deque)
    for position in range(len(one.tasks)):
        earlier[to_json(task_identity(one.state, position))].append(position)
    for position in other.state.dag.order:
        found = earlier[to_json(task_identity(other.state, position))]
        if not found:
            yield _difference(None, _compared(other, position), "new task")
            continue
        place = found.popleft()
        why = describe_change(before, place, after, position)
        yield _difference(_compared(one, place), _compared(other, position), why)
    left = sorted(position for positions in earlier.values() for position in positions)
    for position in left:
        yield _difference(_compared(one, position), None, "task removed")


def _difference(a: ComparedTask | None, b: ComparedTask | None, why: str | None) -> TaskDifference:
    if a is None or b is None:
        (side,) = (one for one in (a, b) if one is not None)
        return TaskDifference(task_id=side.task_id, changed=("task",), why=why, a=a, b=b, words={})
    texts = {"prompt": (a.prompt, b.prompt), "result": (a.text or "", b.text or "")}
    differs = {"prompt": a.prompt != b.prompt, "result": a.text != b.text, "status": a.status != b.status}
    words = {name: word_changes(*texts[name]) for name in texts if differs[name]}
    changed = tuple(name for name, value in differs.items() if value)
    return TaskDifference(task_id=b.task_id, changed=changed, why=why, a=a, b=b, words=words)


def _compared(run: StoredRun, position: int) -> ComparedTask:
    task = run.state.dag.tasks[position]
    try:
        prompt = run.state.prompt(task)
    except PromptError:
        prompt = task.prompt
    record = run.tasks[position]
    return ComparedTask(
        task_id=record.task_id,
        status=record.status,
        prompt=prompt,
        text=record.text,
        error_kind=record.error_kind,
        error=record.error,
        duration_s=record.duration_s,
        **usage_fields(record.usage),
    )


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
