"""Statuses of runs and tasks, and the tables of allowed transitions. Pure."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class TaskStatus(StrEnum):
    """The status of a task. *Eligible* and *blocked* are computed from the graph, never stored."""

    PENDING = "pending"
    """Not started, or waiting for the next attempt."""
    RUNNING = "running"
    """An attempt is under way. Back to pending: a retry, or the attempt ended with its process."""
    WAITING_INPUT = "waiting_input"
    """Waits for a person: the task asked a question, or the end of the process interrupted an `at_most_once` task."""
    COMPLETED = "completed"
    """The result is stored."""
    FAILED = "failed"
    """All attempts failed, or the error is of a kind that is not retried."""
    SKIPPED = "skipped"
    """The task failed with failure mode `skip`, or the condition of the task (`when`) was false: dependents continue as
    after a completion with an empty result.
    """
    CANCELLED = "cancelled"
    """Ended before its result, with the run or by the policy."""

    # `Enum.__hash__` is ten times slower, and differs from the hash of the equal text.
    __hash__ = str.__hash__


class RunStatus(StrEnum):
    """The status of a run."""

    QUEUED = "queued"
    """Stored, not begun."""
    RUNNING = "running"
    """A process executes the run."""
    WAITING_INPUT = "waiting_input"
    """No task can run before a person answers; no process waits."""
    COMPLETED = "completed"
    """Every task is completed or skipped."""
    FAILED = "failed"
    """At least one task failed, and every task able to run has run. Blocked tasks stay pending."""
    CANCELLING = "cancelling"
    """Cancelled by a request: no further task starts, and running attempts have a grace time."""
    CANCELLED = "cancelled"
    """Ended for good; cannot be resumed."""
    INTERRUPTED = "interrupted"
    """Displayed, never stored: the run is stored as running without a live owner. `resume` continues the run."""

    __hash__ = str.__hash__


_T, _R = TaskStatus, RunStatus

TASK_TRANSITIONS: Mapping[TaskStatus, frozenset[TaskStatus]] = MappingProxyType(
    {
        _T.PENDING: frozenset({_T.RUNNING, _T.CANCELLED}),
        # Back to pending: a retry, or the attempt ended with its owner.
        _T.RUNNING: frozenset(
            {_T.PENDING, _T.WAITING_INPUT, _T.COMPLETED, _T.FAILED, _T.SKIPPED, _T.CANCELLED},
        ),
        _T.WAITING_INPUT: frozenset(
            {_T.PENDING, _T.RUNNING, _T.COMPLETED, _T.FAILED, _T.SKIPPED, _T.CANCELLED},
        ),
        _T.COMPLETED: frozenset(),
        _T.FAILED: frozenset(),
        _T.SKIPPED: frozenset(),
        _T.CANCELLED: frozenset(),
    }
)
"""Allowed transitions of tasks. A failed task changes its status only on request of a person: see TASK_REOPENINGS."""

TASK_REOPENINGS: frozenset[TaskStatus] = frozenset({_T.FAILED})
"""Statuses that `resume(retry_failed=True)` resets to pending. Never includes completed."""

RUN_TRANSITIONS: Mapping[RunStatus, frozenset[RunStatus]] = MappingProxyType(
    {
        _R.QUEUED: frozenset({_R.RUNNING, _R.CANCELLED}),
        _R.RUNNING: frozenset({_R.WAITING_INPUT, _R.COMPLETED, _R.FAILED, _R.CANCELLING, _R.CANCELLED}),
        _R.WAITING_INPUT: frozenset({_R.RUNNING, _R.CANCELLING, _R.CANCELLED}),
        _R.CANCELLING: frozenset({_R.CANCELLED}),
        _R.COMPLETED: frozenset(),
        _R.FAILED: frozenset(),
        _R.CANCELLED: frozenset(),
    }
)
"""Allowed transitions of runs."""

RUN_REOPENINGS: frozenset[RunStatus] = frozenset({_R.FAILED})
"""Statuses from which `resume(retry_failed=True)` returns a run to running."""

TASK_STATUSES: Mapping[str, TaskStatus] = MappingProxyType({status.value: status for status in TaskStatus})
"""Statuses by stored text. A lookup is ten times faster than a call of the class, and a resume needs one per task."""

TASK_DONE: frozenset[TaskStatus] = frozenset(s for s in TaskStatus if not TASK_TRANSITIONS[s])
RUN_DONE: frozenset[RunStatus] = frozenset(s for s in RUN_TRANSITIONS if not RUN_TRANSITIONS[s])

Status = TypeVar("Status", TaskStatus, RunStatus)


def may_follow(table: Mapping[Status, frozenset[Status]], old: Status, new: Status) -> bool:
    """Return whether `table` allows the transition from `old` to `new`."""
    return new in table.get(old, frozenset())


UNDER_WAY = frozenset({RunStatus.RUNNING, RunStatus.CANCELLING})
"""Statuses of a run with an owner. Without a live owner, a run with such a status is interrupted."""
