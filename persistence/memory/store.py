"""The store for runs that need not outlive the process: the guarantees of SQLiteStore, in plain dictionaries.

Theory: a batch is applied to a staged copy of the touched parts. Only a batch without errors is published, by plain
assignments that cannot fail. Nothing awaits in between, so no other task ever reads half of a batch.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Self

from plait.persistence import rules
from plait.persistence.errors import Conflict
from plait.persistence.memory.staged import MemoryRun, StagedRun
from plait.persistence.records import (
    AttemptRecord,
    EventKind,
    EventRecord,
    MessageRecord,
    NoteRecord,
    RunRecord,
    TaskRecord,
)
from plait.usage import NO_USAGE

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from plait.persistence.changes import Batch
    from plait.persistence.records import Note


class MemoryStore:
    """Keeps runs in memory as long as the object lives. Implements `Store`; `async with` is allowed and does nothing.

    A write is final at its return, but a power loss deletes everything.
    """

    def __init__(self) -> None:
        self._runs: dict[str, MemoryRun] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    async def write(self, batch: Batch) -> None:
        run = self._runs.get(batch.run_id)
        skipped = rules.count_applied(batch, None if run is None else run.head)
        changes = batch.changes[skipped:]
        if not changes:
            return
        run = run or MemoryRun(rules.new_head(changes[0]))
        staged = StagedRun(batch.run_id, run)
        for seq, change in enumerate(changes, batch.first_seq + skipped):
            staged.apply(seq, change)
        staged.publish(batch.last_seq)
        self._runs[batch.run_id] = run

    async def get_run(self, run_id: str) -> RunRecord | None:
        run = self._runs.get(run_id)
        return None if run is None else _record(run_id, run)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        # Reversed before the stable sort, which puts the later of two runs of one millisecond first.
        latest_first = reversed(self._runs.items())
        newest_first = sorted(latest_first, key=lambda item: item[1].head.created_at, reverse=True)
        return tuple(replace(_record(run_id, run), settings="") for run_id, run in newest_first)[: max(0, limit)]

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        now = time.time()
        found = [
            (run.head.created_at, run_id, run)
            for run_id, run in self._runs.items()
            if rules.is_claimable(run.head, now)
        ]
        found.sort(key=lambda one: one[0])
        return tuple(replace(_record(run_id, run), settings="") for _, run_id, run in found[: max(0, limit)])

    async def list_tasks(self, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
        run = self._runs.get(run_id)
        tasks: Iterable[TaskRecord] = () if run is None else run.tasks.values()
        return tuple(_with_attempt(run, task) for task in tasks if run is not None and task_id in {None, task.task_id})

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        run = self._runs.get(run_id)
        attempts: Iterable[AttemptRecord] = () if run is None else run.attempts.values()
        return tuple(attempt for attempt in attempts if task_id in {None, attempt.task_id})

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        run = self._runs.get(run_id)
        messages = [] if run is None else run.messages.get(task_id, [])
        discarded = set[tuple[str, int]]() if run is None else run.discarded
        kept = [message for message in messages if (task_id, message.position) not in discarded]
        return tuple(replace(message, position=position) for position, message in enumerate(kept))

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: EventKind | None = None
    ) -> tuple[EventRecord, ...]:
        run = self._runs.get(run_id)
        if run is None:
            return ()
        first = bisect_right(run.events, after, key=lambda event: event.seq)
        found = islice(run.events, first, None) if kind is None else (e for e in run.events[first:] if e.kind == kind)
        return tuple(islice(found, max(0, limit)))

    async def send(self, run_id: str, note: Note) -> None:
        run = self._runs.get(run_id)
        if run is None:
            raise Conflict(f"run {run_id!r} is not in the store, so no note can be sent to its owner")
        run.notes.append(NoteRecord(len(run.notes) + 1, note.kind, note.at, note.task_id, note.body))

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        run = self._runs.get(run_id)
        return () if run is None else tuple(run.notes[max(0, after) :])


def _record(run_id: str, run: MemoryRun) -> RunRecord:
    counts = dict(Counter(task.status for task in run.tasks.values()))
    usage = sum((attempt.usage for attempt in run.attempts.values()), NO_USAGE)
    has_expired = rules.lease_has_expired(run.head, time.time())
    return run.head.record(run_id, counts, replace(usage, model=None), lease_has_expired=has_expired)


def _with_attempt(run: MemoryRun, task: TaskRecord) -> TaskRecord:
    last = run.attempts.get((task.task_id, task.attempt))
    if last is None:
        return task
    return replace(
        task,
        error_kind=last.error_kind,
        error=last.error,
        session_id=last.session_id,
        usage=last.usage,
        duration_s=last.duration_s,
        started_at=last.started_at,
        ended_at=last.ended_at,
    )
