"""`Schedule`: which task may start now, and what an outcome unlocks. Pure: no await, no clock, no I/O.

Every task is in exactly one place: missing dependencies, eligible in its backend's heap, holding a place (started),
set aside (a retry that waits its turn, a question that somebody is answering), parked (it waits for a person), or done.
Only `take` gives out places and only `finish`, `set_aside` and `park` free them, so the limits hold by construction.
All steps are O(log n), but `finish` is linear in the task's dependents. What is dropped stays in its heap until it is
on top: from there it goes at once, so a heap that is not empty has a task to give out.

A task with `for_each` calls no backend, so it needs no place: it waits in a line of its own (`take_gathering`), first
to be unfolded into its parts, and then, when they are done, to gather their results.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from plait.runner.domain.dag import DAG
from plait.runner.domain.status import TASK_DONE, TaskStatus
from plait.runner.domain.task import FailureMode
from plait.runner.scheduling.for_each import Gathering
from plait.runner.scheduling.slots import Lane, Places


@dataclass(frozen=True, slots=True)
class Outset:
    """How the tasks of a run stand at the start: their `statuses` (all pending if there are none); the positions of
    those that run with nothing beside them, and after everything else that can run (`alone`); of those that are set
    aside though they could start (`later`), and of those among them whose backend asked for it (`throttled`); and of
    those that hold a place already (`held`), which may be more than there are: then nothing starts before enough of
    them have ended.
    """

    statuses: Sequence[TaskStatus] = ()
    alone: Collection[int] = ()
    later: Collection[int] = ()
    throttled: Collection[int] = ()
    held: Collection[int] = ()


AFRESH = Outset()
"""No task has been started yet."""


class Schedule:
    """Gives out tasks by position in the graph: the one with the longest remaining path first, ties by declaration.

    `backends` names the backend of each task; `places` are its own, or those that it shares with other runs.
    """

    def __init__(
        self,
        dag: DAG,
        backends: Sequence[str],
        places: Places,
        outset: Outset = AFRESH,
    ) -> None:
        self._dag = dag
        self._places = places
        self._priorities = dag.priorities()
        self._lanes: dict[str, Lane] = {}
        self._lane_of = [self._lane(name) for name in backends]
        self._gathering = Gathering(dag)
        self._alone = frozenset(outset.alone)
        self._alone_heap: list[tuple[float, int]] = []
        self._dropped: set[int] = set()
        self._undisturbed: set[int] = set()
        """Tasks that hold their places, and are to run alone: one, or several that were held at the start."""
        self._missing = [len(dag.needed(position)) for position in range(len(dag))]
        self.taken = 0
        """How many tasks hold a place."""
        self.aside = 0
        """How many tasks wait for `requeue` or `let_go`."""
        self.later: list[int] = []
        """Tasks that were set aside at the start."""
        self._load(outset.statuses or [TaskStatus.PENDING] * len(dag), outset)
        for position in outset.held:
            self._hold(position)

    def _lane(self, name: str) -> Lane:
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane(self._places.gate(name), self._places)
        return lane

    def extend(self, backends: Sequence[str], statuses: Sequence[TaskStatus]) -> None:
        """The graph has grown: `backends` are those of the new tasks, `statuses` those of all."""
        start = len(self._missing)
        self._priorities += self._dag.priorities(start, self._priorities)
        self._lane_of += [self._lane(name) for name in backends]
        for position in range(start, len(self._dag)):
            self._missing.append(self._count(position, statuses))
            if not self._missing[position]:
                self._push(position)

    def join(self, position: int, parts: int) -> None:
        """The task that `take_gathering` gave is unfolded, and waits for that many parts, all of them new; those that
        pair up with it wait for it no longer.
        """
        self._missing[position] = parts
        if not parts:
            self._push(position)
        self._one_less(self._gathering.paired(position))

    def put_back(self, position: int, statuses: Sequence[TaskStatus]) -> bool:
        """Have the task that `take_gathering` gave, which cannot be unfolded, wait for those that it pairs up with;
        whether there is one that is not done.
        """
        self._gathering.put_back(position)
        self._missing[position] = self._count(position, statuses)
        return self._missing[position] > 0

    def take_gathering(self) -> int | None:
        """The next task with `for_each` whose time has come; None when there is none. It holds no place."""
        return self._gathering.take(self._dropped)

    def take(self) -> int | None:
        """The next task that may start, holding a place from now on; None when there is none or no place is free."""
        best = self._best()
        if best is None:
            return self._take_alone() if self._may_take_alone else None
        best.take()
        self.taken += 1
        return self._pop(best.heap)

    def _best(self) -> Lane | None:
        if self._places.taken >= self._places.most or self._undisturbed:
            return None
        best: Lane | None = None
        for lane in self._lanes.values():
            if lane.heap and lane.may_take and (best is None or lane.heap[0] < best.heap[0]):
                best = lane
        return best

    @property
    def _may_take_alone(self) -> bool:
        if not self._alone_heap or self.taken or self._places.taken >= self._places.most:
            return False
        return self._lane_of[self._alone_heap[0][1]].may_take

    def _take_alone(self) -> int:
        position = self._pop(self._alone_heap)
        self._hold(position)
        return position

    def _hold(self, position: int) -> None:
        self._lane_of[position].take()
        self.taken += 1
        if position in self._alone:
            self._undisturbed.add(position)

    @property
    def may_take(self) -> bool:
        """Whether `take` would give a task."""
        return self._best() is not None or self._may_take_alone

    def stand_in_line(self, take: Callable[[], None]) -> bool:
        """Whether tasks are left for which other runs have the places: `take` is called when there might be one."""
        if not self._places.shared:
            return False
        waiting = [lane for lane in self._lanes.values() if lane.heap]
        if self._alone_heap:
            waiting.append(self._lane_of[self._alone_heap[0][1]])
        for lane in waiting:
            self._places.stand_in_line(self, lane.gate, partial(self._offered, lane, take))
        return bool(waiting)

    def _offered(self, lane: Lane, take: Callable[[], None]) -> None:
        if self.may_take:
            del lane.gate.line[self]
            take()
        elif not lane.heap and not self._alone_heap:
            del lane.gate.line[self]  # it has had by itself what it came for

    def give_back(self) -> None:
        """The run has been left: whatever it holds is for others, and it wants nothing more."""
        self._places.leave_lines(self)
        for lane in self._lanes.values():
            lane.give_back()
        self._places.offer(self)

    def finish(self, position: int, status: TaskStatus) -> None:
        """The started task `position` ended as `status`: its place is free, and what only waited for it is eligible."""
        self._free(position)
        gate = self._lane_of[position].gate
        if status is TaskStatus.COMPLETED:
            gate.completed()
        self._places.offer(self)
        self.settle(position, status)

    def settle(self, position: int, status: TaskStatus) -> None:
        """The task, which holds no place, ended as `status`; as `finish`."""
        if self._lets_pass(position, status):
            self._one_less(self._gathering.waiting(position))

    def _one_less(self, waiting: Sequence[int]) -> None:
        for position in waiting:
            self._missing[position] -= 1
            if not self._missing[position]:
                self._push(position)

    def park(self, position: int) -> None:
        """The started task gives its place back and waits for a person: the run does not wait for it."""
        self._free(position)
        self._places.offer(self)

    def unpark(self, position: int, statuses: Sequence[TaskStatus]) -> None:
        """The person has answered: the parked task is eligible, unless something that it needs is done once more."""
        self._missing[position] = self._count(position, statuses)
        if not self._missing[position]:
            self._push(position)

    def hold(self) -> None:
        """Somebody is about to answer for a parked task: the run waits for it, until `let_go`."""
        self.aside += 1

    def let_go(self) -> None:
        """The opposite of `hold`."""
        self.aside -= 1

    def drop(self, position: int) -> None:
        """The task, which holds no place, never will again."""
        self._missing[position] = -1
        self._dropped.add(position)
        self._uncover(self._lane_of[position].heap)
        self._uncover(self._alone_heap)
        self._gathering.uncover(self._dropped)

    def set_aside(self, position: int) -> None:
        """The started task `position` gives its place back and waits for `requeue`."""
        self._free(position)
        self.aside += 1
        self._places.offer(self)

    def throttle(self, position: int) -> None:
        """The started task's backend asks to be left alone for a while: the task is set aside, and nothing starts on
        that backend until it and all others like it are back, and then less: see `Gate`.
        """
        self._lane_of[position].throttle(position)
        self.set_aside(position)

    def closings(self, position: int) -> int:
        """See `Lane`, of the task's backend."""
        return self._lane_of[position].closings

    def requeue(self, position: int) -> None:
        """The task that was set aside is eligible again, unless it has been dropped meanwhile."""
        self.aside -= 1
        if self._lane_of[position].come_back(position):
            self._places.offer(self)
        if position not in self._dropped:
            self._push(position)

    @property
    def exhausted(self) -> bool:
        """Nothing holds a place, nothing is set aside, nothing is eligible: the run has come to its end."""
        if self.taken or self.aside or self._alone_heap or self._gathering.line:
            return False
        return not any(lane.heap for lane in self._lanes.values())

    def _load(self, statuses: Sequence[TaskStatus], outset: Outset) -> None:
        for position, status in enumerate(statuses):
            if self._has_passed(position, status):
                for waiting in self._dag.needed_by(position):
                    self._missing[waiting] -= 1
        for position, status in enumerate(statuses):
            if self._dag.tasks[position].for_each is not None:
                self._missing[position] = self._count(position, statuses)
            if status is not TaskStatus.PENDING:
                # What it depends on may be run again; it is not, so its count must never come down to zero.
                self._missing[position] = -1
            elif not self._missing[position] and position in outset.later:
                self.later.append(position)
                if position in outset.throttled:
                    self._lane_of[position].send_away(position)
            elif not self._missing[position]:
                self._push(position)
        self.aside += len(self.later)

    def _count(self, position: int, statuses: Sequence[TaskStatus]) -> int:
        """How many tasks the one at `position` waits for."""
        needed = [one for one in self._dag.needed(position) if not self._has_passed(one, statuses[one])]
        return sum(self._gathering.waits(position, one) for one in needed)

    def _has_passed(self, position: int, status: TaskStatus) -> bool:
        return status in TASK_DONE and self._lets_pass(position, status)

    def _lets_pass(self, position: int, status: TaskStatus) -> bool:
        """Whether dependents may run after `position` ended as `status`."""
        if status is TaskStatus.COMPLETED:
            return True
        if status is TaskStatus.FAILED:
            return self._dag.tasks[position].failure_mode is not FailureMode.HARD
        return status is TaskStatus.SKIPPED

    def _push(self, position: int) -> None:
        if self._dag.tasks[position].for_each is not None:
            self._gathering.line.append(position)
            return
        heap = self._alone_heap if position in self._alone else self._lane_of[position].heap
        heapq.heappush(heap, (-self._priorities[position], position))

    def _pop(self, heap: list[tuple[float, int]]) -> int:
        position = heapq.heappop(heap)[1]
        if self._dropped:
            self._uncover(heap)
        return position

    def _uncover(self, heap: list[tuple[float, int]]) -> None:
        while heap and heap[0][1] in self._dropped:
            heapq.heappop(heap)

    def _free(self, position: int) -> None:
        self._lane_of[position].free()
        self.taken -= 1
        self._undisturbed.discard(position)
