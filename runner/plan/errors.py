"""Problems of a plan file and their positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from plait.runner.errors import PlaitError, first_of

Path: TypeAlias = tuple[str | int, ...]
"""The position of a value in a plan: keys and indexes from the top, such as `("tasks", 3, "depends_on", 0)`."""


_MOST_SHOWN = 2_000


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """A problem of a plan."""

    message: str
    """The problem, in words."""
    where: str = ""
    """The path in the file; empty for the whole file."""
    line: int | None = None
    """The line, from 1; None if the format has no positions (TOML) or the problem is not in the file."""
    column: int | None = None
    """The column, from 1; None as for `line`."""
    file: str = "plan"
    """The name of the file."""

    def __str__(self) -> str:
        place = [self.file, *(str(number) for number in (self.line, self.column) if number is not None)]
        return ": ".join(part for part in (":".join(place), self.where, self.message) if part)


class PlanError(PlaitError):
    """Raised if a plan is unusable. The message lists the first 2,000 problems and counts the rest."""

    def __init__(self, problems: Iterable[PlanProblem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
        self.problems = tuple(dict.fromkeys(ordered))
        """All problems found, in the order of the file."""
        super().__init__(first_of(self.problems, _MOST_SHOWN))


def spell(path: Path) -> str:
    """Return `path` in the form `tasks[3].depends_on[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
