"""A task with its conversation and its attempts, for display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plait.errors import PlaitError, TaskNotFound
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import AttemptRecord, MessageRecord
from plait.runner.state.stored_run import placed_attempts, stored_record, stored_run
from plait.runner.views.read_views import TaskInfo, task_infos
from plait.statuses import TASK_DONE, TaskStatus


@dataclass(frozen=True, slots=True)
class TaskDetail:
    """A task, its conversation and its attempts."""

    run_id: str
    info: TaskInfo
    messages: Sequence[MessageRecord]
    attempts: Sequence[AttemptRecord]
    places: Mapping[int, str]
    """The hosts of the attempts that ran on other hosts, by the number of the attempt."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as the JSON object of `plait show RUN TASK --json`."""
        return {
            "run_id": self.run_id,
            **self.info.as_json(),
            "messages": [asdict(one) for one in self.messages],
            "history": [_attempt_json(one, self.places) for one in self.attempts],
        }


def _attempt_json(attempt: AttemptRecord, places: Mapping[int, str]) -> dict[str, Any]:
    value = asdict(attempt)
    usage = value.pop("usage")
    return {**value, **usage, "place": places.get(attempt.attempt)}


async def task_detail(store: Store, run_id: str, task_id: str, now: float) -> TaskDetail:
    """Return the task at Unix time `now`. Raises RunNotFound, TaskNotFound, StoreError."""
    _, run = await stored_record(store, run_id)
    found = await store.list_tasks(run_id, task_id)
    if not found:
        raise TaskNotFound(f"run {run_id} has no task {task_id!r}; `plait show {run_id}` lists them")
    # The reason for which a task waits depends on the other tasks.
    everything = found if TaskStatus(found[0].status) in TASK_DONE else await store.list_tasks(run_id)
    info = (await task_infos(store, run, everything, now, only=task_id))[task_id]
    messages = await store.list_messages(run_id, task_id)
    attempts = await store.list_attempts(run_id, task_id)
    placed = await placed_attempts(store, run_id)
    places = {one.attempt: place.place for one in attempts if (place := placed.get((task_id, one.attempt)))}
    return TaskDetail(run_id, info, messages, attempts, places)


async def rendered_prompt(store: Store, run_id: str, task_id: str) -> str | None:
    """Return the prompt of a task that has no stored message yet; None while the prompt cannot be rendered."""
    run = await stored_run(store, run_id)
    try:
        return run.state.prompt(run.state.dag[task_id])
    except PlaitError:  # a dependency has no result yet
        return None
