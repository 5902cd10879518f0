"""A throttled backend, or a host that is away, in one line: for the live display, plain lines and `plait log`."""

from __future__ import annotations

from datetime import datetime

from plait.runner.cli.display.text import one_line
from plait.runner.cli.display.throttling import throttling_line
from plait.runner.domain import events
from plait.runner.domain.question import parse_time
from plait.runner.domain.waiting import MOST_NAMED


def wait_line(event: events.BackendThrottled | events.HostAway) -> str:
    """Return the throttling of a backend, or the state of a host: `m3 away since 12:03:04 (timed out); a, b wait`."""
    if isinstance(event, events.BackendThrottled):
        return throttling_line(event, parse_time(event.at))
    host, reason = one_line(event.host), one_line(event.reason)
    if event.since is None:
        return f"no task waits for {host} any longer: {reason}" if reason else f"{host} is back"
    since = f"{datetime.fromisoformat(event.since).astimezone():%H:%M:%S}"
    names = ", ".join(map(one_line, event.tasks[:MOST_NAMED]))
    more = f" and {len(event.tasks) - MOST_NAMED:,} more" if len(event.tasks) > MOST_NAMED else ""
    return f"{host} away since {since} ({reason}); {names}{more} {'wait' if event.tasks[1:] else 'waits'}"
