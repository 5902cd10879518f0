"""Time, passed in. Wall time is only for people and for lease expiry; durations and delays use the monotonic clock."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from random import SystemRandom

import anyio

_UNIQUE = SystemRandom()  # a generator of our own would be copied with the process by a fork, and give both the same id


class Clock:
    """The real clock. Tests pass another one with the same three calls."""

    def wall(self) -> float:
        """Unix time in seconds."""
        return time.time()

    def monotonic(self) -> float:
        """Seconds since some fixed moment; never jumps."""
        return time.monotonic()

    def sleep(self, seconds: float) -> Awaitable[None]:
        """Wait. Cancellable."""
        return anyio.sleep(seconds)


def stamper(clock: Clock) -> Callable[[], str]:
    """A function that gives the wall time as UTC ISO 8601 text with milliseconds.

    Most stamps of a busy run fall into the same millisecond, so the last text is kept.
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
    """Unix seconds as text such as `2026-11-21T23:01:16.123Z`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_run_id(clock: Clock) -> str:
    """A run id that sorts by creation time and is readable and typeable: `20261121-230116-123-k3f9ab`."""
    now = clock.wall()
    moment = datetime.fromtimestamp(now, UTC)
    tail = "".join(_UNIQUE.choices("abcdefghijkmnpqrstuvwxyz23456789", k=6))
    return f"{moment:%Y%m%d-%H%M%S}-{int(now * 1000) % 1000:03d}-{tail}"
