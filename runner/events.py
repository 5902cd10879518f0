"""What happens in a run, as typed events: plain frozen values, in the order in which they were made durable.

An event is told only after it was stored (or, when the store is away, after it was found to be). `at` is UTC in ISO
8601 with milliseconds. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from backends.protocol import NO_USAGE, Message, Usage
from runner.dag import DAG
from runner.status import RunStatus, TaskStatus
from runner.task import JsonValue


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events. `kind` is the event's name in snake case."""

    kind: ClassVar[str] = "event"
    at: str


@dataclass(frozen=True, slots=True)
class RunCreated(Event):
    """The run and its whole DAG are stored. `settings` is kept with it."""

    kind: ClassVar[str] = "run_created"
    run_id: str
    dag: DAG
    settings: Mapping[str, JsonValue]


@dataclass(frozen=True, slots=True)
class RunStarted(Event):
    """The run begins."""

    kind: ClassVar[str] = "run_started"
    run_id: str


@dataclass(frozen=True, slots=True)
class RunResumed(Event):
    """The run goes on: `reused` tasks were done already. `previous` is the status that it had."""

    kind: ClassVar[str] = "run_resumed"
    run_id: str
    previous: RunStatus
    reused: int


@dataclass(frozen=True, slots=True)
class RunEnded(Event):
    """Base of the events that end a run for this process; nothing follows one."""

    run_id: str
    status: RunStatus
    error: str | None = None


@dataclass(frozen=True, slots=True)
class RunCompleted(RunEnded):
    """Every task is completed or skipped."""

    kind: ClassVar[str] = "run_completed"


@dataclass(frozen=True, slots=True)
class RunFailed(RunEnded):
    """At least one task failed; all that could run has run."""

    kind: ClassVar[str] = "run_failed"


@dataclass(frozen=True, slots=True)
class RunCancelled(RunEnded):
    """The run was cancelled for good."""

    kind: ClassVar[str] = "run_cancelled"


@dataclass(frozen=True, slots=True)
class RunInterrupted(RunEnded):
    """This process left the run before its end; `resume` goes on with it."""

    kind: ClassVar[str] = "run_interrupted"


@dataclass(frozen=True, slots=True)
class TaskEvent(Event):
    """Base of the events of one task."""

    task_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class TaskStarted(TaskEvent):
    """The attempt is recorded as running; its backend is called next."""

    kind: ClassVar[str] = "task_started"
    backend: str
    session_id: str | None = None


@dataclass(frozen=True, slots=True)
class SessionOpened(TaskEvent):
    """The conversation's id became known during the turn."""

    kind: ClassVar[str] = "session_opened"
    session_id: str


@dataclass(frozen=True, slots=True)
class TaskOutput(TaskEvent):
    """Something seen while the turn goes on. Not stored."""

    kind: ClassVar[str] = "task_output"
    output: Literal["text", "notice"]
    text: str


@dataclass(frozen=True, slots=True)
class TaskCompleted(TaskEvent):
    """The result is stored. `data_json` is `data` as stored; `messages` are the turn's messages."""

    kind: ClassVar[str] = "task_completed"
    text: str
    data: JsonValue = None
    data_json: str | None = None
    usage: Usage = NO_USAGE
    duration_s: float = 0.0
    session_id: str | None = None
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskRetrying(TaskEvent):
    """The attempt failed; the next one follows after `delay_s`."""

    kind: ClassVar[str] = "task_retrying"
    error_kind: str
    error: str
    delay_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class TaskFailed(TaskEvent):
    """The task failed for good, or is skipped, as `status` says."""

    kind: ClassVar[str] = "task_failed"
    status: TaskStatus
    error_kind: str
    error: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class TaskInterrupted(TaskEvent):
    """The attempt ended with its owner; the task is pending again."""

    kind: ClassVar[str] = "task_interrupted"
    reason: str


@dataclass(frozen=True, slots=True)
class TaskCancelled(TaskEvent):
    """The task was cancelled with its run."""

    kind: ClassVar[str] = "task_cancelled"


@dataclass(frozen=True, slots=True)
class TaskReopened(TaskEvent):
    """The failed task is pending again because `resume` was asked to retry failed tasks."""

    kind: ClassVar[str] = "task_reopened"


@dataclass(frozen=True, slots=True)
class StoreDegraded(Event):
    """The store failed; the run goes on, and what it does is kept in memory until the store answers."""

    kind: ClassVar[str] = "store_degraded"
    error: str


@dataclass(frozen=True, slots=True)
class StoreRecovered(Event):
    """The store answers again and everything kept in memory is stored."""

    kind: ClassVar[str] = "store_recovered"
    changes: int


@dataclass(frozen=True, slots=True)
class EventsDropped(Event):
    """This reader was too slow: `count` task outputs were left out here. Other events are never dropped."""

    kind: ClassVar[str] = "events_dropped"
    count: int
