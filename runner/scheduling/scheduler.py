"""`Scheduler`: which task may start now, and which tasks an outcome unlocks. Pure: no I/O.

No await, no clock. Every task is in exactly one state: missing dependencies, eligible (in the heap of its backend),
holding a slot (started), set aside (a retry waiting for its time, a question being answered), parked (waiting for a
person), or done. Only `take` assigns slots, and only `finish`, `set_aside` and `park` release slots, so the limits hold
by construction. All steps are O(log n), except that `finish` is linear in the number of dependents. A dropped task
stays in its heap until it reaches the top and is then removed at once; a non-empty heap therefore has a task to start.

A `for_each` task calls no backend and needs no slot. A separate queue (`take_slotless`) returns the task twice: first
for expansion into parts, and after the end of all parts for collecting their results. A task that calls a plan does the
same with the tasks of the plan, once for each round of a loop. The same queue returns each task with a condition once,
when all dependencies are done; `admit` then makes the task eligible.

In a run that may take answers over, each task that is about to be eligible is looked at first (`look`), as a task with
an answer needs no slot; `enter` makes it eligible.

A call goes on once all its tasks have ended or can never start (`Joins`), and fails if not all are done; a `for_each`
with a part that failed hard stays blocked.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Literal

from plait.backends.backend_protocol import Allowance
from plait.runner.domain.dag import DAG
from plait.runner.domain.run_tuning import Tuning
from plait.runner.scheduling.own_limits import CallSize, Ledger, RateGate, Reservation, Timer
from plait.runner.scheduling.slots import Account, Pause, ReadyQueue, SlotPool
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import Join, may_start, satisfies

_NOBODY = -1
"""In the place of a task, for a limit that an earlier process has met."""
_UNDER_WAY = 1e12
"""More than any path: the server still has the conversation in its cache, and its end sets a slot free."""
_NO_SPARES: Mapping[str, Sequence[str]] = {}
_NOT_MOVED: Mapping[int, str] = {}


class Scheduler:
    """Selects tasks by position in the graph: a conversation that goes on before new ones, then the longest remaining
    path first, ties by order of declaration.

    `backends` names the backend of each task. `slots` are the slots of this run, or slots shared with other runs. A
    stored run begins with the `statuses` of its tasks, and, by position: tasks to set aside until `later`, and tasks
    that have `held` a slot since before. If these are more than the slots, none starts until enough of them have ended.

    While a limit closes a backend, its tasks take slots of the first of its `spares` that none closes, and are its own
    again once they have given the slot back. `moved` names the backends of the held slots that are spares. Of the runs
    that wait for slots, those of a higher `priority` come first.
    """

    def __init__(
        self,
        dag: DAG,
        backends: Sequence[str],
        slots: SlotPool,
        *,
        statuses: Sequence[TaskStatus] = (),
        later: Collection[int] = (),
        held: Collection[int] = (),
        spares: Mapping[str, Sequence[str]] = _NO_SPARES,
        moved: Mapping[int, str] = _NOT_MOVED,
        priority: int = 0,
        looks_first: bool = False,
    ) -> None:
        self._dag = dag
        self._slots = slots
        self._priority = priority
        self.searches = slots.searches
        """Whether `call_ended` is to be called: the run searches for the width of its backends."""
        self._paths = dag.priorities()
        """The longest remaining path of each task, by position."""
        self._changed: Callable[[str, Account], None] | None = None
        self._queues: dict[str, ReadyQueue] = {}
        self.rates = RunRates(self, self._gates, priority)
        """The calls of this run on backends with rate limits."""
        self._queue_of = [self._queue(name) for name in backends]
        self._spares = {self._queue(name): [*map(self._queue, others)] for name, others in spares.items()}
        """The queues of the spares of a backend, by its queue."""
        self._own: dict[int, ReadyQueue] = {}
        """The queue of the own backend of each task that has a slot of another one: of a spare, or, after `move`, of
        the backend of its judge, for which it may still wait.
        """
        self._asking_credit: dict[int, str] = {}
        """The tasks that ask a person to top up the account of a backend, each with its name."""
        self.closings: list[tuple[str, int, float]] = []
        """The backends that were paused, each with the task for which, and the time to `reopen` it."""
        self._tuning: Tuning | None = None
        self._offer: tuple[ReadyQueue, int] | None = None
        """While the run is offered a slot: the tasks that may take it, and the number of slots in use with it."""
        self._slotless: deque[int] = deque()
        """The tasks that `take_slotless` returns, in order."""
        self._dropped: set[int] = set()
        self._admitted: set[int] = set()
        """Tasks with a condition that is true."""
        self._unlooked: list[tuple[float, int]] | None = [] if looks_first else None
        """The entries in the heaps of the tasks to be looked at; None in a run that takes no answers over."""
        self._missing = [len(dag.needed(position)) for position in range(len(dag))]
        for position in dag.behind_rows:
            self._missing[position] += 1
        self._joins = Joins(dag, self._missing)
        self._judged: set[int] = set()
        """The tasks that have a slot of their judge's backend, or wait for one (`move`)."""
        self._moving: set[int] = set()
        """Those that wait."""
        self.taken = 0
        """The number of tasks holding a slot."""
        self.aside = 0
        """The number of tasks waiting for `requeue` or `end_keep_open`."""
        self.later: list[int] = []
        """Tasks set aside at the start."""
        for position in held:
            if position in moved:
                self._move_to(position, self._queue(moved[position]))
            self._queue_of[position].take(None)
            self.taken += 1
        self._load(statuses or [TaskStatus.PENDING] * len(dag), later)

    def _queue(self, name: str) -> ReadyQueue:
        queue = self._queues.get(name)
        if queue is None:
            account, slots = self._slots.account_of(name), self._slots.slots(name)
            queue = ReadyQueue(self, name, self._slots, slots, account, self._throttling_changed, self._priority)
            self._queues[name] = queue
        return queue

    def widen(self, concurrency: int) -> None:
        """Raise the number of slots of this run, or of all runs that share the slots, to `concurrency`."""
        self._slots.widen(concurrency)
        self._slots.offer(self, self._priority)

    def tune(self, tuning: Tuning) -> None:
        """Start tasks as a person says. Running ones go on, and so do those that wait for their judge's slot, once
        they may. Slots that several runs share become no more.
        """
        self._tuning = tuning
        if not self._slots.shared:
            for name, slots in tuning.slots.items():
                self._slots.raise_to(slots, name)
        for queue in self._queues.values():
            queue.account.queue.pop(self, None)
            if queue.account.gate is not None:
                queue.account.gate.leave(self)
        self._slots.offer(self, self._priority)

    def _tuned(self, tuning: Tuning) -> list[ReadyQueue]:
        """Return the queues of the backends on which a person lets a further task start."""
        slots = tuning.slots
        if self.taken >= slots.get(None, inf):
            return []
        queues = self._queues.items()
        return [one for name, one in queues if one.taken < slots.get(name, inf) and not self._is_paused(name)]

    def _is_paused(self, name: str) -> bool:
        """Return whether a person lets no further task of the backend start."""
        return self._tuning is not None and self._tuning.pause_of(name) is not None

    def watch(self, changed: Callable[[str, Account], None]) -> None:
        """Call `changed` with the name of each backend that is throttled now, and later whenever it is paused, opened,
        or has all its slots again.
        """
        self._changed = changed
        for name, queue in self._queues.items():
            if queue.account.pause is not None:
                changed(name, queue.account)

    def slots_of(self, name: str) -> tuple[int, int]:
        """Return the slots of the run's backend `name` for all runs: how many now, and how many without throttling."""
        account = self._queues[name].account
        return account.slots, account.total

    def _throttling_changed(self, name: str, account: Account) -> None:
        if self._changed is not None:
            self._changed(name, account)

    def extend(self, backends: Sequence[str], statuses: Sequence[TaskStatus]) -> None:
        """Add the tasks appended to the graph. `backends` names the backends of the new tasks; `statuses` covers all
        tasks.
        """
        start = len(self._missing)
        self._paths += self._dag.priorities(start, self._paths)
        self._queue_of += [self._queue(name) for name in backends]
        for position in range(start, len(self._dag)):
            self._missing.append(self._count(position, statuses))
            if not self._missing[position]:
                self._push(position)
        for position in self._joins.enter(start, statuses):
            self._push(position)

    def end_rows(self) -> None:
        """Let the tasks start that wait until all rows are done."""
        self._decrement(self._dag.behind_rows)

    @property
    def eligible(self) -> int:
        """The number of tasks that wait for nothing but a slot."""
        return sum(len(queue.heap) for queue in self._queues.values()) + len(self._unlooked or ())

    @property
    def slots(self) -> int:
        """The number of tasks that may run at once."""
        return self._slots.concurrency

    def is_undecided(self, position: int) -> bool:
        """Return whether the condition of the task, if any, has still to be decided."""
        return self._dag.tasks[position].when is not None and position not in self._admitted

    def join(self, position: int, parts: int) -> None:
        """Make the expanded task at `position` wait for its `parts` new parts. Tasks paired with it stop waiting for
        it.
        """
        self._missing[position] = parts
        if not parts:
            self._push(position)
        for ready in self._joins.wait_for_parts(position, parts) if parts else ():
            self._push(ready)
        self._decrement(self._joins.paired(position))

    def take_slotless(self) -> int | None:
        """Return the next ready `for_each` task or task with an undecided condition; None if there is none. The task
        holds no slot.
        """
        if not self._slotless:
            return None
        position = self._slotless.popleft()
        self._discard_dropped_slotless()
        return position

    def admit(self, position: int) -> None:
        """Make the task at `position` eligible, after `take_slotless` and the decision that its condition is true. The
        task stays admitted.
        """
        self._admitted.add(position)
        self._push(position)

    def look(self) -> list[tuple[float, int]]:
        """Return the tasks to be looked at in the order of their starts, each position behind its rank. For each
        follows `enter` or `keep_open`.
        """
        if not self._unlooked:
            return []
        ready = sorted(self._unlooked)
        self._unlooked.clear()
        return ready

    def enter(self, rank: float, position: int) -> None:
        """Make a task eligible that has no answer to take over."""
        heapq.heappush(self._queue_of[position].heap, (rank, position))

    def take(self) -> int | None:
        """Return the next task to start and assign a slot to it. Return None if no task is eligible or no slot is
        free.
        """
        best = self._best()
        if best is None:
            return None
        source = best
        if self._spares and (best := self._serving(source)) is not source:
            self._move_to(source.heap[0][1], best)
        best.take(source.heap[0][1])
        self.taken += 1
        if best.account.gate is not None:
            self.rates.reserve(best.account.gate, source.heap[0][1])
        position = heapq.heappop(source.heap)[1]
        if self._moving:
            self._moving.discard(position)
        if self._dropped:
            self._discard_dropped(source.heap)
        return position

    def spare_of(self, position: int) -> str | None:
        """Return the spare backend of which the task has a slot; None for a task with a slot of its own backend."""
        return self._queue_of[position].name if position in self._own and position not in self._judged else None

    def _move_to(self, position: int, queue: ReadyQueue) -> None:
        """Let the task, which takes a slot of `queue`, be that queue's as long as it has the slot."""
        self._own[position], self._queue_of[position] = self._queue_of[position], queue

    def _serving(self, queue: ReadyQueue) -> ReadyQueue:
        """Return the queue whose slots the ready tasks of `queue` take now: its own, unless a limit closes the backend
        and one of the spares is not closed. A task that waits for its judge waits for this judge.
        """
        if not queue.account.is_closed or (self._moving and queue.heap and queue.heap[0][1] in self._moving):
            return queue
        return next((spare for spare in self._spares.get(queue, ()) if not spare.account.is_closed), queue)

    def _best(self) -> ReadyQueue | None:
        """Return the queue with the task to start now; None if there is none."""
        taken = self._slots.taken
        if taken >= self._slots.concurrency or (self._offer is not None and taken >= self._offer[1]):
            return None
        best: ReadyQueue | None = None
        tuned = None if self._tuning is None else self._tuned(self._tuning)
        for name, queue in self._queues.items():
            if not queue.heap:
                continue
            serving = self._serving(queue) if self._spares else queue
            if not serving.may_take or (best is not None and best.heap[0] < queue.heap[0]):
                continue
            if self._offer is not None and serving is not self._offer[0]:
                continue
            if tuned is not None and (serving not in tuned or self._is_paused(name)):
                continue
            gate = serving.account.gate
            best = queue if gate is None or self.rates.admitted(gate, queue.heap[0][1]) else best
        return best

    def enqueue(self, take: Callable[[], None]) -> bool:
        """Request slots held by other runs, backends that refusals have closed or narrowed, and turns at the limits of
        rate. Return whether eligible tasks wait for any of them; `take` is called when one of them may start.
        """
        if self._slots.passed_over:  # this run has taken what it can use
            self._slots.offer(self)
        waits = False
        queues: Iterable[ReadyQueue] = self._queues.values()
        if self._tuning is not None:
            waits = any(queue.heap for queue in queues)
            queues = self._tuned(self._tuning)
        for queue in queues:
            waits = self._request(queue, queue.heap, take) or waits
        for queue in self._spares:
            if queue.heap and (spare := self._serving(queue)) is not queue:
                waits = self._request(spare, queue.heap, take) or waits
        return waits

    def _request(self, queue: ReadyQueue, heap: Sequence[tuple[float, int]], take: Callable[[], None]) -> bool:
        """Request a slot of `queue` for a task in `heap`. Return whether one waits for it."""
        gate = queue.account.gate
        joins = gate is not None and self._join(queue, gate, heap, take)
        if not heap or (queue.account.is_open and not self._slots.shared):
            return joins
        queue.wait(partial(self._offered, queue, take))
        return True

    def _gates(self) -> dict[str, RateGate]:
        """Return the rate limits of the run's backends, by name."""
        queues = self._queues.items()
        return {name: queue.account.gate for name, queue in queues if queue.account.gate is not None}

    def lower(self, position: int, allowance: Allowance) -> None:
        """Take the limits into account that the server reports to the task at `position`."""
        gate = self._queue_of[position].account.gate
        if gate is not None:
            gate.lower(allowance)

    def _join(
        self, queue: ReadyQueue, gate: RateGate, heap: Sequence[tuple[float, int]], take: Callable[[], None]
    ) -> bool:
        """Wait for a turn at the backend's rate limit if the limit is all that keeps the tasks in `heap`. Return
        whether it is.
        """
        if not heap or not queue.has_room or not queue.account.is_open:
            gate.leave(self)
            return False
        slots, most = queue.slots, self._slots.concurrency - self._slots.taken
        self.rates.join(gate, heap[0][1], take, int(min(len(heap), most, slots.ceiling - slots.taken)))
        return True

    def _offered(self, queue: ReadyQueue, take: Callable[[], None]) -> bool:
        """Call `take`, which may take one slot, for a task of `queue`. Return whether it has."""
        before = self._slots.taken
        self._offer = queue, before + 1
        try:
            if self._best() is not None:
                del queue.account.queue[self]
                take()
            elif not queue.heap and not self._spares:
                del queue.account.queue[self]  # all its tasks have been started meanwhile
            elif queue.account.gate is not None:
                self._join(queue, queue.account.gate, queue.heap, take)
        finally:
            self._offer = None
        return self._slots.taken > before

    def release_all(self) -> None:
        """Release all slots and requests at the end of the run's execution."""
        for queue in self._queues.values():
            queue.release_all()
        self._slots.offer(self)
        for queue in self._queues.values():
            queue.leave()

    def call_ended(self, position: int, took: float, now: float) -> None:
        """Take into account that the call of the started task has succeeded, after `took` seconds, at the monotonic
        time `now`. `finish` follows.
        """
        if position not in self._judged:  # it has waited for the slot of its judge
            self._queue_of[position].account.call_ended(took, now)

    def finish(self, position: int, status: TaskStatus) -> None:
        """Release the slot of the started task at `position`, ended as `status`, and unlock its dependents."""
        account = self._queue_of[position].account
        self._free(position)
        if status is TaskStatus.COMPLETED:
            account.complete()
        self._slots.offer(self, self._priority)
        self.finish_without_slot(position, status)

    def finish_without_slot(self, position: int, status: TaskStatus) -> None:
        """Record the end as `status` of a task without a slot, and unlock its dependents."""
        if satisfies(self._dag.tasks[position], status):
            self._decrement(self._joins.without(self._joins.waiting(position)))
        for ready in self._joins.end(position, status):
            self._push(ready)

    def _decrement(self, waiting: Sequence[int]) -> None:
        for position in waiting:
            self._missing[position] -= 1
            if not self._missing[position]:
                self._push(position)

    def move(self, position: int, name: str) -> bool:
        """Let the started task, whose answer is there, give its slot back and wait for one of the backend `name`, on
        which the answer is judged: `take` returns the task once more. Return False, with no effect, if the slot that
        the task has serves.
        """
        queue = self._queue(name)
        if queue is self._queue_of[position] and queue.account.gate is None:
            return False
        answered = self._queue_of[position].account
        self._free(position)
        answered.complete()
        self._move_to(position, queue)
        self._judged.add(position)
        self._moving.add(position)
        heapq.heappush(queue.heap, (-self._paths[position], position))
        self._slots.offer(self, self._priority)
        return True

    def park(self, position: int) -> None:
        """Release the slot of a started task that waits for a person. The run does not wait for the task."""
        self._free(position)
        self._slots.offer(self, self._priority)

    def unpark(self, position: int, statuses: Sequence[TaskStatus]) -> None:
        """Make a parked task eligible after the person's answer, unless a required task has to run again first."""
        self._missing[position] = self._count(position, statuses)
        if not self._missing[position]:
            self._push(position, had_begun=True)

    def keep_open(self) -> None:
        """Let the run wait for a parked task that is about to be answered, or one that takes an answer over, until
        `end_keep_open`.
        """
        self.aside += 1

    def end_keep_open(self) -> None:
        """Withdraw `keep_open`."""
        self.aside -= 1

    def drop(self, position: int) -> None:
        """Exclude the task, which holds no slot, from ever starting."""
        self._missing[position] = -1
        self._dropped.add(position)
        self._discard_dropped(self._queue_of[position].heap)
        self._discard_dropped_slotless()
        for ready in self._joins.end(position, TaskStatus.CANCELLED):
            self._push(ready)

    def set_aside(self, position: int) -> None:
        """Release the slot of the started task at `position`. The task waits for `requeue`."""
        self.aside += 1
        self.park(position)

    def throttle(self, position: int, pause: Pause) -> None:
        """Record that the backend refused the call of the started task. If that pauses the backend, tell the processes
        that share its account, and add it to `closings`. `set_aside` follows.
        """
        queue = self._queue_of[position]
        account, before = queue.account, queue.account.pause
        is_probe = account.probing and account.probe == (self, position)
        if account.throttle((self, position), pause):
            self.closings.append((queue.name, position, pause.until))
        if account.gate is None:
            return
        if account.throttled and account.pause is not None and account.pause != before:
            self.rates.close(account.gate, account.pause.until, probe=account.pause.probe)
        elif is_probe:
            self.rates.end_probe(account.gate, accepted=False)

    def others_open_at(self, position: int) -> float:
        """Return the Unix time from which one of the other backends of the started task is open, the past if one is;
        infinite if there is none, or none with credit.
        """
        called = self._queue_of[position]
        own = self._own.get(position, called)
        others = (one.account for one in (own, *self._spares.get(own, ())) if one is not called)
        return min(map(_end_of_limit, others), default=inf)

    def close(self, name: str, until: float | None, cause: str) -> None:
        """Close a backend, until `reopen`, that a limit has closed in an earlier process. If that time has passed
        (None), let a task look first whether the limit has ended.
        """
        queue = self._queue(name)
        account = queue.account
        if account.taken > queue.taken:  # calls of other runs say more about a limit than what is stored
            return
        if until is None:
            account.probing = True
        else:
            account.close_for((self, _NOBODY), Pause(until, cause, probe=True))
            self.closings.append((name, _NOBODY, until))
        account.announce()

    def reopen(self, name: str, position: int) -> None:
        """Let tasks start again on the backend, as far as the task at `position` has paused it."""
        if self._queues[name].account.reopen_for((self, position)):
            self._slots.offer(self, self._priority)

    def close_for_person(self, position: int, name: str, pause: Pause) -> None:
        """Close the backend until `end_person_wait` of the task at `position`, which asks a person."""
        account = self._queues[name].account
        account.close_for((self, position), pause)
        self._asking_credit[position] = name
        account.announce()

    def asks_for_credit(self, name: str) -> bool:
        """Return whether a task of the run asks a person to top up the account of the backend."""
        return name in self._asking_credit.values()

    def end_person_wait(self, position: int) -> None:
        """Let tasks start again on the backend for whose credit the task at `position` has asked, if it has."""
        if (name := self._asking_credit.pop(position, None)) is not None:
            self.reopen(name, position)

    def refuse_for_good(self, position: int) -> None:
        """Record that the backend refused the call of a started task that is not retried."""
        self.withdraw(position)
        self._queue_of[position].account.refuse((self, position))

    def is_probe(self, position: int) -> bool:
        """Return whether the call of the started task shows whether its backend takes calls again."""
        return self._queue_of[position].is_probe(position)

    def accept(self, position: int) -> bool:
        """Let further tasks start on the backend, which has accepted the call of the started task. Return False, with
        no effect, if the task is not a probe.
        """
        queue = self._queue_of[position]
        if not queue.is_probe(position):
            return False
        self._end_probe(queue.account, accepted=True)
        self._slots.offer(self, self._priority)
        return True

    def _end_probe(self, account: Account, *, accepted: bool) -> None:
        if account.probing and account.gate is not None:
            self.rates.end_probe(account.gate, accepted=accepted)
        if accepted:
            account.end_probe()
        else:
            account.probe = None

    def withdraw(self, position: int) -> None:
        """Let another task be the probe of the backend, if the task at `position` is: its call ended, and told nothing.
        The task keeps its slot.
        """
        queue = self._queue_of[position]
        if queue.is_probe(position):
            self._end_probe(queue.account, accepted=False)
            self._slots.offer(self, self._priority)

    def spare(self, position: int) -> None:
        """Give back what the started task has beside its slot, because its call is not made: its share of the limits of
        rate, and its place as the probe of the backend. `set_aside` or `park` follows.
        """
        self.rates.give_back(position)
        self.withdraw(position)

    def refusals(self, position: int) -> tuple[int, int]:
        """Return how many calls the backend of the task has refused since it last completed one, and how often it was
        paused since.
        """
        account = self._queue_of[position].account
        return account.refusals, account.pauses

    def requeue(self, position: int) -> None:
        """Make a task that was set aside eligible again, unless it was dropped meanwhile."""
        self.aside -= 1
        if position not in self._dropped:
            self._push(position)

    def waits_until(self, ends: Mapping[int, float]) -> float | None:
        """Return the Unix time at which the next task may start, if everything that is left to run waits for a time:
        for the end of its own delay (`ends`, by position), or until its backend may be called again. None if not,
        and if everything waits for a person.
        """
        if self.taken or self.aside != len(ends) or self._slotless:
            return None
        times: list[float] = []
        for queue in self._queues.values():
            if queue.heap:
                if (opens := self._opens_at(queue)) is None:
                    return None
                times.append(opens)
        for position, end in ends.items():
            times.append(max(end, self._opens_at(self._queue_of[position]) or end))
        return min((time for time in times if time != inf), default=None)

    def _opens_at(self, queue: ReadyQueue) -> float | None:
        """Return the Unix time at which the backend of `queue` or one of its spares may be called again, infinite if a
        person decides about it; None if one may be called now.
        """
        times = [one.account.opens_at for one in (queue, *self._spares.get(queue, ()))]
        opening_times = [time for time in times if time is not None]
        return min(opening_times) if len(opening_times) == len(times) else None

    @property
    def exhausted(self) -> bool:
        """True at the end of the run: no task holds a slot, is set aside, or is eligible."""
        if self.taken or self.aside or self._slotless or self._unlooked:
            return False
        return not any(queue.heap and not self._waits_for_person(queue) for queue in self._queues.values())

    def _waits_for_person(self, queue: ReadyQueue) -> bool:
        """Return whether the tasks of `queue` can only start once a person has answered a task of this run."""
        queues = [self._queues[name] for name in self._asking_credit.values()]
        return all(one in queues for one in (queue, *self._spares.get(queue, ())))

    def _load(self, statuses: Sequence[TaskStatus], later: Collection[int]) -> None:
        self._joins.enter(0, statuses)
        for position, status in enumerate(statuses):
            if status is not TaskStatus.PENDING and satisfies(self._dag.tasks[position], status):
                for waiting in self._joins.without(self._dag.needed_by(position)):
                    self._missing[waiting] -= 1
        for position, status in enumerate(statuses):
            if self._dag.tasks[position].for_each is not None:
                self._missing[position] = self._count(position, statuses)
            if status is not TaskStatus.PENDING:
                # Dependencies may run again, but this task does not: the count must never reach zero.
                self._missing[position] = -1
            elif not self._missing[position]:
                if position in later:
                    self.later.append(position)
                else:
                    self._push(position)
        self.aside += len(self.later)

    def _count(self, position: int, statuses: Sequence[TaskStatus]) -> int:
        """Return the number of tasks that the task at `position` waits for."""
        if self._dag.tasks[position].join != "all" or position in self._joins.joined:
            return self._joins.missing(position)
        tasks, waits = self._dag.tasks, self._joins.waits
        needed = [before for before in self._dag.needed(position) if not satisfies(tasks[before], statuses[before])]
        return sum(waits(position, before) for before in needed)

    def _push(self, position: int, *, had_begun: bool = False) -> None:
        task = self._dag.tasks[position]
        if task.gathers or self.is_undecided(position):
            self._slotless.append(position)
            return
        path = self._paths[position]
        if had_begun or task.continues is not None:
            path += _UNDER_WAY
        if self._unlooked is None or had_begun:
            heapq.heappush(self._queue_of[position].heap, (-path, position))
        else:
            self._unlooked.append((-path, position))

    def _discard_dropped(self, heap: list[tuple[float, int]]) -> None:
        while heap and heap[0][1] in self._dropped:
            heapq.heappop(heap)

    def _discard_dropped_slotless(self) -> None:
        while self._slotless and self._slotless[0] in self._dropped:
            self._slotless.popleft()

    def _free(self, position: int) -> None:
        """Release the slot of the task, or the wait for one of its judge's. The task is its own backend's again."""
        queue = self._queue_of[position]
        if self._own and position in self._own:
            self._queue_of[position] = self._own.pop(position)
            self._judged.discard(position)
        if self._moving and position in self._moving:
            self._moving.discard(position)
            queue.heap.remove((-self._paths[position], position))
            heapq.heapify(queue.heap)
            self._discard_dropped(queue.heap)
            return
        queue.free()
        self.taken -= 1
        if queue.is_probe(position):
            self._end_probe(queue.account, accepted=True)


def _end_of_limit(account: Account) -> float:
    """Return the Unix time at which the limit that closes the backend ends; the past if none closes it, infinite if it
    has no credit left.
    """
    pause = account.pause
    if pause is None or not account.is_closed:
        return 0.0
    return inf if pause.no_credit else pause.until


@dataclass(slots=True)
class _Joined:
    """The dependencies of a task with `join`."""

    join: Join | Literal["gathered"]
    """`gathered`: once all are done; never, if not, but not before all have ended."""
    unended: set[int]
    """Those that have not ended, and may still start."""
    completed: int = 0
    dead: int = 0
    """The number of those that failed hard, were cancelled, or can never start."""

    @property
    def starts(self) -> bool | None:
        if self.join == "gathered":
            return None if self.unended else not self.dead
        return may_start(self.join, completed=self.completed, unended=len(self.unended), dead=self.dead)


class Joins:
    """Who waits for whom in the run of `dag`, where that is not just all that a task needs.

    The tasks of a pair of `for_each` tasks do not wait for each other, only their parts do. The tasks with `join` other
    than `all`, and those that gather their parts (a call goes on once all have ended), have 1 in `missing` each until
    they may start, then 0.

    Whether a task can never start is followed only in a graph with a join or a call: for all others it makes no
    difference.
    """

    def __init__(self, dag: DAG, missing: list[int]) -> None:
        self._dag = dag
        self._missing = missing
        self.joined: dict[int, _Joined] = {}
        self._follows = False
        self._dead: set[int] = set()

    def waits(self, position: int, other: int) -> bool:
        """Return whether the task at `position` itself waits for `other`, a task it needs. For a pair, only the parts
        wait.
        """
        return not self._dag.pairs_up(position, other)

    def waiting(self, position: int) -> Sequence[int]:
        """Return the positions of the tasks that themselves wait for the task at `position`."""
        needed_by = self._dag.needed_by(position)
        if self._dag.tasks[position].for_each is None:
            return needed_by
        return [after for after in needed_by if self.waits(after, position)]

    def paired(self, position: int) -> list[int]:
        """Return the positions of the dependents of the expanded task at `position` that do not wait for the task
        itself.
        """
        return [after for after in self._dag.needed_by(position) if not self.waits(after, position)]

    def without(self, positions: Sequence[int]) -> Sequence[int]:
        """Return the positions of the tasks that start after all of their dependencies."""
        return [each for each in positions if each not in self.joined] if self.joined else positions

    def missing(self, position: int) -> int:
        """Return 0 if the task with `join` at `position` may start, otherwise 1."""
        joined = self.joined.get(position)
        return 0 if joined is not None and joined.starts else 1

    def enter(self, start: int, statuses: Sequence[TaskStatus]) -> list[int]:
        """Enter the tasks from position `start` on. Return those with `join` that may start."""
        is_first, tasks = not self._follows, self._dag.tasks
        self._follows = self._follows or any(
            tasks[position].join != "all" or tasks[position].call is not None for position in range(start, len(tasks))
        )
        for position in range(start, len(tasks)) if self._follows else ():
            task = tasks[position]
            if self._dag.is_expanded(position):
                parts = [one for one in self._dag.needed(position) if self.waits(position, one)]
                if task.join != "all":  # which has let it start
                    parts = [one for one in parts if tasks[one].id.startswith(f"{task.id}.")]
                self._gather(position, parts)
            elif task.join != "all":
                self.joined[position] = _Joined(task.join, set(self._dag.dependencies[position]))
                self._missing[position] = 1
        if not self._follows:
            return []
        if start == 0:
            for position, status in enumerate(statuses):
                if status is not TaskStatus.PENDING:
                    self._missing[position] = -1  # what has begun is not told that it can never start
        edges: list[tuple[int, int, bool]] = []
        for position, status in enumerate(statuses) if is_first else ():
            if status in TASK_DONE:
                edges += self._edges(position, status)
        for position in () if is_first else range(start, len(self._dag)):
            for earlier in self._dag.needed(position):
                if statuses[earlier] in TASK_DONE or earlier in self._dead:
                    edges.append((position, earlier, statuses[earlier] is TaskStatus.COMPLETED))
        return self._settle(edges)

    def wait_for_parts(self, position: int, parts: int) -> list[int]:
        """Let the expanded task at `position` wait for its parts, the last ones in the graph. Return the tasks that may
        start now, as none of the parts can ever start.
        """
        if not self._follows:
            return []
        self._gather(position, range(len(self._dag) - parts, len(self._dag)))
        if self.joined[position].starts is not False:
            return []
        self._dead.add(position)
        return self._settle([(after, position, False) for after in self.waiting(position)])

    def _gather(self, position: int, parts: Collection[int]) -> None:
        kind: Literal["done", "gathered"] = "done" if self._dag.tasks[position].calls else "gathered"
        dead = self._dead.intersection(parts)
        self.joined[position] = _Joined(kind, {*parts} - dead, dead=len(dead))
        self._missing[position] = 1

    def end(self, position: int, status: TaskStatus) -> list[int]:
        """Take the end of a task into account. Return the tasks with `join` that may start now."""
        return self._settle(self._edges(position, status)) if self._follows else []

    def _edges(self, position: int, status: TaskStatus) -> list[tuple[int, int, bool]]:
        if not satisfies(self._dag.tasks[position], status):
            self._dead.add(position)
        is_completed = status is TaskStatus.COMPLETED
        return [(after, position, is_completed) for after in self.waiting(position)]

    def _settle(self, edges: list[tuple[int, int, bool]]) -> list[int]:
        """Tell each task of a dependency that has ended, completed or not, or can never start: `edges` are the two, and
        whether it completed. Return the tasks with `join` that may start now.
        """
        ready: list[int] = []
        while edges:
            position, earlier, is_completed = edges.pop()
            joined, is_dead = self.joined.get(position), earlier in self._dead
            if joined is not None:
                if earlier not in joined.unended:
                    continue  # named further upstream
                joined.unended.discard(earlier)
                joined.completed += is_completed
                joined.dead += is_dead
            starts = (False if is_dead else None) if joined is None else joined.starts
            if self._missing[position] <= 0 or position in self._dead:
                continue
            if starts:
                self._missing[position] = 0
                ready.append(position)
            elif starts is False:
                self._dead.add(position)
                edges += [(after, position, False) for after in self.waiting(position)]
        return ready


class RunRates:
    """The calls of `run` on backends with rate limits. `gates` returns the gates of the run's backends, by name."""

    def __init__(self, run: object, gates: Callable[[], Mapping[str, RateGate]], priority: int = 0) -> None:
        self._run = run
        self._priority = priority
        self.gates = gates
        self.size_of: Callable[[int], int] = lambda _position: 0
        """Returns the length in characters of a task's prompt and history, by position."""
        self.usd_of: Callable[[int, str], float] = lambda _position, _name: 0.0
        """Returns the most that a call of a task costs, in US dollars, by position and backend."""
        self.timer: Timer | None = None
        """The run's timer. None in a preview, which calls no backend, and once the run has ended."""
        self._sizes: dict[int, dict[RateGate, CallSize]] = defaultdict(dict)
        """The sizes of the next calls, by position: the gates of a backend and of its spares ask for them."""
        self._unsettled: deque[tuple[Ledger, Reservation, float]] = deque()
        """The dollars reserved for calls that have ended, each with what the call cost, of which no store knows yet."""
        self.reserved: dict[int, tuple[RateGate, Reservation]] = {}
        """The shares of the calls under way, by position."""

    def admitted(self, gate: RateGate, position: int) -> bool:
        """Return whether the task at `position` may begin its call now."""
        return gate.admits(self._run, self._size(gate, position))

    def reserve(self, gate: RateGate, position: int) -> None:
        """Take the share of the call of the admitted task at `position`."""
        self.reserved[position] = gate, gate.reserve(self._run, self._size(gate, position))
        self._sizes.pop(position, None)

    def join(self, gate: RateGate, position: int, take: Callable[[], None], calls: int = 1) -> None:
        """Call `take` when the task at `position`, the first of `calls`, may begin its call."""
        assert self.timer is not None
        gate.join(self._run, self._size(gate, position), take, self.timer, calls, self._priority)

    def close(self, gate: RateGate, until: float, *, probe: bool) -> None:
        """Tell the other processes that keep the limit too that the backend takes no calls until this Unix time, and
        then a `probe` first.
        """
        if gate.ledger is not None and self.timer is not None:
            self.timer(partial(gate.ledger.close, until, probe=probe), lambda: None)

    def end_probe(self, gate: RateGate, *, accepted: bool) -> None:
        """Tell the other processes of the end of a probe."""
        if gate.ledger is not None and self.timer is not None:
            self.timer(partial(gate.ledger.end_probe, accepted=accepted), lambda: None)

    def settle(self, position: int, input_tokens: int, output_tokens: int, usd: float = 0.0) -> None:
        """Replace the estimate of the call that ended by its real usage."""
        gate, reservation = self.reserved.pop(position)
        gate.settle(reservation, input_tokens, output_tokens)
        self._settle_money(gate, reservation, usd)

    def give_back(self, position: int) -> None:
        """Return the share, if any, of a call that was never made."""
        if position in self.reserved:
            gate, reservation = self.reserved.pop(position)
            gate.give_back(reservation)
            self._settle_money(gate, reservation, 0.0)

    def _settle_money(self, gate: RateGate, reservation: Reservation, usd: float) -> None:
        if gate.ledger is not None and gate.limiter.counts_money:
            self._unsettled.append((gate.ledger, reservation, usd))
            if self.timer is not None:
                self.timer(self.settle_money, lambda: None)

    async def settle_money(self) -> None:
        """Let the stores know what the calls that have ended cost: at the end of a run those that its timer missed."""
        while self._unsettled:
            ledger, reservation, usd = self._unsettled.popleft()
            await ledger.settle(reservation, usd)

    def leave(self) -> None:
        """Leave all lines. What was granted meanwhile is still to be given back: see `settle_money`."""
        for gate in self.gates().values():
            gate.leave(self._run)
            if gate.ledger is not None and (unused := gate.take_unused_money()) is not None:
                self._unsettled.append((gate.ledger, unused, 0.0))

    def waiting(self) -> list[str]:
        """Return the backends at whose rate limits tasks of the run wait."""
        gates = self.gates()
        return [name for name, gate in gates.items() if gate.makes_wait(self._run)] if gates else []

    def _size(self, gate: RateGate, position: int) -> CallSize:
        limiter = gate.limiter
        if not (limiter.counts_tokens or limiter.counts_money):
            return CallSize(0)
        sizes = self._sizes[position]
        if gate not in sizes:
            name = next(name for name, one in self.gates().items() if one is gate) if limiter.counts_money else ""
            # A call that may cost more than the whole limit is made on a day without any other.
            usd = min(self.usd_of(position, name), limiter.limits.usd_per_day or inf) if limiter.counts_money else 0.0
            sizes[gate] = CallSize(self.size_of(position) if limiter.counts_tokens else 0, usd)
        return sizes[gate]
