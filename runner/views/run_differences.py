"""Comparison of two stored runs, task by task."""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, TypedDict

from plait.errors import PromptError, RunNotFound
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import RunRecord, TaskRecord
from plait.runner.reuse.answer_keys import AnswerKeys, describe_change, task_identity
from plait.runner.reuse.earlier_answers import KEPT, REUSED, ReuseFrom, stored_answer_keys
from plait.runner.state.codec import to_json
from plait.runner.state.stored_run import StoredRun, stored_run
from plait.runner.views.view_models import usage_fields


@dataclass(frozen=True, slots=True)
class ComparedTask:
    """A task in one of the two runs."""

    record: TaskRecord
    prompt: str
    """The prompt as rendered; the template if the prompt cannot be rendered."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        record = self.record
        return {
            "task_id": record.task_id,
            "status": record.status,
            "prompt": self.prompt,
            "text": record.text,
            "error_kind": record.error_kind,
            "error": record.error,
            **usage_fields(record.usage),
            "duration_s": record.duration_s,
        }


@dataclass(frozen=True, slots=True)
class TaskDifference:
    """The same task in both runs. At most one side is None: then the task is in the other run only."""

    before: ComparedTask | None
    after: ComparedTask | None
    why: str | None
    """The first reason for another prompt or result, in a few words; None without a reason in plan and upstream."""

    @property
    def task_id(self) -> str:
        """The id of the task in the second run, or in the first if the second lacks the task."""
        side = self.after or self.before
        assert side is not None
        return side.record.task_id

    @property
    def changed(self) -> tuple[str, ...]:
        """The names of the parts that differ: `prompt`, `result`, `status`; `task` if only one run has the task."""
        before, after = self.before, self.after
        if before is None or after is None:
            return ("task",)
        differs = {
            "prompt": before.prompt != after.prompt,
            "result": before.record.text != after.record.text,
            "status": before.record.status != after.record.status,
        }
        return tuple(name for name, value in differs.items() if value)

    def as_json(self) -> dict[str, Any]:
        """Return the difference as a JSON object; `prompt` and `result` are lists of kept, removed and added words."""
        before, after = self.before, self.after
        value: dict[str, Any] = {"task_id": self.task_id, "changed": list(self.changed), "why": self.why}
        value |= {"a": before and before.as_json(), "b": after and after.as_json()}
        if before is not None and after is not None:
            texts = {
                "prompt": (before.prompt, after.prompt),
                "result": (before.record.text or "", after.record.text or ""),
            }
            value["words"] = {name: word_changes(*texts[name]) for name in texts if name in self.changed}
        return value


@dataclass(frozen=True, slots=True)
class RunComparison:
    """Two runs compared. Tasks in only one run are differences too."""

    before: RunRecord
    after: RunRecord
    tasks: Sequence[TaskDifference]
    """Every task, in the topological order of the second run, then those that only the first run has."""

    @property
    def parted(self) -> TaskDifference | None:
        """The first task that differs; None if all are the same."""
        return next((task for task in self.tasks if task.changed), None)

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as a JSON object; unchanged tasks are counted and not listed."""
        differ = [task for task in self.tasks if task.changed]
        return {
            "a": _run_json(self.before),
            "b": _run_json(self.after),
            "parted": None if self.parted is None else self.parted.task_id,
            "same": len(self.tasks) - len(differ),
            "tasks": [task.as_json() for task in differ],
        }


def _run_json(run: RunRecord) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "name": run.name,
        "status": run.status,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        **usage_fields(run.usage),
    }


async def compare_runs(store: Store | None, before: str, after: str) -> RunComparison:
    """Return the differences from run `before` to run `after`. Raises StoreRequired, RunNotFound, StoreError."""
    one, other = await stored_run(store, before), await stored_run(store, after)
    return RunComparison(one.record, other.record, list(_differences(one, other)))


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
            yield TaskDifference(None, _compared(other, position), "new task")
            continue
        place = found.popleft()
        why = describe_change(before, place, after, position)
        yield TaskDifference(_compared(one, place), _compared(other, position), why)
    left = sorted(position for positions in earlier.values() for position in positions)
    for position in left:
        yield TaskDifference(_compared(one, position), None, "task removed")


def _compared(run: StoredRun, position: int) -> ComparedTask:
    task = run.state.dag.tasks[position]
    try:
        prompt = run.state.prompt(task)
    except PromptError:
        prompt = task.prompt
    return ComparedTask(run.tasks[position], prompt)


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
