"""The options of a runner, the accounts of its backends, and whether it has the backends that a DAG needs.

The account of a server and key belongs to the process: what the server counts is known to all runs of the process,
whichever runner began them. A limiter of a rate outlives event loops and runs, because the server counts on. What
refusals have taught, and a line of waiting runs, belongs to one event loop, for as long as a run of the loop uses the
backend.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary, WeakValueDictionary

from plait.backends.backend_protocol import (
    AdjustableBackend,
    Backend,
    FileBackend,
    OptionalPromptBackend,
    PlacedBackend,
    ReusableBackend,
)
from plait.backends.prices import Price
from plait.clock_and_ids import Clock
from plait.errors import BackendMissing, BackendUnavailable, DAGError, Problem
from plait.json_form import JsonValue
from plait.persistence.store_protocol import Store
from plait.runner.domain.asked_question import OnQuestion
from plait.runner.domain.dag import DAG, nearest
from plait.runner.domain.policy import Policy
from plait.runner.scheduling.rate_limits import RateGate, RateLimiter, RateLimits
from plait.runner.scheduling.slots import Account, SlotPool
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import (
    MODEL_SETTINGS,
    NO_PROMPT,
    OWN_OPTIONS,
    TEXT,
    GrowthLimits,
    Task,
    TaskFile,
    no_such_setting,
    takes_no_such_file,
)

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


DEFAULT_BACKEND = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
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


def answer_keys(options: RunOptions) -> dict[str, JsonValue]:
    """Return the answer keys of the backends whose answers a later run may take over; "" is the default backend."""
    keys = {
        name: backend.answer_key() for name, backend in options.backends.items() if isinstance(backend, ReusableBackend)
    }
    return {**keys, "": keys[options.default]} if options.default in keys else keys


def task_backends(dag: DAG, default: str) -> list[str]:
    """Return each task's backend name, by position."""
    return [dag.backend_of(task) or default for task in dag]


def needed_backends(names: Sequence[str], statuses: Sequence[TaskStatus] = ()) -> dict[str, int]:
    """Return the backend names that unfinished tasks need, each with the position of the last such task. Without
    `statuses` every task counts as unfinished.
    """
    return {name: i for i, name in enumerate(names) if not statuses or statuses[i] not in TASK_DONE}


def policy_backends(policy: Policy, default: str) -> set[str]:
    """Return the names of the backends that tasks of `policy` may run on."""
    return {default if name is None else name for name in policy.backends()}


def backend_names(dag: DAG, options: RunOptions, statuses: Sequence[TaskStatus] = ()) -> list[str]:
    """Return each task's backend name, by position. Raises BackendMissing if an unfinished task has no backend, or if a
    task continues a conversation of another backend, and DAGError if an unfinished task has a setting that its backend
    does not have, or lacks a prompt that its backend needs.
    """
    names = task_backends(dag, options.default)
    needed = needed_backends(names, statuses)
    for name, position in needed.items():
        if name not in options.backends and dag.backend_of(dag.tasks[position]) is None:
            have = ", ".join(sorted(options.backends)) or "none"
            raise BackendMissing(
                f"task {dag.tasks[position].id!r} names no backend; set `default=` to a backend of this runner: "
                f"{have}; or add a backend with backend=..."
            )
        if name not in options.backends:
            require_backends(options, set(needed), f"task {dag.tasks[position].id!r}")
    for task, name in zip(dag, names, strict=True):
        if task.continues is not None and names[dag.position(task.continues)] != name:
            raise BackendMissing(
                f"task {task.id!r} continues {task.continues!r} on backend {name!r}, but that conversation is on "
                f"{names[dag.position(task.continues)]!r}, and cannot move; leave the task's backend out"
            )
    _require_settings(dag, options.backends, names, statuses)
    return names


def _require_settings(
    dag: DAG, backends: Mapping[str, Backend], names: Sequence[str], statuses: Sequence[TaskStatus]
) -> None:
    problems = [
        problem
        for position, (task, name) in enumerate(zip(dag, names, strict=True))
        if not (statuses and statuses[position] in TASK_DONE)
        for problem in unfit_settings(task, name, backends[name], position)
    ]
    problems += [
        Problem(takes_no_such_file(name, file.name, file.media_type), task.id, "files", None, position)
        for position, (task, name) in enumerate(zip(dag, names, strict=True))
        if task.files and not (statuses and statuses[position] in TASK_DONE)
        for file in task.files
        if isinstance(file, TaskFile) and file.media_type != TEXT and not isinstance(backends[name], FileBackend)
    ]
    if problems:
        raise DAGError(problems)


def unfit_settings(task: Task, name: str, backend: Backend, position: int) -> Iterator[Problem]:
    """Yield a problem for each setting of `task` that `backend`, called `name`, does not take, and for a blank prompt
    that it needs.
    """
    if task.options is not OWN_OPTIONS:
        known = backend.adjustable if isinstance(backend, AdjustableBackend) else ()
        for setting in MODEL_SETTINGS:
            if getattr(task, setting) is not None and setting not in known:
                yield Problem(no_such_setting(name, setting, known), task.id, setting, None, position)
    if not (task.files or task.prompt.strip() or _takes_no_prompt(backend)):
        yield Problem(NO_PROMPT, task.id, "prompt", None, position)


def _takes_no_prompt(backend: Backend) -> bool:
    return isinstance(backend, OptionalPromptBackend) and not backend.needs_prompt


def require_policy_backends(options: RunOptions, policy: Policy) -> None:
    """Raise BackendMissing unless the runner has every backend that tasks of `policy` may run on."""
    require_backends(options, policy_backends(policy, options.default), f"policy {policy.kind!r}")


def require_backends(options: RunOptions, names: set[str], needed_by: str) -> None:
    """Raise BackendMissing, naming every missing backend, unless all `names` are configured."""
    missing = sorted(names - options.backends.keys())
    if missing:
        have = ", ".join(sorted(options.backends)) or "none"
        raise BackendMissing(
            f"no backend named {', '.join(map(repr, missing))} (needed by {needed_by}); this runner has: {have}. "
            f"Give it with backend=... or backends={{name: ...}}"
        )
