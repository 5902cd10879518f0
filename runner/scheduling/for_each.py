"""Queue of the tasks of a run that are ready for a step without a slot. Pure.

The steps are the expansion of a `for_each` task, the collection of its results, and the decision of a condition.

The queue also decides whether a task waits for a `for_each` task itself, or only its parts wait for the other parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from plait.runner.domain.dag import DAG


class ForEachQueue:
    """The `for_each` tasks of the run of `dag`."""

    def __init__(self, dag: DAG) -> None:
        self._dag = dag
        self._put_back: set[int] = set()
        """Tasks that could not be expanded and wait for all dependencies before failing."""
        self.ready: deque[int] = deque()
        """Positions of the ready tasks, tasks with a condition included, in order."""

    def take(self, dropped: Collection[int]) -> int | None:
        """Remove and return the position of the next ready task; None if there is none."""
        if not self.ready:
            return None
        position = self.ready.popleft()
        self.discard_dropped(dropped)
        return position

    def discard_dropped(self, dropped: Collection[int]) -> None:
        """Remove the tasks in `dropped` from the head of the queue."""
        while self.ready and self.ready[0] in dropped:
            self.ready.popleft()

    def put_back(self, position: int) -> None:
        """Cancel the pairings of the task at `position`: from now on the task waits for its dependencies itself."""
        self._put_back.add(position)

    def waits(self, position: int, other: int) -> bool:
        """Return whether the task at `position` itself waits for `other`, a task it needs. For a pair, only the parts
        wait.
        """
        return position in self._put_back or not self._dag.pairs_up(position, other)

    def waiting(self, position: int) -> Sequence[int]:
        """Return the positions of the tasks that themselves wait for the task at `position`."""
        needed_by = self._dag.needed_by(position)
        if self._dag.tasks[position].for_each is None:
            return needed_by
        return [one for one in needed_by if self.waits(one, position)]

    def paired(self, position: int) -> list[int]:
        """Return the positions of the dependents of the expanded task at `position` that do not wait for the task
        itself.
        """
        return [one for one in self._dag.needed_by(position) if not self.waits(one, position)]
