"""The spans of a stored run as they end, read from the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from plait.persistence.store_protocol import Store
from plait.persistence.store_records import AttemptRecord
from plait.runner.state.stored_run import stored_record
from plait.runner.views.trace_spans import Span, TracedTask, run_span, task_spans
from plait.statuses import RUN_DONE, RunStatus

_READ_ALONE = 50
"""Number of changed tasks up to which each is read by itself, instead of all tasks of the run."""


class RunTrace:
    """The spans of the run. With `content`, the spans of attempts hold the messages of the conversations."""

    def __init__(self, store: Store, run_id: str, *, content: bool = False) -> None:
        self._store = store
        self._run_id = run_id
        self._content = content
        self._after: int | None = None
        """The number of the last event read; None before the first call."""
        self._told: dict[str, str] = {}
        """The end of each span returned so far. A reopened task ends again."""
        self.is_over = False
        """Whether the run had ended at the last call."""

    async def ended(self) -> list[Span]:
        """Return the spans that have ended since the previous call, of each task in the order of the run. Raises
        RunNotFound, StoreError.
        """
        # The record comes first: a run that has ended has all its events in the store.
        _, run = await stored_record(self._store, self._run_id)
        spans = [*task_spans(run, await self._changed_tasks())]
        if (whole := run_span(run)) is not None:
            spans.append(whole)
        self.is_over = RunStatus(run.status) in RUN_DONE
        fresh = [span for span in spans if self._told.get(span.span_id) != span.end]
        self._told.update((span.span_id, span.end) for span in fresh)
        return fresh

    async def _changed_tasks(self) -> list[TracedTask]:
        is_first, after = self._after is None, self._after or 0
        changed: set[str] = set()
        while page := await self._store.list_events(self._run_id, after):
            after = page[-1].seq
            changed.update(event.task_id for event in page if event.task_id is not None)
        self._after = after
        return await self._read(None if is_first or len(changed) > _READ_ALONE else changed)

    async def _read(self, only: Collection[str] | None) -> list[TracedTask]:
        """Return the tasks in `only`, or all tasks, with their attempts."""
        store, run_id = self._store, self._run_id
        if only is None:
            tasks, attempts = await store.list_tasks(run_id), await store.list_attempts(run_id)
        else:
            tasks = tuple([task for name in only for task in await store.list_tasks(run_id, name)])
            attempts = tuple([one for name in only for one in await store.list_attempts(run_id, name)])
        by_task: defaultdict[str, list[AttemptRecord]] = defaultdict(list)
        for attempt in attempts:
            by_task[attempt.task_id].append(attempt)
        traced = [TracedTask(task, by_task[task.task_id]) for task in sorted(tasks, key=lambda one: one.position)]
        if not self._content:
            return traced
        return [
            TracedTask(one.task, one.attempts, await store.list_messages(run_id, one.task.task_id)) for one in traced
        ]
