"""What a store is told: changes to one run. Plain frozen values, all text and numbers.

Times named `at` or `*_at` are UTC in ISO 8601 with milliseconds, such as `2026-11-21T23:01:16.123Z`, from the caller.
JSON comes encoded, so that nothing can change between the moment it is handed over and the moment it is written.
Statuses are the words of docs/concepts.md.
"""

from __future__ import annotations

from typing import TypeAlias

from plait.persistence.records import NOTHING_SPENT, Owner, Spent
from plait.persistence.values import value


@value
class NewTask:
    """A task to be added, as pending. `spec` is the rest of the task as JSON; the store keeps it and never reads it."""

    task_id: str
    prompt: str
    depends_on: tuple[str, ...] = ()
    backend: str | None = None
    spec: str = "{}"


@value
class RunCreated:
    """The run, its tasks and their edges, all at once. The run is queued. The first change of a run's first batch.

    `settings` is JSON that the store keeps and never reads.
    """

    at: str
    name: str
    settings: str
    tasks: tuple[NewTask, ...]


@value
class RunClaimed:
    """`owner` runs the run from now on: the epoch goes up by one. `lease_expires_at` is a Unix time in seconds."""

    at: str
    owner: Owner
    lease_expires_at: float


@value
class LeaseRenewed:
    """The owner still lives."""

    lease_expires_at: float


@value
class RunReleased:
    """The owner leaves; nobody owns the run."""

    at: str


@value
class RunStatusChanged:
    """The run's status follows the table in `runner/status.py`; `error` says in one line why it failed.

    `resumed`: the run goes on with another owner. Only then may a running run become running.
    """

    at: str
    status: str
    error: str | None = None
    resumed: bool = False


@value
class TasksAdded:
    """Further tasks, as pending, behind those that are there; they may depend on those and on each other. `added_by` is
    the task that brought them in, None where the run's policy did.
    """

    at: str
    tasks: tuple[NewTask, ...]
    added_by: str | None = None


@value
class PolicyDecided:
    """The run's policy was asked about all that had happened so far. `state` is what it wants to know next time, as a
    small JSON text that the store keeps and never reads.
    """

    at: str
    state: str


@value
class TaskStarted:
    """pending -> running, attempt `attempt` (one more than the last). `session_id` where it was chosen beforehand.

    `confirmed`: the attempt goes on with a session that is known to hold the task's prompt; see SessionOpened.
    """

    at: str
    task_id: str
    attempt: int
    backend: str
    session_id: str | None = None
    confirmed: bool = False


@value
class TaskAdopted:
    """An attempt that outlived the process which began it goes on with the run's new owner. An event, and no more."""

    at: str
    task_id: str
    attempt: int


@value
class SessionOpened:
    """The conversation's id became known, or became another one; from now on it is confirmed: its backend has the
    session, with the task's prompt in it, and can go on with it by that id.
    """

    at: str
    task_id: str
    attempt: int
    session_id: str


@value
class TurnAppended:
    """One message of a task's conversation, appended after those already there.

    `attempt` is the attempt that it belongs to; 0 marks a message of a person who went on with the conversation later.
    """

    at: str
    task_id: str
    attempt: int
    role: str
    content: str
    input_tokens: int = 0
    output_tokens: int = 0


@value
class TaskCompleted:
    """running or waiting_input -> completed. `data` is the structured result as JSON, None if there is none. `model` is
    the one that answered, as its backend names it; None where that is not known, here as wherever an attempt ends.

    `prompt`: what was said in the attempt is this, from the user, and `text` in answer, from the assistant, with the
    tokens given here. Both are messages of the task as if two TurnAppended had said them just before. None where they
    have, or where nothing was said; only from running.
    """

    at: str
    task_id: str
    attempt: int
    text: str
    data: str | None = None
    spent: Spent = NOTHING_SPENT
    duration_s: float = 0.0
    prompt: str | None = None


@value
class TaskFailed:
    """running or waiting_input -> failed, or skipped, as `status` says."""

    at: str
    task_id: str
    attempt: int
    status: str
    error_kind: str
    error: str
    duration_s: float = 0.0
    spent: Spent = NOTHING_SPENT


@value
class TaskRetried:
    """running -> pending: the attempt failed, another follows after `delay_s`. With `goes_on` it takes up the attempt's
    session, which is confirmed thereby; without, that is not confirmed any more.
    """

    at: str
    task_id: str
    attempt: int
    error_kind: str
    error: str
    delay_s: float
    duration_s: float = 0.0
    spent: Spent = NOTHING_SPENT
    goes_on: bool = False


@value
class TaskInterrupted:
    """running -> pending: the attempt ended with its owner; its outcome is unknown. `crashed`: the owner did not leave
    by itself but died, which counts in `TaskRecord.crashes`.
    """

    at: str
    task_id: str
    attempt: int
    reason: str
    crashed: bool = False


@value
class TaskWaiting:
    """running -> waiting_input: a person has to say what follows. `question` is the text they are asked.

    `asked` is more about the question as JSON that the store keeps and never reads, where the task itself asked: then
    the attempt ended as asked, with its cost. Where it is None the attempt ended as interrupted; `crashed` as in
    TaskInterrupted.
    """

    at: str
    task_id: str
    attempt: int
    question: str
    crashed: bool = False
    asked: str | None = None
    duration_s: float | None = None
    spent: Spent = NOTHING_SPENT


@value
class TaskAnswered:
    """waiting_input -> pending: the task runs again. `answers` are all answers that its questions have had so far, as
    JSON that the store keeps and never reads; None leaves those that are stored.
    """

    at: str
    task_id: str
    answers: str | None = None


@value
class TaskCancelled:
    """pending, running or waiting_input -> cancelled. The cost is that of an attempt that was running."""

    at: str
    task_id: str
    spent: Spent = NOTHING_SPENT


@value
class TaskReopened:
    """failed -> pending, because a person asked for it. `damaged`: completed -> pending, its result thrown away,
    because what is stored of it does not fit its checksum, with the message that it is where it came with its prompt.
    Either way its answers are forgotten.
    """

    at: str
    task_id: str
    damaged: bool = False


Change: TypeAlias = (
    RunCreated
    | RunClaimed
    | LeaseRenewed
    | RunReleased
    | RunStatusChanged
    | TasksAdded
    | PolicyDecided
    | TaskStarted
    | TaskAdopted
    | SessionOpened
    | TurnAppended
    | TaskCompleted
    | TaskFailed
    | TaskRetried
    | TaskInterrupted
    | TaskWaiting
    | TaskAnswered
    | TaskCancelled
    | TaskReopened
)
AttemptEnd: TypeAlias = TaskCompleted | TaskFailed | TaskRetried | TaskInterrupted | TaskWaiting | TaskCancelled
"""Every change that ends an attempt."""
TaskTransition: TypeAlias = TaskStarted | TaskAnswered | TaskReopened | AttemptEnd
"""Every change of a task's status."""


@value
class Batch:
    """Changes to one run, applied all or none.

    Change i has the sequence number `first_seq + i`; a run's numbers start at 1 and have no gap. A store skips every
    change whose number it has applied already, so a batch (or a longer one that starts with it) can be written again
    after an error without harm. `epoch` is the epoch that the writer holds, 0 before the first claim.
    """

    run_id: str
    epoch: int
    first_seq: int
    changes: tuple[Change, ...]

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.changes) - 1
