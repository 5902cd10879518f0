"""What happens in a run, as typed events: plain frozen values, in the order in which they were made durable.

An event is told only after it was stored (or, when the store is away, after it was found to be). `at` is UTC in ISO
8601 with milliseconds. Durations are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from plait.backends.protocol import NO_USAGE, JsonInput, JsonValue, Message, Reply, Usage
from plait.backends.values import value
from plait.runner.domain.dag import DAG
from plait.runner.domain.question import Answered, Asking
from plait.runner.domain.status import RunStatus, TaskStatus
from plait.runner.domain.task import Task


@value
class Event:
    """Base of all events. `kind` is the event's name in snake case."""

    kind: ClassVar[str] = "event"
    at: str


@value
class RunCreated(Event):
    """The run and its whole DAG are stored. `settings` is kept with it."""

    kind: ClassVar[str] = "run_created"
    run_id: str
    dag: DAG
    settings: Mapping[str, JsonInput]


@value
class RunStarted(Event):
    """The run begins."""

    kind: ClassVar[str] = "run_started"
    run_id: str


@value
class RunResumed(Event):
    """The run goes on: `reused` tasks were done already. `previous` is the status that it had."""

    kind: ClassVar[str] = "run_resumed"
    run_id: str
    previous: RunStatus
    reused: int


@value
class TasksAdded(Event):
    """Tasks were added to the run by the task `added_by`, or, where that is None, by the run's policy."""

    kind: ClassVar[str] = "tasks_added"
    tasks: tuple[Task, ...]
    added_by: str | None = None


@value
class PolicyDecided(Event):
    """The run's policy was asked about what had happened. `state` is what it will see next time, `state_json` the same
    as it is stored.
    """

    kind: ClassVar[str] = "policy_decided"
    state: JsonValue
    state_json: str


@value
class RunCancelling(Event):
    """Somebody cancelled the run: nothing more starts, and what is under way has a grace time to come to its end."""

    kind: ClassVar[str] = "run_cancelling"
    run_id: str


@value
class RunWatched(Event):
    """Whether the run's owner still lives cannot be told from here; it is given `seconds` to show it."""

    kind: ClassVar[str] = "run_watched"
    run_id: str
    owner: str
    seconds: float


@value
class RunEnded(Event):
    """Base of the events that end a run for this process; nothing follows one."""

    run_id: str
    status: RunStatus
    error: str | None = None


@value
class RunCompleted(RunEnded):
    """Every task is completed or skipped."""

    kind: ClassVar[str] = "run_completed"


@value
class RunFailed(RunEnded):
    """At least one task failed; all that could run has run."""

    kind: ClassVar[str] = "run_failed"


@value
class RunCancelled(RunEnded):
    """The run was cancelled for good."""

    kind: ClassVar[str] = "run_cancelled"


@value
class RunInterrupted(RunEnded):
    """This process left the run before its end; `resume` goes on with it."""

    kind: ClassVar[str] = "run_interrupted"


@value
class RunWaitingInput(RunEnded):
    """Nothing can run any more before a person has answered; `resume` goes on after that."""

    kind: ClassVar[str] = "run_waiting_input"


@value
class TaskEvent(Event):
    """Base of the events of one task."""

    task_id: str
    attempt: int


@value
class TaskStarted(TaskEvent):
    """The attempt is recorded as running; its backend is called next. `confirmed`: it goes on with the conversation of
    an attempt that was interrupted. `adopted`: it was begun by a process that has died since; its turn lived on.
    """

    kind: ClassVar[str] = "task_started"
    backend: str
    session_id: str | None = None
    confirmed: bool = False
    adopted: bool = False


@value
class SessionOpened(TaskEvent):
    """The conversation's id became known during the turn, or its backend confirmed the one that was chosen."""

    kind: ClassVar[str] = "session_opened"
    session_id: str


@value
class TaskOutput(TaskEvent):
    """Something seen while the turn goes on. Not stored."""

    kind: ClassVar[str] = "task_output"
    output: Literal["text", "tool", "waiting", "notice"]
    text: str
    usage: Usage = NO_USAGE


@value
class TaskCompleted(TaskEvent):
    """The result is stored. `data_json` is `data` as stored. `said` are the turn's messages, or, where these are the
    prompt and `text` alone, the prompt: most tasks have no more to say, and need no messages of their own for that.
    """

    kind: ClassVar[str] = "task_completed"
    text: str
    data: JsonValue = None
    data_json: str | None = None
    usage: Usage = NO_USAGE
    duration_s: float = 0.0
    session_id: str | None = None
    said: tuple[Message, ...] | str = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turn's messages, the prompt included."""
        return Reply(self.text, usage=self.usage).turn(self.said) if isinstance(self.said, str) else self.said


@value
class TaskRetrying(TaskEvent):
    """The attempt failed; the next one follows after `delay_s`, told anew by a resume, and may go on in its session."""

    kind: ClassVar[str] = "task_retrying"
    error_kind: str
    error: str
    delay_s: float
    duration_s: float
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()
    goes_on: bool = False


@value
class TaskFailed(TaskEvent):
    """The task failed for good, or is skipped, as `status` says."""

    kind: ClassVar[str] = "task_failed"
    status: TaskStatus
    error_kind: str
    error: str
    duration_s: float
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()


@value
class TaskInterrupted(TaskEvent):
    """The attempt ended with its owner; the task is pending again. `crashed`: the owner died, rather than left."""

    kind: ClassVar[str] = "task_interrupted"
    reason: str
    crashed: bool = False


@value
class TaskWaiting(TaskEvent):
    """The task waits for a person. `asking` is what its own code or its conversation asked; None where the attempt
    ended with its owner, and only a person can say whether it took effect.
    """

    kind: ClassVar[str] = "task_waiting_input"
    question: str
    crashed: bool = False
    asking: Asking | None = None
    duration_s: float | None = None
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()


@value
class TaskAnswered(TaskEvent):
    """The question of a waiting task has its answer, the last of `answers`; the task goes on. None where a person just
    had it run again.
    """

    kind: ClassVar[str] = "task_answered"
    answers: tuple[Answered, ...] | None = None


@value
class TaskCancelled(TaskEvent):
    """The task was cancelled with its run. `usage` is what its attempt had cost, as far as its backend had said."""

    kind: ClassVar[str] = "task_cancelled"
    usage: Usage = NO_USAGE


@value
class TaskReopened(TaskEvent):
    """The failed task is pending again because `resume` was asked to retry failed tasks. `damaged`: it was completed,
    but its stored result cannot be used.
    """

    kind: ClassVar[str] = "task_reopened"
    damaged: bool = False


@value
class StoreDegraded(Event):
    """The store failed; the run goes on, and what it does is kept in memory until the store answers."""

    kind: ClassVar[str] = "store_degraded"
    error: str


@value
class StoreRecovered(Event):
    """The store answers again and everything kept in memory is stored."""

    kind: ClassVar[str] = "store_recovered"
    changes: int


@value
class EventsDropped(Event):
    """This reader was too slow: `count` task outputs were left out here. Other events are never dropped."""

    kind: ClassVar[str] = "events_dropped"
    count: int
