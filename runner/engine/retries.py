"""Retries of failed attempts: the decision and the delay, according to `Retry`. The random generator is an argument.

A server's `retry_after` hint is waited for however long it is, and holds for later processes as well: if a limit is
lifted in a week, a resume does not call the server earlier.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable

import anyio
import anyio.abc

from plait.clock_and_ids import Clock
from plait.errors import BackendError
<<<<<<< HEAD:runner/engine/retries.py
from plait.task import NEVER_RETRIED, Retry
from plait.runner.state.run_state import PATIENCE
=======
from plait.runner.state.failures import PATIENCE
from plait.task import NEVER_RETRIED, Retry
>>>>>>> f238fc64 (names: call the modules of plans and tasks by what they hold):runner/engine/retry.py

_LONGEST_PROBE_S = 3600.0
"""Longest time between two calls, in seconds, to a backend that names no end of its limit."""
_STEP_S = 60.0
"""Seconds between two looks at the clocks during a delay."""


def deserves_retry(retry: Retry, failures: int, error: BackendError) -> bool:
    """Return whether another attempt follows `error`. `failures` counts the failed attempts; throttled attempts may not
    count.
    """
    deserves = error.kind in retry.on and error.kind not in NEVER_RETRIED
    return deserves and max(failures, 1) < retry.attempts


def retry_delay(retry: Retry, times: int, hint: float | None, rng: random.Random, *, limited: bool = False) -> float:
    """Return the seconds to wait after the `times`-th failure, or refusal by a limit if `limited`: see `Retry`."""
    longest = retry.max_delay
    if limited and times > PATIENCE:
        longest = max(longest, min(_LONGEST_PROBE_S, longest * 2.0 ** min(times - PATIENCE, 60)))
    if hint is not None and hint >= retry.base_delay:
        return hint + rng.uniform(0, min(retry.base_delay, hint / 4))
    # Back off after a very short hint as well: the hinted time passes, but the limit may remain.
    return (hint or 0.0) + rng.uniform(0, min(longest, retry.base_delay * 2 ** min(times - 1, 60)))


class Delays:
    """The delays between two attempts of tasks.

    A delay ends when the delay has been slept, or when the wall clock has advanced by it: a laptop that is suspended
    stops the clock of its sleeps, and a wall clock that is set back must not prolong the delay.

    `try_again` is called with the position of the task when the delay of the task is over or ended early.
    """

    def __init__(self, clock: Clock, try_again: Callable[[int], Awaitable[None]]) -> None:
        self._clock = clock
        self._try_again = try_again
        self._scopes: dict[int, anyio.CancelScope] = {}

    def begin(self, workers: anyio.abc.TaskGroup, position: int, delay: float) -> None:
        """Start a delay of `delay` seconds for the task at `position`. A negative `delay` counts as 0."""
        self._scopes[position] = scope = anyio.CancelScope()
        workers.start_soon(self._wait, position, delay, scope)

    def end(self, position: int) -> None:
        """End the delay of the task at `position` early, if any."""
        if position in self._scopes:
            self._scopes[position].cancel()

    async def _wait(self, position: int, delay: float, scope: anyio.CancelScope) -> None:
        left = max(0.0, delay)
        end = self._clock.wall() + left
        with scope:
            await self._clock.sleep(step := min(left, _STEP_S))
            while (left := min(left - step, end - self._clock.wall())) > 0:
                await self._clock.sleep(step := min(left, _STEP_S))
        del self._scopes[position]
        await self._try_again(position)
