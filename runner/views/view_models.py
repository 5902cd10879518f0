"""What a run, a task, an attempt, an event, a question look like: one form in Python, HTTP, --json and the page.

A view is a plain dataclass, built from the store without validation. `view_json` gives its JSON, `json_text` the JSON
as text, and pydantic publishes the schema from the fields and their docstrings. JSON values are typed Any: pydantic
cannot resolve the recursive alias.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeVar, cast, dataclass_transform

from plait.clock_and_ids import parse_time
from plait.events import RUN_ENDS, BackendThrottled, RunTuned
from plait.persistence.store_records import MessageRecord
from plait.runner.domain.asked_question import Asking, Way
from plait.runner.domain.run_result import html_table
from plait.runner.domain.wait_reasons import WaitReason, clock_time
from plait.runner.policies.goal_policy import Phase, Stop
from plait.runner.recovery.resume_plan import ResumeStep
from plait.runner.state.budget import Budget
from plait.runner.views.event_sentences import counted, named_tasks
from plait.statuses import AttemptStatus, RunStatus, TaskStatus
from plait.usage import Usage, dollars

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from plait.backends.backend_protocol import Reply

ANSWERED = "answered, to be resumed"
"""A run that is waiting_input although no task asks: no process has resumed the run since the last answer."""

T = TypeVar("T")

_VIEWS: Final[list[Any]] = []


def _with_inherited_docs(schema: dict[str, Any], kind: type[Any]) -> None:
    """Describe the fields that `kind` inherits: pydantic reads the docstrings of the class itself alone."""
    for base in kind.__mro__[1:-1]:
        for name, inherited in json_schema(base)["properties"].items():
            if "description" in inherited:
                schema["properties"][name].setdefault("description", inherited["description"])


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def view(cls: type[T]) -> type[T]:
    """Make `cls` a dataclass with slots, frozen for type checkers only (see `value`): a run may have 20,000 tasks."""
    made: Any = dataclass(slots=True, kw_only=True)(cls)
    made.__pydantic_config__ = {
        "use_attribute_docstrings": True,
        "json_schema_serialization_defaults_required": True,
        "json_schema_extra": _with_inherited_docs,
    }
    _VIEWS.append(made)
    return made  # type: ignore[no-any-return]


def prepare_schemas() -> None:
    """Have pydantic read each view once. FastAPI asks for a schema at every route, and again at the first request, and
    each time pydantic would read the docstrings of all views within it from their source.
    """
    for kind in _VIEWS:
        kind.__pydantic_core_schema__ = _adapter(kind).core_schema


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter  # noqa: PLC0415 - 15 MB and 0.1 s, which `plait show` without --json saves

    return TypeAdapter(kind)


def view_json(shown: Any) -> dict[str, Any]:
    """Return the view as a JSON object."""
    return _adapter(shown.__class__).dump_python(shown, mode="json")  # type: ignore[no-any-return]


def json_text(shown: Any) -> bytes:
    """Return the view as JSON text."""
    return _adapter(shown.__class__).dump_json(shown)


def json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON Schema of a view as it is sent."""
    return _adapter(kind).json_schema(mode="serialization")


@view
class UsageView:
    """Tokens and cost."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    """Part of `input_tokens` read from the provider's cache."""
    cache_write_tokens: int = 0
    """Part of `input_tokens` written to the provider's cache."""
    cache_write_1h_tokens: int = 0
    """Part of `cache_write_tokens` that the provider keeps for an hour."""
    reasoning_tokens: int = 0
    """Part of `output_tokens` spent on reasoning."""
    cost_usd: float | None = None
    """Dollars; null if unknown."""
    cost_is_partial: bool = False
    """True if `cost_usd` is a sum without some unknown costs."""

    @property
    def usage(self) -> Usage:
        """The same as one value, which can be added up."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return Usage(model=getattr(self, "model", None), **counts)


_COUNTS = tuple(one.name for one in fields(cast("Any", UsageView)))


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Return tokens and cost as the fields of a view, and of a JSON object."""
    return {name: getattr(usage, name) for name in _COUNTS}


def view_of(kind: type[T], source: Any, **more: Any) -> T:
    """Return the view `kind` of `source`: its fields of the same names, its usage, and `more` in place of these."""
    values = {name: getattr(source, name) for name in _shared(cast("Any", kind), source.__class__)}
    if issubclass(kind, UsageView) and not isinstance(source, UsageView):
        values.update(usage_fields(source.usage))
    return kind(**{**values, **more})


@cache
def _shared(kind: Any, source: Any) -> Sequence[str]:
    names = {one.name for one in fields(source)}
    return [one.name for one in fields(kind) if one.name in names]


@view
class OwnerView:
    """The process that owns a run."""

    host: str
    pid: int
    liveness: Literal["alive", "dead", "unknown"]
    """As far as this host can determine."""

    @property
    def process(self) -> str:
        """The process in words."""
        return f"process {self.pid} on {self.host}"


_WHY_STOPPED: Mapping[str | None, str] = {
    Stop.MAX_ITERATIONS: "no further task was started: max_iterations is reached",
    Stop.MAX_TASKS: "no further task was planned: max_tasks is reached",
    Stop.NO_PROGRESS: "no further progress was made",
}


@view
class LoopView:
    """The progress of a run that plans its tasks towards a goal."""

    phase: Phase
    iteration: int
    """Number of executed tasks."""
    ended_by: Literal["goal_reached", "max_iterations", "max_tasks", "no_progress"] | None
    """Why no further task is planned; null while the loop goes on."""

    @property
    def description(self) -> str:
        """The progress in a few words."""
        executed = f"{counted(self.iteration, 'task')} executed"
        if self.ended_by in {None, "goal_reached"}:
            return f"{'goal reached' if self.ended_by else self.phase.value}, {executed}"
        return f"goal not reached ({self.ended_by}), {executed}"

    @property
    def why_stopped(self) -> str | None:
        """Why no further task is planned although the goal is not reached, in words; None otherwise."""
        return _WHY_STOPPED.get(self.ended_by)


@view
class RunView(UsageView):
    """A run. The usage is that of all attempts; turns of `continue_task` count only in the messages of their task."""

    run_id: str
    name: str
    """The name for people; need not be unique."""
    status: RunStatus
    """The status; interrupted if the run is stored as running or cancelling without a live owner, and parked if its
    process has left it until a time.
    """
    created_at: str
    """UTC in ISO 8601, as all times."""
    started_at: str | None
    ended_at: str | None
    error: str | None
    """The reason for a failure, in one line."""
    reason: str | None
    """The reason for the status, in a few words; null if the status needs none."""
    owner: OwnerView | None
    """The process that owns the run, dead or alive."""
    done: int
    """Number of ended tasks, in any status."""
    total: int
    counts: Mapping[TaskStatus, int]
    """Number of tasks by status; statuses without tasks are left out."""
    loop: LoopView | None
    """Null for a run without a goal."""
    due_at: str | None
    """When a parked run goes on, or a run that waits for a person without an answer: the deadline of a question. Null
    for other runs.
    """

    @property
    def status_text(self) -> str:
        """The status for a person: a run whose questions are all answered no longer waits for input; a parked run
        with its time.
        """
        if self.status is RunStatus.PARKED and self.due_at is not None:
            return f"parked until {clock_time(parse_time(self.due_at), 0.0)}"
        is_answered = self.status is RunStatus.WAITING_INPUT and not self.counts.get(TaskStatus.WAITING_INPUT)
        return ANSWERED if is_answered else self.status.value

    @property
    def progress(self) -> str:
        """How many tasks have ended, in words."""
        ended = (TaskStatus.FAILED, TaskStatus.SKIPPED, TaskStatus.CANCELLED)
        numbers = [f"{self.counts[status]:,} {status.value}" for status in ended if self.counts.get(status)]
        completed = f"{self.counts.get(TaskStatus.COMPLETED, 0):,} of {counted(self.total, 'task')} completed"
        return ", ".join([completed, *numbers])


@view
class AskedView:
    """Details of a question."""

    schema: Any = None
    """JSON Schema of the answer; null for any text."""
    default: Any = None
    """The answer that counts after the deadline."""
    deadline_at: str | None = None

    @classmethod
    def of(cls, asking: Asking) -> AskedView:
        """Return the details of the open question `asking`."""
        question = asking.question
        schema = None if question.schema is None else dict(question.schema)
        return cls(schema=schema, default=question.default, deadline_at=asking.deadline_at)


@view
class AnswerView:
    """An answer to a question of a task."""

    attempt: int
    """The attempt that ended with the question."""
    way: Way
    """How the task asked: reply (its conversation ended with the question) or call (its code called `ask`)."""
    question: str
    value: Any
    by: str
    """The source of the answer: person, default (the deadline has passed) or callback."""

    @property
    def text(self) -> str:
        """The message sent in the conversation."""
        return self.value if isinstance(self.value, str) else json.dumps(self.value, ensure_ascii=False)


@view
class TaskView(UsageView):
    """A task and its result. The usage is that of the last attempt."""

    task_id: str
    position: int
    """Index of the task in the run, from 0."""
    status: TaskStatus
    depends_on: tuple[str, ...]
    backend: str | None
    """Name of the backend; null for the default backend."""
    model: str | None
    """Model that answered, as the server or the agent names it; null if unknown."""
    prompt: str
    """The prompt template."""
    attempts: int
    """How many attempts were started."""
    crashes: int
    """How often a process died while it ran the task."""
    text: str | None
    """Result of the task; null before there is a result, and if the result is `damaged`."""
    data: Any
    """Result as JSON if the task has an output schema, else null."""
    damaged: bool
    """True if the stored result does not match its checksum; text and data are null then."""
    error_kind: str | None
    """Kind of the error, an `ErrorKind` value."""
    error: str | None
    next_try_at: str | None
    """Time of the next attempt, if the last attempt failed and another attempt follows."""
    question: str | None
    """Question to a person, while the task is waiting_input."""
    waits: WaitReason | None
    """The reason for which the task is not running, or waits for a host that is away; null for any other task."""
    asks: AskedView | None
    """Details of the question; null if the task does not ask, but a crash interrupted it (plait answer)."""
    answers: tuple[AnswerView, ...]
    """Answers to earlier questions of the task."""
    session_id: str | None
    """The backend's id of the conversation, if known."""
    session_confirmed: bool
    """True if the backend has named the session; false if only the runner has chosen its id."""
    duration_s: float | None
    """Seconds of the last attempt."""
    started_at: str | None
    ended_at: str | None
    added_by: str | None
    """Id of the task that added this task to the run."""
    spec: Mapping[str, Any]
    """Further settings of the task, such as its retry policy."""


class _Listed:
    """Tasks by their ids are a list in JSON."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        from pydantic import PlainSerializer  # noqa: PLC0415 - see `_adapter`

        def listed(tasks: Mapping[str, TaskView]) -> list[TaskView]:
            return list(tasks.values())

        return PlainSerializer(listed, return_type=list[TaskView]).__get_pydantic_core_schema__(source, handler)


@view
class BudgetView:
    """The money of a run, in US dollars."""

    usd: float | None
    """What the run may spend; null if only tasks have a `max_cost`."""
    spent_usd: float
    """What the ended attempts cost. An attempt whose cost is not known counts at the most that it may have cost."""
    unsure_usd: float
    """The part of `spent_usd` of such attempts."""
    reserved_usd: float
    """What the attempts under way may cost at most."""
    reserved_by: Mapping[str, float]
    """`reserved_usd` by task id."""

    @classmethod
    def of(cls, budget: Budget) -> BudgetView:
        """Return the money as it is shown."""
        reserved = {task_id: usd for task_id, usd in budget.reserved.items() if usd}
        return cls(
            usd=None if budget.usd == inf else budget.usd,
            spent_usd=budget.spent,
            unsure_usd=budget.unsure,
            reserved_usd=sum(reserved.values()),
            reserved_by=reserved,
        )

    @property
    def description(self) -> str:
        """What the run may spend, has spent and has reserved, and by which tasks, in words."""
        spent = f"{dollars(self.spent_usd)} spent"
        if self.unsure_usd:
            spent += f" (at most: {dollars(self.unsure_usd)} of it by attempts whose cost is not known)"
        reserved = f", {dollars(self.reserved_usd)} reserved by {named_tasks(tuple(self.reserved_by))}"
        whole = "max_cost of tasks" if self.usd is None else dollars(self.usd)
        return f"{whole}, {spent}{reserved if self.reserved_by else ''}"


@view
class RunDetail(RunView):
    """A run with its tasks."""

    budget: BudgetView | None = None
    """The money of the run; null without a limit."""
    tuned: tuple[RunTuned, ...] = ()
    """What a person has changed in a run that has not ended: pauses, and numbers of tasks at once."""
    throttled: tuple[BackendThrottled, ...] = ()
    """The throttled backends of a running run, each with its last event."""
    tasks: Annotated[Mapping[str, TaskView], _Listed] = field(default_factory=dict[str, TaskView])
    """The tasks, in the order of the plan; in Python by their ids."""


@view
class AttemptView(UsageView):
    """An attempt at a task."""

    task_id: str
    attempt: int
    """Counts from 1."""
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
    moved_from: str | None
    """The backend of the task, for an attempt that called a spare in its place."""


@view
class TaskDetail(TaskView):
    """A task with its conversation and its attempts."""

    run_id: str
    messages: tuple[MessageRecord, ...]
    history: tuple[AttemptView, ...]
    """The attempts, the first one first."""


@view
class QuestionView:
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
    asks: AskedView | None
    """Details of the question; null for an interrupted task marked at_most_once: decide with `settle`."""


@view
class EventView:
    """An entry of the history of a run."""

    seq: int
    """The number of the event, increasing within the run, with gaps; also its id in the stream."""
    at: str
    """The time, UTC in ISO 8601."""
    kind: str
    """The kind of the event, such as `task_completed`."""
    task_id: str | None
    """Null for an event of the whole run."""
    attempt: int | None
    """Number of the attempt, from 1, if the event belongs to an attempt."""
    detail: Mapping[str, Any]
    """Further values, depending on `kind`."""

    @property
    def is_last(self) -> bool:
        """Whether it ends the run: nothing follows, unless a person reopens the run."""
        return self.kind in RUN_ENDS


@view
class Preview:
    """The actions that a resume would take."""

    run_id: str
    status: RunStatus
    """The status of the run as in `RunView`: interrupted for a run stored as under way without a living owner."""
    ended: bool
    """Whether the run is over, so that a resume would only return the stored result."""
    damaged: tuple[str, ...]
    """The ids of the tasks whose stored result does not fit its checksum, and that would not run again: a resume counts
    these tasks as failed.
    """
    runs: int
    """The number of tasks that would be executed if no task failed."""
    adopted: int
    """The number of tasks whose attempt outlived its process and would be followed."""
    possibly_billed_twice: int
    """The number of tasks to be executed that may be paid for twice."""
    repeated_input_tokens: int
    """The estimated number of input tokens that would be paid for twice. Lost output tokens are not included: no count
    exists.
    """
    tasks: Mapping[str, ResumeStep]
    """The step of each task, by task id, in the order of the DAG."""

    def _repr_html_(self) -> str:
        """Return the preview as a table for a notebook."""
        caption = f"resume of run {self.run_id}, {self.status.value}: {self.runs} tasks to run"
        rows = [(task_id, step.action.value, step.reason) for task_id, step in self.tasks.items()]
        return html_table(caption, ("task", "action", "reason"), rows)


@view
class ReplyView(UsageView):
    """The answer to one more message."""

    run_id: str
    task_id: str
    text: str
    session_id: str | None

    @classmethod
    def of(cls, run_id: str, task_id: str, reply: Reply) -> ReplyView:
        """Return the answer `reply` of the task."""
        return view_of(cls, reply, run_id=run_id, task_id=task_id)
