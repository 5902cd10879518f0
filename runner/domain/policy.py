"""A policy: a pure function from a run's recorded state to what is added or decided next.

The runner asks it whenever a task has ended, and once more when nothing is left that could run. What it decides is
stored in the same transaction as the end that it was asked about, and so is the word that it was asked: after a crash
it is asked about what it has not been asked about, and about nothing else. It has no state but what it gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from plait.backends.protocol import JsonInput
from plait.runner.domain.result import TaskResult
from plait.runner.domain.status import RunStatus
from plait.runner.domain.task import Task

if TYPE_CHECKING:
    from plait.runner.domain.dag import DAG


@dataclass(frozen=True, slots=True)
class RunView:
    """What a policy sees of a run. `tasks` are all of them, in the order in which they came in; `result` tells where
    one of them stands; `state` is what the policy gave back last, None at first. `ended` is the task that it is asked
    about, None when nothing is left that could run.
    """

    tasks: Sequence[Task]
    result: Callable[[str], TaskResult]
    state: JsonInput = None
    ended: str | None = None
    position: Callable[[str], int] | None = None
    """Where a task stands in `tasks`; a view without it looks through them."""

    def task(self, task_id: str) -> Task:
        """The task of that id. Raises KeyError."""
        if self.position is not None:
            return self.tasks[self.position(task_id)]
        found = next((task for task in self.tasks if task.id == task_id), None)
        if found is None:
            raise KeyError(task_id)
        return found


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to follow. `add` are further tasks, checked like those of a DAG; `cancel` are tasks that have not
    begun, or wait for a person, and that no longer matter, those of `add` included: they, what waits for them, and
    the parts of a `for_each` become cancelled. `state` is what the policy wants to see next time: small, and JSON.
    `end` ends the run as that, and what is under way with it; nothing can be added then. In a run that is completed
    so, what is not done becomes cancelled; in one that failed it is left, so that a resume with `retry_failed` goes
    on. `error` says in one line why. Without `end`, a run ends when nothing is left that could run.
    """

    add: tuple[Task, ...] = ()
    cancel: tuple[str, ...] = ()
    state: JsonInput = None
    end: Literal[RunStatus.COMPLETED, RunStatus.FAILED] | None = None
    error: str | None = None


class Policy(Protocol):
    """Decides how a run goes on. Pure: the same view gives the same decision; no clock, no chance, no I/O, and quick,
    for the whole run waits for it. What it raises fails the run.
    """

    @property
    def kind(self) -> str:
        """Its name, stored with the run: `resume` needs a policy of the same kind."""
        ...

    def settings(self) -> Mapping[str, JsonInput]:
        """What it was made with, stored with the run, so that `resume` can make it again."""
        ...

    def backends(self) -> Collection[str | None]:
        """The names of the backends that tasks it adds may run on, None for the runner's default one: without them no
        run with it begins, or goes on.
        """
        ...

    def decide(self, run: RunView) -> Decision:
        """What follows after the end of `run.ended`."""
        ...


@runtime_checkable
class CheckingPolicy(Policy, Protocol):
    """A policy that can tell beforehand what would be wrong with the tasks that it adds."""

    def check(self, dag: DAG) -> None:
        """Raises DAGError with every mistake in what it would add to a run of `dag`: then no run is begun."""
        ...
