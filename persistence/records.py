"""What a store takes and returns: batches of events, records, and the notes in a run's inbox. Plain frozen values.

Times and JSON have the formats of `plait.events`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from plait.events import Event, Owner
from plait.json_form import value
from plait.usage import NO_USAGE, Usage


@value
class Batch:
    """Changes to one run, applied all or none.

    Change i has the sequence number `first_seq + i`. The numbers of a run start at 1 and have no gap. A store skips
    applied changes by their numbers, so a batch, or a longer batch that starts with the same changes, can be written
    again after an error.
    """

    run_id: str
    epoch: int
    """The epoch of the writer; 0 before the first claim."""
    first_seq: int
    """The number of the first change."""
    changes: tuple[Event, ...]

    @property
    def last_seq(self) -> int:
        """The number of the last change."""
        return self.first_seq + len(self.changes) - 1


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A stored run."""

    run_id: str
    name: str
    status: str
    created_at: str
    started_at: str | None
    """The time of the first start."""
    ended_at: str | None
    """The time of the last end; None while the run has not ended."""
    error: str | None
    """One line that explains a failure."""
    settings: str
    """The JSON of RunCreated; empty in `Store.list_runs`."""
    epoch: int
    """The number of claims."""
    last_seq: int
    """The number of the last applied change."""
    owner: Owner | None
    lease_expires_at: float | None
    """Unix time in seconds by the clock of the owner; without an owner, the `due_at` of the last RunReleased."""
    counts: dict[str, int]
    """The number of tasks by status, without the statuses of no task."""
    usage: Usage = NO_USAGE
    """The sums over all attempts, without a model."""
    policy_state: str | None = None
    """The state of the last PolicyDecided."""
    policy_seq: int = 0
    """The number of the last PolicyDecided; 0 before the first."""
    lease_has_expired: bool = False
    """Whether the owner has let the lease expire, by the clock of the store: of the server, or of this host. False
    without an owner.
    """
    damaged: bool = False
    """Whether the stored run does not fit its checksum. Only in `Store.list_runs`: then `status` is failed, `error` is
    the reason, and nothing else but `run_id` is known.
    """


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A stored task, with the result of the last attempt."""

    task_id: str
    position: int
    """Counts from 0 in the order of adding."""
    prompt: str
    depends_on: tuple[str, ...]
    backend: str | None
    """The backend of the plan, as in NewTask."""
    spec: str
    status: str
    attempt: int
    """The number of the last attempt; 0 before the first."""
    text: str | None = None
    data: str | None = None
    error_kind: str | None = None
    error: str | None = None
    session_id: str | None = None
    usage: Usage = NO_USAGE
    """The usage of the last attempt."""
    duration_s: float | None = None
    """Seconds that the last attempt took."""
    started_at: str | None = None
    ended_at: str | None = None
    damaged: bool = False
    """`text` or `data` does not fit the checksum. Both are None then."""
    crashes: int = 0
    """The number of changes with `crashed` about the task."""
    session_confirmed: bool = False
    """The last attempt's session is confirmed, as in SessionOpened."""
    question: str | None = None
    """The text for a person, while the task is waiting_input."""
    asked: str | None = None
    """More about the question, as in TaskWaiting."""
    answers: str | None = None
    """The answers of the last TaskAnswered with answers."""
    added_by: str | None = None
    """As in TasksAdded; None for a task of RunCreated."""


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """A stored attempt at a task."""

    task_id: str
    attempt: int
    """Counts from 1 within the task."""
    status: str
    """An AttemptStatus, as text."""
    backend: str
    session_id: str | None
    started_at: str
    ended_at: str | None
    error_kind: str | None
    error: str | None
    usage: Usage
    duration_s: float | None
    traceback: str | None = None
    """The traceback of a function that failed, as Python prints it."""


THOUGHTS = "thoughts"
"""The role of a record with the thoughts that a model wrote into the message after it. The thoughts are shown, and are
no part of the conversation.
"""


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """A stored message of a task's conversation."""

    task_id: str
    position: int
    """Counts from 0 within the task."""
    attempt: int
    """As in MessageAppended."""
    role: str
    """As in MessageAppended."""
    content: str
    """Empty if `damaged`."""
    input_tokens: int
    output_tokens: int
    at: str
    damaged: bool = False
    """The content does not fit the checksum."""


class EventKind(StrEnum):
    """The kinds of events in a run's history: the changes in snake case, and one kind for each new status of the run.

    MessageAppended, LeaseRenewed, RunClaimed and RunReleased add no event.
    """

    RUN_CREATED = "run_created"
    """The run and its whole graph are stored. Always the first event."""
    RUN_STARTED = "run_started"
    """A process begins the run."""
    RUN_RESUMED = "run_resumed"
    """A process continues the run, after an interruption, an answer, or a failure that a person reopened."""
    RUN_WAITING_INPUT = "run_waiting_input"
    """No task can run before a person answers."""
    RUN_CANCELLING = "run_cancelling"
    """A request cancelled the run; running attempts have a grace time."""
    RUN_COMPLETED = "run_completed"
    """Every task is completed or skipped."""
    RUN_FAILED = "run_failed"
    """At least one task failed, and every task able to run has run."""
    RUN_CANCELLED = "run_cancelled"
    """The run is ended for good."""
    TASKS_ADDED = "tasks_added"
    """A task or the policy of the run added tasks."""
    POLICY_DECIDED = "policy_decided"
    """The policy of the run made a decision."""
    BACKEND_THROTTLED = "backend_throttled"
    """A backend is paused after a rate limit or an overload, may be called again, or has all its slots again."""
    HOST_AWAY = "host_away"
    """Tasks wait for a host that is away, or no task waits for the host any longer."""
    TASK_STARTED = "task_started"
    """An attempt begins."""
    TASK_ADOPTED = "task_adopted"
    """A resume took over an agent that outlived its process."""
    TASK_PLACED = "task_placed"
    """An attempt is about to begin on another host; the `place` of the detail is the name of the host."""
    NODE_STARTED = "node_started"
    """A node of a graph begins; the `node` of the detail is its name."""
    SESSION_OPENED = "session_opened"
    """The id of the conversation is known, or the backend confirmed the id."""
    TASK_COMPLETED = "task_completed"
    """The result of the task is stored."""
    TASK_FAILED = "task_failed"
    """The task failed for good."""
    TASK_SKIPPED = "task_skipped"
    """The task failed and its failure mode is `skip`, or the condition of the task (`when`) is false."""
    TASK_RETRIED = "task_retried"
    """The attempt failed; another attempt follows."""
    TASK_INTERRUPTED = "task_interrupted"
    """The attempt ended with its process; the task is pending again."""
    TASK_WAITING_INPUT = "task_waiting_input"
    """The task waits for a person."""
    TASK_ANSWERED = "task_answered"
    """A person or a program answered the question of the task."""
    TASK_CANCELLED = "task_cancelled"
    """The task is cancelled, with the run or by the policy."""
    TASK_REOPENED = "task_reopened"
    """A person lets a failed task, or a task with a damaged result, run again."""


RUN_ENDS: Final = frozenset({EventKind.RUN_COMPLETED, EventKind.RUN_FAILED, EventKind.RUN_CANCELLED})
"""The kinds of the events that end a run."""
TASK_RESULTS: Final = frozenset({EventKind.TASK_COMPLETED, EventKind.TASK_FAILED, EventKind.TASK_SKIPPED})
"""The kinds of the events that give a task its result."""
ATTEMPT_ENDS: Final = TASK_RESULTS | {
    EventKind.TASK_RETRIED,
    EventKind.TASK_INTERRUPTED,
    EventKind.TASK_WAITING_INPUT,
    EventKind.TASK_CANCELLED,
}
"""The kinds of the events that end an attempt."""


@dataclass(frozen=True, slots=True)
class EventRecord:
    """A stored event: the trace of one change in the run's history."""

    seq: int
    """The number of the change."""
    at: str
    kind: EventKind
    task_id: str | None
    attempt: int | None
    detail: str
    """A small JSON object, without prompts and results."""


@value
class Note:
    """A request to the owner of a run. Any process may send a note; notes are no changes of the run."""

    kind: str
    """The request, such as cancel or answer."""
    at: str
    task_id: str | None = None
    """The task concerned; None for a request about the run."""
    body: str = "{}"
    """JSON that the store never reads."""


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A stored note."""

    number: int
    """Counts the notes of the run from 1, in the order of arrival."""
    kind: str
    at: str
    task_id: str | None
    body: str
