"""The tasks with `for_each` of one run, as its schedule sees them: when they are unfolded and gathered, and for whom
they wait themselves, and not their parts. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from plait.runner.domain.dag import DAG


class Gathering:
    """Those of the run of `dag`."""

    def __init__(self, dag: DAG) -> None:
        self._dag = dag
        self._put_back: set[int] = set()
        """Those that could not be unfolded, and wait for all that they depend on before they fail."""
        self.line: deque[int] = deque()
        """Those whose time has come."""

    def take(self, dropped: Collection[int]) -> int | None:
        """The next one; None when there is none."""
        if not self.line:
            return None
        position = self.line.popleft()
        self.uncover(dropped)
        return position

    def uncover(self, dropped: Collection[int]) -> None:
        """Take those off the line's head that never will be unfolded or gathered."""
        while self.line and self.line[0] in dropped:
            self.line.popleft()

    def put_back(self, position: int) -> None:
        """It pairs up with nobody any more."""
        self._put_back.add(position)

    def waits(self, position: int, other: int) -> bool:
        """Whether the task at `position`, which needs `other`, waits for it itself. Where it pairs up with that,
        its parts do.
        """
        return position in self._put_back or not self._dag.pairs_up(position, other)

    def waiting(self, position: int) -> Sequence[int]:
        """The tasks that wait themselves for the one at `position`."""
        needed_by = self._dag.needed_by(position)
        if self._dag.tasks[position].for_each is None:
            return needed_by
        return [one for one in needed_by if self.waits(one, position)]

    def paired(self, position: int) -> list[int]:
        """The tasks that depend on the one at `position`, which is unfolded, and do not wait for it themselves."""
        return [one for one in self._dag.needed_by(position) if not self.waits(one, position)]
