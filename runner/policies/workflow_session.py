"""What a workflow has done so far: interactions, read from the tasks of its run. Pure.

Nothing of it lives in memory. A task that stands for a try of a step says so in its metadata (`step`, `try`), which is
stored with it; how it ended is stored with it as well. All else in the run, such as tasks that a step added, is none
of a workflow's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from plait.backends.protocol import JsonValue
from plait.runner.domain.policy import RunView
from plait.runner.domain.result import TaskResult
from plait.runner.domain.status import RunStatus, TaskStatus
from plait.runner.domain.task import NEVER_RETRIED, Task
from plait.runner.errors import PlaitError


class UnknownStep(PlaitError):  # noqa: N818
    """The session's last completed interaction is of a step that the workflow does not have."""


class ImpossibleState(PlaitError):  # noqa: N818
    """The session's last completed interaction has a status or number that no interaction can have."""


class SessionEnded(PlaitError):  # noqa: N818
    """The session's run has ended, or is being cancelled: nothing follows any more."""


@dataclass(frozen=True, slots=True)
class Interaction:
    """One try of one step. `status` is `ok` or `error` once it has come to its end, and None before. `number` counts
    the tries of the step, from 1. `text` and `data` are its result, `error` says in one line why there is none, and
    `unavailable` that its backend could not be had, so that the next try would come to the same.
    """

    step: str
    status: Literal["ok", "error"] | None = None
    text: str = ""
    data: JsonValue = None
    number: int = 1
    error: str | None = None
    unavailable: bool = False

    @property
    def task_id(self) -> str:
        """The task that stands for it in the run."""
        return task_id(self.step, self.number)


@dataclass(frozen=True, slots=True)
class Session:
    """The interactions of a run, the newest last, and where the run stands."""

    interactions: tuple[Interaction, ...] = ()
    status: RunStatus = RunStatus.RUNNING

    @property
    def last_completed(self) -> Interaction | None:
        """The newest interaction that has come to its end, well or not."""
        return next((one for one in reversed(self.interactions) if one.status is not None), None)


@dataclass(frozen=True, slots=True)
class SessionComplete:
    """No step follows. `ok` is False where a step failed and its rule ended the session: `error` then says so."""

    ok: bool
    error: str | None = None


_STATUSES: dict[TaskStatus, Literal["ok", "error"]] = {
    TaskStatus.COMPLETED: "ok",
    TaskStatus.FAILED: "error",
    TaskStatus.SKIPPED: "error",
}


def task_id(step: str, number: int) -> str:
    """The id of the task that stands for try `number` of `step`."""
    return f"{step}.{number}"


def session_of(run: RunView, status: RunStatus = RunStatus.RUNNING) -> Session:
    """The session that the tasks of `run` tell of."""
    found = (_interaction(task, run.result(task.id)) for task in run.tasks if is_interaction(task))
    return Session(tuple(found), status)


def is_interaction(task: Task) -> bool:
    """Whether `task` is a try of a step."""
    step, number = task.metadata.get("step"), task.metadata.get("try")
    return isinstance(step, str) and isinstance(number, int) and task.id == task_id(step, number)


def _interaction(task: Task, result: TaskResult) -> Interaction:
    step, number = task.id.rsplit(".", 1)
    status = _STATUSES.get(result.status)
    unavailable = result.error_kind in NEVER_RETRIED
    return Interaction(step, status, result.text, result.data, int(number), result.error, unavailable)
