"""What the store says of its runs, as values to be shown."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio.to_thread

from plait.backends.protocol import JsonValue, Usage
from plait.persistence.protocol import Store
from plait.persistence.records import EventRecord, RunRecord, TaskRecord
from plait.runner.clock import Clock
from plait.runner.domain.question import OpenQuestion, asking_of
from plait.runner.domain.status import LAST_EVENTS, RUN_DONE, TASK_DONE, UNDER_WAY, RunStatus, TaskStatus
from plait.runner.errors import RunNotFound
from plait.runner.state.owner import seems_free

_LOOKS_A_RECORD = 25


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as it is stored. `text` and `data` are its result, None before there is one or where it is `damaged`.

    `attempts` counts those that were begun, `usage` and `duration_s` (seconds) are those of the last one. While the
    task is waiting_input, `question` is what a person is asked, and `asks` the same with all that belongs to it; that
    is None where not the task asks, but a crash has left it in doubt. `added_by` is the task that added this one.
    """

    task_id: str
    status: TaskStatus
    depends_on: tuple[str, ...]
    backend: str | None
    attempts: int
    text: str | None
    data: JsonValue
    damaged: bool
    error_kind: str | None
    error: str | None
    question: str | None
    asks: OpenQuestion | None
    session_id: str | None
    usage: Usage
    duration_s: float | None
    started_at: str | None
    ended_at: str | None
    added_by: str | None


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as it is stored; `status` is interrupted where it is stored as going on and its owner is gone.

    `counts` says how many tasks have which status, leaving out those that none has; `usage` sums up all attempts;
    turns of `continue_task` are none, and what they used stands in the task's messages alone. Times are UTC in ISO
    8601. `tasks` holds every task by id in the order of the DAG; lists of runs leave it empty.
    """

    run_id: str
    name: str
    status: RunStatus
    created_at: str
    started_at: str | None
    ended_at: str | None
    error: str | None
    counts: Mapping[TaskStatus, int]
    usage: Usage
    tasks: Mapping[str, TaskInfo] = field(default_factory=dict[str, TaskInfo])

    @property
    def done(self) -> int:
        """How many tasks have come to their end, in whatever way."""
        return sum(self.counts.get(status, 0) for status in TASK_DONE)


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """One line of a run's history. `seq` grows within the run, with gaps; `at` is UTC in ISO 8601."""

    seq: int
    at: str
    kind: str
    task_id: str | None
    attempt: int | None
    detail: Mapping[str, JsonValue]

    @property
    def is_last(self) -> bool:
        """Whether it ends the run: nothing follows, unless a person reopens the run."""
        return self.kind in LAST_EVENTS


def shown_status(run: RunRecord, now: float) -> RunStatus:
    """The run's status at Unix time `now`; interrupted when it is stored as going on and nobody is there to do so."""
    status = RunStatus(run.status)
    if status in UNDER_WAY and seems_free(run.owner, run.lease_expires_at, now):
        return RunStatus.INTERRUPTED
    return status


async def look_up(store: Store, run_id: str, now: float, with_tasks: bool) -> RunInfo:
    """The run, with its tasks if they are wanted. Raises RunNotFound, StoreError."""
    record = await _record(store, run_id)
    records = await store.list_tasks(run_id) if with_tasks else ()
    # In a thread of its own: thousands of tasks take their time, in which other runs would stand still.
    tasks = await anyio.to_thread.run_sync(_task_infos, run_id, records) if records else {}
    return run_info(record, now, tasks)


def run_info(run: RunRecord, now: float, tasks: Mapping[str, TaskInfo] | None = None) -> RunInfo:
    """What `run` says at Unix time `now`."""
    return RunInfo(
        run.run_id,
        run.name,
        shown_status(run, now),
        run.created_at,
        run.started_at,
        run.ended_at,
        run.error,
        {TaskStatus(status): number for status, number in run.counts.items()},
        Usage(run.input_tokens, run.output_tokens, run.cost_usd),
        tasks or {},
    )


def _task_infos(run_id: str, records: Sequence[TaskRecord]) -> dict[str, TaskInfo]:
    return {task.task_id: task_info(run_id, task) for task in records}


def task_info(run_id: str, task: TaskRecord) -> TaskInfo:
    """What the record of a task of that run says."""
    return TaskInfo(
        task.task_id,
        TaskStatus(task.status),
        task.depends_on,
        task.backend,
        task.attempt,
        task.text,
        None if task.data is None else json.loads(task.data),
        task.damaged,
        task.error_kind,
        task.error,
        task.question,
        _asks(run_id, task),
        task.session_id,
        Usage(task.input_tokens, task.output_tokens, task.cost_usd, task.model),
        task.duration_s,
        task.started_at,
        task.ended_at,
        task.added_by,
    )


def _asks(run_id: str, task: TaskRecord) -> OpenQuestion | None:
    if task.question is None or task.asked is None:
        return None
    try:
        return OpenQuestion.of(run_id, task.task_id, task.attempt, asking_of(task.question, task.asked))
    except (ValueError, KeyError, TypeError):  # damaged: its text alone is better than nothing
        return None


def run_value(run: RunInfo) -> dict[str, Any]:
    """The run as JSON, without its tasks: what the command prints of it and what HTTP tells."""
    return {
        "run_id": run.run_id,
        "name": run.name,
        "status": run.status.value,
        "created_at": run.created_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "error": run.error,
        "done": run.done,
        "total": sum(run.counts.values()),
        "counts": {status.value: number for status, number in run.counts.items()},
        **usage_value(run.usage),
    }


def task_value(task: TaskInfo) -> dict[str, Any]:
    """The task as JSON, as `run_value`."""
    asks = task.asks
    return {
        "task_id": task.task_id,
        "status": task.status.value,
        "depends_on": task.depends_on,
        "backend": task.backend,
        "model": task.usage.model,
        "attempts": task.attempts,
        "text": task.text,
        "data": task.data,
        "damaged": task.damaged,
        "error_kind": task.error_kind,
        "error": task.error,
        "question": task.question,
        "asks": None if asks is None else asks_value(asks),
        "session_id": task.session_id,
        **usage_value(task.usage),
        "duration_s": task.duration_s,
        "started_at": task.started_at,
        "ended_at": task.ended_at,
        "added_by": task.added_by,
    }


def asks_value(question: OpenQuestion) -> dict[str, Any]:
    """What belongs to a question, as JSON."""
    return {"schema": question.schema, "default": question.default, "deadline_at": question.deadline_at}


def usage_value(usage: Usage) -> dict[str, Any]:
    """The tokens and the cost, as JSON."""
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens, "cost_usd": usage.cost_usd}


async def history(store: Store, run_id: str, after: int, clock: Clock, poll: float) -> AsyncGenerator[StoredEvent]:
    """The run's stored events behind number `after`; while it has not ended, those to come as well, looked for every
    `poll` seconds. Raises RunNotFound, StoreError.
    """
    ended, looks = False, 0
    while not ended:
        if looks % _LOOKS_A_RECORD == 0:
            # Read before its events: if it had ended by then, its last event is among those read now. Not each time,
            # because it counts the run's tasks, while to find no events costs nothing.
            ended = RunStatus((await _record(store, run_id)).status) in RUN_DONE
        looks += 1
        while records := await store.list_events(run_id, after):
            for record in records:
                event = _event(record)
                after = event.seq
                if event.task_id is None:  # what a person says to a task of an ended run does not begin it again
                    ended = event.is_last
                yield event
        if not ended:
            await clock.sleep(poll)


async def _record(store: Store, run_id: str) -> RunRecord:
    record = await store.get_run(run_id)
    if record is None:
        raise RunNotFound(f"the store has no run {run_id!r}")
    return record


def _event(record: EventRecord) -> StoredEvent:
    detail = json.loads(record.detail)
    return StoredEvent(record.seq, record.at, record.kind, record.task_id, record.attempt, detail)
