"""What a store takes and returns: batches of events, records, and the notes in a run's inbox. Plain frozen values.

Times and JSON have the formats of `plait.events`.
"""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from plait.events import Event, Owner
from plait.json_form import value
from plait.usage import NO_USAGE, Usage


@value
class Batch:
    """Events of one run, applied all or none.

    Event i is change `first_seq + i` of the run. The numbers of a run start at 1 and have no gap. A store skips applied
    changes by their numbers, so a batch, or a longer batch that starts with the same events, can be written again after
    an error.
    """

    run_id: str
    epoch: int
    """The epoch of the writer; 0 before the first claim."""
    first_seq: int
    """The number of the first change."""
    events: tuple[Event, ...]
    owner_id: str | None = None
    """The `owner_id` of the last claim before the batch; None if the writer does not know it. With it, a writer is
    fenced even if a server has lost its claim, and counts another one in its place.
    """

    @property
    def last_seq(self) -> int:
        """The number of the last change."""
        return self.first_seq + len(self.events) - 1


class Claim(NamedTuple):
    """A claim of a run. The n-th claim starts epoch n."""

    seq: int
    """The number of the RunClaimed."""
    owner_id: str


@value
class RunRecord:
    """A stored run. What a store needs to check a batch is its `head`: the record without `counts`."""

    run_id: str
    name: str
    status: str
    created_at: str
    started_at: str | None = None
    """The time of the first start."""
    ended_at: str | None = None
    """The time of the last end; None while the run has not ended."""
    error: str | None = None
    """One line that explains a failure."""
    settings: str = ""
    """The JSON of RunCreated; empty in `Store.list_runs`."""
    claims: tuple[Claim, ...] = ()
    """Every claim so far."""
    last_seq: int = 0
    """The number of the last applied change."""
    owner: Owner | None = None
    lease_expires_at: float | None = None
    """Unix time in seconds by the clock of the owner; without an owner, the `due_at` of the last release."""
    counts: dict[str, int] = field(default_factory=dict[str, int])
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

    @property
    def epoch(self) -> int:
        """The number of claims."""
        return len(self.claims)

    @property
    def last_written(self) -> tuple[int, int, str | None]:
        """What differs in the store as soon as another has written: the last change, the epoch and the owner."""
        return self.last_seq, self.epoch, None if self.owner is None else self.owner.owner_id


@value
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


@value
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


@value
class Purged:
    """The effect of `SQLiteStore.purge` or `PostgresStore.purge`."""

    run_ids: tuple[str, ...]
    """The deleted runs, without unknown ids."""
    freed_bytes: int
    """The reduction of the file's size; 0 for a server."""
    remains: str | None = None
    """None if no byte of the deleted runs is left in the store. Else one line with the reason.

    Another purge, with the same ids or with none, removes the rest.
    """


THOUGHTS = "thoughts"
"""The role of a record with the thoughts that a model wrote into the message after it. The thoughts are shown, and are
no part of the conversation.
"""


@value
class MessageRecord:
    """A stored message of a task's conversation."""

    task_id: str
    position: int
    """Counts from 0 within the task."""
    attempt: int
    """0 for a message outside of any attempt."""
    role: str
    """`system`, `user` or `assistant`, or THOUGHTS."""
    content: str
    """Empty if `damaged`."""
    input_tokens: int
    output_tokens: int
    at: str
    damaged: bool = False
    """The content does not fit the checksum."""


@value
class EventRecord:
    """A stored event: the trace of one change in the run's history."""

    seq: int
    """The number of the change."""
    at: str
    kind: str
    """The kind of the event, as `plait.events.TaskStarted.kind`."""
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


@value
class NoteRecord:
    """A stored note."""

    number: int
    """Counts the notes of the run from 1, in the order of arrival."""
    kind: str
    at: str
    task_id: str | None
    body: str
