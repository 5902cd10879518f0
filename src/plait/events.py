"""Everything that can happen in a run, as frozen values: made by the engine, stored, streamed, worded, traced.

An event is delivered only after the store wrote it, or, during an outage of the store, after the outage was detected.
`at` is UTC in ISO 8601 with milliseconds. Durations are seconds. JSON is stored text, because a value could otherwise
change between its making and the transaction.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar, Final, Literal, TypeAlias

from plait.clock_and_ids import parse_time
from plait.dialogue import Message
from plait.json_form import JsonValue, as_json, parsed, parsed_object, value
from plait.statuses import RunStatus, TaskStatus
from plait.task import Task, write_spec
from plait.usage import NO_USAGE, Usage


@value
class Owner:
    """The process that runs a run. Everything but `owner_id` shows whether the process is still alive."""

    owner_id: str
    """New for every claim."""
    host: str
    boot_id: str
    """The id of the host's boot."""
    pid: int
    process_started: str
    """The start time of the process, as the operating system reports the time."""
    claimed_at: str

    @property
    def process(self) -> str:
        """The process in words."""
        return f"process {self.pid} on {self.host}"


@value
class NewTask:
    """A task to be added, as pending."""

    task_id: str
    """Unique in the run."""
    prompt: str
    """The template, before rendering."""
    depends_on: tuple[str, ...] = ()
    """The ids of the tasks that have to end first."""
    backend: str | None = None
    """The name of the backend in the plan; None for the run's default."""
    spec: str = "{}"
    """The other fields of the task as JSON: see `task.write_spec`. The store never reads the JSON."""

    @classmethod
    def of(cls, task: Task, spec: str | None = None) -> NewTask:
        """Return the task as it is stored; `spec` is its spec if that is written already."""
        spec = write_spec(task) if spec is None else spec
        return cls(task.id, task.prompt, tuple(task.depends_on), task.backend, spec)


_COLUMNS = frozenset({"at", "run_id", "task_id", "attempt"})
_OF_THE_ATTEMPT = _COLUMNS | {"error", "usage", "duration_s", "messages", "traceback"}


@value
class Event:
    """Base of all events. `kind` is the name of the event in snake case."""

    kind: ClassVar[str] = "event"
    left_out: ClassVar[frozenset[str]] = _COLUMNS
    """The fields that the detail of a stored event leaves out: columns, and what was asked and answered."""
    stored: ClassVar[bool] = True
    """Whether the event has a change number. One that has none is told to listeners alone."""
    informs: ClassVar[bool] = False
    """Whether the event changes nothing that is known of a status: all goes on as if it were lost."""
    shown: ClassVar[bool] = True
    """Whether the event is a part of the history, and told to listeners. One that is not is stored alone."""
    at: str
    """The time of the event, UTC in ISO 8601 with milliseconds."""


@value
class RunCreated(Event):
    """The run and its whole DAG are stored, as queued. Always the first event."""

    kind: ClassVar[str] = "run_created"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"name", "settings", "tasks"}
    run_id: str
    name: str
    """The name for people; need not be unique."""
    settings: str
    """JSON that the store never reads."""
    tasks: tuple[NewTask, ...]
    """In the order of their positions, which count from 0."""


@value
class RunClaimed(Event):
    """Make `owner` the owner of the run. The epoch goes up by one."""

    kind: ClassVar[str] = "run_claimed"
    shown: ClassVar[bool] = False
    owner: Owner
    lease_expires_at: float
    """Unix time in seconds, by the clock of `at`. The difference is the length of all leases of the claim."""


@value
class LeaseRenewed(Event):
    """Prolong the lease of the owner."""

    kind: ClassVar[str] = "lease_renewed"
    informs: ClassVar[bool] = True
    shown: ClassVar[bool] = False
    lease_expires_at: float
    """Unix time in seconds."""


@value
class RunReleased(Event):
    """Leave the run without an owner, in the status that it has. The end of a run does so too."""

    kind: ClassVar[str] = "run_released"
    shown: ClassVar[bool] = False
    due_at: float | None = None
    """The Unix time in seconds from which the run can go on, for a run that waits: that of RunParked, the deadline of a
    question, or 0 once a person has answered. None for a run that waits for an answer alone, and for one that may go on
    at any time.
    """


@value
class RunStarted(Event):
    """The run begins."""

    kind: ClassVar[str] = "run_started"
    run_id: str


@value
class RunResumed(Event):
    """The run continues."""

    kind: ClassVar[str] = "run_resumed"
    run_id: str
    previous: RunStatus
    """The status before the resume."""
    reused: int
    """The number of tasks already done."""


@value
class TasksAdded(Event):
    """Tasks were added to the run."""

    kind: ClassVar[str] = "tasks_added"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"tasks", "added_by"}
    tasks: tuple[NewTask, ...]
    """May depend on existing tasks and on each other."""
    added_by: str | None = None
    """The id of the task whose answer or expansion added the tasks; None for the policy of the run."""


@value
class PolicyDecided(Event):
    """The policy of the run made a decision."""

    kind: ClassVar[str] = "policy_decided"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"state_json"}
    state_json: str
    """JSON of an object: the policy's `state`, and what it decided for the run."""

    @property
    def state(self) -> JsonValue:
        """The state for the policy's next decision."""
        return parsed_object(self.state_json).get("state")


@value
class RunCancelling(Event):
    """The run was cancelled by a request: no further task starts, and running attempts have a grace time to end."""

    kind: ClassVar[str] = "run_cancelling"
    run_id: str


@value
class RunWatched(Event):
    """The state of the run's owner is unknown; the owner has `seconds` to renew its lease."""

    kind: ClassVar[str] = "run_watched"
    stored: ClassVar[bool] = False
    run_id: str
    owner: str
    seconds: float


OWN_LIMITS = "limits"
"""The `cause` of a BackendThrottled without a refusal."""
USD_PER_DAY = "usd_per_day"
"""The `cause` of a BackendThrottled whose account has spent its money of the day."""


@value
class BudgetRaised(Event):
    """The budget of the run, or the `max_cost` of a task, was raised, or the run was given a budget."""

    kind: ClassVar[str] = "budget_raised"
    informs: ClassVar[bool] = True
    usd: float
    """The new limit, in US dollars."""
    only: str | None = None
    """The id of the task whose `max_cost` it is; None for the budget of the run."""


@value
class RunTuned(Event):
    """A person has paused the run or a backend of it, let it go on, or set how many tasks run at once. Either `paused`
    or `slots` is given.
    """

    kind: ClassVar[str] = "run_tuned"
    informs: ClassVar[bool] = True
    backend: str | None = None
    """The backend; None for the whole run."""
    paused: bool | None = None
    """Whether no further task starts."""
    slots: int | None = None
    """The number of tasks that run at once from now on."""


@value
class BackendThrottled(Event):
    """A backend is paused after a rate limit or an overload, may be called again, or has all its slots again."""

    kind: ClassVar[str] = "backend_throttled"
    informs: ClassVar[bool] = True
    backend: str
    until: str | None
    """The end of the pause; None if the backend is not paused."""
    cause: str
    """The HTTP status of the refusal, such as `429`; without a status the kind of the error, such as `rate_limited`.
    OWN_LIMITS once tasks wait for the rate limits that the run itself keeps; sent once. USD_PER_DAY while they wait
    for the next day.
    """
    slots: int
    """The number of tasks that may run on the backend at once, after the pause if there is one. 0 if its account has no
    credit left, until a person has answered the task that asks to top it up.
    """
    total: int
    """The number without throttling."""


@value
class HostAway(Event):
    """Tasks wait for a host that is away, or no task waits for the host any longer."""

    kind: ClassVar[str] = "host_away"
    informs: ClassVar[bool] = True
    host: str
    """The name of the host."""
    since: str | None
    """The time at which the host was found to be away; None once no task waits for the host."""
    reason: str
    """Why the host is away, in one line; empty if the host is back."""
    tasks: tuple[str, ...]
    """The ids of the tasks that wait for the host, in the order in which they began to wait."""


@value
class RunEnded(Event):
    """Base of the events that end a run for this process, and leave it without an owner. No event follows."""

    status: ClassVar[RunStatus]
    """The status of the run."""
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"error", "due_at"}
    run_id: str
    error: str | None = None
    """The reason for a failure, in one line."""


@value
class RunCompleted(RunEnded):
    """Every task is completed or skipped."""

    kind: ClassVar[str] = "run_completed"
    status: ClassVar[RunStatus] = RunStatus.COMPLETED


@value
class RunFailed(RunEnded):
    """At least one task failed, and every task able to run has run."""

    kind: ClassVar[str] = "run_failed"
    status: ClassVar[RunStatus] = RunStatus.FAILED


@value
class RunCancelled(RunEnded):
    """The run was cancelled permanently."""

    kind: ClassVar[str] = "run_cancelled"
    status: ClassVar[RunStatus] = RunStatus.CANCELLED


@value
class RunInterrupted(RunEnded):
    """This process stopped executing the run before its end. The run keeps its status, and `resume` continues it."""

    kind: ClassVar[str] = "run_interrupted"
    status: ClassVar[RunStatus] = RunStatus.INTERRUPTED


@value
class RunParked(RunEnded):
    """Everything that is left of the run waits for a time, and this process has left the run until then; or it was
    stopped with nobody there, and the run is due at once. The run keeps its status.
    """

    kind: ClassVar[str] = "run_parked"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"error"}
    status: ClassVar[RunStatus] = RunStatus.PARKED

    until: str = ""
    """When the run can go on, UTC in ISO 8601: the first task may start, or the deadline of a question has come."""

    @property
    def due_at(self) -> float:
        """The same as Unix time in seconds: see `RunReleased.due_at`."""
        return parse_time(self.until)


@value
class RunWaitingInput(RunEnded):
    """No task can run before a person answers a question. `resume` continues the run afterwards."""

    kind: ClassVar[str] = "run_waiting_input"
    status: ClassVar[RunStatus] = RunStatus.WAITING_INPUT

    due_at: float | None = None
    """The earliest deadline of the questions, as Unix time in seconds; None without a deadline."""


@value
class TaskEvent(Event):
    """Base of the events of a task."""

    task_id: str
    attempt: int
    """The number of the attempt, from 1."""


@value
class TaskStarted(TaskEvent):
    """The attempt is stored as running. The call of the backend follows."""

    kind: ClassVar[str] = "task_started"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"session_id"}
    backend: str
    session_id: str | None = None
    """The id of the conversation, if known before the call."""
    confirmed: bool = False
    """True if the attempt continues the conversation of an interrupted attempt."""
    reserved_usd: float | None = None
    """The most that the attempt costs, in US dollars, which counts until its cost is known; None without a budget."""
    moved_from: str | None = None
    """The backend of the task, if the attempt calls a spare in its place."""


@value
class TaskAdopted(TaskStarted):
    """This process follows an attempt that a process which has died began: the turn outlived the process."""

    kind: ClassVar[str] = "task_adopted"
    informs: ClassVar[bool] = True


@value
class TaskPlaced(TaskEvent):
    """A host has a slot for the attempt, and the attempt begins there."""

    kind: ClassVar[str] = "task_placed"
    informs: ClassVar[bool] = True
    place: str
    """The name of the host."""
    interrupted: bool = False
    """True if the attempt continues an interrupted turn."""


@value
class SessionOpened(TaskEvent):
    """The id of the conversation became known during the turn, or the backend confirmed the chosen id."""

    kind: ClassVar[str] = "session_opened"
    informs: ClassVar[bool] = True
    session_id: str


@value
class NodeStarted(TaskEvent):
    """A node of the task's graph begins. Nodes of nested graphs are not reported."""

    kind: ClassVar[str] = "node_started"
    informs: ClassVar[bool] = True
    node: str
    """The name of the node."""


@value
class FolderAwaited(TaskEvent):
    """The task is ready, and waits for its folder, in which another one writes."""

    kind: ClassVar[str] = "folder_awaited"
    informs: ClassVar[bool] = True
    folder: str
    """The path of the folder."""
    by: str | None
    """The id of the task of this run that writes there; None for another run or process."""


@value
class MessageAppended(TaskEvent):
    """Append a message to the conversation of a task, outside of any attempt."""

    kind: ClassVar[str] = "message_appended"
    shown: ClassVar[bool] = False
    message: Message


@value
class TaskOutput(TaskEvent):
    """Output observed during the turn. Not stored."""

    kind: ClassVar[str] = "task_output"
    stored: ClassVar[bool] = False
    output: Literal["text", "tool", "waiting", "notice"]
    """The kind of the output, as in `Output.kind`."""
    text: str
    usage: Usage = NO_USAGE
    """The usage of the turn so far."""


@value
class TaskCompleted(TaskEvent):
    """The result is stored."""

    kind: ClassVar[str] = "task_completed"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"text", "data_json", "duration_s", "turn", "session_id"}
    text: str
    data_json: str | None = None
    """`data` as stored text."""
    usage: Usage = NO_USAGE
    duration_s: float = 0.0
    session_id: str | None = None
    turn: tuple[Message, ...] | str = ()
    """The messages of the turn; the prompt alone if the turn consists of the prompt and `text` (true for most
    tasks).
    """

    @property
    def data(self) -> JsonValue:
        """The structured result; None without one."""
        return None if self.data_json is None else parsed(self.data_json)

    @property
    def messages(self) -> tuple[Message, ...]:
        """The messages of the turn, including the prompt."""
        if isinstance(self.turn, str):
            return Message("user", self.turn), Message("assistant", self.text, self.usage)
        return self.turn


@value
class TaskRetried(TaskEvent):
    """The attempt failed. The next attempt follows after `delay_s` seconds; a resume repeats the event."""

    kind: ClassVar[str] = "task_retried"
    left_out: ClassVar[frozenset[str]] = _OF_THE_ATTEMPT
    error_kind: str
    error: str
    delay_s: float
    duration_s: float = 0.0
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()
    continues_session: bool = False
    """True if the next attempt may continue the session of the failed attempt."""
    traceback: str | None = None
    """The traceback of a function that failed."""


@value
class TaskFailed(TaskEvent):
    """The task failed for good, or is skipped."""

    kind: ClassVar[str] = "task_failed"
    left_out: ClassVar[frozenset[str]] = _OF_THE_ATTEMPT
    status: ClassVar[TaskStatus] = TaskStatus.FAILED
    error_kind: str
    error: str
    duration_s: float = 0.0
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()
    traceback: str | None = None
    """As in TaskRetried."""


@value
class TaskSkipped(TaskFailed):
    """The task failed and its failure mode is `skip`, or the condition of the task (`when`) is false."""

    kind: ClassVar[str] = "task_skipped"
    status: ClassVar[TaskStatus] = TaskStatus.SKIPPED


@value
class TaskInterrupted(TaskEvent):
    """The attempt ended with its owner; the task is pending again."""

    kind: ClassVar[str] = "task_interrupted"
    reason: str
    crashed: bool = False
    """True if the owner died, False if the owner stopped."""
    delay_s: float = 0.0
    """As in TaskRetried."""


@value
class TaskWaiting(TaskEvent):
    """The task waits for a person."""

    kind: ClassVar[str] = "task_waiting_input"
    left_out: ClassVar[frozenset[str]] = _OF_THE_ATTEMPT | {"question", "asked"}
    question: str
    crashed: bool = False
    asked: str | None = None
    """More about the question as JSON, if the task's code or conversation asked it. None if the attempt ended with its
    owner and a person has to decide whether the attempt took effect.
    """
    duration_s: float | None = None
    usage: Usage = NO_USAGE
    messages: tuple[Message, ...] = ()


@value
class TaskAnswered(TaskEvent):
    """The question of a waiting task is answered; the task continues."""

    kind: ClassVar[str] = "task_answered"
    left_out: ClassVar[frozenset[str]] = _COLUMNS | {"answers"}
    answers: str | None = None
    """All answers of the task as JSON, the newest last. None if a person decided to run the task again."""


@value
class TaskCancelled(TaskEvent):
    """The task was cancelled, with its run or by the policy."""

    kind: ClassVar[str] = "task_cancelled"
    usage: Usage = NO_USAGE
    """The usage of the attempt, as far as reported by the backend."""


@value
class TaskReopened(TaskEvent):
    """A failed task, or a task with a damaged result, is pending again after a `resume` with `retry_failed`."""

    kind: ClassVar[str] = "task_reopened"
    damaged: bool = False
    """True if the task was completed with a stored result that is now unusable."""
    prompt: str | None = None
    """The new prompt of the task; None if the prompt did not change."""


@value
class StoreDegraded(Event):
    """The store failed. The run continues and keeps its changes in memory until the store answers again."""

    kind: ClassVar[str] = "store_degraded"
    stored: ClassVar[bool] = False
    error: str


@value
class StoreAwaited(Event):
    """The run has ended, and waits up to `seconds` for its store, a server that is away. A stop ends the wait."""

    kind: ClassVar[str] = "store_awaited"
    stored: ClassVar[bool] = False
    changes: int
    """The number of changes that are not stored yet."""
    seconds: float


@value
class StoreRecovered(Event):
    """The store answers again and has stored all changes kept in memory."""

    kind: ClassVar[str] = "store_recovered"
    stored: ClassVar[bool] = False
    changes: int
    """The number of changes stored after the outage."""


@value
class EventsDropped(Event):
    """The reader was too slow: `count` task outputs were omitted here. Other events are never dropped."""

    kind: ClassVar[str] = "events_dropped"
    stored: ClassVar[bool] = False
    count: int


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def columns_of(event: Event) -> tuple[str, str, str | None, int | None, str]:
    """Return the columns of the stored event: `at`, the kind, the task, the attempt, and the detail as JSON text.

    The detail holds no prompt, no result and no policy state, because the history would grow with the square of the
    decisions; in their place stand the number of added tasks, and that a prompt has changed.
    """
    if type(event) is TaskStarted:
        detail = _detail_of_start(event.backend, event.confirmed, event.reserved_usd, event.moved_from)
        return event.at, event.kind, event.task_id, event.attempt, detail
    if type(event) is TaskCompleted and event.usage is NO_USAGE:  # all other fields are left out
        return event.at, event.kind, event.task_id, event.attempt, "{}"
    if isinstance(event, TaskReopened) and event.prompt is not None:
        event = replace(event, prompt="changed")
    form = as_json(event, event.left_out)
    if isinstance(event, TaskEvent):
        return event.at, event.kind, event.task_id, event.attempt, _encode(form) if form else "{}"
    if isinstance(event, RunCreated | TasksAdded):
        form["tasks"] = len(event.tasks)
    return event.at, event.kind, getattr(event, "added_by", None), None, _encode(form)


@lru_cache(maxsize=1000)
def _detail_of_start(backend: str, confirmed: bool, reserved_usd: float | None, moved_from: str | None) -> str:
    start = TaskStarted("", "", 0, backend, confirmed=confirmed, reserved_usd=reserved_usd, moved_from=moved_from)
    return _encode(as_json(start, TaskStarted.left_out))


AttemptEnd: TypeAlias = TaskCompleted | TaskFailed | TaskRetried | TaskInterrupted | TaskWaiting | TaskCancelled
"""Every event that ends an attempt."""
TaskTransition: TypeAlias = TaskStarted | TaskAnswered | TaskReopened | AttemptEnd
"""Every event that changes the status of a task."""

EVENTS: Final[Mapping[str, type[Event]]] = {
    one.kind: one
    for one in list(globals().values())
    if isinstance(one, type) and issubclass(one, Event) and one.kind != Event.kind
}
"""The class of each kind of event."""
HISTORY: Final = frozenset(kind for kind, one in EVENTS.items() if one.stored and one.shown)
"""The kinds of stored events."""
RUN_ENDS: Final = frozenset({RunCompleted.kind, RunFailed.kind, RunCancelled.kind})
"""The kinds of the events that end a run."""
TASK_RESULTS: Final = frozenset({TaskCompleted.kind, TaskFailed.kind, TaskSkipped.kind})
"""The kinds of the events that give a task its result."""
ATTEMPT_ENDS: Final = TASK_RESULTS | {TaskRetried.kind, TaskInterrupted.kind, TaskWaiting.kind, TaskCancelled.kind}
"""The kinds of the events that end an attempt."""
