"""Statuses of runs, tasks and attempts, and the one table of transitions. Pure."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


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
    PARKED = "parked"
    """Displayed, never stored: the run is stored as running, and its process has left it until a time for which
    everything waits. `plait wake` continues the run then.
    """

    __hash__ = str.__hash__


class AttemptStatus(StrEnum):
    """The status of an attempt: the status of its task, or the way in which the attempt ended without a result."""

    RUNNING = "running"
    """The attempt is under way, or its process died and no resume has followed."""
    COMPLETED = "completed"
    """The result of the task is stored."""
    FAILED = "failed"
    """The attempt failed, and the task with the attempt."""
    SKIPPED = "skipped"
    """The attempt failed and the failure mode of the task is `skip`, or the condition of the task is false."""
    RETRIED = "retried"
    """The attempt failed, and another attempt follows."""
    ASKED = "asked"
    """The attempt ended with a question to a person."""
    INTERRUPTED = "interrupted"
    """The attempt ended with the owner of the run."""
    CANCELLED = "cancelled"
    """The attempt ended with the run, or by the policy."""


Status = TypeVar("Status", TaskStatus, RunStatus)


class Transition(NamedTuple, Generic[Status]):
    """What an event does to its task or run."""

    before: frozenset[Status]
    """The statuses in which the event can happen."""
    after: Status


_T, _R = TaskStatus, RunStatus
_UNFINISHED = frozenset({_T.PENDING, _T.RUNNING, _T.WAITING_INPUT})
_BEGUN = frozenset({_T.RUNNING, _T.WAITING_INPUT})

TASK_TRANSITIONS: Mapping[str, Transition[TaskStatus]] = MappingProxyType(
    {
        "task_started": Transition(frozenset({_T.PENDING}), _T.RUNNING),
        "task_completed": Transition(_BEGUN, _T.COMPLETED),
        "task_failed": Transition(_BEGUN, _T.FAILED),
        "task_skipped": Transition(_BEGUN, _T.SKIPPED),
        "task_retried": Transition(frozenset({_T.RUNNING}), _T.PENDING),
        "task_interrupted": Transition(frozenset({_T.RUNNING}), _T.PENDING),
        "task_waiting_input": Transition(frozenset({_T.RUNNING}), _T.WAITING_INPUT),
        "task_answered": Transition(frozenset({_T.WAITING_INPUT}), _T.PENDING),
        "task_cancelled": Transition(_UNFINISHED, _T.CANCELLED),
        # Only a person reopens a task. A completed one is reopened only if its stored result is damaged, see
        # `plait.persistence.write_rules.statuses_before`; to this process it has failed.
        "task_reopened": Transition(frozenset({_T.FAILED}), _T.PENDING),
    }
)
"""Every transition of a task, by the kind of its event: asked by `RunState`, and again by each store."""

RUN_TRANSITIONS: Mapping[str, Transition[RunStatus]] = MappingProxyType(
    {
        "run_started": Transition(frozenset({_R.QUEUED}), _R.RUNNING),
        # From running: by another owner. From failed and completed: reopened by a person, a completed run only to
        # replace damaged results.
        "run_resumed": Transition(frozenset({_R.RUNNING, _R.WAITING_INPUT, _R.COMPLETED, _R.FAILED}), _R.RUNNING),
        "run_waiting_input": Transition(frozenset({_R.RUNNING}), _R.WAITING_INPUT),
        "run_completed": Transition(frozenset({_R.RUNNING}), _R.COMPLETED),
        "run_failed": Transition(frozenset({_R.RUNNING}), _R.FAILED),
        "run_cancelling": Transition(frozenset({_R.RUNNING, _R.WAITING_INPUT}), _R.CANCELLING),
        "run_cancelled": Transition(frozenset({_R.QUEUED, _R.RUNNING, _R.WAITING_INPUT, _R.CANCELLING}), _R.CANCELLED),
    }
)
"""Every transition of a run, by the kind of its event."""

TASK_STATUSES: Mapping[str, TaskStatus] = MappingProxyType({status.value: status for status in TaskStatus})
"""Statuses by stored text. A lookup is ten times faster than a call of the class, and a resume needs one per task."""

TASK_DONE: frozenset[TaskStatus] = frozenset(TaskStatus) - _UNFINISHED
RUN_DONE: frozenset[RunStatus] = frozenset({_R.COMPLETED, _R.FAILED, _R.CANCELLED})
UNDER_WAY = frozenset({RunStatus.RUNNING, RunStatus.CANCELLING})
"""Statuses of a run with an owner. Without a live owner, a run with such a status is interrupted."""
TO_START = frozenset({RunStatus.QUEUED, RunStatus.INTERRUPTED})
"""Statuses of a run that waits for a process alone."""
RESUMABLE = TO_START | {RunStatus.WAITING_INPUT, RunStatus.PARKED}
"""Statuses of a run that a resume continues as it is."""


URGENT = (TaskStatus.FAILED, TaskStatus.WAITING_INPUT)
"""The statuses of tasks at which a person looks first."""


def group_status(statuses: Iterable[TaskStatus]) -> tuple[TaskStatus, str]:
    """Return the status for whose colour a group of tasks is shown, and the number of tasks by status in words."""
    counts = Counter(statuses)
    shown = next(one for one in (*URGENT, TaskStatus.RUNNING, *TaskStatus) if counts[one])
    return shown, ", ".join(f"{counts[one]:,} {one.value.replace('_', ' ')}" for one in TaskStatus if counts[one])
