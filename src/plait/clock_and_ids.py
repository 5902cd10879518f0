"""Time as an argument, and the ids of runs and of their traces.

Wall time serves display and lease expiry only; durations and delays use the monotonic clock. The ids in traces (W3C
Trace Context) are hashes of the ids of the run, the task and the attempt: the same attempt has the same ids in each
process and each export, so spans can be made after a crash and sent twice.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from random import SystemRandom

import anyio

_UNIQUE = SystemRandom()  # `random.Random()` would be copied by a fork: equal ids


class Clock:
    """The system clock. Tests pass another object with the same three methods."""

    wall: Callable[[], float] = staticmethod(time.time)
    """Returns the Unix time in seconds."""
    monotonic: Callable[[], float] = staticmethod(time.monotonic)
    """Returns the seconds since a fixed moment. The value never jumps."""

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Wait for `seconds`. Cancellable."""
        return anyio.sleep(seconds)


def stamper(clock: Clock) -> Callable[[], str]:
    """Return a function that returns the wall time as UTC ISO 8601 text with milliseconds.

    Most timestamps of a busy run fall into the same millisecond, so the function caches the last text.
    """
    last_ms, text = -1, ""

    def stamp() -> str:
        nonlocal last_ms, text
        ms = int(clock.wall() * 1000)
        if ms != last_ms:
            last_ms, text = ms, iso(ms / 1000)
        return text

    return stamp


def iso(seconds: float) -> str:
    """Return Unix seconds as text such as `2026-11-21T23:01:16.123Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def parse_time(at: str) -> float:
    """Return the Unix time of a text of `iso`."""
    return datetime.fromisoformat(at).timestamp()  # strptime takes a hundred times as long


def new_run_id(clock: Clock) -> str:
    """Return a run id that sorts by creation time and is easy to read and type: `20261121-230116-123-k3f9ab`."""
    now = clock.wall()
    moment = datetime.fromtimestamp(now, UTC)
    tail = "".join(_UNIQUE.choices("abcdefghijkmnpqrstuvwxyz23456789", k=6))
    return f"{moment:%Y%m%d-%H%M%S}-{int(now * 1000) % 1000:03d}-{tail}"


@lru_cache(maxsize=16)
def trace_id(run_id: str) -> str:
    """Return the id of the run's trace: 32 hexadecimal digits."""
    return _digest("trace", run_id)[:32]


def span_id(run_id: str, task_id: str | None = None, attempt: int | None = None) -> str:
    """Return the id of the span of a run, of a task, or of an attempt: 16 hexadecimal digits."""
    return _digest("span", run_id, task_id, attempt)[:16]


def traceparent(run_id: str, task_id: str, attempt: int | None = None) -> str:
    """Return the value of TRACEPARENT for a process that works for the attempt; without one, for the task."""
    return f"00-{trace_id(run_id)}-{span_id(run_id, task_id, attempt)}-01"


def _digest(*parts: str | int | None) -> str:
    return sha256(json.dumps(parts).encode()).hexdigest()
