"""The progress of a workflow as interactions, derived from the tasks of the run. Pure.

Nothing is kept in memory. A task for a try of a step is marked in its metadata (`step`, `try`); mark and outcome are
stored with the task. Other tasks of the run, such as tasks added by a step, are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.json_form import JsonValue
from plait.runner.domain.policy import RunView
from plait.runner.domain.result import TaskResult
from plait.runner.domain.task import NEVER_RETRIED, Task
from plait.statuses import RunStatus, TaskStatus


@dataclass(frozen=True, slots=True)
class Interaction:
    """A try of a step."""

    step: str
    """The name of the step."""
    status: Literal["ok", "error"] | None = None
    """`ok` or `error` after the end, None before."""
    text: str = ""
    """The text of the result."""
    data: JsonValue = None
    """The structured result."""
    number: int = 1
    """The number of the try of the step, from 1."""
    error: str | None = None
    """The reason for a failure, in one line."""
    unavailable: bool = False
    """True if the backend was unavailable and another try would fail in the same way."""

    @property
    def task_id(self) -> str:
        """The id of the task for the try."""
        return task_id(self.step, self.number)


@dataclass(frozen=True, slots=True)
class Session:
    """The interactions of a run."""

    interactions: tuple[Interaction, ...] = ()
    """The interactions, the newest last."""
    status: RunStatus = RunStatus.RUNNING
    """The status of the run."""

    @property
    def last_completed(self) -> Interaction | None:
        """The newest interaction that has ended, successfully or not; None if there is none."""
        return next((one for one in reversed(self.interactions) if one.status is not None), None)


@dataclass(frozen=True, slots=True)
class SessionComplete:
    """The end of a session."""

    ok: bool
    """False if a failed step ended the session."""
    error: str | None = None
    """The reason for a failure."""


_STATUSES: dict[TaskStatus, Literal["ok", "error"]] = {
    TaskStatus.COMPLETED: "ok",
    TaskStatus.FAILED: "error",
    TaskStatus.SKIPPED: "error",
}


def task_id(step: str, number: int) -> str:
    """Return the id of the task for try `number` of `step`."""
    return f"{step}.{number}"


def session_of(run: RunView, status: RunStatus = RunStatus.RUNNING) -> Session:
    """Return the session derived from the tasks of `run`."""
    found = (_interaction(task, run.result(task.id)) for task in run.tasks if is_interaction(task))
    return Session(tuple(found), status)


def is_interaction(task: Task) -> bool:
    """Return whether `task` is a try of a step."""
    step, number = task.metadata.get("step"), task.metadata.get("try")
    return isinstance(step, str) and isinstance(number, int) and task.id == task_id(step, number)


def _interaction(task: Task, result: TaskResult) -> Interaction:
    step, number = task.id.rsplit(".", 1)
    status = _STATUSES.get(result.status)
    unavailable = result.error_kind in NEVER_RETRIED
    return Interaction(step, status, result.text, result.data, int(number), result.error, unavailable)
