"""The records of rows: checked by their checksums, and turned into what a store returns. Pure."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from plait.errors import StoreError
from plait.events import EVENTS, Owner
from plait.persistence.apply_events import TaskState
from plait.persistence.checksums import checksum, damaged, digest
from plait.persistence.store_records import AttemptRecord, EventRecord, MessageRecord, NoteRecord, RunRecord, TaskRecord
from plait.persistence.tables import RUN_STATUSES
from plait.persistence.write_rules import Claim, RunHead
from plait.statuses import TASK_STATUSES
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

Row = tuple[Any, ...]
WRONG_TYPES: Final = (TypeError, ValueError, KeyError, AttributeError)
"""What a value of the wrong type raises; no database lets one in, but a damaged file may hold one."""


@contextmanager
def explained_damage() -> Generator[None]:
    """Raise StoreError for a value of the wrong type that is read in the block."""
    try:
        yield
    except WRONG_TYPES as error:
        raise StoreError(
            f"a stored row is damaged: a value has the wrong type ({error}); restore a copy of the store"
        ) from error


@contextmanager
def paused_collector() -> Generator[None]:
    """Pause the garbage collector. All objects of the block are kept, and collections took a quarter of the time of a
    resume of 10,000 tasks.
    """
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
    tokens_in, tokens_out, cost, model, *parts, is_partial, kept_1h = values
    return Usage(tokens_in, tokens_out, cost, model, parts[0], parts[1], parts[2], is_partial == 1, kept_1h)


def _whole(text: str | None, key: bytes | None, large: str | None) -> str | None:
    """Return the text of a row, which is in `texts` if it has a key; None if it is lost."""
    if key is None:
        return text
    return large if large is not None and digest(large) == key else None


def run_head(row: Row, settings: str = "") -> tuple[RunHead, Usage]:
    """Return the head of the run with the row of GET_HEAD, and the usage of all attempts. Raises StoreError."""
    run_id, name, created_at, status, started_at, ended_at, error, last_seq, claims, *owner = row[:15]
    lease, policy_state, policy_seq, tokens_in, tokens_out, cost, *parts, _ = row[15:]
    try:
        claimed = tuple(Claim(seq, owner_id) for seq, owner_id in json.loads(claims))
        datetime.fromisoformat(created_at)  # lists of runs show it
    except WRONG_TYPES as wrong:
        raise damaged(run_id, "its row") from wrong
    if status not in RUN_STATUSES:
        raise damaged(run_id, "its status")
    head = RunHead(
        name, settings, created_at, status, started_at, ended_at, error, last_seq,
        None if owner[0] is None else Owner(*owner), lease, claimed, policy_state, policy_seq,
    )  # fmt: skip
    return head, _usage([tokens_in, tokens_out, cost, None, *parts])


def whole_settings(run_id: str, row: Row) -> str:
    """Return the settings of the row of GET_SETTINGS. Raises StoreError if they are damaged."""
    expected, key, text, large = row
    settings = _whole(text, key, large)
    if settings is None or checksum(run_id, settings) != expected:
        raise damaged(run_id, "the text of its settings and inputs")
    return settings


def run_record(
    run_id: str, head: RunHead, usage: Usage, counts: dict[str, int], *, lease_has_expired: bool
) -> RunRecord:
    """Return the record of the run. Raises StoreError if a task has no status."""
    if not counts.keys() <= TASK_STATUSES.keys():
        raise damaged(run_id, "the status of a task")
    return head.record(run_id, counts, usage, lease_has_expired=lease_has_expired)


def damaged_run(run_id: str, error: StoreError) -> RunRecord:
    """Return the record of a run that cannot be read, for a list of runs."""
    head = RunHead(name="", settings="", created_at="", status="failed", error=str(error))
    return replace(head.record(run_id, {}, NO_USAGE), damaged=True)


def task_state(row: Row) -> tuple[str, TaskState]:
    """Return the id and the state of the task with the row of GET_STATES."""
    task_id, position, status, attempt, crashes, took, *usage = row
    if status != "waiting_input":
        return task_id, TaskState(position, status, attempt, crashes)
    return task_id, TaskState(position, status, attempt, crashes, _usage(usage), took)


def task_record(run_id: str, row: Row) -> TaskRecord:
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
    if (prompt_sum != checksum(task_id, prompt) or spec_sum != checksum(task_id, edges, spec)
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
    # By position: keyword arguments take a third longer over 10,000 tasks.
    return _record(
        task_id, position, prompt, upstream, backend, spec, status, attempt, text, data, error_kind, error, session_id,
        _usage(usage), took, started_at, ended_at, is_damaged, crashes, confirmed == 1, question, asked, answers,
        added_by,
    )
    # fmt: on


_record: Callable[..., TaskRecord] = TaskRecord
"""TaskRecord for values whose types the columns guarantee."""


def attempt_records(rows: Iterable[Row]) -> tuple[AttemptRecord, ...]:
    """Return the records of the rows of LIST_ATTEMPTS, in the order of their starts."""
    return tuple(map(_attempt, sorted(rows, key=lambda row: row[0])))


def _attempt(row: Row) -> AttemptRecord:
    _, task_id, attempt, status, backend, session_id, started_at, ended_at, kind, error, took, traceback, *usage = row
    ended = ended_at, kind, error, _usage(usage), took, traceback
    return AttemptRecord(task_id, attempt, status, backend, session_id, started_at, *ended)


def message_records(task_id: str, messages: Iterable[Row], exchanges: Iterable[Row]) -> tuple[MessageRecord, ...]:
    """Return the records of the rows of LIST_MESSAGES and LIST_EXCHANGES, in order. A damaged message is marked."""
    found = [
        (seq, part, attempt, role, _said(task_id, total, _whole(text, key, large), role), tokens_in, tokens_out, at)
        for seq, part, attempt, role, at, tokens_in, tokens_out, total, key, text, large in messages
    ]
    for seq, attempt, at, tokens_in, tokens_out, prompt_sum, prompt_key, prompt, large_prompt, *result in exchanges:
        asked = _said(task_id, prompt_sum, _whole(prompt, prompt_key, large_prompt))
        found.append((seq, 0, attempt, "user", asked, 0, 0, at))
        total, key, text, large, data = result
        if total is not None:  # else the answer was damaged, and was deleted
            answer = _said(task_id, total, _whole(text, key, large), data)
            found.append((seq, 1, attempt, "assistant", answer, tokens_in, tokens_out, at))
    found.sort(key=lambda message: message[:2])
    return tuple(
        MessageRecord(task_id, position, attempt, role, content or "", tokens_in, tokens_out, at, content is None)
        for position, (_, _, attempt, role, content, tokens_in, tokens_out, at) in enumerate(found)
    )


def _said(task_id: str, expected: int, text: str | None, more: str | None = None) -> str | None:
    """Return the text, or None if it does not fit its checksum."""
    return None if text is None or checksum(task_id, text, more) != expected else text


def event_record(row: Row) -> EventRecord:
    """Return the record of the row of LIST_EVENTS."""
    seq, at, kind, task_id, attempt, detail = row
    return EventRecord(seq, at, EVENTS[kind].kind, task_id, attempt, detail)


def note_checksum(kind: str, task_id: str | None, body: str) -> int:
    return checksum(kind, task_id, body)


def note_record(run_id: str, row: Row) -> NoteRecord:
    """Return the record of the row of LIST_NOTES. Raises StoreError if it is damaged."""
    number, at, kind, task_id, body, expected = row
    if expected != note_checksum(kind, task_id, body):
        raise damaged(run_id, f"note {number}")
    return NoteRecord(number, kind, at, task_id, body)


def session_ids(sessions: Iterable[Row], opened: Iterable[Row]) -> set[str]:
    """Return the ids in the rows of LIST_SESSIONS and LIST_OPENED_SESSIONS."""
    found = {session_id for (session_id,) in sessions}
    return found | {json.loads(detail)["session_id"] for (detail,) in opened}
