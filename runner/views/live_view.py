"""A run as the web page shows it: small rows of its tasks, and one task in full, as a stream of changes.

The rows of the first screen are sent before all others are made. The rows of tasks with new events are read at once,
whichever process runs the run. All rows are read again after a rest, since the reasons of waiting tasks depend on all
tasks: reading takes a fixed share of the time, however large the run is. Only rows that differ from the rows sent
before are sent.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import islice
from typing import Any

import anyio.to_thread

from plait.clock_and_ids import Clock, parse_time
from plait.events import TasksAdded
from plait.json_form import JsonValue, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import AttemptRecord, RunRecord, TaskRecord
from plait.runner.domain.dag import group_of
from plait.runner.domain.wait_reasons import WaitReason, Waits
from plait.runner.engine.lease import shown_status
from plait.runner.state.stored_run import listed_tasks, stored_record
from plait.runner.views.event_sentences import event_sentence, failure, remedy
from plait.runner.views.read_views import (
    read_tuning,
    read_waits,
    rendered_prompt,
    run_view,
    task_detail,
    throttled_backends,
)
from plait.runner.views.run_log import RunLog
from plait.runner.views.view_models import view_json
from plait.safe_text import shorten
from plait.statuses import UNDER_WAY, TaskStatus

QUICKEST_S = 0.25
"""Seconds between two looks at the store, at least."""
_SHARE = 4
"""Seconds of rest for each second of reading."""
_STALE_S = 1.0
"""Seconds after which a run is read without an event: its owner may have died, a pause may be over."""
_MOST_EVENTS = 1000
_LONGEST = 200
_LONGEST_CELL = 120
_MOST_FIELDS = 20
_LONGEST_TEXT = 200_000
_FEW = 200
"""Tasks whose attempts are read one by one. Beyond, all attempts of the run are read at once."""
_ONE_ATTEMPT = {TaskStatus.RUNNING, TaskStatus.COMPLETED, TaskStatus.FAILED, TaskStatus.SKIPPED}
_FIRST_ROWS = 100
"""Rows that are made and sent before all other rows are made: more than a screen shows."""
_ROWS_AT_ONCE = 250
"""Rows of one change: a browser parses them in a millisecond or two."""
_MOST_ACTIVITY = 500


@value
class ViewChange:
    """A part of the view that has changed."""

    kind: str
    """run, rows, task or activity."""
    value: Mapping[str, Any]


class LiveView:
    """The view of a run, with the task `task_id` in full if given. Must be closed."""

    def __init__(self, store: Store, clock: Clock, run_id: str, task_id: str | None = None) -> None:
        self._store = store
        self._clock = clock
        self._run_id = run_id
        self._task_id = task_id
        self._event: int = -1
        """The number of the last event whose task has been read."""
        self._seq = -1
        """The number of the last change seen."""
        self._looked_at = 0.0
        self._rests_until = 0.0
        self._behind: bool = False
        self._created = 0.0
        """The Unix time of the creation of the run."""
        self._head: Mapping[str, Any] = {}
        self._rows: dict[str, Mapping[str, Any]] = {}
        self._attempts: dict[str, tuple[object, list[AttemptRecord]]] = {}
        """The attempts of tasks with several, by id, each list with the state of the task for which it was read."""
        self._task: Mapping[str, Any] = {}
        self._log = None if task_id is None else RunLog(store, run_id, task_id)
        self.pause = QUICKEST_S
        """Seconds to wait before the next call of `changes`."""

    def close(self) -> None:
        """Close all files."""
        if self._log is not None:
            self._log.close()

    async def changes(self) -> AsyncGenerator[ViewChange]:
        """Yield the changes since the last call. Raises RunNotFound, TaskNotFound, StoreError."""
        begun = self._clock.monotonic()
        touched = await self._touched()
        if touched is None or touched or self._behind or begun - self._looked_at > _STALE_S:
            self._looked_at = begun
            async for change in self._read(begun, touched):
                yield change
        async for change in self._activity():
            yield change

    async def _touched(self) -> set[str] | None:
        """Return the tasks with events since the last call; None at first, and if there are too many to list."""
        if self._event < 0:
            return None
        events = await self._store.list_events(self._run_id, self._event, limit=_MOST_EVENTS)
        if len(events) == _MOST_EVENTS or any(one.kind == TasksAdded.kind for one in events):
            return None
        if events:
            self._event = events[-1].seq
        return {one.task_id for one in events if one.task_id is not None}

    async def _read(self, begun: float, touched: set[str] | None) -> AsyncGenerator[ViewChange]:
        """Read the run. All rows are read in turns with a rest; in between only the rows of `touched`."""
        _, run = await stored_record(self._store, self._run_id)
        if touched is None:
            self._event = run.last_seq  # tasks are read after this moment
        now = self._clock.wall()
        status = shown_status(run)
        # A turn after the run is stored without an event.
        quiet = not touched and run.last_seq != self._seq
        self._seq = run.last_seq
        self._created = parse_time(run.created_at)
        if self._task_id is not None and (touched is None or self._task_id in touched or quiet):
            async for change in self._task_changes(run, self._task_id):
                yield change
        throttled = await throttled_backends(self._store, run, now)
        tuned = (await read_tuning(self._store, run)).in_force
        head = {**view_json(run_view(run)), "throttled": [event_sentence(one) for one in (*tuned, *throttled)]}
        news = head != self._head
        if news:
            self._head = head
            yield ViewChange("run", head)
        under_way = status in UNDER_WAY  # the reasons of waiting tasks depend on the time
        self.pause = max(QUICKEST_S, _SHARE * (self._clock.monotonic() - begun))
        self._behind = self._behind or touched is None or bool(touched) or under_way or news
        if self._behind and (not self._rows or not under_way or begun >= self._rests_until):
            async for change in self._all_rows(run):
                yield change
            self._behind = under_way
            ends = self._clock.monotonic()
            self._rests_until = ends + max(_STALE_S, _SHARE * (ends - begun))
        elif touched:
            records = [one for name in touched for one in await self._store.list_tasks(self._run_id, name)]
            async for change in self._rows_of(records):
                yield change
            self.pause = max(QUICKEST_S, self._clock.monotonic() - begun)

    async def _all_rows(self, run: RunRecord) -> AsyncGenerator[ViewChange]:
        records = await listed_tasks(self._store, run)
        if not self._rows:
            async for change in self._rows_of(records[:_FIRST_ROWS]):
                yield change
        _, find_waits = await read_waits(self._store, run, records, self._clock.wall())
        await self._read_attempts(records)
        rows = await anyio.to_thread.run_sync(lambda: self._make_rows(records, find_waits()))
        news = [row for name, row in rows.items() if self._rows.get(name) != row]
        self._rows = rows
        for start in range(0, len(news), _ROWS_AT_ONCE):
            yield ViewChange("rows", {"rows": news[start : start + _ROWS_AT_ONCE]})

    async def _rows_of(self, records: Sequence[TaskRecord]) -> AsyncGenerator[ViewChange]:
        """Yield the rows of `records`, without the reasons of pending tasks, which depend on all tasks."""
        await self._read_attempts(records)
        rows = self._make_rows(records, None)
        news = [row for name, row in rows.items() if self._rows.get(name) != row]
        self._rows.update(rows)
        if news:
            yield ViewChange("rows", {"rows": news})

    async def _read_attempts(self, records: Sequence[TaskRecord]) -> None:
        """Read the attempts of the tasks whose own times do not tell them."""
        states = {one.task_id: (one.attempt, one.status, one.crashes) for one in records if _has_several(one)}
        news = [name for name, state in states.items() if self._attempts.get(name, (None,))[0] != state]
        self._attempts.update((name, (states[name], [])) for name in news)
        for only in news if len(news) <= _FEW else (None,):
            for attempt in await self._store.list_attempts(self._run_id, only):
                if attempt.task_id in news:
                    self._attempts[attempt.task_id][1].append(attempt)

    def _make_rows(self, records: Sequence[TaskRecord], waits: Waits | None) -> dict[str, Mapping[str, Any]]:
        return {one.task_id: self._row(one, None if waits is None else waits.reason(one.task_id)) for one in records}

    def _row(self, task: TaskRecord, waits: WaitReason | None) -> Mapping[str, Any]:
        """Return what a list of tasks shows; fields without a value are left out. Times are those of `_since`. It is
        made from the record itself: a view of each of 20,000 tasks takes twice as long as the row.
        """
        item: JsonValue = json.loads(task.spec).get("item")
        # A row of a table by its values.
        item_text = ", ".join(map(str, item.values())) if isinstance(item, dict) else str(item)
        attempts = self._attempts[task.task_id][1] if _has_several(task) else ()
        fields = {
            "id": task.task_id,
            "status": task.status,
            "group": group_of(task.task_id, item),
            "item": None if item is None else shorten(item_text, _LONGEST),
            "answer": _answer(task),
            "attempts": task.attempt,
            "bars": [(one.status, self._since(one.started_at), self._since(one.ended_at)) for one in attempts],
            "tokens": task.usage.input_tokens + task.usage.output_tokens,
            "cost_usd": task.usage.cost_usd,
            "note": _note(task),
            "wait": None if waits is None or task.question else waits.text,
        }
        took = None if task.duration_s is None else round(task.duration_s * 1000)
        times = {"start": self._since(task.started_at), "took": took}
        shown = {name: value for name, value in fields.items() if value}
        return {"position": task.position, **shown, **{name: at for name, at in times.items() if at is not None}}

    def _since(self, at: str | None) -> int | None:
        """Return the milliseconds from the creation of the run to `at`: a browser holds a small integer in little
        memory.
        """
        return None if at is None else round((parse_time(at) - self._created) * 1000)

    async def _task_changes(self, run: RunRecord, task_id: str) -> AsyncGenerator[ViewChange]:
        detail = await task_detail(self._store, run, task_id, self._clock.wall())
        rendered = None
        if not detail.messages and detail.attempts:
            rendered = await rendered_prompt(self._store, self._run_id, task_id)
        value = {**view_json(detail), "remedy": remedy(detail.error_kind), "rendered": rendered}
        task = {name: _cut(one) for name, one in value.items()}
        if task != self._task:
            self._task = task
            yield ViewChange("task", task)

    async def _activity(self) -> AsyncGenerator[ViewChange]:
        """Yield the new output of the task's agents, the newest entries first if there are very many."""
        if self._log is None:
            return
        entries = [
            {"at": one.at, "attempt": one.attempt, "kind": one.detail["output"], "text": _cut(one.detail["text"])}
            async for one in self._log.more()
            if one.kind == "output"
        ]
        if entries:
            yield ViewChange("activity", {"task_id": self._task_id, "entries": entries[-_MOST_ACTIVITY:]})


def _note(task: TaskRecord) -> str:
    """Return the words beside the status of a task: its error or its question. The reason of a wait follows them."""
    if task.damaged:
        return "the stored result is damaged"
    if task.question is not None:
        return shorten(task.question, _LONGEST)
    return failure(task.error_kind, shorten(task.error or "", _LONGEST))


def _has_several(task: TaskRecord) -> bool:
    """Return whether the attempts of the task differ from a single one with the times and the status of the task."""
    alone = task.attempt == 1 and not task.crashes and not task.answers and TaskStatus(task.status) in _ONE_ATTEMPT
    return task.attempt > 0 and not alone


def _answer(task: TaskRecord) -> JsonValue:
    """Return the answer of a task as cells of a table: a text, or the fields of an object."""
    data: JsonValue = None if task.data is None else json.loads(task.data)
    if isinstance(data, dict):
        return {name: _cell(value) for name, value in islice(data.items(), _MOST_FIELDS)}
    return _cell(task.text if data is None else data)


def _cell(value: JsonValue) -> JsonValue:
    if value is None or isinstance(value, bool | int | float):
        return value
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return shorten(text, _LONGEST_CELL)


def _cut(value: JsonValue) -> JsonValue:
    """Return `value` with texts cut that a page cannot show: a result may have hundreds of megabytes."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return f"{value[:_LONGEST_TEXT]}… ({len(value):,} characters; plait show prints all)"
    if isinstance(value, list):
        return [_cut(one) for one in value]
    if isinstance(value, dict):
        return {name: _cut(one) for name, one in value.items()}
    return value
