"""The failed attempts that a task's retry policy counts, and the errors that count only after a while."""

from __future__ import annotations

from collections import Counter
from typing import Final

from plait.backends.errors import ErrorKind

THROTTLING: Final = frozenset({ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED})
"""Kinds of errors by which a backend asks to be left alone for a while: not the task's fault."""


PATIENCE: Final = 20
"""How often a task may be throttled before it counts as a failure; or its backend, with nothing completed between."""


class Failures:
    """Which failed attempts of each task its retry policy counts, by position. Interrupted ones are none."""

    def __init__(self) -> None:
        self._counted: Counter[int] = Counter()
        self._throttled: Counter[int] = Counter()

    def of(self, position: int) -> int:
        """How many count."""
        return self._counted[position]

    def note(self, position: int, kind: str | None, in_a_row: int = 0) -> int:
        """One more. Where the backend throttled the task: how often it did so by now, or how often `in_a_row` it did so
        with any task, if that is more; else 0.
        """
        times = 0
        if kind in THROTTLING:
            self._throttled[position] += 1
            times = max(self._throttled[position], in_a_row)
        if not 0 < times <= PATIENCE:
            self._counted[position] += 1
        return times

    def forget(self, position: int) -> None:
        """A person has reopened the task."""
        del self._counted[position], self._throttled[position]
