"""Models of requests and responses, published in /openapi.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictBool

from plait.json_form import JsonValue
from plait.runner.client.answer_task import How
from plait.runner.client.create_run import MOST_KEY_CHARACTERS
from plait.runner.domain.asked_question import Way
from plait.runner.domain.wait_reasons import WaitKind
from plait.runner.engine.event_feed import TextPiece
from plait.runner.policies.goal_policy import Phase
from plait.runner.views.read_views import RunInfo, StoredEvent
from plait.statuses import AttemptStatus, RunStatus, TaskStatus

MOST_SEQ = 2**53


MOST_LEVELS = 500
"""Depth of nesting that every supported version of Python can read and write."""


def _json(value: JsonValue) -> JsonValue:
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [inner for one in level for inner in _within(one)]
    if level:
        raise ValueError(f"is nested deeper than {MOST_LEVELS} levels")
    json.dumps(value, allow_nan=False)
    return value


def _within(value: JsonValue) -> Iterable[JsonValue]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


Json: TypeAlias = Annotated[Any, AfterValidator(_json)]
"""Any JSON value. Python's reader would accept NaN as well."""


class _Received(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class _Sent(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class NewRun(_Received):
    """A run to create and start."""

    plan: dict[str, Any]
    """A plan as in a plan file, without `backends`, `concurrency` and inputs that are files."""
    inputs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values of the plan's inputs, in place of the defaults."""
    key: Annotated[str, Field(min_length=1, max_length=MOST_KEY_CHARACTERS)] | None = None
    """Key of the request: the same request with the same key creates no second run."""


class ResumeBody(_Received):
    """How a run continues."""

    answers: dict[str, Json] = Field(default_factory=dict[str, Any])
    """Answers to questions of waiting tasks, by task id."""
    retry_failed: StrictBool = False
    """Run failed tasks again, and completed tasks whose stored result is damaged."""


class AnswerBody(_Received):
    """The answer to the question of a task."""

    value: Json
    """A value that fits the schema of the question: text if the schema is null, any value if the schema is empty."""
    attempt: Annotated[int, Field(ge=1, le=MOST_SEQ)] | None = None
    """The attempt that asked (`attempts` of the task). Without it, the answer is for the present question."""


class SettleBody(_Received):
    """The decision of a person about a task that waits: see `plait answer`."""

    how: How
    """`done` completes the task with `text` as its result, `again` runs the task again, `fail` fails it for the reason
    `text`. `again` is for a task marked at_most_once that was interrupted.
    """
    text: str = ""


class ContinueBody(_Received):
    """One more message in the conversation of a task."""

    message: Annotated[str, Field(min_length=1, pattern=r"\S")]
    """The message, which is not blank."""


class SignInBody(_Received):
    """The sign-in of a browser."""

    code: str
    """The code in the address that the command opened."""


class LiveQuery(_Received):
    """The view of a run."""

    task: str | None = None
    """The task to send in full."""
    attempts: bool = False
    """Whether the rows have the attempts and the waits of their tasks."""


class PreviewQuery(_Received):
    """The resume to preview."""

    retry_failed: bool = False
    """Run failed tasks again, and completed tasks whose stored result is damaged."""


class ListQuery(_Received):
    """Which runs to list."""

    limit: int = Field(default=50, ge=1, le=1000)
    """Number of runs at most."""
    offset: int = Field(default=0, ge=0, le=10_000)
    """Number of newer runs to leave out."""
    status: list[RunStatus] = Field(default_factory=list[RunStatus])
    """Only runs in one of these statuses; may be given more than once."""
    name: str | None = None
    """Only runs with exactly this name."""
    search: str = ""
    """Only runs with this text in their id or name, in any case."""


class EventsQuery(_Received):
    """Which events to stream."""

    after: int = Field(default=0, ge=0, le=MOST_SEQ)
    """Stream only events with a higher number."""
    text: bool = False
    """Also stream the texts of answers while they are written, of attempts that execute on this server."""


class EventShape(_Sent):
    """The data of an event."""

    seq: int
    """Number of the event in its run, and id of the event in the stream."""
    at: str
    kind: str
    task_id: str | None
    attempt: int | None
    detail: dict[str, Any]


class TextShape(_Sent):
    """The data of an event `task_text`: a piece of an answer that is being written."""

    task_id: str
    attempt: int
    """Number of the attempt. A further attempt begins a new text."""
    offset: int
    """Number of characters of the text before the piece."""
    text: str


class RunStatusShape(_Sent):
    """A run and its status."""

    run_id: str
    status: RunStatus


class AnswerResult(RunStatusShape):
    """A run after an answer."""

    taken: bool
    """True if the task has the answer; false if the answer is stored for the process that runs the run."""


class OwnerShape(_Sent):
    """The process that owns a run."""

    host: str
    pid: int
    liveness: Literal["alive", "dead", "unknown"]
    """As far as this host can determine."""


class LoopShape(_Sent):
    """The progress of a run that plans its tasks towards a goal."""

    phase: Phase
    iteration: int
    """Number of executed tasks."""
    ended_by: Literal["goal_reached", "max_iterations", "max_tasks", "no_progress"] | None
    """Why no further task is planned; null while the loop goes on."""


class UsageShape(_Sent):
    """Tokens and cost."""

    input_tokens: int
    output_tokens: int
    cache_read_tokens: int
    """Part of `input_tokens` read from the provider's cache."""
    cache_write_tokens: int
    """Part of `input_tokens` written to the provider's cache."""
    cache_write_1h_tokens: int
    """Part of `cache_write_tokens` that the provider keeps for an hour."""
    reasoning_tokens: int
    """Part of `output_tokens` spent on reasoning."""
    cost_usd: float | None
    """Dollars; null if unknown."""
    cost_is_partial: bool
    """True if `cost_usd` is a sum without some unknown costs."""


class RunShape(RunStatusShape, UsageShape):
    """A run in a list."""

    name: str
    created_at: str
    """UTC in ISO 8601, as all times."""
    started_at: str | None
    ended_at: str | None
    error: str | None
    reason: str | None
    """The reason for the status, in a few words; null if the status needs none."""
    owner: OwnerShape | None
    """The process that owns the run, dead or alive."""
    done: int
    """Number of ended tasks, in any status."""
    total: int
    counts: dict[str, int]
    """Number of tasks by status; statuses without tasks are left out."""
    loop: LoopShape | None
    """Null for a run without a goal."""


class AskedShape(_Sent):
    """Details of a question."""

    schema_: Any = Field(alias="schema")
    """JSON Schema of the answer; null for any text."""
    default: Any
    """The answer that counts after the deadline."""
    deadline_at: str | None


class AnswerShape(_Sent):
    """An answer to a question of a task."""

    attempt: int
    """The attempt that ended with the question."""
    way: Way
    """How the task asked: reply (its conversation ended with the question) or call (its code called `ask`)."""
    question: str
    value: Any
    by: str
    """The source of the answer: person, default (the deadline has passed) or callback."""


class WaitShape(_Sent):
    """The reason for which a task is not running."""

    kind: WaitKind
    text: str
    """The reason in a few words; times are those of the server's zone."""
    tasks: list[str]
    """The first tasks that this task waits for, at most 3."""
    count: int
    """The number of tasks that this task waits for."""
    backend: str | None
    """The backend of the task, where the backend is the reason."""
    until: str | None
    """The end of the wait as far as known."""


class TaskShape(UsageShape):
    """A task and its result. The fields are those of `TaskInfo.as_json`, as in `plait show --json`."""

    task_id: str
    position: int
    """Index of the task in the run, from 0."""
    status: TaskStatus
    depends_on: list[str]
    backend: str | None
    model: str | None
    """Model that answered, as the server or the agent names it; null if unknown."""
    prompt: str
    attempts: int
    """How many attempts were started."""
    crashes: int
    """How often a process died while it ran the task."""
    text: str | None
    data: Any
    damaged: bool
    """True if the stored result does not match its checksum; text and data are null then."""
    error_kind: str | None
    error: str | None
    next_try_at: str | None
    """Time of the next attempt, if the last attempt failed and another attempt follows."""
    question: str | None
    """Question to a person, while the task is waiting_input."""
    waits: WaitShape | None
    """The reason for which the task is not running, or waits for a host that is away; null for any other task."""
    asks: AskedShape | None
    """Details of the question; null if the task does not ask, but a crash interrupted it (plait answer)."""
    answers: list[AnswerShape]
    """Answers to earlier questions of the task."""
    session_id: str | None
    session_confirmed: bool
    """True if the backend has named the session."""
    duration_s: float | None
    """Seconds of the last attempt."""
    started_at: str | None
    ended_at: str | None
    added_by: str | None
    """Id of the task that added this task to the run."""
    spec: dict[str, Any]
    """Further settings of the task, such as its retry policy."""


class ThrottledShape(_Sent):
    """The throttling of a backend: after a rate limit or an overload the backend is paused, then called by fewer tasks
    at once.
    """

    at: str
    """Time of the last change."""
    backend: str
    until: str | None
    """End of the pause; null if the backend is not paused."""
    cause: str
    """HTTP status of the refusal; without a status the kind of the error; `limits` for the backend's own `limits`."""
    slots: int
    """Number of tasks that may run on the backend at once, after the pause if there is one."""
    total: int
    """The number without throttling."""


class RunDetailShape(RunShape):
    """A run with its tasks, in the order of the plan."""

    throttled: list[ThrottledShape]
    """The throttled backends of a running run."""
    tasks: list[TaskShape]


class MessageShape(_Sent):
    """A message of a task's conversation."""

    task_id: str
    position: int
    attempt: int
    """The attempt; 0 for a turn after the run."""
    role: str
    content: str
    input_tokens: int
    output_tokens: int
    at: str
    damaged: bool
    """True if the content does not match its checksum; it is empty then."""


class AttemptShape(UsageShape):
    """An attempt at a task."""

    task_id: str
    attempt: int
    status: AttemptStatus
    backend: str
    session_id: str | None
    started_at: str
    ended_at: str | None
    error_kind: str | None
    error: str | None
    duration_s: float | None
    traceback: str | None
    """The traceback of a function that failed."""
    model: str | None
    place: str | None
    """The host of an attempt on another host."""


class TaskDetailShape(TaskShape):
    """A task with its conversation and its attempts."""

    run_id: str
    messages: list[MessageShape]
    history: list[AttemptShape]


class WaitingTaskShape(_Sent):
    """A task that waits for a person."""

    run_id: str
    run_name: str
    task_id: str
    attempt: int
    """The attempt that asked or was cut, for `attempt` of the answer."""
    question: str
    """The question, or the reason for which a task marked at_most_once waits."""
    since: str | None
    """Start of the attempt that asked."""
    asks: AskedShape | None
    """Details of the question; null for an interrupted task marked at_most_once: decide with `settle`."""


class QuestionList(_Sent):
    """The tasks of all runs that wait for a person, those of the newest run first."""

    questions: list[WaitingTaskShape]


class PreviewStepShape(_Sent):
    """The action of a resume for a task."""

    task_id: str
    action: str
    reason: str
    possibly_billed_twice: bool
    input_tokens: int
    """Estimate of the input tokens that would be billed again."""


class PreviewShape(_Sent):
    """The actions of a resume."""

    run_id: str
    status: RunStatus
    ended: bool
    """True if nothing is left to do."""
    damaged: list[str]
    runs: int
    """Number of tasks that would be executed if no task failed."""
    adopted: int
    possibly_billed_twice: int
    repeated_input_tokens: int
    tasks: list[PreviewStepShape]


class ReplyShape(UsageShape):
    """The answer to one more message."""

    run_id: str
    task_id: str
    text: str
    session_id: str | None


class RunList(_Sent):
    """Runs, newest first."""

    runs: list[RunShape]


class ErrorShape(_Sent):
    kind: str
    """One word for programs, such as run_not_found."""
    message: str
    """The cause and the remedy, for people."""


class ErrorBody(_Sent):
    """The shape of every error."""

    error: ErrorShape


def run_shape(run: RunInfo) -> RunShape:
    """Return the run as an entry of a list."""
    return RunShape.model_validate(run.as_json())


def run_detail_shape(run: RunInfo) -> RunDetailShape:
    """Return the run with its tasks."""
    return RunDetailShape.model_validate(run.as_json_with_tasks())


def event_shape(one: StoredEvent) -> EventShape:
    """Return the event as sent."""
    return EventShape.model_validate(one, from_attributes=True)


def text_shape(piece: TextPiece) -> TextShape:
    """Return the piece as sent."""
    return TextShape.model_validate(piece, from_attributes=True)
