"""A throttled backend, or a host that is away, in one line: for the live display, plain lines, `plait log` and `plait
show`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from plait import events
from plait.runner.cli.terminal_output import as_line, seconds
from plait.runner.domain.asked_question import parse_time
from plait.runner.domain.wait_reasons import MOST_NAMED

_NAMES_TIME_FROM = 60.0
"""Seconds of a pause from which the time of its end is shown as well."""


def wait_line(event: events.BackendThrottled | events.HostAway) -> str:
    """Return the throttling of a backend, or the state of a host: `m3 away since 12:03:04 (timed out); a, b wait`."""
    if isinstance(event, events.BackendThrottled):
        return throttling_line(event, parse_time(event.at))
    host, reason = as_line(event.host), as_line(event.reason)
    if event.since is None:
        return f"no task waits for {host} any longer: {reason}" if reason else f"{host} is back"
    since = f"{datetime.fromisoformat(event.since).astimezone():%H:%M:%S}"
    verb = "wait" if event.tasks[1:] else "waits"
    return f"{host} away since {since} ({reason}); {named_tasks(event.tasks)} {verb}"


def named_tasks(tasks: Sequence[str]) -> str:
    """Return the first of the task ids, and the number of the others: `a, b, c and 4 more`."""
    names = ", ".join(map(as_line, tasks[:MOST_NAMED]))
    return f"{names} and {len(tasks) - MOST_NAMED:,} more" if len(tasks) > MOST_NAMED else names


def throttling_line(throttled: events.BackendThrottled, now: float) -> str:
    """Return the throttling of a backend at Unix time `now`: `api paused 1.2s after 429; 4 of 8 slots`."""
    name, after = as_line(throttled.backend), f" after {as_line(throttled.cause)}" if throttled.cause else ""
    slots = f"{throttled.slots} of {throttled.total} slots"
    left = 0.0 if throttled.until is None else parse_time(throttled.until) - now
    if left > 0 and throttled.until is not None:
        end = f", until {local_time(throttled.until, now)}" if left >= _NAMES_TIME_FROM else ""
        fewer = f"; {slots}" if throttled.slots < throttled.total else ""
        return f"{name} paused {seconds(left)}{after}{end}{fewer}"
    if throttled.cause == events.OWN_LIMITS:
        return f"{name} has reached its limits of rate; further tasks start as the limits allow"
    if throttled.slots < throttled.total:
        return f"{name} goes on{after}; {slots}"
    return f"{name} has all its {throttled.total} slots again"


def local_time(at: str, now: float) -> str:
    """Return the time in the zone of this machine, with the day unless the day is that of `now`."""
    moment = datetime.fromisoformat(at).astimezone()
    today = datetime.fromtimestamp(now).astimezone().date()
    return f"{moment:%H:%M:%S}" if moment.date() == today else f"{moment:%a %d %b %H:%M}"
