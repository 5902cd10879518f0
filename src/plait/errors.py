"""Every error that a caller can catch, with the word for it that HTTP and `--json` print.

`PlaitError` is the base of all. A turn that failed is a `BackendError`, a call of a store that failed a `StoreError`;
any other exception from a store is a bug, and the runner treats the exception as StoreError. Adapters translate their
SDK's errors into the kinds of `BackendError`; only the runner retries.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import ClassVar

from plait.dialogue import Message
from plait.json_form import value
from plait.usage import NO_USAGE, Usage

__all__ = [
    "AnswerConflict",
    "BackendError",
    "BackendMissing",
    "BackendUnavailable",
    "Conflict",
    "DAGError",
    "ErrorKind",
    "Fenced",
    "Gap",
    "ImpossibleState",
    "InvalidRequest",
    "KeyConflict",
    "OwnershipLost",
    "PlaitError",
    "PlanError",
    "PlanProblem",
    "PolicyMissing",
    "Problem",
    "PromptError",
    "RunExists",
    "RunNotFound",
    "RunNotResumable",
    "RunOwned",
    "StoreBusy",
    "StoreError",
    "StoreNotOpen",
    "StoreRefused",
    "StoreRequired",
    "StoreUnusable",
    "TaskNotFound",
    "TurnNotStored",
    "UnknownStep",
    "WorkflowEnded",
]

_MOST_OF_GRAPH = 20
_MOST_OF_PLAN = 2_000


class PlaitError(Exception):
    """Base of all errors of plait: the call cannot be done. The message is for a person and names the next step."""

    word: ClassVar[str] = "refused"
    """The word for the error in `{"error": {"kind": ...}}`, over HTTP and under `--json`."""
    exit_code: ClassVar[int] = 2
    """The exit code of a command that fails so."""
    http_status: ClassVar[int] = 422
    """The status of an HTTP response that fails so."""


class InvalidRequest(PlaitError):  # noqa: N818 - the name states the condition
    """What a person or a program asks for cannot be done: an option, a name or a file does not fit."""

    word = "invalid_request"


# --- graphs, prompts and plans


@value
class Problem:
    """One mistake in a graph."""

    message: str
    """The mistake, in words."""
    task_id: str | None = None
    """The id of the task with the mistake; None for a mistake of the whole graph."""
    field: str | None = None
    """The name of the `Task` field with the mistake, if known."""
    index: int | None = None
    """The index of the wrong entry in a list field such as `depends_on`, from 0."""
    position: int | None = None
    """The index of the task in the list of tasks, from 0."""
    line: int | None = None
    """The line within the prompt, from 1."""
    name: str | None = None
    """The name in the prompt or among the inputs that the mistake is about, if any."""
    lacks_dependency: bool = False
    """True if a dependency would mend the mistake."""

    def __str__(self) -> str:
        return self.message if self.task_id is None else f"task {self.task_id!r}: {self.message}"


class DAGError(PlaitError):
    """Raised if the tasks do not form a valid graph. The message lists the first 20 problems and counts the rest."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        """All mistakes found."""
        super().__init__(first_of(self.problems, _MOST_OF_GRAPH))


@value
class PlanProblem:
    """A problem of a plan."""

    message: str
    """The problem, in words."""
    where: str = ""
    """The path in the file; empty for the whole file."""
    line: int | None = None
    """The line, from 1; None if the format has no positions (TOML) or the problem is not in the file."""
    column: int | None = None
    """The column, from 1; None as for `line`."""
    file: str = "plan"
    """The name of the file."""

    def __str__(self) -> str:
        place = [self.file, *(str(number) for number in (self.line, self.column) if number is not None)]
        return ": ".join(part for part in (":".join(place), self.where, self.message) if part)


class PlanError(PlaitError):
    """Raised if a plan is unusable. The message lists the first 2,000 problems and counts the rest."""

    word = "plan_invalid"

    def __init__(self, problems: Iterable[PlanProblem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
        self.problems = tuple(dict.fromkeys(ordered))
        """All problems found, in the order of the file."""
        super().__init__(first_of(self.problems, _MOST_OF_PLAN))


class PromptError(PlaitError):
    """Raised if a prompt template cannot be parsed or rendered."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        """The line within the prompt, from 1; None if unknown."""
        super().__init__(message)


# --- runs


class RunNotFound(PlaitError):  # noqa: N818
    """Raised if the store holds no run with the given id."""

    word = "run_not_found"
    http_status = 404


class TaskNotFound(PlaitError):  # noqa: N818
    """Raised if the run has no task with the given id."""

    word = "not_found"
    http_status = 404


class RunExists(PlaitError):  # noqa: N818
    """Raised if the store already holds a run with the given id."""


class KeyConflict(PlaitError):  # noqa: N818
    """Raised if the key of a new run is already in use for another DAG or other settings."""

    word = "key_conflict"
    http_status = 409


class RunOwned(PlaitError):  # noqa: N818
    """Raised if another live process executes the run. The message names the process and the start of its ownership."""

    word = "run_owned"
    http_status = 409


class RunNotResumable(PlaitError):  # noqa: N818
    """Raised if the run was cancelled, failed and the call does not reopen failed tasks, would build on a damaged
    result, or has ended, so that it cannot be paused.
    """

    word = "run_not_resumable"
    http_status = 409


class BackendMissing(PlaitError):  # noqa: N818
    """Raised if a task or a policy needs a backend that the runner does not have."""

    word = "backend_missing"


class OwnershipLost(PlaitError):  # noqa: N818
    """Raised if another process took the run over while the current process was suspended. The store refused the next
    write, and execution stopped.
    """

    word = "ownership_lost"
    exit_code = 5
    http_status = 409


class StoreRequired(PlaitError):  # noqa: N818
    """Raised if an operation needs a store and the runner has none."""


class AnswerConflict(PlaitError):  # noqa: N818
    """Raised if a question was already answered, is past its deadline, or is no longer open."""

    word = "answer_conflict"
    http_status = 409


class PolicyMissing(PlaitError):  # noqa: N818
    """Raised if a run needs a policy that does not come with plait and the caller did not pass the policy."""


class TurnNotStored(PlaitError):  # noqa: N818
    """Raised if `continue_task` received a reply but could not store the turn. `text` holds the reply."""

    word = "store_failed"
    exit_code = 3
    http_status = 503

    def __init__(self, message: str, text: str) -> None:
        self.text = text
        """The text of the reply, kept here to prevent its loss."""
        super().__init__(message)


class UnknownStep(PlaitError):  # noqa: N818
    """Raised if the last completed interaction belongs to a step missing from the workflow."""


class ImpossibleState(PlaitError):  # noqa: N818
    """Raised if the last completed interaction has an invalid status or number."""


class WorkflowEnded(PlaitError):  # noqa: N818
    """Raised if the run of the workflow has ended or is being cancelled."""


# --- backends


class ErrorKind(StrEnum):
    """The cause of a failed turn. The runner's retry policy is written in terms of these kinds."""

    TRANSIENT = "transient"
    """Network trouble, 408, 409, 424, 425, 499, 5xx, or an answer that broke off, has an unknown end, or cannot be
    read.
    """
    RATE_LIMITED = "rate_limited"
    """429: too many requests or tokens. `BackendError.retry_after` is the wait requested by the server, if any."""
    OVERLOADED = "overloaded"
    """498, 503, 529, or a model that is still loading: the server is up but has no room."""
    AUTH = "auth"
    """The key is missing, wrong, or lacks the permission (401, 403)."""
    NO_CREDIT = "no_credit"
    """The account has no credit left (402): a spare backend takes over, or a person is asked to top the account up."""
    INVALID_REQUEST = "invalid_request"
    """400, 404, 422, a redirect, or an invalid schema: the server will never accept the request unchanged."""
    CONTEXT_OVERFLOW = "context_overflow"
    """Prompt and history do not fit into the model's context, or are more than the server takes at once (413)."""
    TRUNCATED = "truncated"
    """The answer reached a limit of its length. `BackendError.messages` holds the text that arrived."""
    LIMIT_REACHED = "limit_reached"
    """An agent reached a limit of the plan for its turn: model requests, or US dollars that a person did not raise."""
    REFUSED = "refused"
    """The model or a content filter declined to answer."""
    TIMEOUT = "timeout"
    """No whole answer within the task's or the client's time limit."""
    SESSION_LOST = "session_lost"
    """The backend no longer has the session to continue."""
    CRASHED = "crashed"
    """The process behind the backend died."""
    COMMAND_FAILED = "command_failed"
    """A command (`run`) ended with another exit code than 0."""
    CHECK_FAILED = "check_failed"
    """No answer of the conversation has passed the check of the task."""
    CHILD_FAILED = "child_failed"
    """A task of the plan that the task calls, or of its loop, has failed."""
    LOOP_EXHAUSTED = "loop_exhausted"
    """A loop has had all its rounds (`max`), and its condition (`until`) is still false."""
    INVALID_OUTPUT = "invalid_output"
    """The answer is empty, calls a tool that nobody offered, does not fit the requested schema, also after the repair
    turn, or cannot be checked in time.
    """
    UNAVAILABLE = "unavailable"
    """The backend is unavailable on this machine (`BackendUnavailable`): an extra, a key, a file or a
    command is missing. Retrying is useless until a person fixes the cause.
    """
    UNEXPECTED = "unexpected"
    """An exception of a user's function, or an exception that the backend did not classify. One that reports a limit,
    an overload or a failed connection has the kind of that failure.
    """


class BackendError(PlaitError):
    """A failed turn, by `kind`. To a caller of the runner, only `continue_task` raises the error.

    - `kind` decides whether the runner retries.
    - `message` is one line for a person, without keys and without prompt text.
    - `retry_after` is the server's own hint in seconds, or None.
    - `status` is the HTTP status of the answer, or None; an attribute alone.
    - `usage` is the cost of the failed turn.
    - `messages` are the turn's messages, including the prompt; empty if the prompt was the only message.
    - `traceback` is the traceback of the user's code that failed, as Python prints it, or None.
    - `continues_session` says that the session holds the prompt and the work done: the next attempt goes on there.
    """

    word = "backend_failed"
    exit_code = 1
    http_status = 502

    def __init__(
        self,
        kind: ErrorKind,
        message: str,
        *,
        retry_after: float | None = None,
        usage: Usage = NO_USAGE,
        messages: tuple[Message, ...] = (),
        continues_session: bool = False,
        traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.traceback = traceback
        self.continues_session = continues_session
        self.usage = usage
        self.messages = messages
        self.kind = kind
        self.message = message
        self.retry_after = retry_after
        self.status: int | None = None

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.message}"


class BackendUnavailable(PlaitError):  # noqa: N818 - reads as what it is
    """A backend cannot be built: an extra, a key or a file is missing. The message says how to fix the cause."""

    word = "backend_unavailable"
    http_status = 502


# --- stores


class StoreError(PlaitError):
    """Base of all errors of a store: a call of the store failed.

    A batch is unknown after a failed `write`: applied or not. Writing the same batch again is always safe.
    """

    word = "store_failed"
    exit_code = 3
    http_status = 503


class StoreNotOpen(StoreError):  # noqa: N818 - the name states the condition
    """The store is not open yet, is closed, or was opened for reading only. Nothing was changed.

    The program is wrong, so a run does not begin with the store.
    """


class StoreBusy(StoreError):  # noqa: N818 - the name states the condition
    """Another process wrote to the store for longer than a write waits. Nothing of the batch was applied.

    The batch can be applied once the other process is done. A run that ends repeats the write for up to a minute.
    """


class StoreRefused(StoreError):  # noqa: N818 - the name states the condition
    """The store lets this process write nothing until a person changes something: a right, a password, a database that
    is gone or read-only, a full disk. Nothing of the batch was applied.

    The batch can be applied afterwards. A run goes on, but does not wait for the store at its end.
    """


class StoreUnusable(StoreError):  # noqa: N818 - the name states the condition
    """The store cannot be opened: missing, empty, foreign, damaged, in another format, or not permitted.

    The message names the path, the reason and the remedy. Nothing was changed.
    """


class Fenced(StoreError):  # noqa: N818
    """The epoch of the batch is not the epoch of the run: another process owns the run.

    Nothing was applied, and writing the batch again fails again.
    """


class Conflict(StoreError):  # noqa: N818
    """A change cannot be applied. Nothing of the batch was applied, and writing the batch again fails again.

    Either the change does not follow from the stored state (unknown run or task, existing run, transition out of a
    terminal status), or a value cannot be stored.
    """


class Gap(Conflict):
    """The batch starts beyond the stored changes: changes before the batch are missing. Nothing was applied.

    Raised if the caller skipped changes, and if the store has lost changes, as a standby that was promoted before it
    had received the last ones. Writing the missing changes first, from `next_seq` on, closes the gap.
    """

    def __init__(self, message: str, next_seq: int) -> None:
        super().__init__(message)
        self.next_seq = next_seq
        """The number of the first missing change."""


# --- messages


def first_of(problems: Sequence[object], most: int) -> str:
    """Return the first `most` problems, one per line, followed by the number of the remaining problems, if any."""
    lines = [str(problem) for problem in problems[:most]]
    if more := len(problems) - len(lines):
        lines.append(f"and {more:,} more")
    return "\n".join(lines)


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean 'x'?`, or an empty text if no known name is
    close.
    """
    close = difflib.get_close_matches(name, list(names)[:10_000], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
