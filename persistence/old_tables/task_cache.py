"""The statuses of a run's tasks, cached for the writer, so that a change is checked without a query.

Theory: only the owner writes to a run, batch after batch, so the state after a batch is the state before the next. A
cache is valid as long as the last change of the run is the last change that the cache has seen: every write adds
changes, and no two runs ever have the same number. An outdated cache is dropped. A new cache is empty; missing tasks of
a batch are read by one query. Ended tasks are removed, because changes of ended tasks are rare. A store derives its own
cache, which reads the missing tasks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.persistence import rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, TypeAlias

    from plait.events import NewTask
    from plait.persistence.changes import Change
    from plait.persistence.rules import RunHead

    CachedTask: TypeAlias = tuple[int, str, int, int]
    """The id of the task's row, the status, the number of the last attempt, and the id of that attempt's start."""


def ids_of(number: int) -> dict[str, int]:
    """Return the lowest and the highest id of rows of the run `number`: of tasks, starts, ends and messages."""
    return {"first": number << 32, "last": number << 32 | 0xFFFFFFFF}


class TaskCache:
    """The tasks of one run that were needed so far.

    `tasks` holds the tasks by id, and `base` is the lowest row id of the run `number`.
    """

    def __init__(self, connection: object, run_id: str, number: int) -> None:
        self.run_id = run_id
        self.number = number
        self.base = ids_of(number)["first"]
        self.tasks: dict[str, CachedTask] = {}
        self._connection = connection
        self._written_up_to: tuple[Any, ...] = ()
        self._changes: Sequence[Change] = ()
        self._ended_tasks: list[str] = []
        self._next_task: int | None = None

    def is_current(self, connection: object, number: int, head: RunHead) -> bool:
        """Return whether no other process has written to the run since `mark_written`, and the run is the same."""
        return self._written_up_to == (connection, number, head.last_seq, head.claims)

    def mark_written(self, head: RunHead, last_seq: int) -> None:
        """Note that the batch is in the transaction: `last_seq` is its last change, and `head` the head after it."""
        self._written_up_to = (self._connection, self.number, last_seq, head.claims)
        self._changes = ()
        for task_id in self._ended_tasks:
            self.tasks.pop(task_id, None)
        self._ended_tasks.clear()

    def begin_batch(self, changes: Sequence[Change]) -> None:
        """Note the changes of the batch, whose tasks `find` reads together."""
        self._changes = changes

    def add_tasks(self, tasks: Sequence[NewTask]) -> range:
        """Add new tasks behind the tasks of the run. Return the ids of their rows."""
        first = self._next_task
        if first is None:
            first = self.read_next_task()
        self._next_task = first + len(tasks)
        ids = range(first, self._next_task)
        for new, task in zip(tasks, ids, strict=True):
            self.tasks[new.task_id] = (task, "pending", 0, 0)
        return ids

    def stored(self, task_ids: Iterable[str]) -> set[str]:
        """Return the ids among `task_ids` that the run has."""
        wanted = set(task_ids)
        self._look_up(wanted)
        return wanted & self.tasks.keys()

    def find(self, change: Change, task_id: str) -> CachedTask:
        """Return the task. Raises Conflict if the run has no such task."""
        if task_id not in self.tasks:
            # With all other tasks of the batch, which are needed next.
            named = {getattr(one, "task_id", task_id) for one in self._changes}
            self._look_up({task_id, *named})
        if task_id not in self.tasks:
            raise rules.conflict(self.run_id, change, None)
        return self.tasks[task_id]

    def put_ended(self, task_id: str, cached: CachedTask) -> None:
        """Put an ended task, which `mark_written` removes."""
        self.tasks[task_id] = cached
        self._ended_tasks.append(task_id)

    def _look_up(self, task_ids: set[str]) -> None:
        for task_id, position, status, attempt, started_seq in self.read_tasks(task_ids - self.tasks.keys()):
            self.tasks[task_id] = (self.base | position, status, attempt, self.base | (started_seq or 0))

    def read_tasks(self, task_ids: set[str]) -> Iterable[tuple[str, int, str, int, int | None]]:
        """Return the id, the position, the status, the last attempt and the number of its start, for each stored task
        among `task_ids`.
        """
        raise NotImplementedError

    def read_next_task(self) -> int:
        """Return the id of the row of the next task of the run."""
        raise NotImplementedError
