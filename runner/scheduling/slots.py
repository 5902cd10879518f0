"""Slots for running tasks, in total and per backend, and what refused calls have taught about a backend. Pure.

Slots belong to a single run, or are shared by several runs of an event loop. Beside them stands the `Account` of each
backend, which refusals close or narrow for all runs of the process. What one run sets free, a shared slot or a backend,
is first offered to the waiting runs, longest wait first, before the releasing run may use it again. A wide run
therefore cannot starve the others. Each backend has a queue of its own: a run served in one queue keeps its turn in the
other queues. Runs of a higher priority come first: those of a lower one get what they leave. `account_ledger` does the
same between processes.

A refused call (a rate limit, an overload) delays its own task. Whether the backend refuses the others too is found out
by the `Account`:

    open      tasks start while fewer than `width` run. Many refusals (`Account.pressure`), or one that holds for all
              tasks alike (`Pause.at_once`), lead to paused, and halve the width
    paused    no task starts until the task with the last refusal may return; then the backend is open, after a long
              pause held
    held      no task starts but one, the probe. Once it is accepted, the backend is open; if not, another goes

A server counts the calls of an account, whichever run makes them. So do the refusals, the probe, the pause and the
width. The account is forgotten when the last run leaves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from typing import Literal, TypeAlias

from plait.errors import nearest
from plait.json_form import value
from plait.runner.scheduling.own_limits import RateGate

MANY = 3
"""The least pressure that pauses a backend."""
_SHARE = 4
"""MANY refusals pause a backend only if there is more than one for every so many calls under way."""
_TOO_MANY = 4
"""The pressure that pauses a backend whatever is under way, once calls have completed since its last pause: before, a
few random refusals among many calls are no sign of a limit.
"""
_RELIEF = 0.5
"""What a completed call takes from the pressure: random refusals, up to a third of all calls, add up to nothing."""
FIRST_WIDTH = 8
MOST_AT_ONCE = 256
"""The width is never raised beyond."""
_SLOWER = 2.0
"""How many times as long calls take when the width is halved."""
_AS_MANY = 0.75
"""The part of the calls in a second that still end, at least, after a halving that stays."""

Concurrency: TypeAlias = int | Literal["auto"]
"""How many tasks run at once. "auto": as many on each backend as it takes well, which is searched for."""
Call: TypeAlias = tuple[object, int]
"""A call of a run: the run, and the position of its task."""


@value
class Pause:
    """A time without calls of a backend, after the backend refused a call."""

    until: float = 0.0
    """The end of the pause as Unix time in seconds; infinite if a person ends it."""
    cause: str = ""
    """The cause, for display."""
    probe: bool = False
    """Whether a single task runs on the backend after the pause, and the others once that call is accepted."""
    at_once: bool = False
    """Whether the refusal alone pauses the backend."""
    no_credit: bool = False
    """Whether the account has no credit left."""


@dataclass(slots=True, eq=False)
class BackendSlots:
    """The slots of a backend in the pool of a run, or of several runs."""

    ceiling: float
    """The most tasks at once; infinite without a limit of the backend."""
    taken: int = 0


class WidthSearch:
    """The search for the number of calls at once that a backend takes well, while the calls are made. Times are
    monotonic seconds.

    The width begins at FIRST_WIDTH. Each completed call raises it by one, which doubles it with each round of calls,
    until the backend is paused for refusals, or its calls take twice as long as they did: it then queues them. Either
    halves the width. From then on a round raises it by an eighth, the next one by twice as much, and so on.

    A random refusal delays its own call and changes nothing here: `Account` pauses a backend only if it refuses many.
    Calls may also take longer because they ask for more. If fewer calls end in a second after the width was
    halved for their time, the halving is taken back, and the time that they take now is the new measure.

    A round is as many calls as the width, begun and ended in it. A width of which less than half is in use is not
    raised.
    """

    def __init__(self) -> None:
        self._doubling = True
        self._step = 1.0
        """How much a round of calls adds to the width, once it doubles no more."""
        self._least: float | None = None
        """The mean time of the calls of the fastest round."""
        self._halved: tuple[float, float, bool] | None = None
        """The width before it was halved because calls took long, the calls that ended in a second, and whether it was
        doubling.
        """
        self._began: float | None = 0.0
        """The begin of the round; None before."""
        self._calls = FIRST_WIDTH
        """The calls of the round."""
        self._ended = self._all_ended = 0
        """The calls that ended in the round: those that also began in it, and all."""
        self._took = 0.0
        """The sum of the times of the former."""

    def call_ended(self, width: float, in_use: int, took: float, now: float) -> float:
        """Return the width after a successful call that took `took` seconds, while `in_use` calls were under way."""
        if self._began is None:
            if in_use <= width:  # the calls of the time before have ended
                self._begin_round(width, now)
            return width
        if 2 * in_use >= width:
            most = max(width, min(MOST_AT_ONCE, 2 * self._calls))
            width = min(most, width + (1.0 if self._doubling else self._step / width))
        self._all_ended += 1
        if now - took >= self._began:
            self._ended += 1
            self._took += took
            if self._ended >= self._calls:
                return self._judge_round(width, self._took / self._ended, now)
        return width

    def paused(self) -> None:
        """Take into account that the backend was paused for refusals, and its width halved."""
        self._doubling, self._step, self._halved, self._began = False, max(1.0, self._calls / 8), None, None

    def _begin_round(self, width: float, now: float) -> None:
        self._began, self._calls, self._ended, self._all_ended, self._took = now, int(width), 0, 0, 0.0

    def _judge_round(self, width: float, took: float, now: float) -> float:
        assert self._began is not None
        rate = self._all_ended / max(now - self._began, 1e-9)
        if self._halved is not None:
            before, rate_before, was_doubling = self._halved
            self._halved = None
            if rate < rate_before * _AS_MANY:
                self._doubling, self._least, width = was_doubling, took, max(width, before)
        elif self._least is not None and took >= _SLOWER * self._least:
            self._halved = width, rate, self._doubling
            self._doubling, self._step, self._began = False, max(1.0, width / 16), None
            return max(1.0, width / 2)
        else:
            self._least = took if self._least is None else min(took, self._least)
            self._step *= 1 if self._doubling else 2
        self._begin_round(width, now)
        return width


@dataclass(slots=True, eq=False, weakref_slot=True)
class Account:
    """A backend as its server counts the calls."""

    gate: RateGate | None = None
    """The backend's rate limit, if any."""
    width: float = inf
    """How many tasks may run at once: halved by each pause, and raised by about one for as many completed tasks as run
    at once, until it covers all slots of the runs. With `search`, as the search says.
    """
    search: WidthSearch | None = None
    """Finds the width, for runs that state none."""
    width_before: float = 0.0
    """The width found by `search` before the last pause."""
    taken: int = 0
    """The number of tasks that hold a slot."""
    throttled: set[Call] = field(default_factory=set[Call])
    """The refused calls that keep the backend paused. No task starts on the backend until all of them may return."""
    pressure: float = 0.0
    """The number of refusals since the last pause, less _RELIEF for each call completed since. The backend is paused
    once it is at least MANY, and more than one for every _SHARE calls under way; or, after a completion, _TOO_MANY.
    """
    has_answered: bool = False
    """Whether a call has completed since the last pause."""
    refusals: int = 0
    """The number of refusals since the last completion of a task on the backend."""
    pauses: int = 0
    """The number of pauses since then."""
    pause: Pause | None = None
    """The last pause, of several at once the longest; None while the backend has all its slots."""
    probing: bool = False
    """Whether the backend is held after a long pause: see `Pause.probe`."""
    probe: Call | None = None
    """The probe of a held backend while it runs."""
    runs: dict[object, ReadyQueue] = field(default_factory=dict[object, "ReadyQueue"], repr=False)
    """The runs that use the backend."""
    queue: dict[object, ReadyQueue] = field(default_factory=dict[object, "ReadyQueue"], repr=False)
    """Runs waiting for a slot, longest wait first."""

    @property
    def is_open(self) -> bool:
        """Whether another task may start on the backend."""
        if self.throttled:
            return False
        if self.probing:
            return self.probe is None
        return self.taken + 1 <= self.width

    @property
    def opens_at(self) -> float | None:
        """The end of the pause as Unix time in seconds, also of one that another process has told of; None if the
        backend is not paused.
        """
        if self.throttled and self.pause is not None:
            return self.pause.until
        return None if self.gate is None else self.gate.closed_until

    @property
    def is_closed(self) -> bool:
        """Whether a limit keeps tasks from the backend: it has named a long wait, or a quota that is used up. The task
        that looks whether the limit has ended is under way, or may not start yet.
        """
        return self.probing and not self.is_open

    @property
    def total(self) -> int:
        """The number of tasks of all runs that may run at once while the backend is not throttled."""
        pools = {queue.slots: queue.pool for queue in self.runs.values()}
        total = sum(min(slots.ceiling, pool.concurrency) for slots, pool in pools.items())
        if self.search is None:
            return int(total)
        return int(min(total, self.width if self.pause is None else max(self.width, self.width_before)))

    @property
    def slots(self) -> int:
        """The number of tasks of all runs that may run at once, after the pause if the backend is paused."""
        return 1 if self.probing and not self.throttled else int(min(self.width, self.total))

    def begin(self, call: Call | None) -> None:
        """Record the start of a call, which holds a slot: on a held backend as the probe. None is a call that another
        process has started.
        """
        self.taken += 1
        if self.gate is not None and self.gate.is_held:
            self.gate.is_held, self.probing = False, True
        if call is not None and self.probing:
            self.probe = call

    def complete(self) -> None:
        """Record the completion of a task on the backend."""
        self.refusals = self.pauses = 0
        self.has_answered = not self.throttled
        if self.pressure:
            self.pressure = max(0.0, self.pressure - _RELIEF)
        if self.width < inf and not self.throttled:
            if self.search is None:
                self.width += 1 / self.width
            if self.pause is not None and self.slots >= self.total:
                self.announce()

    def call_ended(self, took: float, now: float) -> None:
        """Record that a call under way has succeeded, after `took` seconds, at the monotonic time `now`."""
        if self.search is not None and not self.throttled:
            self.width = self.search.call_ended(self.width, self.taken, took, now)

    def end_probe(self) -> None:
        """Let further tasks run, because the backend has accepted the probe."""
        self.probe = None
        self.pressure = 0.0
        if self.probing and not self.throttled:
            self.probing = False
            self.announce()

    def refuse(self, call: Call) -> None:
        """Record that the backend refused `call`, which holds its slot."""
        self.refusals += 1
        if self.probe == call:
            self.probe = None
        if self.throttled:
            self.width = max(1.0, min(self.width, self.taken - 1))  # those that were not refused
        else:
            self.pressure += 1

    def throttle(self, call: Call, pause: Pause) -> bool:
        """Record that the backend refused `call`, and pause the backend until the end of `pause` if it refuses many
        calls, or all. Return whether `call` pauses it.
        """
        self.refuse(call)
        is_open = not self.throttled
        many = self.pressure >= MANY and self.pressure * _SHARE > self.taken
        if pause.at_once or pause.probe or many or (self.has_answered and self.pressure >= _TOO_MANY):
            self.close_for(call, pause)
        if is_open and self.throttled:
            self._narrow()
        if self.throttled:
            self.announce()
        return call in self.throttled

    def close_for(self, call: Call, pause: Pause) -> None:
        """Close the backend until the refused `call` may be made again, at the end of `pause`."""
        self.pauses += not self.throttled
        if not self.throttled or self.pause is None or pause.until > self.pause.until:
            self.pause = pause
        self.pressure, self.has_answered = 0.0, False
        self.probing = self.probing or pause.probe
        self.probe = None  # a task started before this pause does not show whether the pause is over
        self.throttled.add(call)

    def reopen_for(self, call: Call) -> bool:
        """Return whether the return of `call` reopens the backend. No effect unless the call keeps it paused."""
        if call not in self.throttled:
            return False
        self.throttled.remove(call)
        if self.throttled:
            return False
        self.announce()
        return True

    def leave(self, run: object, taken: int) -> None:
        """Forget the calls of `run`, which held `taken` slots and ends."""
        del self.runs[run]
        self.taken -= taken
        if self.probe is not None and self.probe[0] is run:
            self.probe = None
        for call in [call for call in self.throttled if call[0] is run]:
            self.reopen_for(call)
        if self.pause is not None:
            self.announce()  # fewer slots in total

    def announce(self) -> None:
        """Forget the pause if the backend has all its slots again, and tell the runs."""
        if not self.throttled and self.slots >= self.total:
            self.pause = None
            if self.search is None:
                self.width = inf
        for queue in tuple(self.runs.values()):
            queue.changed(queue.name, self)

    def _narrow(self) -> None:
        """Halve the width, because the backend is paused."""
        if self.search is not None:
            self.width_before = self.width
            self.search.paused()
        self.width = max(1.0, min(self.width, self.total) // 2)


_numbers = count()
"""Numbers of the waiting runs. They are compared between the pools of a process."""


class SlotPool:
    """`concurrency` slots in total, at most `limits` per named backend; `shared` by several runs or exclusive to a
    single run. With "auto", the width of each backend without a limit is searched for. `account_of` returns the account
    of a backend; by default it is the pool's own.
    """

    def __init__(
        self,
        concurrency: Concurrency,
        limits: Mapping[str, int] | None = None,
        *,
        shared: bool = False,
        account_of: Callable[[str], Account] | None = None,
    ) -> None:
        self.searches = concurrency == "auto"
        self.concurrency = MOST_AT_ONCE + sum((limits or {}).values()) if concurrency == "auto" else concurrency
        self.shared = shared
        self.taken = 0
        self.passed_over = False
        """Whether runs of a lower priority have not been offered what a run has set free."""
        self.accounts: Counter[Account] = Counter()
        """The accounts of the runs, each with the number of runs that use it."""
        self.account_of: Callable[[str], Account] = account_of or defaultdict[str, Account](Account).__getitem__
        self._limits = limits or {}
        self._slots: dict[str, BackendSlots] = {}

    def slots(self, backend: str) -> BackendSlots:
        """Return the slots of `backend`."""
        return self._slots.setdefault(backend, BackendSlots(self._limits.get(backend, inf)))

    def widen(self, concurrency: int) -> None:
        """Raise the number of slots to `concurrency`, unless there are more."""
        self.concurrency = max(self.concurrency, concurrency)

    def raise_to(self, slots: int, backend: str | None) -> None:
        """Make sure that there are `slots`, in total, and of `backend` unless None."""
        if backend is not None:
            one = self.slots(backend)
            one.ceiling = max(one.ceiling, slots)
        self.widen(slots)

    def offer(self, releasing: object, priority: int | None = None) -> None:
        """Offer what is free, one slot at a time, to all waiting runs except the run `releasing`. With its `priority`
        runs of a lower one are passed over: `releasing` may use what is free first.
        """
        passed: set[ReadyQueue] = set()
        self.passed_over = False
        while (first := self._next_waiting(releasing, passed)) is not None:
            if priority is not None and -first.turn[0] < priority:
                self.passed_over = True
                break
            if not first.take_offered():
                passed.add(first)

    def _next_waiting(self, releasing: object, passed: Set[ReadyQueue]) -> ReadyQueue | None:
        """Return the first in turn of the runs that may be offered a slot."""
        first: ReadyQueue | None = None
        for account in self.accounts:
            if not account.queue or not account.is_open:
                continue
            for run, waiting in account.queue.items():
                if run is not releasing and waiting.has_room and waiting not in passed:
                    first = waiting if first is None or waiting.turn < first.turn else first
                    break
        return first


@dataclass(slots=True, eq=False)
class ReadyQueue:
    """The tasks of `run` on a backend: eligible tasks (`heap`), and the number of slots held. It uses the account from
    now until `leave`, and calls `changed`, with the name and the account of the backend, when the backend is paused,
    opened, or has all its slots again.
    """

    run: object
    name: str
    """The name of the backend."""
    pool: SlotPool
    slots: BackendSlots
    account: Account
    changed: Callable[[str, Account], None]
    priority: int = 0
    heap: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    taken: int = 0
    turn: tuple[int, int] = (0, 0)
    """While the run waits for a slot: lower for a higher priority, and for a longer wait, on whatever backend."""
    take_offered: Callable[[], bool] = bool
    """While the run waits: lets it take one slot. Returns whether it has."""

    def __post_init__(self) -> None:
        if self.pool.searches and self.slots.ceiling == inf and self.account.search is None:
            self.account.search = WidthSearch()
            self.account.width = min(self.account.width, max(FIRST_WIDTH, self.account.taken))
        self.account.runs[self.run] = self
        self.pool.accounts[self.account] += 1

    def release_all(self) -> None:
        """Release the slots, the wait and the refused calls of the run, which ends."""
        self.account.queue.pop(self.run, None)
        self.slots.taken -= self.taken
        self.pool.taken -= self.taken
        self.account.leave(self.run, self.taken)

    def leave(self) -> None:
        """Leave the pool, after `release_all`, and after others were offered what the run has released."""
        self.pool.accounts[self.account] -= 1
        if not self.pool.accounts[self.account]:
            del self.pool.accounts[self.account]

    @property
    def may_take(self) -> bool:
        """Whether a task may start on the backend, given a free slot."""
        return self.slots.taken < self.slots.ceiling and self.account.is_open

    def take(self, position: int | None) -> None:
        """Assign a slot to the task at `position`, which starts now; None for a task that runs already."""
        self.taken += 1
        self.slots.taken += 1
        self.pool.taken += 1
        self.account.begin(None if position is None else (self.run, position))

    def free(self) -> None:
        """Release the slot of a task."""
        self.taken -= 1
        self.slots.taken -= 1
        self.pool.taken -= 1
        self.account.taken -= 1

    def is_probe(self, position: int) -> bool:
        """Return whether the running task is the probe of its backend."""
        return self.account.probe is not None and self.account.probe == (self.run, position)

    def wait(self, take: Callable[[], bool]) -> None:
        """Call `take` whenever the run may get a slot on the backend, until the run is removed from `Account.queue`. It
        returns whether the run has taken one.

        `take` runs in the context variables of this call, not in the context of the releasing run. A served run removes
        itself and may call again.
        """
        if self.run not in self.account.queue:
            queue = self.account.queue
            self.turn, self.take_offered = (-self.priority, next(_numbers)), partial(copy_context().run, take)
            is_ahead = bool(queue) and next(reversed(queue.values())).turn > self.turn
            queue[self.run] = self
            if is_ahead:
                self.account.queue = dict(sorted(queue.items(), key=lambda waiting: waiting[1].turn))

    @property
    def has_room(self) -> bool:
        """Whether the run's own limits have a free slot."""
        return self.pool.taken < self.pool.concurrency and self.slots.taken < self.slots.ceiling


DEFAULT_CONCURRENCY = 8
"""The tasks at once of all backends together that state no number."""


def default_concurrency(stated: Iterable[int | None]) -> int:
    """Return the sum of the numbers that the backends of a run state, and DEFAULT_CONCURRENCY for all together that
    state none.
    """
    limits = list(stated)
    numbers = [limit for limit in limits if limit is not None]
    return sum(numbers) + (DEFAULT_CONCURRENCY if len(numbers) < len(limits) or not limits else 0)


def mistakes_of_spares(
    or_else: Mapping[str, Sequence[str]], backends: Collection[str]
) -> Iterator[tuple[str, int, str]]:
    """Yield each mistake in `or_else`, the backends that take over while a limit closes one: the backend, the index of
    the spare, and what is wrong.
    """
    for name, spares in or_else.items():
        if name not in backends:
            yield name, 0, f"it is no backend of this runner{nearest(name, backends)}"
        for index, spare in enumerate(spares):
            if spare not in backends:
                yield name, index, f"unknown backend {spare!r}{nearest(spare, backends)}"
            elif spare == name:
                yield name, index, "a backend cannot take over from itself; leave it out"
            elif spare in spares[:index]:
                yield name, index, f"{spare!r} is named twice; leave it out"


def spares_of(or_else: Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Return the spares of each backend that has some, each followed by its own, but none twice: two backends may be
    the spares of each other.
    """

    def walk(name: str, names: dict[str, None]) -> dict[str, None]:
        for spare in or_else.get(name, ()):
            if spare not in names:
                names[spare] = None
                walk(spare, names)
        return names

    return {name: tuple(one for one in walk(name, {}) if one != name) for name, spares in or_else.items() if spares}
