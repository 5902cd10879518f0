"""`ThrottlingReporter`: the event BackendThrottled whenever the throttling of a backend of the run changes.

A change caused by another run of the account counts as well: it holds the tasks of this run back. A refusal that
delays only its own task is no event. Calls that are refused while the backend is paused change nothing, unless the
pause becomes longer, so a refusal of many tasks at once is one event. The end of a short pause needs no event: the
event of the pause names its end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from plait import events
from plait.backends.limit_resets import names_quota
from plait.clock_and_ids import iso
from plait.errors import BackendError
from plait.runner.engine.checkpointer import EventSink
from plait.runner.scheduling.account import Account, Pause
from plait.runner.scheduling.scheduler import Scheduler

LONG_S = 60.0
"""Seconds of a pause after which a single task goes first: its limit is likely to hold for all tasks alike."""
_LONGER_S = 1.0
"""Seconds by which a pause becomes longer before the pause is reported again."""


def pause_of(error: BackendError, delay: float, now: float, took: float, *, exhausted: bool) -> Pause:
    """Return the pause of a backend that refused a call at Unix time `now`, for `delay` seconds, after `took` seconds.

    `exhausted` if the response reported that nothing is left of a limit.
    """
    cause = error.kind.value if error.status is None else str(error.status)
    at_once = exhausted or names_quota(error.message)
    return Pause(now + delay, cause, probe=delay > LONG_S, at_once=at_once, took=took)


class ThrottlingReporter:
    """Reports the throttling of the backends of one run."""

    def __init__(self, scheduler: Scheduler, sink: EventSink, stamp: Callable[[], str]) -> None:
        self._scheduler = scheduler
        self._sink = sink
        self._stamp = stamp
        self._told: dict[str, tuple[float, int]] = {}
        """The end of the pause, 0.0 without one, and the slots of each throttled backend, as reported last."""
        self._causes: dict[str, str] = {}
        self._limited: set[str] = set()
        """The backends at whose own limits of rate tasks have waited."""

    def begin(self) -> None:
        """Report the backends that are throttled now, and every later change."""
        self._scheduler.watch(self._changed)

    def limited(self, names: Collection[str]) -> None:
        """Report, once each, the backends at whose own limits of rate tasks of the run wait."""
        for name in names:
            if name not in self._limited:
                self._limited.add(name)
                slots, total = self._scheduler.slots_of(name)
                event = events.BackendThrottled(self._stamp(), name, None, events.OWN_LIMITS, slots, total)
                self._sink.submit([event])

    def _changed(self, name: str, account: Account) -> None:
        pause, told = account.pause, self._told.get(name)
        until = pause.until if pause is not None and account.throttled else 0.0
        if not _is_news(told, until, account):
            return
        if pause is None:
            del self._told[name]
        else:
            self._told[name], self._causes[name] = (until, account.slots), pause.cause
        end = iso(until) if until else None
        event = events.BackendThrottled(self._stamp(), name, end, self._causes[name], account.slots, account.total)
        self._sink.submit([event])


def _is_news(told: tuple[float, int] | None, until: float, account: Account) -> bool:
    """Return whether a pause until `until`, 0.0 for none, is to be reported after `told`."""
    if told is None:
        return account.pause is not None
    told_until, told_slots = told
    if until:
        return not told_until or until > told_until + _LONGER_S
    was_long = told_until > 0 and account.pause is not None and account.pause.probe
    return account.pause is None or account.slots != told_slots or was_long
