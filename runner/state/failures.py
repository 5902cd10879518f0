"""The count of a task's failed attempts. Throttling counts only after many repetitions."""

from __future__ import annotations

from collections import Counter
from typing import Final

from plait.backends.errors import ErrorKind

THROTTLING: Final = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED})
"""Error kinds with which a backend requests a pause: not the fault of the task."""


PATIENCE: Final = 20
"""Number of throttlings after which each further one counts as a failure: throttlings of the task, or of the backend
with no completed task in between.
"""


class Failures:
    """The number of failed attempts that count for retries, by task position. Interrupted attempts do not count."""

    def __init__(self) -> None:
        self._counted: Counter[int] = Counter()
        self._throttled: Counter[int] = Counter()

    def of(self, position: int) -> int:
        """Return the number of counted failures of the task."""
        return self._counted[position]

    def note(self, position: int, kind: str | None, in_a_row: int = 0) -> int:
        """Count a failed attempt with an error of `kind`.

        Returns 0 unless the backend throttled the task; else the number of throttlings of the task so far, or
        `in_a_row`, the backend's throttlings of any task in a row, if greater.
        """
        times = 0
        if kind in THROTTLING:
            self._throttled[position] += 1
            times = max(self._throttled[position], in_a_row)
        if not 0 < times <= PATIENCE:
            self._counted[position] += 1
        return times

    def reset(self, position: int) -> None:
        """Reset the counts of the task, because a person has reopened the task."""
        del self._counted[position], self._throttled[position]
