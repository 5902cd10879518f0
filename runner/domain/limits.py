"""How far a run may grow. Pure."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TASKS = 10_000
MAX_DEPTH = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """How far a run may grow: to `max_tasks` tasks in all, and to tasks added by tasks that were added themselves, at
    most `max_depth` levels deep.
    """

    max_tasks: int = MAX_TASKS
    max_depth: int = MAX_DEPTH

    def within(self, others: Limits | None) -> Limits:
        """The narrower of both."""
        if others is None:
            return self
        return Limits(min(self.max_tasks, others.max_tasks), min(self.max_depth, others.max_depth))
