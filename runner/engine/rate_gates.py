"""`RateGates`: finds the limits of rate of a runner's backends. The limiters of a server and key belong to the process.

A limiter outlives event loops, because the server counts on; a line of waiting runs belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakValueDictionary

from plait.backends.errors import BackendUnavailable
from plait.backends.protocol import Backend
from plait.runner.scheduling.rate_gate import RateGate
from plait.runner.scheduling.rates import RateLimiter, RateLimits

_limiters: dict[tuple[str, str], RateLimiter] = {}
"""The limiters of this process, by the backend's name and its account."""
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[RateLimiter, RateGate]] = WeakKeyDictionary()
"""The gates in use by a run, by event loop and limiter. A run that needs a gate again gets a new one."""


class RateGates:
    """The limits of rate of one runner. A backend without an account shares its limiter with no other runner."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._own: dict[tuple[str, str], RateLimiter] = {}

    def find(self, name: str, backend: Backend, limits: RateLimits) -> RateGate:
        """Return the gate before `backend` for the runs of this event loop. The newest run's limits hold for all."""
        account = _account(backend)
        known = self._own if account is None else _limiters
        key = (name, account or "")
        limiter = known.get(key)
        if limiter is None:
            limiter = known[key] = RateLimiter(limits, self._now(), getattr(backend, "max_tokens", None))
        gates = _gates.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
        gate = gates.get(limiter)
        if gate is None:
            gate = gates[limiter] = RateGate(limiter, self._now)
        if limiter.limits != limits:
            gate.change(limits)
        return gate


def _account(backend: Backend) -> str | None:
    """Return the server and key that a backend uses; None if it has none, or none that can be found."""
    try:
        account: object = getattr(backend, "account", None)
    except BackendUnavailable:  # reported by the attempt
        return None
    return account if isinstance(account, str) else None
