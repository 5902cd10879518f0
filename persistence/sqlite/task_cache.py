"""How the tasks of a run stand, for whoever writes: what a change has to follow from is looked up here, instead of
being asked of the database each time.

Theory: only its owner writes to a run, batch after batch, so what one batch leaves is what the next one finds. A cache
is kept from batch to batch, and is as good as the database for as long as the run's last change is the one that it was
kept after: every write adds changes, and no two runs ever have the same number. Else it is thrown away. It begins with
nothing: what a batch names and the cache does not have is looked up, all at once. Tasks that are done are left out
again, since nothing more is to be expected of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.persistence import rules
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.bulk import execute_bulk

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence
    from typing import Any, TypeAlias

    from plait.persistence.changes import Change, NewTask
    from plait.persistence.rules import RunHead

    CachedTask: TypeAlias = tuple[int, str, int, int]
    """A task's id, its status, its last attempt, and the id of that one's start."""


def ids_of(number: int) -> dict[str, int]:
    """The first and the last id that there can be of the run of that number, of tasks as of changes."""
    return {"first": number << 32, "last": number << 32 | 0xFFFFFFFF}


class TaskCache:
    """The tasks of run `number`, as far as they were needed."""

    def __init__(self, connection: sqlite3.Connection, run_id: str, number: int) -> None:
        self.run_id = run_id
        self.number = number
        self.base = ids_of(number)["first"]
        self.tasks: dict[str, CachedTask] = {}
        self._connection = connection
        self._written_up_to: tuple[Any, ...] = ()
        self._changes: Sequence[Change] = ()
        self._ended_tasks: list[str] = []
        self._next_task: int | None = None

    def is_current(self, connection: sqlite3.Connection, number: int, head: RunHead) -> bool:
        """Whether nothing was written since it was kept, by another owner or to another run of that id."""
        return self._written_up_to == (connection, number, head.last_seq, head.claims)

    def mark_written(self, head: RunHead, last_seq: int) -> None:
        """The batch is written, up to change `last_seq`; `head` is the run's after it."""
        self._written_up_to = (self._connection, self.number, last_seq, head.claims)
        self._changes = ()
        for task_id in self._ended_tasks:
            self.tasks.pop(task_id, None)
        self._ended_tasks.clear()

    def begin_batch(self, changes: Sequence[Change]) -> None:
        """These are to be written."""
        self._changes = changes

    def add_tasks(self, tasks: Sequence[NewTask]) -> range:
        """New tasks, behind those that the run has: their ids."""
        first = self._next_task
        if first is None:
            (first,) = self._connection.execute(sql.NEXT_TASK, ids_of(self.number)).fetchone()
            assert isinstance(first, int)
        self._next_task = first + len(tasks)
        ids = range(first, self._next_task)
        for new, task in zip(tasks, ids, strict=True):
            self.tasks[new.task_id] = (task, "pending", 0, 0)
        return ids

    def stored(self, task_ids: Iterable[str]) -> set[str]:
        """Those of the tasks that the run has."""
        wanted = set(task_ids)
        self._look_up(wanted)
        return wanted & self.tasks.keys()

    def find(self, change: Change, task_id: str) -> CachedTask:
        """How the task stands. Raises Conflict where the run has none of that id."""
        if task_id not in self.tasks:
            # The others that the batch names as well, since they will be asked for, too.
            named = {getattr(one, "task_id", task_id) for one in self._changes}
            self._look_up({task_id, *named})
        if task_id not in self.tasks:
            raise rules.conflict(self.run_id, change, None)
        return self.tasks[task_id]

    def put_ended(self, task_id: str, cached: CachedTask) -> None:
        """The task is done: nothing more is expected of it, and what comes all the same will be looked up."""
        self.tasks[task_id] = cached
        self._ended_tasks.append(task_id)

    def _look_up(self, task_ids: set[str]) -> None:
        rows = [value for task_id in task_ids - self.tasks.keys() for value in (self.run_id, task_id)]
        for cursor in execute_bulk(self._connection, sql.FIND_TASKS, rows):
            for task_id, position, status, attempt, started_seq in cursor.fetchall():
                self.tasks[task_id] = (self.base | position, status, attempt, self.base | (started_seq or 0))
