"""The options of a runner: its store, opened and with a time limit for each call, the accounts of its backends, and
whether it has the backends that a DAG needs.

The account of a server and key belongs to the process: what the server counts is known to all runs of the process,
whichever runner began them. A limiter of a rate outlives event loops and runs, because the server counts on. What
refusals have taught, and a line of waiting runs, belongs to one event loop, for as long as a run of the loop uses the
backend. A limit that a store keeps for several processes belongs to the account on that store.
"""

from __future__ import annotations

import asyncio
import operator
import os
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import field
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import anyio

from plait.backends.backend_protocol import (
    Abilities,
    Backend,
    PlacedBackend,
    answer_key,
)
from plait.backends.extras import missing_extra
from plait.backends.function_backend import as_backend
from plait.backends.prices import Price
from plait.clock_and_ids import Clock
from plait.errors import (
    BackendMissing,
    BackendUnavailable,
    DAGError,
    InvalidRequest,
    Problem,
    StoreError,
    StoreUnusable,
    nearest,
)
from plait.events import RunCreated, TasksAdded
from plait.json_form import JsonValue, value
from plait.persistence.store_protocol import ServerStore, Store
from plait.persistence.store_records import Batch
from plait.runner.domain.asked_question import OnQuestion
from plait.runner.domain.dag import DAG
from plait.runner.domain.notify_target import NotifyTarget
from plait.runner.domain.policy import Policy
from plait.runner.domain.prompt_values import parameter_name, with_arguments
from plait.runner.engine.stored_ledger import StoredLedger, TransactingStore
from plait.runner.scheduling.own_limits import RateGate, RateLimiter, RateLimits
from plait.runner.scheduling.slots import (
    DEFAULT_CONCURRENCY,
    Account,
    Concurrency,
    SlotPool,
    default_concurrency,
    mistakes_of_spares,
    spares_of,
)
from plait.runner.state.attempt_files import files_root
from plait.runner.state.budget import check_budget
from plait.runner.state.task_files import with_digests
from plait.safe_text import SCHEMES, masked_address
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import (
    NO_PROMPT,
    OWN_OPTIONS,
    TEXT,
    GrowthLimits,
    Task,
    TaskFile,
    command_mismatch,
    given_settings,
    no_such_setting,
    takes_no_such_file,
)

if TYPE_CHECKING:
    from plait.persistence.postgres_store import PostgresStore
    from plait.persistence.sqlite_store import SQLiteStore

_T = TypeVar("_T")
StoreOrPlace: TypeAlias = "Store | str | os.PathLike[str]"
"""A store, the path of a SQLite file, or the address of a PostgreSQL database (`postgresql://user@host/database`)."""
_Key: TypeAlias = tuple[str, object, str | None]
"""The backend's name; its account, or the options of the only runner that uses it; the store that keeps the limit, if
any.
"""

_limiters: dict[_Key, RateLimiter] = {}
_accounts: WeakKeyDictionary[asyncio.AbstractEventLoop, WeakValueDictionary[_Key, Account]] = WeakKeyDictionary()


def _place_of(store: object) -> str:
    """Return the file or the address of a store that several processes share."""
    return str(getattr(store, "path", None) or getattr(store, "address", None) or id(store))


def account_of(backend: Backend | None) -> str | None:
    """Return the server and key that a backend uses; None if it has none, or none that can be found."""
    try:
        account: object = getattr(backend, "account", None)
    except BackendUnavailable:  # reported by the attempt
        return None
    return account if isinstance(account, str) else None


DEFAULT_BACKEND = "default"
LEASE_SECONDS = 30.0
"""Default length of a lease, in seconds. The owner renews the lease every third of the length."""
CANCEL_GRACE_SECONDS = 5.0
DEFAULT_GROWTH = GrowthLimits()


@value
class ServerAddress:
    """The address of a server that keeps runs. As text, its password is replaced by `***`."""

    dsn: str = field(repr=False)

    def __str__(self) -> str:
        return masked_address(self.dsn)


StorePlace: TypeAlias = Path | ServerAddress
"""The file of a store, or the address of a server."""
DEFAULT_STORE = Path(".plait") / "plait.db"
"""The store of a command that names none."""
STORE_VARIABLE = "PLAIT_STORE"
"""The variable of the environment that names another store to the command."""
AnyStore: TypeAlias = "SQLiteStore | PostgresStore"


def store_place(text: str) -> StorePlace:
    """Return the place that `--store` or PLAIT_STORE names."""
    return ServerAddress(text) if text.startswith(SCHEMES) else Path(text)


def open_store(
    place: StorePlace | str | os.PathLike[str], mode: Literal["create", "existing", "read"] = "create"
) -> AnyStore:
    """Return the store at `place`, a SQLite file or a PostgreSQL database, which `async with` opens. Raises
    InvalidRequest without the driver, and StoreUnusable if the store that no one names does not exist and may not be
    made.
    """
    if isinstance(place, ServerAddress):
        return open_server(place, mode)
    if mode != "create" and place == DEFAULT_STORE and not DEFAULT_STORE.exists():
        raise StoreUnusable(
            f"there is no store {DEFAULT_STORE} in {Path.cwd()}; `plait run PLAN` makes one, --store PATH names another"
        )
    from plait.persistence.sqlite_store import SQLiteStore  # noqa: PLC0415 - not needed by every run

    return SQLiteStore(place, mode=mode)


def open_server(place: ServerAddress, mode: Literal["create", "existing", "read"] = "create") -> PostgresStore:
    """Return the store on the server, which `async with` opens. Raises InvalidRequest without the driver."""
    if lack := missing_extra("a store on a PostgreSQL server", "postgres", "asyncpg"):
        raise InvalidRequest(lack)
    from plait.persistence.postgres_store import PostgresStore  # noqa: PLC0415 - of an extra

    try:
        return PostgresStore(place.dsn, mode=mode)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


class OwnStore:
    """The store at `place`. A store that is no address is opened and closed by its owner, and `opened` does nothing."""

    def __init__(self, place: StoreOrPlace | None) -> None:
        named = ServerAddress(place) if isinstance(place, str) and place.startswith(SCHEMES) else place
        self._own = open_store(named) if isinstance(named, str | os.PathLike | ServerAddress) else None
        self.store: Store | None = self._own or cast("Store | None", place)
        self._users = 0
        self._lock = anyio.Lock()

    @asynccontextmanager
    async def opened(self) -> AsyncGenerator[None]:
        """Keep the store open inside the block. Blocks may overlap. Raises StoreUnusable."""
        if self._own is None:
            yield
            return
        async with self._lock:
            if not self._users:
                await self._own.__aenter__()
            self._users += 1
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                async with self._lock:
                    self._users -= 1
                    if not self._users:
                        await self._own.close()


TASKS_WITHIN_LIMIT = 100_000
"""Most tasks that a store adds within its usual limit, which no run may miss for its size alone. SQLite takes about 7 s
for a million.
"""


def bounded(store: Store, seconds: float) -> Store:
    """Return `store` with a limit of `seconds` for each call. After a timeout, as after an exception, the result of a
    write is unknown. A write that adds tasks has as long again for each TASKS_WITHIN_LIMIT of them.
    """
    return store if isinstance(store, _Bounded) else cast("Store", _Bounded(store, seconds))


def unbounded(store: Store) -> Store:
    """Return the store without the limit of `bounded`."""
    return store.inner if isinstance(store, _Bounded) else store


def server_of(store: object) -> ServerStore | None:
    """Return `store`, or the store that it wraps and names as its `server`; None without a server."""
    server = getattr(store, "server", store)
    return server if isinstance(server, ServerStore) else None


class _Bounded:
    def __init__(self, store: Store, seconds: float) -> None:
        self.inner, self._seconds = store, seconds
        self.server: ServerStore | None = server_of(store)
        """The store itself, without a time limit, if it is on a server."""

    @property
    def files_root(self) -> Path | None:
        return files_root(self.inner)

    async def write(self, batch: Batch) -> None:
        added = sum(len(event.tasks) for event in batch.events if isinstance(event, RunCreated | TasksAdded))
        await _answer(self.inner.write(batch), self._seconds * (1 + added // TASKS_WITHIN_LIMIT))

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self.inner, name))

    async def _call(self, method: Callable[..., Awaitable[_T]], *arguments: object, **options: object) -> _T:
        return await _answer(method(*arguments, **options), self._seconds)


async def _answer(call: Awaitable[_T], seconds: float) -> _T:
    cancels = Cancels()
    with anyio.move_on_after(seconds) as limit:
        try:
            return await call
        except StoreError:
            raise
        except asyncio.CancelledError as error:
            if limit.cancel_called or cancels.since:
                raise
            raise StoreError(f"the store raised {error!r}, but plait had not cancelled the call") from error
        except Exception as error:
            # A third-party store must not end the run, whatever the exception.
            raise StoreError(f"{type(error).__name__}: {error}") from error
    raise StoreError(f"the store did not answer within {seconds:g} s")


class Cancels:
    """Cancellation requests sent to the current task since construction, by a cancel scope or by `Task.cancel()`."""

    __slots__ = ("_before", "_task")

    def __init__(self) -> None:
        self._task = asyncio.current_task()
        self._before = 0 if self._task is None else self._task.cancelling()

    @property
    def since(self) -> bool:
        """True if the current task itself has been cancelled since construction.

        False if only the awaited code raised CancelledError, such as a backend's own task cancelled by other code. An
        error of the latter kind is an ordinary failure and must not end the run.
        """
        return self._task is not None and self._task.cancelling() > self._before

    def withdraw(self) -> None:
        """Withdraw the recorded cancellation requests from the current task.

        Needed after a backend call: a home-made time-out may cancel the calling task and catch the error without
        calling `uncancel`, and the task would count as cancelled from then on. A cancelled scope delivers its
        cancellation again.
        """
        while self._task is not None and self._task.cancelling() > self._before:
            self._task.uncancel()


class RunOptions:
    """The options of a runner: see `ParallelRunner`, which takes the same. Raises ValueError for an invalid option."""

    def __init__(
        self,
        backend: Backend | Callable[..., Any] | None = None,
        *,
        backends: Mapping[str, Backend | Callable[..., Any]] | None = None,
        default: str | None = None,
        store: StoreOrPlace | None = None,
        concurrency: Concurrency | EllipsisType | None = ...,
        limits: Mapping[str, int] | None = None,
        rates: Mapping[str, RateLimits] | None = None,
        or_else: Mapping[str, Sequence[str]] | None = None,
        shared_limits: bool = False,
        strict: bool = False,
        store_timeout: float = 10.0,
        lease: float = LEASE_SECONDS,
        cancel_grace: float = CANCEL_GRACE_SECONDS,
        growth: GrowthLimits = DEFAULT_GROWTH,
        on_question: OnQuestion | None = None,
        prices: Mapping[str, Price] | None = None,
        budget: float | None = None,
        unpriced: bool = False,
        notify: Iterable[NotifyTarget | Mapping[str, Any]] = (),
        park: bool = False,
        priority: int | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        named: dict[str, object] = {**(backends or {}), **({} if backend is None else {DEFAULT_BACKEND: backend})}
        self.backends: Mapping[str, Backend] = {
            name: each if isinstance(each, Backend) and not callable(each) else as_backend(each)
            for name, each in named.items()
        }
        self.default = default_backend(self.backends, default, given=backend is not None)
        self.limits: Mapping[str, int] = dict(limits or {})
        self.rates: Mapping[str, RateLimits] = dict(rates or {})
        self.limited_by_day = {name for name, limit in self.rates.items() if limit.usd_per_day is not None}
        """The backends whose account has a limit of money."""
        if or_else and (mistake := next(mistakes_of_spares(or_else, self.backends), None)):
            raise ValueError(f"or_else of backend {mistake[0]!r}: {mistake[2]}")
        self.spares = spares_of(or_else) if or_else else {}
        """The backends that take over from a backend, in order, by its name: also the spares of its spares."""
        self.concurrency: Concurrency | None = (
            default_concurrency(map(self.limits.get, named)) if concurrency is ... else concurrency
        )
        self.shared_limits = shared_limits
        self.strict = strict
        self.lease = lease
        self.cancel_grace = cancel_grace
        self.growth = growth
        self.on_question = on_question
        self.prices: Mapping[str, Price] = dict(prices or {})
        self.budget = budget
        self.unpriced = unpriced
        self.notify: Sequence[NotifyTarget] = tuple(map(NotifyTarget.of, notify))
        self.park = park
        self.priority = priority
        self.clock = clock or Clock()
        self.rng = rng or random.SystemRandom()
        """The source of retry delays: forked processes need different ones."""
        self._check(store_timeout)
        self.own_store = OwnStore(store)
        own = self.own_store.store
        self.store = None if own is None else bounded(own, store_timeout)
        """The store, with a time limit for each call."""
        self._own_limiters: dict[_Key, RateLimiter] = {}
        self._shared: WeakKeyDictionary[asyncio.AbstractEventLoop, SlotPool] = WeakKeyDictionary()

    def _check(self, store_timeout: float) -> None:
        if not store_timeout > 0:
            raise ValueError(f"store_timeout must be more than 0 seconds, not {store_timeout}")
        if self.concurrency not in {None, "auto"} and not (isinstance(self.concurrency, int) and self.concurrency >= 1):
            raise ValueError(f'concurrency must be at least 1, "auto" or None, not {self.concurrency!r}')
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
        check_budget(self.budget)
        if not self.lease > 0:
            raise ValueError(f"lease must be more than 0 seconds, not {self.lease}")
        if not 0 <= self.cancel_grace < float("inf"):
            raise ValueError(f"cancel_grace must be 0 seconds or more, not {self.cancel_grace}")

    def require_ledgers(self) -> None:
        """Raise InvalidRequest if the limit of money of an account cannot be kept in a store."""
        inner = None if self.store is None else unbounded(self.store)
        for name in self.limited_by_day:
            if account_of(self.backends[name]) is None:
                raise InvalidRequest(f"usd_per_day of backend {name!r} needs a backend with a server and a key")
            if not isinstance(inner, TransactingStore):
                raise InvalidRequest(
                    f"usd_per_day of backend {name!r} is kept in a store, on disk or on a server; give the run one"
                )

    def slot_pool(self) -> SlotPool:
        """Return the slots for a new run: a pool of the run's own, or the pool shared by all runs of this event loop.

        Without a number of tasks at once there is one slot, until the hosts are connected: see `follow_slots`.
        Shared pools are kept per event loop, because slots taken in an abandoned loop are never freed.
        """
        limits = self.limits
        if self.concurrency == "auto":  # programs use up this machine before they become slow
            programs = (name for name, one in self.backends.items() if "cwd" in Abilities.of(one).adjustable)
            limits = dict.fromkeys(programs, DEFAULT_CONCURRENCY) | dict(limits)
        pool = SlotPool(self.concurrency or 1, limits, shared=self.shared_limits, account_of=self.account)
        return self._shared.setdefault(asyncio.get_running_loop(), pool) if self.shared_limits else pool

    def account(self, name: str) -> Account:
        """Return the account of the backend `name` for a run of this event loop, which has to join it before another
        one looks. The newest run's rate limits hold for all. A backend without an account of its own shares with no
        other runner.
        """
        backend, now = self.backends.get(name), self.clock.monotonic
        named = account_of(backend)
        limits, inner = self.rates.get(name), None if self.store is None else unbounded(self.store)
        is_stored = limits is not None and named is not None and isinstance(inner, TransactingStore)
        scope = name if limits is None or limits.account is None else limits.account
        key = (name, self if named is None else named, _place_of(inner) if is_stored else None)
        accounts = _accounts.setdefault(asyncio.get_running_loop(), WeakValueDictionary())
        account = accounts.get(key)
        if account is None or not account.runs:
            account = accounts[key] = Account()
        if limits is not None:
            limiters = self._own_limiters if named is None else _limiters
            counted = (scope, *key[1:])
            limiter = limiters.get(counted)
            if limiter is None:
                most_output = getattr(backend, "max_tokens", None)
                limiter = limiters[counted] = RateLimiter(limits, now(), most_output, is_granted=is_stored)
            if account.gate is None:
                ledger = None
                if named is not None and is_stored:
                    digest = sha256(named.encode()).hexdigest()[:16]
                    ledger = StoredLedger(cast("TransactingStore", self.store), f"{scope} {digest}", self.clock)
                account.gate = RateGate(limiter, now, ledger)
            if limiter.limits != limits:
                account.gate.change(limits)
        return account


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
    """Return the name of the default backend: `default` if not None; else the name of the only backend for prompts,
    unless a default backend was `given`; else DEFAULT_BACKEND. Raises ValueError if `default` names no backend.
    """
    if default is not None and default not in named:
        raise ValueError(f"default names {default!r}, which is no backend of this runner{nearest(default, named)}")
    if default is None:
        candidates = [name for name, backend in named.items() if Abilities.of(backend).allows is None]
        default = candidates[0] if not given and len(candidates) == 1 else DEFAULT_BACKEND
    return default


def answer_keys(options: RunOptions) -> dict[str, JsonValue]:
    """Return the answer keys of the backends whose answers a later run may take over; "" is the default backend."""
    keys: dict[str, JsonValue] = {
        name: key for name, backend in options.backends.items() if (key := answer_key(backend)) is not None
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
    problems: list[Problem] = []
    for position, (task, name) in enumerate(zip(dag, names, strict=True)):
        if task.continues is not None and names[dag.position(task.continues)] != name:
            raise BackendMissing(
                f"task {task.id!r} continues {task.continues!r} on backend {name!r}, but that conversation is on "
                f"{names[dag.position(task.continues)]!r}, and cannot move; leave the task's backend out"
            )
        if statuses and statuses[position] in TASK_DONE:
            continue
        if task.check is not None:
            require_backends(options, {*task.check.backends}, f"the check of task {task.id!r}")
        if task.call is not None:
            called = {name or options.default for name in task.call.backends}
            require_backends(options, called, f"the plan that task {task.id!r} calls")
        for one in (name, *options.spares.get(name, ())):
            problems += unfit_settings(task, one, options.backends[one], position)
    if problems:
        raise DAGError(problems)
    return names


def prepared(dag: DAG, options: RunOptions) -> DAG:
    """Return `dag` with the arguments of each task whose backend is a function with parameters beside the prompt, and
    with a digest for each file of its tasks. Raises DAGError for parameters that name nothing, and for files that
    cannot be used.
    """
    fill = argument_filler(options, dag.inputs, dag)
    tasks = [fill(task, dag.backend_of(task)) for task in dag]
    if not all(map(operator.is_, tasks, dag)):
        dag = DAG(tasks, name=dag.name, inputs=dag.inputs, growth=dag.growth, rows_file=dag.rows_file)
    return with_digests(dag) if any(task.files for task in dag) else dag


def argument_filler(
    options: RunOptions, inputs: Iterable[str], tasks: Iterable[Task]
) -> Callable[[Task, str | None], Task]:
    """Return what gives a task on the backend of a name, None for the default one, its arguments. `tasks` are those of
    the run.
    """
    takes = {name: Abilities.of(backend).parameters for name, backend in options.backends.items()}
    takes_values = {name for name, taken in takes.items() if any(parameter != "prompt" for parameter, _ in taken)}
    ids = {parameter_name(task.id): task.id for task in tasks} if takes_values else {}
    named = {*ids, *map(parameter_name, inputs), "item"}
    # Most functions: their only parameter receives the prompt of every task.
    takes_prompt = {name for name, taken in takes.items() if len(taken) == 1 and taken[0][0] not in named}

    def fill(task: Task, backend: str | None) -> Task:
        name = backend or options.default
        if name in takes_prompt and task.prompt.strip() and not (task.arguments or task.inputs or task.aliases):
            return task
        if (
            task.vote is not None
            or task.call is not None
            or not (name in takes_values or (task.arguments and takes.get(name)))
        ):
            return task
        return with_arguments(task, takes[name], inputs, ids)

    return fill


RECORDED = "(recorded in the earlier run)"
"""The prompt of a task that only holds a result of an earlier run, and never calls its backend."""


def unfit_settings(task: Task, name: str, backend: Backend, position: int) -> Iterator[Problem]:
    """Yield a problem for each setting and file of `task` that `backend`, called `name`, does not take, and for a
    blank prompt that it needs.
    """
    if task.options is not OWN_OPTIONS or task.cwd is not None or task.env or task.shared:
        adjustable = Abilities.of(backend).adjustable
        for setting in given_settings(task):
            if setting not in adjustable:
                yield Problem(no_such_setting(name, setting, adjustable), task.id, setting, None, position)
    if task.call is not None or task.prompt == RECORDED:
        return
    # Not by way of `Abilities`: a run may have a million tasks.
    if problem := command_mismatch(name, task.run, is_command=getattr(backend, "allows", None) is not None):
        yield Problem(problem, task.id, "run", None, position)
    if not (task.files or task.prompt.strip() or task.run) and Abilities.of(backend).needs_prompt:
        yield Problem(NO_PROMPT, task.id, "prompt", None, position)
    for file in task.files:
        if isinstance(file, TaskFile) and file.media_type != TEXT and Abilities.of(backend).takes_files is None:
            yield Problem(takes_no_such_file(name, file.name, file.media_type), task.id, "files", None, position)


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
