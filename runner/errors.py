"""Errors of graphs, plans and runs. Each message describes the problem and the remedy."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MOST_SHOWN = 20


class PlaitError(Exception):
    """Base of all errors raised by `runner`: the call cannot be done. The message is for a person and names the next
    step.
    """


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a graph."""

    message: str
    """The mistake, in words."""
    task_id: str | None = None
    """The id of the task with the mistake; None for a mistake of the whole graph."""
    field: str | None = None
    """The name of the `Task` field with the mistake, if known."""
    index: int | None = None
    """The index of the wrong entry in a list field such as `depends_on`, from 0."""
    position: int | None = None
    """The index of the task in the list of tasks, from 0."""
    line: int | None = None
    """The line within the prompt, from 1."""

    def __str__(self) -> str:
        return self.message if self.task_id is None else f"task {self.task_id!r}: {self.message}"


class DAGError(PlaitError):
    """Raised if the tasks do not form a valid graph. The message lists the first 20 problems and counts the rest."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        """All mistakes found."""
        super().__init__(first_of(self.problems, _MOST_SHOWN))


class PromptError(PlaitError):
    """Raised if a prompt template cannot be parsed or rendered."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        """The line within the prompt, from 1; None if unknown."""
        super().__init__(message)


class RunNotFound(PlaitError):  # noqa: N818
    """Raised if the store holds no run with the given id."""


class TaskNotFound(PlaitError):  # noqa: N818
    """Raised if the run has no task with the given id."""


class RunExists(PlaitError):  # noqa: N818
    """Raised if the store already holds a run with the given id."""


class KeyConflict(PlaitError):  # noqa: N818
    """Raised if the key of a new run is already in use for another DAG or other settings."""


class RunOwned(PlaitError):  # noqa: N818
    """Raised if another live process executes the run. The message names the process and the start of its ownership."""


class RunNotResumable(PlaitError):  # noqa: N818
    """Raised if the run was cancelled, failed and the call does not reopen failed tasks, or would build on a damaged
    result.
    """


class BackendMissing(PlaitError):  # noqa: N818
    """Raised if a task or a policy needs a backend that the runner does not have."""


class OwnershipLost(PlaitError):  # noqa: N818
    """Raised if another process took the run over while the current process was suspended. The store refused the next
    write, and execution stopped.
    """


class StoreRequired(PlaitError):  # noqa: N818
    """Raised if an operation needs a store and the runner has none."""


class AnswerConflict(PlaitError):  # noqa: N818
    """Raised if a question was already answered, is past its deadline, or is no longer open."""


class PolicyMissing(PlaitError):  # noqa: N818
    """Raised if a run needs a policy that does not come with plait and the caller did not pass the policy."""


class TurnNotStored(PlaitError):  # noqa: N818
    """Raised if `continue_task` received a reply but could not store the turn. `text` holds the reply."""

    def __init__(self, message: str, text: str) -> None:
        self.text = text
        """The text of the reply, kept here to prevent its loss."""
        super().__init__(message)


def first_of(problems: Sequence[object], most: int) -> str:
    """Return the first `most` problems, one per line, followed by the number of the remaining problems, if any."""
    lines = [str(problem) for problem in problems[:most]]
    if more := len(problems) - len(lines):
        lines.append(f"and {more:,} more")
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: `; did you mean 'x'?`, or an empty text if no known name is
    close.
    """
    close = difflib.get_close_matches(name, list(known)[:10_000], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
