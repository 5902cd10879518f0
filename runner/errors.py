"""What can go wrong with a graph, a plan or a run, said so that a person can act on it."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_MOST_SHOWN = 20


class PlaitError(Exception):
    """Base of the errors that `runner` raises. The message is for a person and says what to do next."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One mistake in a graph: the task and its field where it is, and what is wrong with it.

    `task_id` is None for a mistake of the whole graph; `field` is a name of `Task`'s, or None. `index` tells apart
    entries of a list field (`depends_on`), counted from 0; `position` is the task's place in the list of tasks, from 0;
    `line` is the line within a prompt, from 1.
    """

    message: str
    task_id: str | None = None
    field: str | None = None
    index: int | None = None
    position: int | None = None
    line: int | None = None

    def __str__(self) -> str:
        return self.message if self.task_id is None else f"task {self.task_id!r}: {self.message}"


class DAGError(PlaitError):
    """The tasks do not make a graph that can run. `problems` lists every mistake found; the message shows the first 20,
    a line for each, and says how many more there are.
    """

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__(first_of(self.problems, _MOST_SHOWN))


class PromptError(PlaitError):
    """A prompt template cannot be parsed or rendered. `line` counts from 1 within the prompt, None if unknown."""

    def __init__(self, message: str, line: int | None = None) -> None:
        self.line = line
        super().__init__(message)


class RunNotFound(PlaitError):  # noqa: N818
    """The store holds no run of this id."""


class TaskNotFound(PlaitError):  # noqa: N818
    """The run has no task of this id."""


class RunExists(PlaitError):  # noqa: N818
    """A run of the given id is already in the store."""


class KeyConflict(PlaitError):  # noqa: N818
    """The key of a new run was used before, for another DAG or other settings."""


class RunOwned(PlaitError):  # noqa: N818
    """Another live process runs this run. The message says which one and since when."""


class RunNotResumable(PlaitError):  # noqa: N818
    """The run has ended in a way that `resume` does not go on from, such as cancelled."""


class BackendMissing(PlaitError):  # noqa: N818
    """A task names a backend that the runner does not have."""


class OwnershipLost(PlaitError):  # noqa: N818
    """Another process took this run over while we slept; our first write was refused and we stopped."""


class StoreRequired(PlaitError):  # noqa: N818
    """The call needs a store and the runner has none."""


class AnswerConflict(PlaitError):  # noqa: N818
    """The question was answered before, or its deadline has passed, or it is not asked any more."""


class PolicyMissing(PlaitError):  # noqa: N818
    """The run is led by a policy that the caller did not give, and that is none of ours."""


class TurnNotStored(PlaitError):  # noqa: N818
    """A person's turn was answered, but could not be stored. `text` is the answer, so that it is not lost."""

    def __init__(self, message: str, text: str) -> None:
        self.text = text
        super().__init__(message)


def first_of(problems: Sequence[object], most: int) -> str:
    """The first `most` of them, a line for each, and how many more there are."""
    lines = [str(problem) for problem in problems[:most]]
    if more := len(problems) - len(lines):
        lines.append(f"and {more:,} more")
    return "\n".join(lines)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest right one, or nothing."""
    close = difflib.get_close_matches(name, list(known)[:10_000], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
