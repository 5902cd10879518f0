"""`Schedule`: which task may start now, and what an outcome unlocks. Pure: no await, no clock, no I/O.

Every task is in exactly one place: missing dependencies, eligible in its backend's heap, holding a place (started),
set aside (a retry that waits its turn), or done. Only `take` gives out places and only `finish` and `set_aside` free
them, so the limits hold by construction. All steps are O(log n), but `finish` is linear in the task's dependents.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from runner.dag import DAG
from runner.status import TASK_DONE, TaskStatus
from runner.task import FailureMode


@dataclass(slots=True)
class _Lane:
    """One backend's eligible tasks and places."""

    limit: float
    taken: int = 0
    heap: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])


class Schedule:
    """Gives out tasks by position in the graph: the one with the longest remaining path first, ties by declaration.

    `backends` names the backend of each task; `concurrency` limits all tasks together, `limits` those of one backend.
    `statuses` is where each task stands at the start (all pending for a new run). Tasks at the positions in `alone` run
    with nothing beside them, and after everything else that can run.
    """

    def __init__(
        self,
        dag: DAG,
        backends: Sequence[str],
        *,
        concurrency: int,
        limits: Mapping[str, int] | None = None,
        statuses: Sequence[TaskStatus] | None = None,
        alone: Collection[int] = (),
    ) -> None:
        self._dag = dag
        self._concurrency = concurrency
        self._keys = [-priority for priority in dag.priorities()]
        limits = limits or {}
        self._lanes = {name: _Lane(limits.get(name, float("inf"))) for name in dict.fromkeys(backends)}
        self._lane_of = [self._lanes[name] for name in backends]
        self._alone = frozenset(alone)
        self._alone_heap: list[tuple[float, int]] = []
        self._undisturbed = False
        """A task that runs alone holds its place."""
        self._missing = [len(needed) for needed in dag.dependencies]
        self.taken = 0
        """How many tasks hold a place."""
        self.aside = 0
        """How many tasks wait for `requeue`."""
        self._load(statuses or [TaskStatus.PENDING] * len(dag))

    def take(self) -> int | None:
        """The next task that may start, holding a place from now on; None when there is none or no place is free."""
        if self.taken >= self._concurrency or self._undisturbed:
            return None
        best: _Lane | None = None
        for lane in self._lanes.values():
            if lane.heap and lane.taken < lane.limit and (best is None or lane.heap[0] < best.heap[0]):
                best = lane
        if best is None:
            return self._take_alone()
        best.taken += 1
        self.taken += 1
        return heapq.heappop(best.heap)[1]

    def _take_alone(self) -> int | None:
        if self.taken or not self._alone_heap:
            return None
        position = heapq.heappop(self._alone_heap)[1]
        self._lane_of[position].taken += 1
        self.taken += 1
        self._undisturbed = True
        return position

    def finish(self, position: int, status: TaskStatus) -> None:
        """The started task `position` ended as `status`: its place is free, and what only waited for it is eligible."""
        self._free(position)
        if self._lets_pass(position, status):
            for dependent in self._dag.dependents[position]:
                self._missing[dependent] -= 1
                if not self._missing[dependent]:
                    self._push(dependent)

    def set_aside(self, position: int) -> None:
        """The started task `position` gives its place back and waits for `requeue`."""
        self._free(position)
        self.aside += 1

    def requeue(self, position: int) -> None:
        """The task that was set aside is eligible again."""
        self.aside -= 1
        self._push(position)

    @property
    def exhausted(self) -> bool:
        """Nothing holds a place, nothing is set aside, nothing is eligible: the run has come to its end."""
        waiting = self._alone_heap or any(lane.heap for lane in self._lanes.values())
        return not self.taken and not self.aside and not waiting

    def _load(self, statuses: Sequence[TaskStatus]) -> None:
        for position, status in enumerate(statuses):
            if status in TASK_DONE and self._lets_pass(position, status):
                for dependent in self._dag.dependents[position]:
                    self._missing[dependent] -= 1
        for position, status in enumerate(statuses):
            if status is not TaskStatus.PENDING:
                # What it depends on may be run again; it is not, so its count must never come down to zero.
                self._missing[position] = -1
            elif not self._missing[position]:
                self._push(position)

    def _lets_pass(self, position: int, status: TaskStatus) -> bool:
        """Whether dependents may run after `position` ended as `status`."""
        if status is TaskStatus.FAILED:
            return self._dag.tasks[position].failure_mode is not FailureMode.HARD
        return status in {TaskStatus.COMPLETED, TaskStatus.SKIPPED}

    def _push(self, position: int) -> None:
        heap = self._alone_heap if position in self._alone else self._lane_of[position].heap
        heapq.heappush(heap, (self._keys[position], position))

    def _free(self, position: int) -> None:
        self.taken -= 1
        self._lane_of[position].taken -= 1
        self._undisturbed = False
