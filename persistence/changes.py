"""The changes that a run's owner writes to a store, and the batch that carries them. Plain frozen values.

Times named `at` are UTC in ISO 8601 with milliseconds, such as `2026-11-21T23:01:16.123Z`, and come from the caller.
JSON comes encoded, because a value could otherwise change between the call of `write` and the transaction.
Statuses are the words of docs/concepts.md.
"""

from __future__ import annotations

from typing import TypeAlias

from plait.events import (
    AttemptId,
    BackendThrottled,
    HostAway,
    LeaseRenewed,
    NodeStarted,
    PolicyDecided,
    RunClaimed,
    RunCreated,
    RunReleased,
    SessionOpened,
    TaskAdopted,
    TaskAnswered,
    TaskCancelled,
    TaskInterrupted,
    TaskPlaced,
    TaskReopened,
    TasksAdded,
    TaskStarted,
)
from plait.json_form import value
from plait.usage import NO_USAGE, Usage


@value
class RunStatusChanged:
    """Change the status of the run, as RUN_TRANSITIONS of `plait.statuses` allows."""

    at: str
    status: str
    error: str | None = None
    """One line that explains a failure."""
    resumed: bool = False
    """The run continues. Only a queued run becomes running without `resumed`."""


@value
class MessageAppended:
    """Append a message to the conversation of a task."""

    at: str
    task_id: str
    attempt: int
    """The attempt of the message; 0 for a message of a person after the run."""
    role: str
    """`system`, `user` or `assistant`, or `thoughts` for those that belong to the message after it."""
    content: str
    input_tokens: int = 0
    output_tokens: int = 0


@value
class TaskCompleted:
    """Store the result of a task: running or waiting_input -> completed."""

    at: str
    task_id: str
    attempt: int
    text: str
    data: str | None = None
    """The structured result as JSON; None without a schema."""
    usage: Usage = NO_USAGE
    duration_s: float = 0.0
    """Seconds that the attempt took."""
    prompt: str | None = None
    """The whole prompt, if the attempt consisted of this prompt and the answer `text`.

    Both become messages of the task, as if two MessageAppended preceded the completion; the answer has the tokens of
    `usage`. Only from running. None if the messages were appended before, or if no message was sent.
    """
    taken_from: AttemptId | None = None
    """The attempt whose answer was taken over; None for an answer of its own.

    The store may refer to the attempt in place of a copy, if the attempt has the same text, data and prompt.
    """


@value
class TaskFailed:
    """End a task without a result: running or waiting_input -> `status`."""

    at: str
    task_id: str
    attempt: int
    status: str
    """failed or skipped."""
    error_kind: str
    error: str
    duration_s: float = 0.0
    usage: Usage = NO_USAGE
    traceback: str | None = None
    """As in AttemptRecord."""


@value
class TaskRetried:
    """End a failed attempt and plan another: running -> pending."""

    at: str
    task_id: str
    attempt: int
    error_kind: str
    error: str
    delay_s: float
    """Seconds until the next attempt."""
    duration_s: float = 0.0
    usage: Usage = NO_USAGE
    continues_session: bool = False
    """The next attempt continues the session, which is confirmed thereby. False revokes the confirmation."""
    traceback: str | None = None
    """As in AttemptRecord."""


@value
class TaskWaiting:
    """End an attempt with a question to a person: running -> waiting_input."""

    at: str
    task_id: str
    attempt: int
    question: str
    """The text for the person."""
    crashed: bool = False
    """As in TaskInterrupted."""
    asked: str | None = None
    """More about the question as JSON, which the store never reads, if the task itself asks.

    The attempt then ends as asked, with `usage`. With None the attempt ends as interrupted.
    """
    duration_s: float | None = None
    usage: Usage = NO_USAGE


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
    | TaskPlaced
    | NodeStarted
    | BackendThrottled
    | HostAway
    | SessionOpened
    | MessageAppended
    | TaskCompleted
    | TaskFailed
    | TaskRetried
    | TaskInterrupted
    | TaskWaiting
    | TaskAnswered
    | TaskCancelled
    | TaskReopened
)
"""Every change that a batch may hold."""
AttemptEnd: TypeAlias = TaskCompleted | TaskFailed | TaskRetried | TaskInterrupted | TaskWaiting | TaskCancelled
"""Every change that ends an attempt."""
TaskTransition: TypeAlias = TaskStarted | TaskAnswered | TaskReopened | AttemptEnd
"""Every change of a task's status."""


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
    changes: tuple[Change, ...]

    @property
    def last_seq(self) -> int:
        """The number of the last change."""
        return self.first_seq + len(self.changes) - 1
