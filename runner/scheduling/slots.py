"""`SlotPool`: slots for running tasks, in total and per backend. Pure: no await, no clock, no I/O.

A refused call (a rate limit, an overload) delays its own task; whether the backend refuses the others too is found out:

    open      tasks start while fewer than `limit` run; a refusal leads to held
    held      no task starts but one, the probe. A probe that is accepted opens the backend at the same width. If it is
              refused, another goes. After PROBES refused probes, or if many (more than a third) of the calls under
              way, or of those begun since the backend was opened, it is paused and its width is halved
    paused    no task starts until the task with the last refusal may return; then the backend is open

A refusal that holds for all tasks alike (`Pause.at_once`) pauses the backend without probes. After a long pause the
backend is held first.

Slots belong to a single run, or are shared by several runs of an event loop. A released shared slot, or a reopened
backend, is first offered to the waiting runs, longest wait first, before the releasing run may use the slot again. A
wide run therefore cannot starve the others. Each backend has a queue of its own: a run served in one queue keeps its
turn in the other queues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from plait.runner.scheduling.rate_gate import RateGate

PROBES = 2
"""Probes that have to be refused, after a first refusal, before the backend is paused."""
_MANY = 5
"""Refusals that say as much as those of the probes, if they are more than a third of the calls."""
_SHORTEST_MOMENT_S, _LONGEST_MOMENT_S = 0.05, 60.0
"""Bounds of `BackendLimiter.moment`."""


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without calls of a backend, after the backend refused a call."""

    until: float = 0.0
    """The end of the pause as Unix time in seconds."""
    cause: str = ""
    """The cause, for display."""
    probe: bool = False
    """Whether a single task runs on the backend after the pause, and the others once that call is accepted."""
    at_once: bool = False
    """Whether the refusal alone pauses the backend, without probes."""
    took: float = 0.0
    """The seconds from the start of the call to its refusal."""


@dataclass(slots=True, eq=False)
class BackendLimiter:
    """The slots of a backend: a fixed `ceiling`, and an adaptive `limit`.

    The limit is halved by each pause, and raised by about one for as many completed tasks as run at once.
    """

    ceiling: float
    limit: float
    total: int
    """The number of slots of a backend that is not throttled."""
    taken: int = 0
    throttled: int = 0
    """The number of tasks that keep the backend paused. No task starts on the backend until all of them are back."""
    in_a_row: int = 0
    """The refusals of a held backend: of a call, then of the probes. 0 for a backend that is open or paused."""
    running: int = 0
    """The number of tasks running on the backend when it was last open and refused a call."""
    begun: int = 0
    """The number of calls begun since the backend was opened last, by a probe or after a pause."""
    refused: int = 0
    """The number of refusals since then, those of calls under way included."""
    took: float | None = None
    """The mean of the seconds that refusals took, recent ones first; None before the first."""
    refusals: int = 0
    """The number of refusals so far, without those of calls that were under way when the backend was held or paused."""
    refusals_before: int = 0
    """The value of `refusals` at the last completion of a task on the backend."""
    gate: RateGate | None = None
    """The backend's limit of rate, if any."""
    queue: dict[object, tuple[int, Callable[[], None]]] = field(
        default_factory=dict[object, tuple[int, Callable[[], None]]]
    )
    """Runs waiting for a slot, longest wait first, each with an increasing number and a callback."""

    pause: Pause | None = None
    """The last pause, of several at once the longest; None while the backend has all its slots."""
    probing: bool = False
    """Whether the backend is held after a long pause: see `Pause.probe`."""
    probe: tuple[object, int] | None = None
    """The probe of a held backend while it runs: the queue of its run, and its position."""
    watchers: dict[object, Callable[[], None]] = field(default_factory=dict[object, Callable[[], None]], repr=False)
    """Functions to call when the backend is paused, opened, or has all its slots again, by run."""

    @property
    def is_open(self) -> bool:
        """Whether another task may start on the backend."""
        if self.throttled:
            return False
        if self.is_held:
            return self.probe is None and self.taken < self.ceiling
        return self.taken + 1 <= self.limit

    @property
    def is_held(self) -> bool:
        """Whether the next task to start on the backend is a probe, unless the backend is paused."""
        return self.probing or self.in_a_row > 0

    @property
    def slots(self) -> int:
        """The number of tasks that may run at once, after the pause if the backend is paused."""
        return 1 if self.probing and not self.throttled else int(min(self.limit, self.total))

    def completed(self) -> None:
        """Record the completion of a task on the backend."""
        self.refusals_before = self.refusals
        if self.limit < self.ceiling and not self.throttled:
            self.limit = min(self.ceiling, self.limit + 1 / self.limit)
            if self.pause is not None and self.slots >= self.total:
                self.announce()

    @property
    def moment(self) -> float:
        """The seconds after which a probe without a response counts as accepted: most refusals come sooner. A shorter
        moment would open the backend too soon, a longer one leaves slots empty.
        """
        return min(max(1.5 * (self.took or 0.0), _SHORTEST_MOMENT_S), _LONGEST_MOMENT_S)

    def begin_refusals(self) -> bool:
        """Note how many tasks run, if the backend is open. Return whether it is."""
        if self.is_held or self.throttled:
            return False
        self.running = self.taken
        return True

    def narrow(self) -> None:
        """Halve the limit for a pause, or set it to the number of tasks that were not refused if that is lower."""
        self.limit = max(1.0, min(self.limit, self.running // 2, self.running - self.refused))

    def end_probe(self) -> None:
        """Let further tasks run, because the backend has accepted the probe."""
        self.probe = None
        self.in_a_row = self.begun = self.refused = 0
        if self.probing and not self.throttled:
            self.probing = False
            self.announce()

    def announce(self) -> None:
        """Forget the pause if the backend has all its slots again, and call the watchers."""
        if not self.throttled and self.slots >= self.total:
            self.pause = None
        for watcher in tuple(self.watchers.values()):
            watcher()


class SlotPool:
    """`concurrency` slots in total, at most `limits` per named backend; `shared` by several runs or exclusive to a
    single run.
    """

    def __init__(
        self,
        concurrency: int,
        limits: Mapping[str, int] | None = None,
        *,
        shared: bool = False,
        gates: Mapping[str, RateGate] | None = None,
    ) -> None:
        self.most = concurrency
        """The number of slots that may be in use now."""
        self.shared = shared
        self._concurrency = concurrency
        self._limits = limits or {}
        self._gates = gates or {}
        self._limiters: dict[str, BackendLimiter] = {}
        self.taken = 0
        self.only: BackendLimiter | None = None
        """The only backend on which a slot may be taken now; None if there is no restriction."""
        self._numbers = count()

    def limiter(self, backend: str) -> BackendLimiter:
        """Return the slots of `backend`."""
        limiter = self._limiters.get(backend)
        if limiter is None:
            limit = self._limits.get(backend, float("inf"))
            total = int(min(limit, self._concurrency))
            limiter = self._limiters[backend] = BackendLimiter(limit, limit, total, gate=self._gates.get(backend))
        return limiter

    def widen(self, concurrency: int) -> None:
        """Raise the number of slots to `concurrency`, unless there are more."""
        self.most = self._concurrency = max(self._concurrency, concurrency)
        for limiter in self._limiters.values():
            limiter.total = int(min(limiter.ceiling, self._concurrency))

    def enqueue(self, run: object, limiter: BackendLimiter, take: Callable[[], None]) -> None:
        """Call `take` whenever `run` may get a slot on the backend, until `run` is removed from `limiter.queue`.

        `take` runs in the context variables of this call, not in the context of the releasing run. A served run removes
        itself and may call again.
        """
        if run not in limiter.queue:
            limiter.queue[run] = (next(self._numbers), partial(copy_context().run, take))

    def dequeue(self, run: object) -> None:
        """Remove `run` from all queues."""
        for limiter in self._limiters.values():
            limiter.queue.pop(run, None)

    def offer(self, releasing: object) -> None:
        """Offer free slots, one at a time, to all waiting runs except the run `releasing`."""
        passed: set[tuple[BackendLimiter, object]] = set()
        while self.taken < self.most and (first := self._next_waiting(releasing, passed)) is not None:
            before = self.taken
            self._offer_one(*first)
            if self.taken == before:
                passed.add(first)

    def _next_waiting(
        self, releasing: object, passed: Set[tuple[BackendLimiter, object]]
    ) -> tuple[BackendLimiter, object] | None:
        """Return the run with the longest wait among the runs waiting for an open backend."""
        first: tuple[int, BackendLimiter, object] | None = None
        for limiter in self._limiters.values():
            if not limiter.queue or not limiter.is_open:
                continue
            for run, (number, _) in limiter.queue.items():
                if run is not releasing and (limiter, run) not in passed:
                    first = (number, limiter, run) if first is None or number < first[0] else first
                    break
        return None if first is None else first[1:]

    def _offer_one(self, limiter: BackendLimiter, run: object) -> None:
        limit, only = self.most, self.only
        self.most, self.only = self.taken + 1, limiter
        try:
            limiter.queue[run][1]()
        finally:
            self.most, self.only = limit, only


@dataclass(slots=True, eq=False)
class ReadyQueue:
    """The tasks of a run on a backend: eligible tasks (`heap`), the number of slots held, and throttled tasks."""

    limiter: BackendLimiter
    slots: SlotPool
    heap: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    taken: int = 0
    throttled: set[int] = field(default_factory=set[int])
    refusals_before: int = field(init=False)
    """The value of `BackendLimiter.refusals` when the run first used the backend."""

    def __post_init__(self) -> None:
        self.refusals_before = self.limiter.refusals

    @property
    def refusals(self) -> int:
        """The number of the backend's refusals since its last completed task, counted from the start of the run."""
        return self.limiter.refusals - max(self.limiter.refusals_before, self.refusals_before)

    @property
    def may_take(self) -> bool:
        """Whether a task may start on the backend, given a free slot."""
        return self.limiter.is_open and self.slots.only in (None, self.limiter)

    def take(self) -> None:
        """Assign a slot to a task."""
        self.taken += 1
        self.limiter.taken += 1
        self.limiter.begun += 1
        self.slots.taken += 1

    def start(self, position: int) -> None:
        """Assign a slot to the task at `position`, which starts now: on a held backend as the probe."""
        self.take()
        if self.limiter.is_held:
            self.limiter.probe = self, position

    def is_probe(self, position: int) -> bool:
        """Return whether the running task is the probe of its backend."""
        return self.limiter.probe == (self, position)

    def free(self) -> None:
        """Release the slot of a task."""
        self.taken -= 1
        self.limiter.taken -= 1
        self.slots.taken -= 1

    def refuse(self, position: int, took: float) -> bool:
        """Record that the backend refused the call of a running task, after `took` seconds. Return whether the backend,
        unless it is paused, refuses all calls.
        """
        limiter = self.limiter
        is_first = limiter.begin_refusals()
        limiter.refused += 1
        limiter.took = took if limiter.took is None else limiter.took + (took - limiter.took) / 8
        if is_first or self.is_probe(position):
            limiter.probe = None
            limiter.in_a_row += 1
            limiter.refusals += 1
        if limiter.throttled:
            limiter.narrow()
            return False
        some = min(limiter.begun, limiter.running)
        return limiter.in_a_row > PROBES or (limiter.refused >= _MANY and 3 * limiter.refused > some)

    def throttle(self, position: int, pause: Pause) -> None:
        """Record that the backend refused the call of a running task, and pause the backend until the end of `pause` if
        it refuses all calls.
        """
        if self.refuse(position, pause.took) or pause.at_once or pause.probe:
            self.close_for(position, pause)
            self.limiter.narrow()

    def close_for(self, position: int, pause: Pause) -> None:
        """Close the backend until the task at `position` may return, at the end of `pause`."""
        limiter = self.limiter
        limiter.begin_refusals()
        if not limiter.throttled or limiter.pause is None or pause.until > limiter.pause.until:
            limiter.pause = pause
        limiter.in_a_row = 0
        limiter.probing = limiter.probing or pause.probe
        limiter.probe = None  # a task started before this pause does not show whether the pause is over
        self.throttled.add(position)
        limiter.throttled += 1

    def reopen_for(self, position: int) -> bool:
        """Return whether the return of the task at `position` reopens the backend. No effect unless the task was
        throttled.
        """
        if position not in self.throttled:
            return False
        self.throttled.remove(position)
        self.limiter.throttled -= 1
        if self.limiter.throttled:
            return False
        self.limiter.begun = self.limiter.refused = 0
        return True

    def release_all(self) -> None:
        """Release all slots and throttled tasks of the run, which ends."""
        self.limiter.taken -= self.taken
        self.slots.taken -= self.taken
        self.limiter.throttled -= len(self.throttled)
        if self.limiter.probe is not None and self.limiter.probe[0] is self:
            self.limiter.probe = None
