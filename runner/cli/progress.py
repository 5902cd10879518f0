"""Where a live run stands, kept up to date from its events; what the displays show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from backends.protocol import NO_USAGE, Usage
from runner import events
from runner.cli.growing import grow
from runner.dag import DAG
from runner.status import TaskStatus
from runner.task import FailureMode

_TAIL = 400  # characters of an answer kept for the display


@dataclass(slots=True)
class Underway:
    """An attempt under way: since when (on the display's clock), where, and the last of what it said."""

    since: float
    backend: str
    attempt: int
    tail: str = ""


class Progress:
    """Feed it a run's events with `take`. `statuses` is where the tasks stand before the first one."""

    def __init__(self, dag: DAG, clock: Callable[[], float], statuses: Mapping[str, TaskStatus] | None = None) -> None:
        self.dag = dag.copy()
        self.clock = clock
        self.began = clock()
        self.statuses = dict(statuses or {task.id: TaskStatus.PENDING for task in dag})
        self.counts = Counter(self.statuses.values())
        self.running: dict[str, Underway] = {}
        self.retries: dict[str, float] = {}
        """Tasks that wait for another attempt, and until when."""
        self.questions: dict[str, str] = {}
        """What is asked by the tasks that wait for a person."""
        self.usage: Usage = NO_USAGE
        """What this process has used."""
        self.ran = 0
        self.degraded: str | None = None

    @property
    def done(self) -> int:
        """How many tasks have ended, well or not."""
        return sum(self.counts[status] for status in _ENDED)

    def take(self, event: events.Event) -> None:
        """Note what happened."""
        if isinstance(event, events.TaskOutput):
            if (underway := self.running.get(event.task_id)) and event.output == "text":
                underway.tail = (underway.tail + event.text)[-_TAIL:]
        elif isinstance(event, events.TaskStarted):
            self.retries.pop(event.task_id, None)
            self.running[event.task_id] = Underway(self.clock(), event.backend, event.attempt)
            self._set(event.task_id, TaskStatus.RUNNING)
        elif isinstance(event, events.TaskEvent):
            self._ended(event)
        elif isinstance(event, events.TasksAdded):
            grow(self.dag, event)
            self.statuses.update({task.id: TaskStatus.PENDING for task in event.tasks})
            self.counts[TaskStatus.PENDING] += len(event.tasks)
        elif isinstance(event, events.StoreDegraded):
            self.degraded = event.error
        elif isinstance(event, events.StoreRecovered):
            self.degraded = None

    def _ended(self, event: events.TaskEvent) -> None:
        if isinstance(event, events.SessionOpened):
            return
        self.running.pop(event.task_id, None)
        self.questions.pop(event.task_id, None)
        if isinstance(event, events.TaskCompleted):
            self.ran += 1
            self.usage += event.usage
            self._set(event.task_id, TaskStatus.COMPLETED)
        elif isinstance(event, events.TaskFailed):
            self._set(event.task_id, event.status)
        elif isinstance(event, events.TaskCancelled):
            self._set(event.task_id, TaskStatus.CANCELLED)
        elif isinstance(event, events.TaskWaiting):
            self.questions[event.task_id] = event.question
            self._set(event.task_id, TaskStatus.WAITING_INPUT)
        else:
            if isinstance(event, events.TaskRetrying):
                self.retries[event.task_id] = self.clock() + event.delay_s
            self._set(event.task_id, TaskStatus.PENDING)

    def _set(self, task_id: str, status: TaskStatus) -> None:
        self.counts[self.statuses[task_id]] -= 1
        self.statuses[task_id] = status
        self.counts[status] += 1

    def waiting(self, limit: int) -> list[tuple[str, list[str]]]:
        """The first tasks that still have to start, with those that they wait for; none if only a place is missing."""
        return list(islice(self._waiting(), limit))

    def _waiting(self) -> Iterator[tuple[str, list[str]]]:
        for position, task in enumerate(self.dag.tasks):
            if self.statuses[task.id] is TaskStatus.PENDING and task.id not in self.retries:
                before = (self.dag.tasks[one] for one in self.dag.dependencies[position])
                yield task.id, [one.id for one in before if not self._lets_go(one.id, one.failure_mode)]

    def _lets_go(self, task_id: str, mode: FailureMode) -> bool:
        status = self.statuses[task_id]
        return status in _GOOD or (status is TaskStatus.FAILED and mode is not FailureMode.HARD)


_GOOD = frozenset({TaskStatus.COMPLETED, TaskStatus.SKIPPED})
_ENDED = _GOOD | {TaskStatus.FAILED, TaskStatus.CANCELLED}
