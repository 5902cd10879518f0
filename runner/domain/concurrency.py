"""The number of tasks of a run at once, where nobody gave it."""

from __future__ import annotations

from collections.abc import Iterable

DEFAULT_CONCURRENCY = 8
"""The tasks at once of all backends together that state no number."""


def default_concurrency(stated: Iterable[int | None]) -> int:
    """Return the sum of the numbers that the backends of a run state, and DEFAULT_CONCURRENCY for all together that
    state none.
    """
    numbers = list(stated)
    known = [one for one in numbers if one is not None]
    return sum(known) + (DEFAULT_CONCURRENCY if len(known) < len(numbers) or not numbers else 0)
