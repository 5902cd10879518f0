"""Retries of failed attempts: the decision, the delay, and the wait. What a refusal does to the whole backend, and how
its throttling is reported.

A server's `retry_after` hint is waited for however long it is, and holds for later processes as well: if a limit is
lifted in a week, a resume does not call the server earlier.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Collection, Hashable
from math import inf
from typing import Generic, TypeVar

import anyio
import anyio.abc

from plait import events
from plait.backends.error_kinds import names_quota
from plait.clock_and_ids import Clock, iso
from plait.errors import BackendError, ErrorKind
from plait.runner.engine.live_run import LiveRun
from plait.runner.scheduling.slots import Account, Pause
from plait.runner.state.run_state import MOST_THROTTLINGS
from plait.task import NEVER_RETRIED, Retry

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
    if limited and times > MOST_THROTTLINGS:
        longest = max(longest, min(_LONGEST_PROBE_S, longest * 2.0 ** min(times - MOST_THROTTLINGS, 60)))
    if hint is not None and hint >= retry.base_delay:
        return hint + rng.uniform(0, min(retry.base_delay, hint / 4))
    # Back off after a very short hint as well: the hinted time passes, but the limit may remain.
    return (hint or 0.0) + rng.uniform(0, min(longest, retry.base_delay * 2 ** min(times - 1, 60)))


Key = TypeVar("Key", bound=Hashable)


class Delays(Generic[Key]):
    """The delays between two attempts of tasks, or until a backend is open again.

    A delay ends when the delay has been slept, or when the wall clock has advanced by it: a laptop that is suspended
    stops the clock of its sleeps, and a wall clock that is set back must not prolong the delay.

    `try_again` is called with the key of the delay, such as the position of the task, when it is over or ended early.
    """

    def __init__(self, clock: Clock, try_again: Callable[[Key], Awaitable[None]]) -> None:
        self._clock = clock
        self._try_again = try_again
        self._scopes: dict[Key, anyio.CancelScope] = {}
        self._is_over = False
        self.ends: dict[Key, float] = {}
        """The Unix time of the end of each delay that has not been ended early, in seconds."""

    def begin(self, workers: anyio.abc.TaskGroup, key: Key, delay: float) -> None:
        """Start a delay of `delay` seconds. A negative `delay` counts as 0."""
        self._scopes[key] = scope = anyio.CancelScope()
        self.ends[key] = self._clock.wall() + delay
        workers.start_soon(self._wait, key, delay, scope)

    def end(self, key: Key) -> None:
        """End the delay early, if there is one."""
        if key in self._scopes:
            self._scopes[key].cancel()
            self.ends.pop(key, None)

    def end_all(self) -> None:
        """End all delays; what they delayed is not to be tried any more."""
        self._is_over = True
        for scope in self._scopes.values():
            scope.cancel()

    async def _wait(self, key: Key, delay: float, scope: anyio.CancelScope) -> None:
        remaining = max(0.0, delay)
        end = self._clock.wall() + remaining
        with scope:
            await self._clock.sleep(step := min(remaining, _STEP_S))
            while (remaining := min(remaining - step, end - self._clock.wall())) > 0:
                await self._clock.sleep(step := min(remaining, _STEP_S))
        if self._scopes.get(key) is scope:
            del self._scopes[key]
            self.ends.pop(key, None)
        if not self._is_over:
            await self._try_again(key)


LONG_S = 60.0
"""Seconds of a pause after which a single task goes first: its limit is likely to hold for all tasks alike. Spare
backends take the tasks over meanwhile.
"""
CREDIT_PROBE_S = 3600.0
"""Seconds after which a backend without credit is called again, if spares have taken its tasks over."""
_LONGER_S = 1.0
"""Seconds by which a pause becomes longer before the pause is reported again."""


def pause_of(error: BackendError, delay: float, now: float, *, exhausted: bool) -> Pause:
    """Return the pause of a backend that refused a call at Unix time `now`, for `delay` seconds.

    `exhausted` if the response reported that nothing is left of a limit.
    """
    cause = error.kind.value if error.status is None else str(error.status)
    at_quota = names_quota(error.message)
    # A quota that is used up may say nothing of its end.
    closes = delay > LONG_S or (at_quota and error.retry_after is None and error.kind is ErrorKind.RATE_LIMITED)
    return Pause(now + delay, cause, probe=closes, at_once=exhausted or at_quota)


def pause_without_credit(until: float) -> Pause:
    """Return the pause of a backend whose account has no credit left, infinite until a person has answered."""
    return Pause(until, ErrorKind.NO_CREDIT.value, probe=True, no_credit=True)


class ThrottlingReporter:
    """Submits the event BackendThrottled whenever the throttling of a backend of the run changes.

    A change caused by another run of the account counts as well: it holds the tasks of this run back. A refusal that
    delays only its own task is no event. Calls that are refused while the backend is paused change nothing, unless the
    pause becomes longer, so a refusal of many tasks at once is one event. The end of a short pause needs no event: the
    event of the pause names its end.
    """

    def __init__(self, run: LiveRun) -> None:
        self._run = run
        self._scheduler = run.scheduler
        self._reported: dict[str, tuple[float, int]] = {}
        """The end of the pause, 0.0 without one, and the slots of each throttled backend, as reported last."""
        self._causes: dict[str, str] = {}
        self._limited: set[tuple[str, float | None]] = set()
        """The backends at whose own limits tasks have waited, each with the end of a day whose money is spent."""

    def begin(self) -> None:
        """Report the backends that are throttled now, and every later change."""
        self._scheduler.watch(self._changed)

    def limited(self, names: Collection[str]) -> None:
        """Report, once each, the backends at whose own limits tasks of the run wait."""
        if not names:
            return
        gates = self._scheduler.rates.gates()
        for name in names:
            if (name, until := gates[name].spent_until) not in self._limited:
                self._limited.add((name, until))
                slots, total = self._scheduler.slots_of(name)
                end, cause = (None, events.OWN_LIMITS) if until is None else (iso(until), events.USD_PER_DAY)
                event = events.BackendThrottled(self._run.stamp(), name, end, cause, slots, total)
                self._run.sink.submit([event])

    def _changed(self, name: str, account: Account) -> None:
        pause, reported = account.pause, self._reported.get(name)
        until = pause.until if pause is not None and account.throttled else 0.0
        if not _is_news(reported, until, account):
            return
        if pause is None:
            del self._reported[name]
        else:
            self._reported[name], self._causes[name] = (until, account.slots), pause.cause
        end, slots = (iso(until), account.slots) if until not in {0.0, inf} else (None, 0 if until else account.slots)
        event = events.BackendThrottled(self._run.stamp(), name, end, self._causes[name], slots, account.total)
        self._run.sink.submit([event])


def _is_news(reported: tuple[float, int] | None, until: float, account: Account) -> bool:
    """Return whether a pause until `until`, 0.0 for none, is to be reported after `reported`."""
    if reported is None:
        return account.pause is not None
    last_until, last_slots = reported
    if until:
        return not last_until or until > last_until + _LONGER_S
    was_long = last_until > 0 and account.pause is not None and account.pause.probe
    return account.pause is None or account.slots != last_slots or was_long
