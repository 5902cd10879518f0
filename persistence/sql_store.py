"""The reads of a store in tables, the same for both databases.

Each read is a generator: it yields a statement with its parameters, is sent the rows, and returns the result. So SQLite
reads on its thread and PostgreSQL by awaiting, and each fills in its own words (`tables`) for the braces.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

from plait.errors import StoreError
from plait.persistence import read_records as records
from plait.persistence import tables
from plait.persistence.apply_events import CachedRun

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plait.events import Event
    from plait.persistence.store_records import (
        AttemptRecord,
        EventRecord,
        MessageRecord,
        NoteRecord,
        RunRecord,
        TaskRecord,
    )

P = ParamSpec("P")
T = TypeVar("T")
Row = tuple[Any, ...]
Reading: TypeAlias = Generator[tuple[str, tuple[Any, ...]], Iterable[Row], T]
_MOST: Final = (1 << 63) - 1


class SQLStore:
    """The reads of `Store`. A subclass runs each as a whole, on one state of the database (`_read`)."""

    async def _read(self, read: Callable[P, Reading[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        raise NotImplementedError

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._read(get_run, run_id)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._read(list_runs, tables.LIST_RUNS, limit)

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        found = await self._read(list_runs, tables.LIST_CLAIMABLE, limit)
        return tuple(run for run in found if not run.damaged)

    async def list_tasks(self, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
        return await self._read(list_tasks, run_id, task_id)

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        return await self._read(list_attempts, run_id, task_id)

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        return await self._read(list_messages, run_id, task_id)

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: str | None = None
    ) -> tuple[EventRecord, ...]:
        return await self._read(list_events, run_id, after, limit, kind)

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        return await self._read(list_notes, run_id, after)

    async def session_ids(self) -> set[str]:
        """Return the backends' session ids of all tasks in all runs."""
        return await self._read(session_ids)


def get_run(run_id: str) -> Reading[RunRecord | None]:
    for row in (yield tables.GET_HEAD, (run_id,)):
        [settings] = yield tables.GET_SETTINGS, (run_id,)
        head, usage = records.run_head(row, records.whole_settings(run_id, settings))
        counts = yield from _counts([run_id])
        return records.run_record(run_id, head, usage, counts.get(run_id, {}), lease_has_expired=row[-1] == 1)
    return None


def _counts(run_ids: list[str]) -> Reading[dict[str, dict[str, int]]]:
    """Read the number of tasks by status of each run."""
    counts: dict[str, dict[str, int]] = {}
    for run_id, status, count in (yield tables.COUNT_TASKS, (run_ids,)):
        counts.setdefault(run_id, {})[status] = count
    return counts


def list_runs(statement: str, limit: int) -> Reading[tuple[RunRecord, ...]]:
    rows = list((yield statement, (min(max(0, limit), _MOST),)))
    counts = yield from _counts([row[0] for row in rows])
    return tuple(_listed(row, counts.get(row[0], {})) for row in rows)


def _listed(row: Row, counts: dict[str, int]) -> RunRecord:
    """Return the run without its settings; marked, if it is damaged."""
    run_id = str(row[0])
    try:
        return records.run_record(run_id, *records.run_head(row), counts, lease_has_expired=row[-1] == 1)
    except StoreError as error:
        return records.damaged_run(run_id, error)


def list_tasks(run_id: str, task_id: str | None) -> Reading[tuple[TaskRecord, ...]]:
    if task_id is None:
        rows = yield tables.LIST_TASKS, (run_id,)
    else:
        rows = yield tables.LIST_TASK, (run_id, task_id)
    with records.paused_collector():
        found = [records.task_record(run_id, row) for row in rows]
    found.sort(key=lambda task: task.position)
    return tuple(found)


def list_attempts(run_id: str, task_id: str | None) -> Reading[tuple[AttemptRecord, ...]]:
    if task_id is None:
        return records.attempt_records((yield tables.LIST_ATTEMPTS, (run_id,)))
    return records.attempt_records((yield tables.LIST_TASK_ATTEMPTS, (run_id, task_id)))


def list_messages(run_id: str, task_id: str) -> Reading[tuple[MessageRecord, ...]]:
    messages = list((yield tables.LIST_MESSAGES, (run_id, task_id)))
    return records.message_records(task_id, messages, (yield tables.LIST_EXCHANGES, (run_id, task_id)))


def list_events(run_id: str, after: int, limit: int, kind: str | None) -> Reading[tuple[EventRecord, ...]]:
    most = min(max(0, limit), _MOST)
    if kind is None:
        rows = yield tables.LIST_EVENTS, (run_id, after, most)
    else:
        rows = yield tables.LIST_EVENTS_OF_KIND, (run_id, after, kind, most)
    return tuple(map(records.event_record, rows))


def list_notes(run_id: str, after: int) -> Reading[tuple[NoteRecord, ...]]:
    return tuple(records.note_record(run_id, row) for row in (yield tables.LIST_NOTES, (run_id, after)))


def session_ids() -> Reading[set[str]]:
    sessions = list((yield tables.LIST_SESSIONS, ()))
    return records.session_ids(sessions, (yield tables.LIST_OPENED_SESSIONS, ()))


def stored_run(run_id: str, *, settings: bool, lock: str = "") -> Reading[CachedRun | None]:
    """Read the head of the run, with its settings or with empty ones; None if there is no such run."""
    for row in (yield tables.GET_HEAD + lock, (run_id,)):
        text = ""
        if settings:  # all inputs are part of the settings, up to many megabytes
            [stored] = yield tables.GET_SETTINGS, (run_id,)
            text = records.whole_settings(run_id, stored)
        return CachedRun(*records.run_head(row, text))
    return None


def open_states(run_id: str, run: CachedRun) -> Reading[None]:
    """Read into `run` all tasks that have not ended."""
    run.tasks.update(map(records.task_state, (yield tables.GET_OPEN_STATES, (run_id,))))


def states(run_id: str, run: CachedRun, changes: Sequence[Event]) -> Reading[None]:
    """Read into `run` what the changes need and it lacks."""
    if missing := run.missing(changes):
        run.tasks.update(map(records.task_state, (yield tables.GET_STATES, (list(missing), run_id))))
    if run.needs_size(changes):
        [(run.size,)] = yield tables.GET_SIZE, (run_id,)


OF_ONE_STATEMENT: Final = frozenset({list_tasks, list_attempts, list_events, list_notes})
"""The reads that need no transaction to see one state of the database."""
