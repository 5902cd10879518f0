"""Results of runs and tasks, as values and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from html import escape
from itertools import islice
from typing import Any

from plait.json_form import JsonValue, value
from plait.safe_text import shorten
from plait.statuses import RunStatus, TaskStatus
from plait.usage import NO_USAGE, Usage, cost


@value
class TaskResult:
    """The state of a task at the end of a run."""

    id: str
    """The id of the task."""
    status: TaskStatus = TaskStatus.PENDING
    """The status at the end of the run."""
    text: str = ""
    """The text of the result; empty unless completed."""
    data: JsonValue = None
    """The structured result, for a task with an `output_schema`; None unless completed."""
    error_kind: str | None = None
    """The kind of the error, an `ErrorKind` value; None unless failed."""
    error: str | None = None
    """The error message; None unless failed."""
    attempts: int = 0
    """The number of all attempts, including attempts of earlier processes."""
    usage: Usage = NO_USAGE
    """The usage of the last attempt."""
    duration_s: float = 0.0
    """The duration of the last attempt, in seconds."""
    session_id: str | None = None
    """The backend's id of the conversation, if known."""
    reused: bool = False
    """True if an earlier process did the task."""
    question: str | None = None
    """The question for a person while the task is waiting_input."""
    read: Callable[[JsonValue], Any] | None = field(default=None, repr=False, compare=False)
    """Makes `value` from the data of a task with `output`."""

    @property
    def value(self) -> Any:
        """The value of `{{ id }}` in prompts of dependents: `data` unless None, else `text`. For a task with `output`
        an instance of the model; for a `for_each` the list of the parts' instances, with "" for a part without result.
        """
        if self.data is None:
            return self.text
        return self.data if self.read is None else self.read(self.data)


@value
class Degradation:
    """A period during which the store failed."""

    since: str
    """The start, UTC in ISO 8601."""
    until: str | None
    """The end; None if the store never answered again."""
    error: str
    """The error of the store."""
    lost: int = 0
    """The number of changes not stored: the last changes of the run, or changes that the store refused for good. The
    run is then not stored as ended.
    """


@value
class ResumeSummary:
    """Summary of a resume, in numbers of tasks."""

    reused: int
    """Tasks done before the resume."""
    ran: int
    """Tasks executed by this process."""
    repeated: int
    """Executed tasks that were interrupted during an attempt and may be billed twice."""
    adopted: int = 0
    """Tasks whose running attempt outlived its process and was continued without a new prompt."""


@value
class RunResult:
    """The result of a run."""

    run_id: str
    """The id of the run."""
    status: RunStatus
    """The final status: completed, failed, waiting_input, parked, cancelled or interrupted."""
    tasks: Mapping[str, TaskResult]
    """The result of every task by id, in the order of the DAG. `result["a"]` is `result.tasks["a"]`."""
    error: str | None = None
    """The reason for a failure, or for an end that is not stored, in one line."""
    degraded: tuple[Degradation, ...] = ()
    """The periods during which the store failed; empty for a healthy store."""
    resume_summary: ResumeSummary | None = None
    """The summary of a resume; None if there was no resume or nothing left to do."""
    usage: Usage = NO_USAGE
    """The sum over all attempts, failed attempts and earlier processes included, without turns of `continue_task`."""
    due_at: str | None = None
    """When a parked run can go on, UTC in ISO 8601; None for every other run."""
    left_out: Mapping[TaskStatus, int] = field(default_factory=dict[TaskStatus, int])
    """The number of tasks by status that are in the store alone, and not in `tasks`: most rows of a file that was read
    as the run went.
    """
    text: Mapping[str, str] = field(init=False)
    """The text of every completed task, by id."""

    def __post_init__(self) -> None:
        texts = {task.id: task.text for task in self.tasks.values() if task.status is TaskStatus.COMPLETED}
        object.__setattr__(self, "text", texts)

    def __getitem__(self, task_id: str) -> TaskResult:
        return self.tasks[task_id]

    @property
    def failed(self) -> tuple[str, ...]:
        """Ids of the failed tasks."""
        return tuple(task.id for task in self.tasks.values() if task.status is TaskStatus.FAILED)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ids of the tasks waiting for a person."""
        return tuple(task.id for task in self.tasks.values() if task.status is TaskStatus.WAITING_INPUT)

    @property
    def blocked(self) -> tuple[str, ...]:
        """Ids of the tasks that could not start because a dependency failed. Empty unless the run is completed or
        failed.
        """
        if self.status not in {RunStatus.COMPLETED, RunStatus.FAILED}:
            return ()
        return tuple(task.id for task in self.tasks.values() if task.status is TaskStatus.PENDING)

    @property
    def reused(self) -> int:
        """The number of tasks done by earlier processes."""
        return sum(task.reused for task in self.tasks.values())

    @property
    def lost(self) -> int:
        """The number of changes that are not stored. The run is then not stored as ended."""
        return sum(one.lost for one in self.degraded)

    @property
    def status_is_stored(self) -> bool:
        """Whether the status is the one that is stored: after lost changes only a cancellation is."""
        return not self.lost or self.status is RunStatus.CANCELLED

    def _repr_html_(self) -> str:
        """Return the result as a table for a notebook."""
        reason = f": {self.error}" if self.error else ""
        caption = ", ".join(filter(None, (f"run {self.run_id}: {self.status.value}{reason}", cost(self.usage))))
        headings = ("task", "status", "result", "attempts", "tokens", "seconds")
        return html_table(caption, headings, [_row(task) for task in self.tasks.values()])


def _row(task: TaskResult) -> tuple[str, ...]:
    text = task.error or task.question or task.text
    used = task.usage
    tokens = f"{used.input_tokens:,}+{used.output_tokens:,}" if used.input_tokens or used.output_tokens else ""
    took = f"{task.duration_s:.2f}" if task.attempts else ""
    return task.id, task.status.value, text, str(task.attempts), tokens, took


MOST_ROWS = 100
_LONGEST_CELL = 200
_CELL = 'style="text-align:left;vertical-align:top"'


def html_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a row of `headings` and at most MOST_ROWS of the `rows`. Every text is escaped, and long
    cells are cut: texts of models must neither run nor fill a page.
    """
    head = "".join(f"<th {_CELL}>{escape(heading)}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in islice(rows, MOST_ROWS))
    remaining = len(rows) - MOST_ROWS
    more = f'<tr><td colspan="{len(headings)}" {_CELL}>and {remaining:,} more tasks</td></tr>' if remaining > 0 else ""
    return f"<table><caption>{escape(caption)}</caption><tr>{head}</tr>{body}{more}</table>"


def _cell(text: str) -> str:
    return f"<td {_CELL}>{escape(shorten(text, _LONGEST_CELL))}</td>"
