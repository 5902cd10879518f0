"""What a store tells: records, plain frozen values with the formats of `plait.persistence.changes`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from plait.persistence.values import value


@value
class Owner:
    """The process that runs a run. `owner_id` is fresh for every claim; the rest tells whether it still lives."""

    owner_id: str
    host: str
    boot_id: str
    pid: int
    process_started: str
    claimed_at: str


@value
class Spent:
    """The tokens and the cost of an attempt or of a run, and the model that answered."""

    input_tokens: int = 0
    output_tokens: int = 0
    cost_usd: float | None = None
    """US dollars; None if the backend reports no cost."""
    model: str | None = None
    """The name that the backend reports; None if the backend reports no name, and for a sum over a run."""

    def __add__(self, more: Spent) -> Spent:
        """Return the sums. The model is that of `more`, or of `self` if `more` has none."""
        costs = [cost for cost in (self.cost_usd, more.cost_usd) if cost is not None]
        return Spent(
            self.input_tokens + more.input_tokens,
            self.output_tokens + more.output_tokens,
            sum(costs) if costs else None,
            self.model if more.model is None else more.model,
        )


NOTHING_SPENT: Final = Spent()


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A stored run. `counts` maps task statuses to numbers of tasks; statuses that no task has are left out. Tokens and
    cost are summed over all attempts.

    `policy_state` is that of the last PolicyDecided, which was change `policy_seq`; None and 0 where there was none.
    """

    run_id: str
    name: str
    status: str
    created_at: str
    started_at: str | None
    ended_at: str | None
    error: str | None
    settings: str
    epoch: int
    last_seq: int
    owner: Owner | None
    lease_expires_at: float | None
    counts: dict[str, int]
    spent: Spent = NOTHING_SPENT
    policy_state: str | None = None
    policy_seq: int = 0


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """A task as it is stored, with the result of its last attempt. `attempt` is 0 before the first one.

    `damaged` is True when text or data do not fit their checksum: then both are None. `crashes` is how often an owner
    died while the task ran. `session_confirmed` as in SessionOpened, for the last attempt. `question` is what a person
    is asked while the task is waiting_input, and `asked` the rest of that question; `answers` are those of the last
    TaskAnswered that gave some. `added_by` as in TasksAdded, None for tasks of RunCreated as well. `model` is the one
    that answered in the last attempt, None where that is not known.
    """

    task_id: str
    position: int
    prompt: str
    depends_on: tuple[str, ...]
    backend: str | None
    spec: str
    status: str
    attempt: int
    text: str | None = None
    data: str | None = None
    error_kind: str | None = None
    error: str | None = None
    session_id: str | None = None
    spent: Spent = NOTHING_SPENT
    duration_s: float | None = None
    started_at: str | None = None
    ended_at: str | None = None
    damaged: bool = False
    crashes: int = 0
    session_confirmed: bool = False
    question: str | None = None
    asked: str | None = None
    answers: str | None = None
    added_by: str | None = None


@dataclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of one task. `status` is running, completed, failed, skipped, retried, asked, interrupted or
    cancelled. `model` is the one that answered, None where that is not known.
    """

    task_id: str
    attempt: int
    status: str
    backend: str
    session_id: str | None
    started_at: str
    ended_at: str | None
    error_kind: str | None
    error: str | None
    spent: Spent
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class MessageRecord:
    """One message. `position` counts from 0 within the task's conversation."""

    task_id: str
    position: int
    attempt: int
    role: str
    content: str
    input_tokens: int
    output_tokens: int
    at: str
    damaged: bool = False


class EventKind(StrEnum):
    """The kinds of events in the history of a run: the changes in snake case, and each status of a run by itself."""

    RUN_CREATED = "run_created"
    RUN_STARTED = "run_started"
    RUN_RESUMED = "run_resumed"
    RUN_WAITING_INPUT = "run_waiting_input"
    RUN_CANCELLING = "run_cancelling"
    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"
    TASKS_ADDED = "tasks_added"
    POLICY_DECIDED = "policy_decided"
    TASK_STARTED = "task_started"
    TASK_ADOPTED = "task_adopted"
    SESSION_OPENED = "session_opened"
    TASK_COMPLETED = "task_completed"
    TASK_FAILED = "task_failed"
    TASK_SKIPPED = "task_skipped"
    TASK_RETRIED = "task_retried"
    TASK_INTERRUPTED = "task_interrupted"
    TASK_WAITING_INPUT = "task_waiting_input"
    TASK_ANSWERED = "task_answered"
    TASK_CANCELLED = "task_cancelled"
    TASK_REOPENED = "task_reopened"


RUN_ENDS: Final = frozenset({EventKind.RUN_COMPLETED, EventKind.RUN_FAILED, EventKind.RUN_CANCELLED})
"""The kinds of the events with which a run ends."""
TASK_RESULTS: Final = frozenset({EventKind.TASK_COMPLETED, EventKind.TASK_FAILED, EventKind.TASK_SKIPPED})
"""The kinds of the events with which a task gets its result."""
ATTEMPT_ENDS: Final = TASK_RESULTS | {
    EventKind.TASK_RETRIED,
    EventKind.TASK_INTERRUPTED,
    EventKind.TASK_WAITING_INPUT,
    EventKind.TASK_CANCELLED,
}
"""The kinds of the events with which an attempt ends."""


@dataclass(frozen=True, slots=True)
class EventRecord:
    """One stored change as a line of the run's history. `seq` is the change's sequence number.

    `kind` is the change in snake case, such as `task_started`; `detail` is a small JSON object. Turns, lease renewals
    and claims leave no event.
    """

    seq: int
    at: str
    kind: EventKind
    task_id: str | None
    attempt: int | None
    detail: str


@value
class Note:
    """What somebody asks of a run's owner: `kind` says what, `task_id` of which task if of one, `body` is JSON that the
    store keeps and never reads. `at` as in `plait.persistence.changes`.
    """

    kind: str
    at: str
    task_id: str | None = None
    body: str = "{}"


@dataclass(frozen=True, slots=True)
class NoteRecord:
    """A stored note. `number` counts the notes of its run from 1, in the order in which they arrived."""

    number: int
    kind: str
    at: str
    task_id: str | None
    body: str
