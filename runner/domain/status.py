"""The states of a run and of a task, and the one table that says which may follow which. Pure."""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping


class TaskStatus(StrEnum):
    """Where a task stands. *Eligible* and *blocked* are computed from the graph, never stored."""

    PENDING = "pending"
    RUNNING = "running"
    WAITING_INPUT = "waiting_input"
    COMPLETED = "completed"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It failed, and its failure mode is `skip`: dependents go on as if it had completed with an empty result."""
    CANCELLED = "cancelled"

    # Enum's own takes ten times as long, and differs from that of the equal text.
    __hash__ = str.__hash__


class RunStatus(StrEnum):
    """Where a run stands."""

    QUEUED = "queued"
    RUNNING = "running"
    WAITING_INPUT = "waiting_input"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"
    """Shown, never stored: the run is stored as running, and nobody runs it any more. `resume` goes on with it."""

    __hash__ = str.__hash__


_T, _R = TaskStatus, RunStatus

TASK_TRANSITIONS: Mapping[TaskStatus, frozenset[TaskStatus]] = MappingProxyType(
    {
        _T.PENDING: frozenset({_T.RUNNING, _T.CANCELLED}),
        # Back to pending: a retry, or an attempt that ended with its owner.
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
"""What may follow what. A failed task leaves its state only when a person asks for it: see TASK_REOPENINGS."""

TASK_REOPENINGS: frozenset[TaskStatus] = frozenset({_T.FAILED})
"""States that `resume(retry_failed=True)` puts back to pending. A completed task is never among them."""

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

RUN_REOPENINGS: frozenset[RunStatus] = frozenset({_R.FAILED})
"""States from which `resume(retry_failed=True)` makes a run running again."""

TASK_STATUSES: Mapping[str, TaskStatus] = MappingProxyType({status.value: status for status in TaskStatus})
"""By the words that are stored. To call the class takes ten times as long, and a resume asks for that of every task."""

TASK_DONE: frozenset[TaskStatus] = frozenset(s for s in TaskStatus if not TASK_TRANSITIONS[s])
RUN_DONE: frozenset[RunStatus] = frozenset(s for s in RUN_TRANSITIONS if not RUN_TRANSITIONS[s])

Status = TypeVar("Status", TaskStatus, RunStatus)


def may_follow(table: Mapping[Status, frozenset[Status]], old: Status, new: Status) -> bool:
    """Whether `table` lets `new` follow `old`."""
    return new in table.get(old, frozenset())


UNDER_WAY = frozenset({RunStatus.RUNNING, RunStatus.CANCELLING})
"""Statuses of a run that somebody runs; where nobody does, it is interrupted."""
