"""`RowReader`: the rows of a large file become tasks during the run, and leave memory once they are done.

The next rows are added in the transaction of the outcome that made room for them. So the number of stored tasks says
how far the file is read, and a later process goes on from there: no row is lost, and none is read twice.

A row leaves memory once its tasks are done and stored. The first row, rows that wait, and those that a failure blocks,
stay. The plan's tasks that are of no row stand before the first one, and stay too. Those behind all rows start once
every row is read and done, and are blocked if one is not.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from anyio import from_thread

from plait import events
from plait.errors import PlanProblem
from plait.json_form import JsonValue
from plait.runner.domain.dag import ROWS_AT_ONCE, RowsFile, tasks_of_row
from plait.runner.engine import growth
from plait.runner.engine.live_run import LiveRun
from plait.runner.state.stored_run import pages_of_tasks, stored_record
from plait.statuses import TASK_DONE, TaskStatus
from plait.task import FailureMode, Task, satisfies

MOST_OPEN = 20_000
"""Rows that are read and not done, such as those that wait for a person, above which no further rows are read."""
_MOST_FAILED = 100
"""Failed rows that stay in memory, for the error of the run."""
_LOOKS = 1_000
"""Steps of the run between two looks for rows that are done, while MOST_OPEN rows are not."""


class RowAnswers:
    """The answers of a task of each row, in the order of the file: read from the store while a function goes over them,
    by `async for`, or by `for` in a function that is not async. As in a list of answers, one without an answer is "".
    """

    def __init__(self, run: LiveRun, file: RowsFile, name: str) -> None:
        self._run = run
        self._file = file
        self._name = name

    async def __aiter__(self) -> AsyncGenerator[JsonValue]:
        """Yield the answers. Raises StoreError."""
        store, record = await stored_record(self._run.options.store, self._run.run_id)
        async with aclosing(pages_of_tasks(store, record, self._file)) as pages:
            async for page in pages:
                for task in page:
                    if task.task_id.rpartition(".")[0] == self._name and task.position >= self._file.first:
                        text = task.text if task.status == TaskStatus.COMPLETED else None
                        yield text or "" if text is None or task.data is None else json.loads(task.data)

    def __iter__(self) -> Iterator[JsonValue]:
        """Yield the answers in a thread of anyio. Raises StoreError."""
        answers = aiter(self)
        while True:
            try:
                yield from_thread.run(answers.__anext__)
            except StopAsyncIteration:
                return

    def __deepcopy__(self, _memo: object) -> RowAnswers:
        return self


def answers_of_rows(run: LiveRun, file: RowsFile, task: Task) -> dict[str, Any]:
    """Return the RowAnswers for the arguments of a `task` that is of no row."""
    of_rows = {one.id.rpartition(".")[0] for one in run.state.dag.tasks[file.first : file.first + file.width]}
    return {name: RowAnswers(run, file, name) for name in of_rows.intersection(task.arguments)}


class RowReader:
    """Reads the `file` of a run, from behind the rows that are stored."""

    def __init__(self, run: LiveRun, file: RowsFile) -> None:
        self._run = run
        self._state = run.state
        self._file = file
        self._first: Sequence[Task] = run.state.dag.tasks[file.first : file.first + file.width]
        before = {run.state.dag.position(name) for task in self._first for name in task.upstream}
        self._before = {position for position in before if position < file.first}
        """The tasks of no row on which rows depend, those of them that are not done."""
        self._count = (sum(run.state.counts.values()) - file.first) // file.width
        """The number of rows that are read."""
        self._open = list(range(file.first, len(run.state.dag), file.width))
        """The position of the first task of each row that was not done at the last look."""
        self._done: list[int] = []
        """The same of each row that was, and is still in memory."""
        self._failed = 0
        self._is_whole = True
        """Whether no row was found that is done or will never be, and on which a task behind all rows may not build."""
        self._has_told = False
        """Whether the tasks behind all rows wait for no row any more."""
        self._steps = 0
        self._entries: Iterator[Any] | None = None
        self._stat: tuple[int, int] | None = None
        self._close: Callable[[], None] = lambda: None
        self._has_ended = False

    def close(self) -> None:
        """Close the file."""
        self._close()

    def read(self) -> list[events.Event]:
        """Add the tasks of the next rows if few tasks are left to start. Return the events."""
        new_events: list[events.Event] = []
        scheduler = self._run.scheduler
        if self._before:
            self._before -= {one for one in self._before if self._is_satisfied(one)}
            if self._before:
                return []
        while not self._has_ended and scheduler.eligible < max(ROWS_AT_ONCE, 2 * scheduler.slots):
            self._steps += 1
            if len(self._open) >= MOST_OPEN and self._steps % _LOOKS and not scheduler.exhausted:
                break
            self._look()
            if len(self._open) >= MOST_OPEN:
                break
            new_events += self._add_rows()
        if self._has_ended and self._file.behind and not self._has_told and self._are_done():
            self._has_told = True
            self._look()
            if self._is_whole and self._run.rows_error is None:
                scheduler.end_rows()
        return new_events

    def _are_done(self) -> bool:
        """Return whether all tasks of the rows that are read are done."""
        statuses = self._state.statuses[: self._file.first]
        undone = sum(count for status, count in self._state.counts.items() if status not in TASK_DONE)
        return undone == sum(status not in TASK_DONE for status in statuses)

    def _is_satisfied(self, position: int) -> bool:
        return satisfies(self._state.dag.tasks[position], self._state.statuses[position])

    def _add_rows(self) -> list[events.Event]:
        tasks, start = list[Task](), len(self._state.dag)
        try:
            for entry in islice(self._opened(), ROWS_AT_ONCE):
                if isinstance(entry, PlanProblem):
                    self._stop(f"line {entry.line}: {entry.message}" if entry.line else entry.message)
                    break
                self._count += 1
                tasks += tasks_of_row(self._first, self._count, entry[1])
        except OSError as error:
            self._stop(f"it cannot be read: {error.strerror}")
        if len(tasks) < ROWS_AT_ONCE * self._file.width:
            self._has_ended = True
        if not tasks:
            return []
        self._open += range(start, start + len(tasks), self._file.width)
        return [growth.add_rows(self._run, tasks)]

    def _opened(self) -> Iterator[Any]:
        from plait.runner.plan.plan_inputs import has_changed, row_entries  # noqa: PLC0415 - pydantic, for such runs only

        path = Path(self._file.path)
        about = path.stat()
        if self._entries is None:
            is_same = not has_changed(self._file)
            entries = row_entries(path, self._count)
            self._entries, self._close = entries, entries.close
        else:
            is_same = (about.st_size, about.st_mtime_ns) == self._stat
        self._stat = about.st_size, about.st_mtime_ns
        if not is_same:
            self._stop("it has changed since the run was made")
            return iter(())
        return self._entries

    def _stop(self, why: str) -> None:
        self._run.rows_error = f"{self._file.path}: {why}; the rows behind row {self._count:,} were not read"
        self._has_ended = True

    def _look(self) -> None:
        """Find the rows that are done, and let those leave memory that were done at the last look."""
        if self._done and not self._run.sink.away:
            # An empty submission is stored behind those of the ends.
            self._run.sink.submit([]).then(partial(self._free, self._done))
            self._done = []
        still_open: list[int] = []
        for first in self._open:
            row = range(first, first + self._file.width)
            statuses = [self._state.statuses[position] for position in row]
            if all(status in TASK_DONE for status in statuses):
                self._is_whole = self._is_whole and all(map(self._is_satisfied, row))
                self._failed += (has_failed := TaskStatus.FAILED in statuses)
                if first != self._file.first and (not has_failed or self._failed > _MOST_FAILED):
                    self._done.append(first)
            elif not self._is_blocked(row):
                still_open.append(first)
        self._open = still_open

    def _is_blocked(self, row: Sequence[int]) -> bool:
        """Return whether the tasks of the row that are not done can never start."""
        statuses, dag, dead = self._state.statuses, self._state.dag, set[int]()
        for _ in row:
            for one in row:
                is_failed = statuses[one] is TaskStatus.FAILED and dag.tasks[one].failure_mode is FailureMode.HARD
                waits = statuses[one] is TaskStatus.PENDING and not dead.isdisjoint(dag.dependencies[one])
                if is_failed or waits or statuses[one] is TaskStatus.CANCELLED:
                    dead.add(one)
        return all(one in dead or statuses[one] in TASK_DONE for one in row)

    def _free(self, rows: list[int]) -> None:
        if self._run.sink.away:  # their ends may not be stored
            self._done += rows
            return
        self._state.free([position for first in rows for position in range(first, first + self._file.width)])
