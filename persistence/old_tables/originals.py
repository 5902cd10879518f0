"""The stored rows to which rows of a batch may refer in place of a copy of their texts.

Theory: a change names an earlier run (`like`) or an attempt (`taken_from`) of which the texts are taken. The writer
reads the named rows in the transaction of the batch. A row becomes a copy only if its texts are those of the named row,
so a damaged, changed or deleted row costs space and no result. A named row that is itself a copy is read with the row
that holds the texts, so no copy refers to a copy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.events import AttemptId
from plait.persistence.changes import RunCreated, TaskCompleted, TasksAdded

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from plait.persistence.changes import Change


class Original(NamedTuple):
    """A row that holds texts."""

    row: int
    """The id of the row."""
    texts: tuple[str | None, ...]
    """Of a task the dependencies, the spec and the prompt; of an end the text, the data and the prompt."""


@dataclass(slots=True)
class Originals:
    """The rows named by the changes of a batch."""

    tasks: dict[str, dict[str, Original]] = field(default_factory=dict[str, dict[str, Original]])
    """By the id of the run, then of the task."""
    answers: dict[AttemptId, Original] = field(default_factory=dict[AttemptId, Original])

    def add_tasks(self, run_id: str, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of a task's id, the id of the row with the texts, and the texts."""
        self.tasks[run_id] = {task_id: Original(row, tuple(texts)) for task_id, row, *texts in rows}

    def add_answers(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows of an attempt, the id of the row with the texts, and the texts."""
        for run_id, task_id, attempt, row, *texts in rows:
            self.answers[AttemptId(run_id, task_id, attempt)] = Original(row, tuple(texts))


def named_runs(changes: Sequence[Change]) -> set[str]:
    """Return the ids of the runs of which tasks may be taken."""
    return {one.like for one in changes if isinstance(one, RunCreated | TasksAdded) and one.like is not None}


def named_attempts(changes: Sequence[Change]) -> list[AttemptId]:
    """Return the attempts of which answers may be taken."""
    return [one.taken_from for one in changes if isinstance(one, TaskCompleted) and one.taken_from is not None]
