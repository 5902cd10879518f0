"""The count of a task's failed attempts. Throttling counts only after many repetitions."""

from __future__ import annotations

from collections import Counter
from typing import Final

from plait.errors import ErrorKind

THROTTLING: Final = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED})
"""Error kinds with which a backend requests a pause: not the fault of the task."""


PATIENCE: Final = 20
"""Number of throttlings, of the task or as pauses of the backend with no completed task in between, after which an
overload counts as a failure. A limit then counts only if other tasks have completed meanwhile: the task may be too
large for it.
"""
_OF_A_PAUSE = 3
"""Refusals that pause a backend: of a call and of two probes."""


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

        `in_a_row` is the number of the backend's earlier refusals of any task in a row. Returns 0 unless the backend
        refused the task; else the number of refusals of the task so far, or of the pauses in a row, if greater.
        """
        if kind not in THROTTLING:
            self._counted[position] += 1
            return 0
        self._throttled[position] += 1
        own = self._throttled[position]
        times = max(own, in_a_row // _OF_A_PAUSE)
        if times > PATIENCE and (kind != ErrorKind.RATE_LIMITED or own > in_a_row + 1):
            self._counted[position] += 1
        return times

    def reset(self, position: int) -> None:
        """Reset the counts of the task, because a person has reopened the task."""
        del self._counted[position], self._throttled[position]
