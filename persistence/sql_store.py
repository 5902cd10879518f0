"""What both databases have in common: `SQLStore`, how a store reads its tables, and how a batch is applied to them.

Each read is a generator (`tables.Reading`). So SQLite reads on its thread and PostgreSQL by awaiting, and each fills in
its own words (`tables`) for the braces. The rows become records here, checked by their checksums.
"""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar, TypeVarTuple

from plait.errors import Conflict, StoreError
from plait.events import EVENTS, Owner, RunCreated
from plait.persistence import tables, write_rules
from plait.persistence.apply_events import Applied, CachedRun, TaskState, apply_events
from plait.persistence.store_records import (
    AttemptRecord,
    Claim,
    EventRecord,
    MessageRecord,
    NoteRecord,
    RunRecord,
    TaskRecord,
)
from plait.persistence.tables import checksum, damaged, digest
from plait.statuses import RUN_DONE, TASK_STATUSES
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Generator, Sequence

    from plait.events import Event
    from plait.persistence.store_records import Batch, Note
    from plait.persistence.tables import Reading, Row

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
WRONG_TYPES: Final = (TypeError, ValueError, KeyError, AttributeError)
"""What a value of the wrong type raises; no database lets one in, but a damaged file may hold one."""
_MOST: Final = (1 << 63) - 1


class SQLStore:
    """The reads of `Store`. A subclass runs each as a whole, on one state of the database (`_read`)."""

    async def _read(self, read: Callable[[*Ts], Reading[T]], *args: *Ts) -> T:
        raise NotImplementedError

    async def get_run(self, run_id: str) -> RunRecord | None:
        return await self._read(get_run, run_id)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        return await self._read(list_runs, tables.LIST_RUNS, limit)

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        runs = await self._read(list_runs, tables.LIST_CLAIMABLE, limit)
        return tuple(run for run in runs if not run.damaged)

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        return await self._read(list_tasks, run_id, only)

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

    async def run_sizes(self) -> dict[str, int]:
        """Return the bytes of text by run id: prompts, results, messages, settings. Reads the whole store.

        A large text is stored once, but counts in every run that holds the text.
        """
        return await self._read(run_sizes)

    async def check_rows(self) -> tuple[list[str], int, int]:
        """Read every run with its notes, events, tasks and messages. Return the names of the damaged parts, and the
        numbers of the results and of the messages.
        """
        return await self._read(check_rows)


@contextmanager
def without_collections() -> Generator[None]:
    """Let the garbage collector rest in the block, which makes many objects and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _usage(values: Sequence[Any]) -> Usage:
    """Return the usage in columns in the order of the fields; all None without an attempt."""
    if not values[0] and not values[1] and values[2] is values[3] is None and not any(values[4:]):
        return NO_USAGE
    tokens_in, tokens_out, cost, model, cached, written, reasoning, is_partial, kept_1h = values
    return Usage(
        tokens_in, tokens_out, cost, model, cached, written, reasoning_tokens=reasoning,
        cost_is_partial=is_partial == 1, cache_write_1h_tokens=kept_1h,
    )  # fmt: skip


def _whole(text: str | None, key: bytes | None, large: str | None) -> str | None:
    """Return the text of a row, which is in `texts` if it has a key; None if it is lost."""
    if key is None:
        return text
    return large if large is not None and digest(large) == key else None


def get_run(run_id: str) -> Reading[RunRecord | None]:
    for row in (yield tables.GET_HEAD, (run_id,)):
        settings = yield from _settings(run_id)
        counts = yield from _counts([run_id])
        return _run(row, counts.get(run_id, {}), settings)
    return None


def _settings(run_id: str) -> Reading[str]:
    """Read the settings. All inputs are part of them, up to many megabytes."""
    [(expected, key, text, large)] = yield tables.GET_SETTINGS, (run_id,)
    settings = _whole(text, key, large)
    if settings is None or checksum(run_id, settings) != expected:
        raise damaged(run_id, "the text of its settings and inputs")
    return settings


def _counts(run_ids: list[str]) -> Reading[dict[str, dict[str, int]]]:
    """Read the number of tasks by status of each run."""
    counts: dict[str, dict[str, int]] = {}
    for run_id, status, count in (yield tables.COUNT_TASKS, (run_ids,)):
        counts.setdefault(run_id, {})[status] = count
    return counts


def _run(row: Row, counts: dict[str, int], settings: str = "") -> RunRecord:
    """Return the record of the row of GET_HEAD. Raises StoreError if it is damaged."""
    run_id, name, created_at, status, started_at, ended_at, error, last_seq, claims, *owner = row[:15]
    lease, policy_state, policy_seq, tokens_in, tokens_out, cost, *parts, has_expired = row[15:]
    try:
        claimed = tuple(Claim(seq, owner_id) for seq, owner_id in json.loads(claims))
        datetime.fromisoformat(created_at)  # lists of runs show it
    except WRONG_TYPES as wrong:
        raise damaged(run_id, "its row") from wrong
    if status not in tables.RUN_STATUSES:
        raise damaged(run_id, "its status")
    if not counts.keys() <= TASK_STATUSES.keys():
        raise damaged(run_id, "the status of a task")
    owned, usage = None if owner[0] is None else Owner(*owner), _usage([tokens_in, tokens_out, cost, None, *parts])
    return RunRecord(
        run_id, name, status, created_at, started_at, ended_at, error=error, settings=settings, claims=claimed,
        last_seq=last_seq, owner=owned, lease_expires_at=lease, counts=counts, usage=usage, policy_state=policy_state,
        policy_seq=policy_seq, lease_has_expired=has_expired == 1,
    )  # fmt: skip


def list_runs(statement: str, limit: int) -> Reading[tuple[RunRecord, ...]]:
    rows = list((yield statement, (min(max(0, limit), _MOST),)))
    counts = yield from _counts([row[0] for row in rows])
    runs: list[RunRecord] = []
    for run_id, *rest in rows:
        try:
            runs.append(_run((run_id, *rest), counts.get(run_id, {})))
        except StoreError as error:
            runs.append(RunRecord(run_id, "", "failed", "", error=str(error), damaged=True))
    return tuple(runs)


def list_tasks(run_id: str, only: str | range | None) -> Reading[tuple[TaskRecord, ...]]:
    if isinstance(only, range):
        rows = yield tables.LIST_TASKS_AT, (run_id, only.start, only.stop)
    else:
        rows = yield (tables.LIST_TASKS, (run_id,)) if only is None else (tables.LIST_TASK, (run_id, only))
    with without_collections():  # which took a quarter of the time of a resume of 10,000 tasks
        tasks = [_task(run_id, row) for row in rows]
    tasks.sort(key=lambda task: task.position)
    return tuple(tasks)


def _task(run_id: str, row: Row) -> TaskRecord:
    """Return the record of the row of LIST_TASKS. Raises StoreError if what was asked is damaged; a damaged result is
    marked.
    """
    # fmt: off
    (task_id, position, status, attempt, confirmed, crashes, backend, added_by, question, asked, answers, answers_sum,
     edges, spec, spec_sum, prompt_sum, prompt_key, prompt, large_prompt,
     session_id, started_at, ended_at, took, error_kind, error, result_sum, text_key, text, large_text, data,
     *usage) = row
    if prompt_key is not None:
        prompt = _whole(prompt, prompt_key, large_prompt)
    if (prompt is None or prompt_sum != checksum(task_id, prompt) or spec_sum != checksum(task_id, edges, spec)
            or (answers is not None and answers_sum != checksum(task_id, answers)) or status not in TASK_STATUSES):
        raise damaged(run_id, f"task {task_id!r} (prompt, dependencies, options, answers)")
    is_damaged = False
    if status == "completed":
        if text_key is not None:
            text = _whole(text, text_key, large_text)
        is_damaged = text is None or result_sum != checksum(task_id, text, data)
    if is_damaged:
        text = data = None
    upstream = () if edges == "[]" else tuple(json.loads(edges))
    return TaskRecord(
        task_id, position, prompt, upstream, backend, spec, status=status, attempt=attempt, text=text, data=data,
        error_kind=error_kind, error=error, session_id=session_id, usage=_usage(usage), duration_s=took,
        started_at=started_at, ended_at=ended_at, damaged=is_damaged, crashes=crashes,
        session_confirmed=confirmed == 1, question=question, asked=asked, answers=answers, added_by=added_by,
    )
    # fmt: on


def list_attempts(run_id: str, task_id: str | None) -> Reading[tuple[AttemptRecord, ...]]:
    if task_id is None:
        rows = yield tables.LIST_ATTEMPTS, (run_id, run_id)
    else:
        rows = yield tables.LIST_TASK_ATTEMPTS, (run_id, task_id, run_id, task_id)
    return tuple(map(_attempt, sorted(rows, key=lambda row: row[0])))


def _attempt(row: Row) -> AttemptRecord:
    _, task_id, attempt, status, backend, session_id, started_at, ended_at, kind, error, took, traceback, *usage = row
    return AttemptRecord(
        task_id, attempt, status, backend, session_id, started_at, ended_at=ended_at, error_kind=kind, error=error,
        usage=_usage(usage), duration_s=took, traceback=traceback,
    )  # fmt: skip


def list_messages(run_id: str, task_id: str) -> Reading[tuple[MessageRecord, ...]]:
    messages = yield tables.LIST_MESSAGES, (run_id, task_id)
    ordered = [
        (seq, part, attempt, role, _said(task_id, total, _whole(text, key, large), role), (tokens_in, tokens_out, at))
        for seq, part, attempt, role, at, tokens_in, tokens_out, total, key, text, large in messages
    ]
    for seq, attempt, at, tokens_in, tokens_out, prompt_sum, prompt_key, prompt, large_prompt, *result in (
        yield tables.LIST_EXCHANGES, (run_id, task_id)
    ):
        prompt_text = _said(task_id, prompt_sum, _whole(prompt, prompt_key, large_prompt))
        ordered.append((seq, 0, attempt, "user", prompt_text, (0, 0, at)))
        total, key, text, large, data = result
        if total is not None:  # else the answer was damaged, and was deleted
            answer = _said(task_id, total, _whole(text, key, large), data)
            ordered.append((seq, 1, attempt, "assistant", answer, (tokens_in, tokens_out, at)))
    ordered.sort(key=lambda message: message[:2])
    return tuple(
        MessageRecord(task_id, position, attempt, role, content or "", *sent, damaged=content is None)
        for position, (_, _, attempt, role, content, sent) in enumerate(ordered)
    )


def _said(task_id: str, expected: int, text: str | None, more: str | None = None) -> str | None:
    """Return the text, or None if it does not fit its checksum."""
    return None if text is None or checksum(task_id, text, more) != expected else text


def list_events(run_id: str, after: int, limit: int, kind: str | None) -> Reading[tuple[EventRecord, ...]]:
    rows = yield tables.LIST_EVENTS, (run_id, after, kind, min(max(0, limit), _MOST))
    return tuple(EventRecord(seq, at, EVENTS[kind].kind, *rest) for seq, at, kind, *rest in rows)


def list_notes(run_id: str, after: int) -> Reading[tuple[NoteRecord, ...]]:
    notes: list[NoteRecord] = []
    for number, at, kind, task_id, body, expected in (yield tables.LIST_NOTES, (run_id, after)):
        if expected != checksum(kind, task_id, body):
            raise damaged(run_id, f"note {number}")
        notes.append(NoteRecord(number, kind, at, task_id, body))
    return tuple(notes)


def add_note(run_id: str, note: Note) -> Reading[None]:
    """Add the note to the run's inbox. Raises Conflict."""
    if not list((yield f"{tables.GET_LAST}{{lock}}", (run_id,))):
        raise Conflict(f"run {run_id!r} is not in the store, so no note can be sent to its owner")
    [(number,)] = yield tables.NEXT_NOTE, (run_id,)
    fields = note.kind, note.task_id, note.body
    yield tables.for_each_row(tables.ADD_NOTE), (run_id, number, note.at, *fields, checksum(*fields))


def session_ids() -> Reading[set[str]]:
    sessions = {session_id for (session_id,) in (yield tables.LIST_SESSIONS, ())}
    return sessions | {json.loads(detail)["session_id"] for (detail,) in (yield tables.LIST_OPENED_SESSIONS, ())}


def run_sizes() -> Reading[dict[str, int]]:
    return {run_id: int(size) for run_id, size in (yield tables.GET_RUN_SIZES, ())}


def delete_runs(run_ids: Collection[str]) -> Reading[tuple[str, ...]]:
    """Delete the runs, and return those stored. Raises Conflict, and deletes none, if one has not ended or is owned."""
    stored: list[Row] = []
    for run_id in dict.fromkeys(run_ids):
        stored += yield tables.GET_OWNERSHIP, (run_id,)
    refused: list[str] = []
    for run_id, status, owner_pid, owner_host in stored:
        if status not in RUN_DONE:
            refused.append(f"run {run_id!r} is {status}: resume or cancel it first")
        elif owner_host is not None:
            refused.append(f"run {run_id!r} is in use by process {owner_pid} on {owner_host}: stop that first")
    if refused:
        raise Conflict(f"nothing was deleted: {'; '.join(refused)}")
    for run_id, *_ in stored:
        for statement in tables.DELETE_RUN:
            yield statement, (run_id,)
    yield tables.DELETE_UNUSED_TEXTS, ()
    return tuple(row[0] for row in stored)


def check_rows() -> Reading[tuple[list[str], int, int]]:
    """See `SQLStore.check_rows`."""
    results = messages = 0
    damaged_parts: list[str] = []
    for (run_id,) in list((yield tables.LIST_RUN_IDS, ())):
        try:
            yield from get_run(run_id)
            yield from list_notes(run_id, 0)
            last = 0
            while events := (yield from list_events(run_id, last, 1000, None)):
                last = events[-1].seq
            # Task by task: a run of a million tasks takes the memory of one.
            for (task_id,) in list((yield tables.LIST_TASK_IDS, (run_id,))):
                [task] = yield from list_tasks(run_id, task_id)
                talk = yield from list_messages(run_id, task_id)
                results += task.status == "completed"
                messages += len(talk)
                if task.damaged or any(message.damaged for message in talk):
                    damaged_parts.append(f"{run_id}/{task_id}")
        except StoreError as error:
            damaged_parts.append(str(error).rsplit(";", maxsplit=1)[0])
        except WRONG_TYPES as error:
            damaged_parts.append(f"run {run_id!r}: a value has the wrong type ({error})")
    return damaged_parts, results, messages


OF_ONE_STATEMENT: Final = frozenset({list_tasks, list_attempts, list_events, list_notes, run_sizes})
"""The reads that need no transaction to see one state of the database."""


def apply_batch(batch: Batch, run: CachedRun | None) -> Reading[Applied | None]:
    """Read what the batch needs, and apply what is not applied yet; None if nothing is left. Raises Fenced, Gap or
    Conflict. `run` is the run as of its last change; None if it has to be read.
    """
    run_id, creates = batch.run_id, bool(batch.events) and isinstance(batch.events[0], RunCreated)
    if run is None or creates:
        run = None
        for row in (yield f"{tables.GET_HEAD}{{lock}}", (run_id,)):
            settings = (yield from _settings(run_id)) if creates else ""
            run = CachedRun(_run(row, {}, settings))
    skipped = write_rules.count_applied(batch, None if run is None else run.head)
    events = batch.events[skipped:]
    if not events:
        return None
    if run is not None:
        yield from states(run_id, run, events)
    return apply_events(run_id, run, batch.first_seq + skipped, events)


def states(run_id: str, run: CachedRun, events: Sequence[Event]) -> Reading[None]:
    """Read into `run` what the events need and it lacks."""
    if missing := run.missing(events):
        run.tasks.update(map(_state, (yield tables.GET_STATES, (list(missing), run_id))))
    if run.needs_size(events):
        [(run.size,)] = yield tables.GET_SIZE, (run_id,)


def open_states(run_id: str, run: CachedRun) -> Reading[None]:
    """Read into `run` all tasks that have not ended."""
    run.tasks.update(map(_state, (yield tables.GET_OPEN_STATES, (run_id,))))
    run.new.clear()


def _state(row: Row) -> tuple[str, TaskState]:
    task_id, position, status, attempt, crashes = row[:5]
    started, took, usage = row[5:9], row[9], row[10:]
    return task_id, TaskState(position, status, attempt, crashes, started, usage=_usage(usage), duration_s=took)
