"""Completed tasks of an earlier run that a fork keeps as they are, whatever their backend.

A fork runs on from some tasks. These tasks, the tasks that did not complete, and all tasks downstream of both make the
cone of the fork. A completed task outside the cone is kept: with its result, its conversation, and the tasks that it
added. Inside the cone a task takes its answer over only if nothing changed: see `answer_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from plait.backends.answer_reader import read_answer
from plait.backends.output_schema import Mismatch, Schema
from plait.dialogue import Message
from plait.errors import BackendError, PlaitError
from plait.json_form import JsonValue
from plait.runner.domain.groups import group_of
from plait.runner.reuse.reusable_answer import ReusableAnswer
from plait.runner.state.codec import to_json
from plait.runner.state.run_state import ReadableState
from plait.runner.state.stored_conversations import own_messages, sent_prompt
from plait.runner.state.stored_run import StoredRun
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import Task

GIVEN = "given by a person"
"""The backend name in the events of a task whose result was given with the fork."""
KEPT = "kept from "
"""The beginning of the backend name in the events of a task with the answer of a person in an earlier run; the run's id
follows.
"""


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """The point of an earlier run from which a fork runs on."""

    roots: tuple[str, ...]
    """The tasks from which the fork runs on: the ids of tasks, or the names of `for_each` tasks for their parts. Tasks
    that were not completed when the fork was made are among them.
    """
    results: Mapping[str, str] = field(default_factory=dict[str, str])
    """Results given with the fork, by task id."""
    tries: str | None = None
    """The only task that runs, if the fork is an attempt beside the earlier run."""

    def as_settings(self) -> dict[str, JsonValue]:
        """Return the JSON for the settings of the run."""
        return {"roots": list(self.roots), "results": dict(self.results), "tries": self.tries}

    @classmethod
    def of_settings(cls, stored: Mapping[str, Any]) -> ForkPoint:
        """Return the point in the settings of a run."""
        return cls(tuple(stored["roots"]), stored["results"], stored["tries"])


def positions_of(state: ReadableState, names: Collection[str]) -> set[int]:
    """Return the tasks with an id in `names`, and the parts of the `for_each` tasks in `names`."""
    return {
        position
        for position, task in enumerate(state.dag.tasks)
        if task.id in names or group_of(task.id, task.item) in names
    }


def fork_cone(state: ReadableState, roots: Collection[int]) -> set[int]:
    """Return `roots` and all tasks downstream: behind a dependency, a name in a prompt, or added by such a task.

    A `for_each` task behind one of its own parts only gathers anew: its other parts are not downstream.
    """
    added: dict[str, list[int]] = {}
    for position in range(len(state.dag)):
        if (by := state.added_by(position)) is not None:
            added.setdefault(by, []).append(position)
    cone, waiting, gathering = set(roots), list(roots), set[int]()
    while waiting:
        position = waiting.pop()
        further = [] if position in gathering else list(added.get(state.dag.tasks[position].id, ()))
        for dependent in state.dag.needed_by(position):
            gathers = _gathers(state, dependent, position)
            if gathers and dependent not in cone:
                gathering.add(dependent)
            if not gathers and dependent in gathering:
                gathering.discard(dependent)  # the list itself may change: all parts are downstream
                cone.discard(dependent)
            further.append(dependent)
        waiting += [one for one in further if one not in cone]
        cone.update(further)
    return cone


def _gathers(state: ReadableState, whole: int, position: int) -> bool:
    """Return whether the task `whole` needs the task at `position` only part by part."""
    return state.added_by(position) == state.dag.tasks[whole].id or state.dag.pairs_up(whole, position)


def unfinished_tasks(state: ReadableState, given: Collection[int]) -> set[int]:
    """Return the tasks of an earlier run that a fork has to run because they are not completed; `given` are the tasks
    with a given result. A `for_each` task that waits for its parts only gathers: its completed parts are kept.
    """
    return {
        position
        for position, task in enumerate(state.dag.tasks)
        if state.statuses[position] is not TaskStatus.COMPLETED
        and position not in given
        and not (task.for_each and state.has_added(position))
    }


def has_taken_all(state: ReadableState, point: ForkPoint) -> bool:
    """Return whether a fork with this state has taken over everything that it keeps, so that the fork can do without
    the earlier run: each task outside the cone is done. Unknown for a run with a policy, which may add further tasks.
    """
    given = positions_of(state, point.results)
    cone = fork_cone(state, positions_of(state, point.roots) - given) | (fork_cone(state, given) - given)
    return all(status in TASK_DONE or position in cone for position, status in enumerate(state.statuses))


async def load_kept(run: StoredRun, point: ForkPoint) -> dict[str, ReusableAnswer]:
    """Return the answers that a fork of `run` at `point` keeps, by task id. Raises StoreError; PlaitError if a given
    result does not fit.
    """
    state = run.state
    completed = [status is TaskStatus.COMPLETED for status in state.statuses]
    given = positions_of(state, point.results)
    cone = fork_cone(state, positions_of(state, point.roots) - given) | fork_cone(state, given)
    if point.tries is None:
        cone |= fork_cone(state, unfinished_tasks(state, given))
    asked = await asked_persons(run)
    kept: dict[str, ReusableAnswer] = {}
    for position, task in enumerate(state.dag):
        if task.id in point.results:
            schema = task.output_schema if point.tries is None else None
            kept[task.id] = await given_answer(replace(task, output_schema=schema), point.results[task.id])
        elif completed[position] and position not in cone:
            kept[task.id] = await _kept_answer(run, position, adds=point.tries is None, asked=position in asked)
    return kept


async def asked_persons(run: StoredRun) -> set[int]:
    """Return the completed tasks with an answer of a person, in this run or kept from an earlier run. Raises
    StoreError.
    """
    state, settings = run.state, json.loads(run.record.settings)
    found = {position for position in state.answers if state.statuses[position] is TaskStatus.COMPLETED}
    if settings.get("fork") is not None or settings.get("keep_answers"):
        attempts = await run.store.list_attempts(run.record.run_id)
        kept = [one.task_id for one in attempts if one.backend == GIVEN or one.backend.startswith(KEPT)]
        found.update(map(state.dag.position, kept))
    return found


async def person_answer(run: StoredRun, position: int) -> ReusableAnswer:
    """Return the answer of a task that asked a person, with the questions and the answers as its conversation."""
    return await _kept_answer(run, position, adds=False, asked=True)


async def given_answer(task: Task, text: str) -> ReusableAnswer:
    """Return the answer with the given text. Raises PlaitError if the text does not fit the output schema."""
    data_json: str | None = None
    data: JsonValue = None
    if task.output_schema is not None:
        try:
            data = await read_answer(Schema(task.output_schema), text)
        except (Mismatch, BackendError) as error:
            raise PlaitError(f"the result given for task {task.id!r} does not fit its output_schema: {error}") from None
        data_json = to_json(data)
    return ReusableAnswer(text, data, data_json, None, source=GIVEN)


async def _kept_answer(run: StoredRun, position: int, *, adds: bool, asked: bool) -> ReusableAnswer:
    state, task, record = run.state, run.state.dag.tasks[position], run.tasks[position]
    result = state.results[position]
    messages: tuple[Message, ...] = ()
    if task.for_each is None and (state.times_continued(position) or asked):
        stored = await own_messages(run.store, run.record.run_id, state, task.id)
        messages = tuple(Message(one.role, one.content) for one in stored)  # the tokens were paid for there
    prompt = None if task.for_each is not None else await sent_prompt(run, position)
    source = f"{KEPT}{run.record.run_id}" if asked else None
    added: tuple[Task, ...] = ()
    if adds and task.for_each is None and state.has_added(position):
        added = tuple(one for place, one in enumerate(state.dag) if state.added_by(place) == task.id)
    return ReusableAnswer(result.text, result.data, record.data, prompt, messages, added, record.session_id, source)
