"""`SlotPool`: slots for running tasks, in total and per backend. Pure: no await, no clock, no I/O.

Slots belong to a single run, or are shared by several runs of an event loop. Beside them stands the `Account` of each
backend, which refusals close or narrow for all runs of the process. What one run sets free, a shared slot or a backend,
is first offered to the waiting runs, longest wait first, before the releasing run may use it again. A wide run
therefore cannot starve the others. Each backend has a queue of its own: a run served in one queue keeps its turn in the
other queues.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Set
from contextvars import copy_context
from dataclasses import InitVar, dataclass, field
from functools import partial
from itertools import count
from math import inf

from plait.runner.scheduling.account import Account, BackendSlots, Waiting

_numbers = count()
"""Numbers of the waiting runs. They are compared between the pools of a process."""


class SlotPool:
    """`concurrency` slots in total, at most `limits` per named backend; `shared` by several runs or exclusive to a
    single run. `account_of` returns the account of a backend; by default it is the pool's own.
    """

    def __init__(
        self,
        concurrency: int,
        limits: Mapping[str, int] | None = None,
        *,
        shared: bool = False,
        account_of: Callable[[str], Account] | None = None,
    ) -> None:
        self.most = concurrency
        """The number of slots that may be in use now."""
        self.shared = shared
        self.taken = 0
        self.only: Account | None = None
        """The only backend on which a slot may be taken now; None if there is no restriction."""
        self.accounts: Counter[Account] = Counter()
        """The accounts of the runs, each with the number of runs that use it."""
        self.account_of: Callable[[str], Account] = account_of or defaultdict[str, Account](Account).__getitem__
        self._concurrency = concurrency
        self._limits = limits or {}
        self._slots: dict[str, BackendSlots] = {}

    def slots(self, backend: str) -> BackendSlots:
        """Return the slots of `backend`."""
        slots = self._slots.get(backend)
        if slots is None:
            ceiling = self._limits.get(backend, inf)
            slots = self._slots[backend] = BackendSlots(ceiling, int(min(ceiling, self._concurrency)))
        return slots

    def widen(self, concurrency: int) -> None:
        """Raise the number of slots to `concurrency`, unless there are more."""
        self.most = self._concurrency = max(self._concurrency, concurrency)
        for slots in self._slots.values():
            slots.total = int(min(slots.ceiling, self._concurrency))

    def offer(self, releasing: object) -> None:
        """Offer what is free, one slot at a time, to all waiting runs except the run `releasing`."""
        passed: set[Waiting] = set()
        while (first := self._next_waiting(releasing, passed)) is not None:
            if not first.take():
                passed.add(first)

    def _next_waiting(self, releasing: object, passed: Set[Waiting]) -> Waiting | None:
        """Return the longest wait among those of the runs that may be offered a slot."""
        first: Waiting | None = None
        for account in self.accounts:
            if not account.queue or not account.is_open:
                continue
            for run, waiting in account.queue.items():
                if run is not releasing and waiting.has_room() and waiting not in passed:
                    first = waiting if first is None or waiting.number < first.number else first
                    break
        return first

    def offer_one(self, account: Account, take: Callable[[], None]) -> bool:
        """Call `take`, which may take one slot, on `account`. Return whether it has."""
        most, only, before = self.most, self.only, self.taken
        self.most, self.only = self.taken + 1, account
        try:
            take()
        finally:
            self.most, self.only = most, only
        return self.taken > before


@dataclass(slots=True, eq=False)
class ReadyQueue:
    """The tasks of `run` on a backend: eligible tasks (`heap`), and the number of slots held. It uses the account from
    now until `leave`, and calls `changed` when the backend is paused, opened, or has all its slots again.
    """

    run: object
    pool: SlotPool
    slots: BackendSlots
    account: Account
    changed: InitVar[Callable[[Account], None]]
    heap: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    taken: int = 0
    refusals_before: int = field(init=False)
    """The value of `Account.refusals` when the run first used the backend."""

    def __post_init__(self, changed: Callable[[Account], None]) -> None:
        self.refusals_before = self.account.refusals
        self.account.runs[self.run] = self.slots, partial(changed, self.account)
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
    def refusals(self) -> int:
        """The number of the backend's refusals since its last completed task, counted from the start of the run."""
        return self.account.refusals - max(self.account.refusals_before, self.refusals_before)

    @property
    def may_take(self) -> bool:
        """Whether a task may start on the backend, given a free slot."""
        if self.slots.taken >= self.slots.ceiling or self.pool.only not in (None, self.account):
            return False
        return self.account.is_open

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
        return self.account.probe == (self.run, position)

    def wait(self, take: Callable[[], None]) -> None:
        """Call `take` whenever the run may get a slot on the backend, until the run is removed from `Account.queue`.

        `take` runs in the context variables of this call, not in the context of the releasing run. A served run removes
        itself and may call again.
        """
        if self.run not in self.account.queue:
            offer = partial(self.pool.offer_one, self.account, partial(copy_context().run, take))
            self.account.queue[self.run] = Waiting(next(_numbers), self._has_room, offer)

    def _has_room(self) -> bool:
        return self.pool.taken < self.pool.most and self.slots.taken < self.slots.ceiling
