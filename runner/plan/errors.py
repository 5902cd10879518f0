"""What is wrong with a plan file, each mistake with its place."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from plait.runner.errors import PlaitError, first_of

Path: TypeAlias = tuple[str | int, ...]
"""Where in a plan something is: keys and indexes from the top, such as `("tasks", 3, "depends_on", 0)`."""


_MOST_SHOWN = 2_000


@dataclass(frozen=True, slots=True)
class PlanProblem:
    """One mistake in a plan. `where` is its path in the file, empty for the whole file.

    `line` and `column` count from 1; None where the format does not tell (TOML) or the mistake is not in the file.
    """

    message: str
    where: str = ""
    line: int | None = None
    column: int | None = None
    file: str = "plan"

    def __str__(self) -> str:
        place = [self.file, *(str(number) for number in (self.line, self.column) if number is not None)]
        return ": ".join(part for part in (":".join(place), self.where, self.message) if part)


class PlanError(PlaitError):
    """A plan cannot be used. `problems` lists every mistake found, in the order of the file; the message shows the
    first 2,000, a line for each, and says how many more there are.
    """

    def __init__(self, problems: Iterable[PlanProblem]) -> None:
        ordered = sorted(problems, key=lambda problem: (problem.line or 0, problem.column or 0))
        self.problems = tuple(dict.fromkeys(ordered))
        super().__init__(first_of(self.problems, _MOST_SHOWN))


def spell(path: Path) -> str:
    """`path` as a person writes it: `tasks[3].depends_on[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
