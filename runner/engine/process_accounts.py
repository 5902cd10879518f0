"""`Accounts`: finds the accounts of a runner's backends. The account of a server and key belongs to the process.

What the server counts is known to all runs of the process, whichever runner began them. A limiter of a rate outlives
event loops and runs, because the server counts on. What refusals have taught, and a line of waiting runs, belongs to
one event loop, for as long as a run of the loop uses the backend.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from plait.backends.backend_protocol import Backend
from plait.errors import BackendUnavailable
from plait.runner.scheduling.account import Account
from plait.runner.scheduling.rate_gate import RateGate
from plait.runner.scheduling.rate_limits import RateLimiter, RateLimits

_Key: TypeAlias = tuple[str, object]
"""The backend's name and its account, or the `Accounts` of the only runner that uses it."""

_limiters: dict[_Key, RateLimiter] = {}
_accounts: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[_Key, Account]] = WeakKeyDictionary()


class Accounts:
    """The accounts of one runner's backends. A backend without an account shares with no other runner."""

    def __init__(
        self, backends: Mapping[str, Backend], rates: Mapping[str, RateLimits], now: Callable[[], float]
    ) -> None:
        self._backends = backends
        self._rates = rates
        self._now = now
        self._own_limiters: dict[_Key, RateLimiter] = {}

    def find(self, name: str) -> Account:
        """Return the account of the backend `name` for a run of this event loop, which has to join it before another
        one looks. The newest run's limits of rate hold for all.
        """
        backend = self._backends.get(name)
        named = _account_of(backend)
        key = (name, self if named is None else named)
        accounts = _accounts.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
        account = accounts.get(key)
        if account is None or not account.runs:
            account = accounts[key] = Account()
        if (limits := self._rates.get(name)) is not None:
            limiters = self._own_limiters if named is None else _limiters
            limiter = limiters.get(key)
            if limiter is None:
                limiter = limiters[key] = RateLimiter(limits, self._now(), getattr(backend, "max_tokens", None))
            if account.gate is None:
                account.gate = RateGate(limiter, self._now)
            if limiter.limits != limits:
                account.gate.change(limits)
        return account


def _account_of(backend: Backend | None) -> str | None:
    """Return the server and key that a backend uses; None if it has none, or none that can be found."""
    try:
        account: object = getattr(backend, "account", None)
    except BackendUnavailable:  # reported by the attempt
        return None
    return account if isinstance(account, str) else None
