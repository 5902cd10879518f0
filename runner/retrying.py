"""Whether and when a failed attempt is tried again: the policy is in `Retry`, chance comes in."""

from __future__ import annotations

import random

from backends.errors import BackendError
from runner.task import Retry

LONGEST_HINT_S = 86_400.0
"""A server that asks for more than a day is not waited for: the task fails, and a person decides."""


def deserves_retry(retry: Retry, failures: int, error: BackendError) -> bool:
    """Whether another attempt follows the `failures`-th failure."""
    waits = error.retry_after is None or error.retry_after <= LONGEST_HINT_S
    return error.kind in retry.on and failures < retry.attempts and waits


def retry_delay(retry: Retry, failures: int, hint: float | None, rng: random.Random) -> float:
    """Seconds to wait after the `failures`-th failure: see `Retry`. A server's hint is only ever stretched."""
    if hint is not None:
        return hint + rng.uniform(0, retry.base_delay)
    return rng.uniform(0, min(retry.max_delay, retry.base_delay * 2 ** min(failures - 1, 60)))
