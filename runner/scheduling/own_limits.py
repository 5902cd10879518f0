"""The requests and tokens per minute of a backend, and its dollars per day, reserved before a call and settled after
it. Pure.

A `TokenBucket` refills continuously and holds at most the refill of BURST_S seconds. Servers refill continuously too,
and hold up to a minute's worth. In any window the bucket lets through the burst and the refill of the window, and
the largest single call beyond them, if that call exceeds the burst. A server that holds a minute's worth therefore
refuses nothing even if some calls arrive almost a minute late. A small burst costs no throughput: refill is lost only
after half a second without a waiting task. Returned units count from the moment of their return.

Where several processes keep a limit together, a bucket holds what the store has granted (`GrantedUnits`), and the gate
asks for more (`Ledger`) in the place of waiting for a refill. Money is always kept in a store.

`RateGate` gives the runs that wait for the limit their turns. They wait in a queue; the first has a timer for the
moment of its turn, so nothing polls. A served run leaves the queue and may join again at its end, so each run gets one
call in turn. A run joins only while the limit is the only obstacle to its next task: a run without a free slot leaves
the queue and delays no other run.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from math import inf
from threading import RLock
from typing import NamedTuple, Protocol, TypeAlias

from plait.backends.backend_protocol import Allowance
from plait.events import USD_PER_DAY
from plait.json_form import value

BURST_S = 0.5
"""The seconds of refill that a bucket holds at most."""
_FIRST_RATIO = 0.30
"""Input tokens per character until the backend has reported usage: on the high side."""
_FIRST_OUTPUT = 1024.0
"""Output tokens of a call until the backend has reported usage, unless its own limit is lower."""
_WEIGHT = 0.2
"""Weight of the newest call in the learned means."""


@value
class RateLimits:
    """Rate limits of a backend, shared by all its calls in this process. Raises ValueError for a rate limit below
    1, or of money that is not above 0.
    """

    requests_per_minute: float | None = None
    """Requests begun per minute; None for no limit."""
    tokens_per_minute: float | None = None
    """Tokens read and written per minute; None for no limit."""
    usd_per_day: float | None = None
    """US dollars that all processes on the store spend on a day in UTC; None for no limit. Needs a store on disk or on
    a server, and a backend with a server and a key.
    """
    account: str | None = None
    """A name for the account, if the limits hold for all backends of its server and key together; None if they hold for
    each backend by itself.
    """

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "tokens_per_minute"):
            number = getattr(self, name)
            if number is not None and not 1 <= number < float("inf"):
                raise ValueError(f"{name} must be at least 1, not {number}")
        if self.usd_per_day is not None and not 0 < self.usd_per_day < inf:
            raise ValueError(f"usd_per_day must be above 0, not {self.usd_per_day}")


class TokenBucket:
    """A bucket for `per_minute` units per minute, full at first. A take may leave a debt."""

    def __init__(self, per_minute: float, now: float) -> None:
        self.given = per_minute
        """The limit set by the user."""
        self.per_minute = per_minute
        """The limit in force: the limit set by the user, or the server's if lower."""
        self.level = self.capacity
        self.at = now

    @property
    def capacity(self) -> float:
        """The most units that the bucket holds: at least one, so that a request fits."""
        return max(1.0, self.per_minute / 60 * BURST_S)

    def wait(self, units: float, now: float) -> float:
        """Return the seconds until `units` may be taken. More units than the bucket holds need a full bucket."""
        self._refill(now)
        missing = min(units, self.capacity) - self.level
        return missing / self.per_minute * 60 if missing > 1e-9 * self.capacity else 0.0

    def take(self, units: float, now: float) -> None:
        """Take `units`, or return units if negative."""
        self._refill(now)
        self.level = min(self.capacity, self.level - units)

    def change(self, per_minute: float, now: float) -> None:
        """Set another limit. The units stay."""
        self._refill(now)
        self.given = self.per_minute = per_minute

    def lower(self, per_minute: float | None, left: float | None, now: float) -> None:
        """Take the server's limit and the units left into account. Neither raises the limit set by the user."""
        self._refill(now)
        if per_minute is not None:
            self.per_minute = min(self.given, per_minute)
        if left is not None:
            self.level = min(self.level, left)
        self.level = min(self.level, self.capacity)

    def _refill(self, now: float) -> None:
        if now > self.at:
            self.level = min(self.capacity, self.level + (now - self.at) * self.per_minute / 60)
            self.at = now


class GrantedUnits(TokenBucket):
    """The units that the store has granted, empty at first. Those that are not used in time expire."""

    def __init__(self, per_minute: float, now: float) -> None:
        super().__init__(per_minute, now)
        self.level = 0.0
        self.expired = 0.0

    def wait(self, units: float, now: float) -> float:
        """Return 0 if `units` may be taken, or infinity: more have to be granted."""
        self._refill(now)
        return 0.0 if units <= self.level + 1e-9 * self.capacity else inf

    def take(self, units: float, now: float) -> None:
        """Take `units`. Returned or granted ones, a negative number, may be used within BURST_S."""
        self._refill(now)
        self.level -= units
        self.at = max(self.at, now + BURST_S) if units < 0 else self.at

    def _refill(self, now: float) -> None:
        if now > self.at and self.level > 0:
            self.expired += self.level
            self.level = 0.0


class CallSize(NamedTuple):
    """The size of a call."""

    characters: int
    """Of its prompt and history."""
    usd: float = 0.0
    """The most US dollars that it costs."""


@value
class Units:
    """Requests, tokens, and US dollars."""

    requests: float = 0.0
    tokens: float = 0.0
    usd: float = 0.0


@value
class Demand:
    """What a process asks for, and what it has learned since it asked before."""

    limits: RateLimits
    first: Units
    """What the first call lacks."""
    call: Units = Units(1.0)
    """What a further call needs."""
    calls: int = 1
    """The number of calls that wait."""
    unused: Units = Units()
    """What was granted before, and has expired."""
    allowance: Allowance | None = None
    """The server's own limits, as last reported."""
    day: int = 0
    """The day of the unused dollars, as `Grant.day`."""
    priority: int = 0
    """The priority of the run that makes the first call."""


@value
class Grant:
    """Units that may be used after `delay` seconds."""

    delay: float
    units: Units
    closed: str = ""
    """Why the account is closed until then, if it is: CLOSED by a process, USD_PER_DAY is spent, or PROBE."""
    day: int = 0
    """The day on which the dollars count, in UTC since 1970."""


CLOSED = "closed"
PROBE = "probe"
"""The account is open again, and this call shows whether it is: no other one is made until it was accepted."""


OnClosed: TypeAlias = Callable[[float, str], None]


class Ledger(Protocol):
    """The limits of an account as a store keeps them for several processes."""

    async def fill(
        self, limiter: RateLimiter, size: CallSize, calls: int, on_closed: OnClosed, priority: int = 0
    ) -> None:
        """Wait for a grant that lets one of `calls` calls begin, the first of `size`, and add it to `limiter`. Calls of
        a higher `priority` come first, whatever process makes them. While the account is closed, call `on_closed` with
        the Unix time of the end, and why, with PROBE before a probe, and with no reason where the grant only has to be
        waited for. Never fails: without its store a process keeps the rate limits alone, and spends nothing under a
        limit of money.
        """
        ...

    async def settle(self, reservation: Reservation, usd: float) -> None:
        """Replace the dollars of the reservation by what the call cost."""
        ...

    async def close(self, until: float, *, probe: bool) -> None:
        """Let no process begin a call until this Unix time, and then one process a `probe`."""
        ...

    async def end_probe(self, *, accepted: bool) -> None:
        """Let all processes begin calls after a probe, or another one send a probe if it was not `accepted`."""
        ...


@value
class Reservation:
    """The share of a call in the buckets."""

    characters: int
    """The length of the prompt and the history."""
    tokens: float
    """The tokens taken in advance."""
    usd: float = 0.0
    """The dollars taken in advance."""
    day: int = 0
    """The day on which they count, as `Grant.day`."""


class RateLimiter:
    """The buckets of a backend, and the learned size of its calls. Any thread may call; the time never comes from here.

    `most_output` is the backend's own limit of the tokens of an answer, if any. With `is_granted`, units come from a
    store (`demand`, `grant`); without it, money has no limit.
    """

    def __init__(
        self, limits: RateLimits, now: float, most_output: int | None = None, *, is_granted: bool = False
    ) -> None:
        self._is_granted = is_granted
        self._allowance: Allowance | None = None
        self._buckets: dict[str, TokenBucket] = {}
        """The buckets of what is limited, by the names of `Units`."""
        self._day = 0
        self._ratio = _FIRST_RATIO
        self._output = _FIRST_OUTPUT if most_output is None else min(_FIRST_OUTPUT, most_output)
        self._lock = RLock()
        self.change(limits, now)

    def change(self, limits: RateLimits, now: float) -> None:
        """Set other limits. Earlier calls stay counted."""
        with self._lock:
            self.limits = limits
            rates = {"requests": limits.requests_per_minute, "tokens": limits.tokens_per_minute}
            if limits.usd_per_day is not None and self._is_granted:
                rates["usd"] = 60.0  # any: the store has the limit
            kind, buckets = GrantedUnits if self._is_granted else TokenBucket, dict[str, TokenBucket]()
            for name, per_minute in rates.items():
                if per_minute is not None:
                    buckets[name] = self._buckets.get(name) or kind(per_minute, now)
                    buckets[name].change(per_minute, now)
            self._buckets = buckets

    @property
    def counts_tokens(self) -> bool:
        """Whether the size of a prompt matters."""
        return "tokens" in self._buckets

    @property
    def counts_money(self) -> bool:
        """Whether the price of a call matters."""
        return "usd" in self._buckets

    def estimate(self, characters: int) -> float:
        """Return the expected tokens of a call with a prompt and a history of `characters`."""
        return characters * self._ratio + self._output

    def wait(self, size: CallSize, now: float) -> float:
        """Return the seconds until a call may begin; 0 if it may begin now."""
        units = self._units(size)
        return max((bucket.wait(getattr(units, name), now) for name, bucket in self._buckets.items()), default=0.0)

    def reserve(self, size: CallSize, now: float) -> Reservation:
        """Take the share of a call from all buckets. The caller makes sure that the call need not wait."""
        with self._lock:
            units = self._units(size)
            self._take(units, now)
            return Reservation(size.characters, units.tokens, size.usd, self._day)

    def settle(self, reservation: Reservation, input_tokens: int, output_tokens: int, now: float) -> None:
        """Replace the estimated tokens by the real ones, and learn from them. Without any the estimate stays."""
        if not input_tokens + output_tokens:
            return
        with self._lock:
            self._take(Units(0.0, input_tokens + output_tokens - reservation.tokens), now)
            if output_tokens:
                self._output += _WEIGHT * (output_tokens - self._output)
            if input_tokens and reservation.characters:
                self._ratio += _WEIGHT * (input_tokens / reservation.characters - self._ratio)

    def give_back(self, reservation: Reservation, now: float) -> None:
        """Return the requests and tokens of a call that was never made."""
        with self._lock:
            self._take(Units(-1.0, -reservation.tokens), now)

    def lower(self, allowance: Allowance, now: float) -> None:
        """Take the server's own limits, as reported with an answer, into account."""
        with self._lock:
            self._allowance = allowance
            for name, bucket in self._buckets.items() if not self._is_granted else ():  # else the store has to know
                bucket.lower(getattr(allowance, f"{name}_per_minute"), getattr(allowance, f"{name}_left"), now)

    def demand(self, size: CallSize, calls: int, now: float, priority: int = 0) -> Demand:
        """Return what to ask the store for, so that the first of `calls` calls may begin, which has this `size`."""
        with self._lock:
            need, lacks, unused = self._units(size), dict[str, float](), dict[str, float]()
            for name, bucket in self._buckets.items():
                assert isinstance(bucket, GrantedUnits)
                bucket.wait(0, now)  # what is too old expires
                lacks[name] = max(0.0, getattr(need, name) - bucket.level)
                unused[name], bucket.expired = bucket.expired, 0.0
            first, call = replace(need, **lacks), Units(1.0, need.tokens)
            allowance, self._allowance = self._allowance, None
            return Demand(self.limits, first, call, calls, Units(**unused), allowance, day=self._day, priority=priority)

    def grant(self, units: Units, now: float, day: int = 0, *, in_time: bool = True) -> None:
        """Add units that the store has granted, to be used now unless not `in_time`. The dollars count on `day`."""
        with self._lock:
            if units.usd and day != self._day:
                self.take_unused_money()  # they count on the day before, which is over
                self._day = day
            for name, bucket in self._buckets.items():
                assert isinstance(bucket, GrantedUnits)
                if in_time:
                    bucket.take(-getattr(units, name), now)
                else:
                    bucket.expired += getattr(units, name)

    def take_unused_money(self) -> Reservation:
        """Remove and return the dollars that were granted, and that no call has used."""
        with self._lock:
            usd, bucket = 0.0, self._buckets.get("usd")
            if isinstance(bucket, GrantedUnits):
                usd, bucket.level, bucket.expired = bucket.level + bucket.expired, 0.0, 0.0
            return Reservation(0, 0.0, usd, self._day)

    def _units(self, size: CallSize) -> Units:
        """Return what a call needs."""
        return Units(1.0, self.estimate(size.characters) if self.counts_tokens else 0.0, size.usd)

    def _take(self, units: Units, now: float) -> None:
        for name, bucket in self._buckets.items():
            bucket.take(getattr(units, name), now)


Timer: TypeAlias = Callable[[float | Callable[[], Awaitable[None]], Callable[[], None]], Callable[[], object] | None]
"""Calls a function after a number of seconds, or once what another one returns has been awaited. Returns a function
that prevents the call; None, without a call, if the run of the timer ends.
"""


class RateGate:
    """The queue of runs of an event loop before `limiter`. With a `ledger` the limit is kept with other processes."""

    def __init__(self, limiter: RateLimiter, now: Callable[[], float], ledger: Ledger | None = None) -> None:
        self.limiter = limiter
        self.ledger = ledger
        self._now = now
        self._queue: dict[object, tuple[CallSize, int, Callable[[], None], Timer, int]] = {}
        """The waiting runs, each with the size of its next call, the number of its calls, its callback, its timer and
        its priority.
        """
        self.closed_until: float | None = None
        """The Unix time until which the account is closed in the store; None while tasks may start."""
        self.is_held = False
        """Whether the next call is a probe, for which the others wait."""
        self.closed_for = ""
        """Why: see `Grant.closed`."""
        self._asks = False
        """Whether the timer is not one of time: the ledger is asked."""
        self._has_to_wait = False
        """Whether the ledger has answered that the next call has to wait."""
        self._timed: object = None
        """The run that the timer is for."""
        self._cancel: Callable[[], object] | None = None

    def admits(self, run: object, size: CallSize) -> bool:
        """Return whether `run` may begin a call now."""
        return next(iter(self._queue), run) is run and self.limiter.wait(size, self._now()) <= 0

    def reserve(self, run: object, size: CallSize) -> Reservation:
        """Take the share of an admitted call of `run`, whose turn ends."""
        reservation = self.limiter.reserve(size, self._now())
        self.leave(run)
        return reservation

    def settle(self, reservation: Reservation, input_tokens: int, output_tokens: int) -> None:
        """Replace the estimate of a call by its real usage."""
        self.limiter.settle(reservation, input_tokens, output_tokens, self._now())
        self._restart()

    def give_back(self, reservation: Reservation) -> None:
        """Return the share of a call that was never made."""
        self.limiter.give_back(reservation, self._now())
        self._restart()

    def change(self, limits: RateLimits) -> None:
        """Set other limits, for the waiting runs as well."""
        self.limiter.change(limits, self._now())
        self._restart()

    def lower(self, allowance: Allowance) -> None:
        """Take the server's own limits into account."""
        self.limiter.lower(allowance, self._now())

    def take_unused_money(self) -> Reservation | None:
        """Remove and return the dollars that were granted, and that no call has used; None if there are none, or if
        another run waits for them.
        """
        if self._queue or not self.limiter.counts_money:
            return None
        unused = self.limiter.take_unused_money()
        return unused if unused.usd else None

    @property
    def spent_until(self) -> float | None:
        """The end of the day whose money is spent, as Unix time; None if that is not what runs wait for."""
        return self.closed_until if self.closed_for == USD_PER_DAY else None

    def makes_wait(self, run: object) -> bool:
        """Return whether `run` waits for the limits, and not only for the ledger's answer."""
        return run in self._queue and (self._has_to_wait or not self._asks or self.ledger is None)

    def join(
        self, run: object, size: CallSize, take: Callable[[], None], timer: Timer, calls: int = 1, priority: int = 0
    ) -> None:
        """Call `take`, in the context variables of this call, at the turn of `run`, which could make `calls` calls.
        `timer` belongs to the run. Runs of a higher priority have their turns first.
        """
        is_ahead = run not in self._queue and any(priority > before for *_, before in self._queue.values())
        self._queue[run] = (size, calls, partial(copy_context().run, take), timer, priority)
        if is_ahead:
            self._queue = dict(sorted(self._queue.items(), key=lambda each: -each[1][-1]))
        self._start()

    def leave(self, run: object) -> None:
        """Remove `run` from the line, if it waits there."""
        if self._queue.pop(run, None) is not None:
            self._start()

    def _start(self) -> None:
        """Start the timer of the first run, unless it has one. Runs that end leave the line."""
        if next(iter(self._queue), None) is self._timed:
            return
        if self._cancel is not None:
            self._cancel()
        self._timed = self._cancel = self.closed_until = None
        self._has_to_wait = False
        while self._cancel is None and self._queue:
            first, (size, _, _, timer, priority) = next(iter(self._queue.items()))
            wait: float | Callable[[], Awaitable[None]] = self.limiter.wait(size, self._now())
            self._asks = wait == inf
            if self._asks and self.ledger is not None:
                calls = sum(calls for _, calls, *_, each in self._queue.values() if each == priority)
                wait = partial(self.ledger.fill, self.limiter, size, calls, self._closed, priority)
            self._cancel = timer(wait, self._call_first)
            if self._cancel is None:
                del self._queue[first]
            else:
                self._timed = first

    def _restart(self) -> None:
        if self._timed is not None and not self._asks:
            self._timed = None
            self._start()

    def _closed(self, until: float, why: str) -> None:
        """Let the waiting runs know that they wait, if the account is closed until this Unix time: they may park. A
        probe goes first then.
        """
        self.is_held = self.is_held or why in {CLOSED, PROBE}
        if why == PROBE:
            return
        self._has_to_wait = True
        if why:
            self.closed_until, self.closed_for = until, why
        for _, _, take, *_ in tuple(self._queue.values()):
            take()

    def _call_first(self) -> None:
        run, self._timed, self._cancel, self.closed_until = self._timed, None, None, None
        self._queue[run][2]()
        if self._timed is None and next(iter(self._queue), None) is run:
            self.leave(run)  # it did not take its turn: it ends
