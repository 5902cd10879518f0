"""Policies: pure functions from the recorded state of a run to further tasks or the end of the run.

The runner calls the policy after the end of each task, and once more when no task is left to run. Each decision is
stored in the same transaction as the end of the task it follows, with a mark that the policy was called. After a crash
the policy is called exactly for the ends not yet marked. A policy has no state besides `Decision.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from plait.json_form import JsonInput, value
from plait.runner.domain.run_result import TaskResult
from plait.statuses import RunStatus
from plait.task import Task

if TYPE_CHECKING:
    from plait.runner.domain.dag import DAG


@value
class RecordedRun:
    """The view of a run presented to a policy."""

    tasks: Sequence[Task]
    """All tasks, in the order of their addition."""
    result: Callable[[str], TaskResult]
    """A function from a task id to the current result of the task."""
    state: JsonInput = None
    """The state returned by the policy's previous decision; None at first."""
    ended: str | None = None
    """The id of the ended task; None if no task is left to run."""
    position: Callable[[str], int] | None = None
    """A function from a task id to the index in `tasks`. Without it, lookups search the whole list."""

    def task(self, task_id: str) -> Task:
        """Return the task with the id `task_id`. Raises KeyError."""
        if self.position is not None:
            return self.tasks[self.position(task_id)]
        match = next((task for task in self.tasks if task.id == task_id), None)
        if match is None:
            raise KeyError(task_id)
        return match


@value
class Decision:
    """The decision of a policy. Without `end`, a run ends when no task is left to run."""

    add: tuple[Task, ...] = ()
    """Further tasks, validated like the tasks of a DAG. Must be empty if `end` is set."""
    cancel: tuple[str, ...] = ()
    """Ids of pending or waiting tasks to cancel, tasks of `add` included. Dependents and `for_each` parts are cancelled
    too.
    """
    state: JsonInput = None
    """The state for the next decision: small, and JSON."""
    end: Literal[RunStatus.COMPLETED, RunStatus.FAILED] | None = None
    """The status with which to end the run and all running attempts. On completed, the unfinished tasks become
    cancelled; on failed, they are kept for a resume with `retry_failed`.
    """
    error: str | None = None
    """The reason for a failure, in one line."""


class Policy(Protocol):
    """A strategy for extending and ending runs.

    Implementations must be pure: the same view gives the same decision, without clock, randomness or I/O. Decisions
    must be quick, because the whole run waits for each decision. An exception fails the run.
    """

    @property
    def kind(self) -> str:
        """The name of the policy, stored with the run. `resume` needs a policy of the same kind."""
        ...

    def settings(self) -> Mapping[str, JsonInput]:
        """Return the settings of the policy, stored with the run. `resume` recreates the policy from the settings."""
        ...

    def backends(self) -> Collection[str | None]:
        """Return the names of the backends for added tasks, with None for the default backend of the runner.

        A run with the policy begins or resumes only if the runner has all of the backends.
        """
        ...

    def decide(self, run: RecordedRun) -> Decision:
        """Return the decision that follows the end of the task `run.ended`."""
        ...


@runtime_checkable
class CheckingPolicy(Policy, Protocol):
    """A policy able to validate its future tasks before the run."""

    def check(self, dag: DAG) -> None:
        """Raise DAGError with all mistakes in the tasks to be added to a run of `dag`. The run is then not created."""
        ...
