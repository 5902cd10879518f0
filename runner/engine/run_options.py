"""The configuration of a runner."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from plait.backends.backend_protocol import Backend, PlacedBackend, ReusableBackend
from plait.backends.prices import Price
from plait.clock_and_ids import Clock
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.domain.asked_question import OnQuestion
from plait.runner.domain.dag import nearest
from plait.runner.engine.process_accounts import Accounts
from plait.runner.scheduling.rate_limits import RateLimits
from plait.runner.scheduling.slots import SlotPool
from plait.task import GrowthLimits

DEFAULT_BACKEND = "default"


@dataclass(frozen=True, slots=True)
class Config:
    """The options of a runner: see `ParallelRunner`. Raises ValueError for an invalid option."""

    backends: Mapping[str, Backend]
    default: str
    store: Store | None
    concurrency: int | None
    limits: Mapping[str, int]
    rates: Mapping[str, RateLimits]
    shared_limits: bool
    strict: bool
    lease: float
    cancel_grace: float
    growth: GrowthLimits
    on_question: OnQuestion | None
    prices: Mapping[str, Price]
    clock: Clock
    rng: random.Random
    _shared: WeakKeyDictionary[asyncio.AbstractEventLoop, SlotPool] = field(
        init=False, default_factory=WeakKeyDictionary["asyncio.AbstractEventLoop", SlotPool]
    )
    _accounts: Accounts = field(init=False)

    def slot_pool(self) -> SlotPool:
        """Return the slots for a new run: a pool of the run's own, or the pool shared by all runs of this event loop.

        Without a number of tasks at once there is one slot, until the hosts are connected: see `follow_slots`.
        Shared pools are kept per event loop, because slots taken in an abandoned loop are never freed.
        """
        pool = SlotPool(self.concurrency or 1, self.limits, shared=self.shared_limits, account_of=self._accounts.find)
        return self._shared.setdefault(asyncio.get_running_loop(), pool) if self.shared_limits else pool

    def __post_init__(self) -> None:
        object.__setattr__(self, "_accounts", Accounts(self.backends, self.rates, self.clock.monotonic))
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {self.concurrency}")
        for name, limit in self.limits.items():
            if limit < 1:
                raise ValueError(f"the limit of backend {name!r} must be at least 1, not {limit}")
        for option, named in (("limits", self.limits), ("rates", self.rates)):
            if unknown := next((name for name in named if name not in self.backends), None):
                raise ValueError(
                    f"{option} names {unknown!r}, which is no backend of this runner{nearest(unknown, self.backends)}"
                )
        _check_hosts(self.backends.values())
        for model, price in self.prices.items():
            price.check(model)
        if not self.lease > 0:
            raise ValueError(f"lease must be more than 0 seconds, not {self.lease}")
        if not 0 <= self.cancel_grace < float("inf"):
            raise ValueError(f"cancel_grace must be 0 seconds or more, not {self.cancel_grace}")


def _check_hosts(backends: Iterable[Backend]) -> None:
    """Raise ValueError if two groups of hosts have a host in common: each would refuse the connection of the other."""
    group_of: dict[str, object] = {}
    for backend in backends:
        if isinstance(backend, PlacedBackend):
            for name in backend.hosts.names:
                if group_of.setdefault(name, backend.hosts) is not backend.hosts:
                    raise ValueError(
                        f"host {name!r} is in two groups of hosts; in one of them, give it another name and its address"
                    )


def default_backend(named: Mapping[str, Backend], default: str | None, *, given: bool) -> str:
    """Return the name of the default backend: `default` if not None; else the name of the only backend, unless a
    default backend was `given`; else DEFAULT_BACKEND. Raises ValueError if `default` names no backend.
    """
    if default is not None and default not in named:
        raise ValueError(f"default names {default!r}, which is no backend of this runner{nearest(default, named)}")
    if default is None:
        default = next(iter(named)) if not given and len(named) == 1 else DEFAULT_BACKEND
    return default


def answer_keys(config: Config) -> dict[str, JsonValue]:
    """Return the answer keys of the backends whose answers a later run may take over; "" is the default backend."""
    keys = {name: one.answer_key() for name, one in config.backends.items() if isinstance(one, ReusableBackend)}
    return {**keys, "": keys[config.default]} if config.default in keys else keys
