"""Read records, by plain functions on the database's thread that return whole results, never a cursor."""

from __future__ import annotations

import gc
import json
import sqlite3
import struct
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from plait.persistence.errors import StoreError
from plait.persistence.event_log import completion_detail, start_detail
from plait.persistence.records import (
    NOTHING_SPENT,
    AttemptRecord,
    EventKind,
    EventRecord,
    MessageRecord,
    NoteRecord,
    Owner,
    RunRecord,
    Spent,
    TaskRecord,
)
from plait.persistence.rules import Claim, RunHead
from plait.persistence.sqlite import statements as sql
from plait.persistence.sqlite.bulk import spent_in
from plait.persistence.sqlite.checksum import (
    blob_key,
    content_checksum,
    damaged,
    end_checksum,
    message_checksum,
    row_checksum,
    start_checksum,
    task_checksum,
)
from plait.persistence.sqlite.task_cache import ids_of
from plait.persistence.sqlite.transaction import decode_lossy, transaction

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from plait.persistence.sqlite.checksum import Content

Row = tuple[Any, ...]
_WRONG_TYPES = TypeError, KeyError, AttributeError, struct.error
"""The errors of reading a value of a type that its column does not allow; struct.error is of a packed number."""
_START = 8
"""The number of columns of a start with its checksum."""
_TASK = 11
_END = 18
_LAST_END = _TASK + _START
"""The column at which the end of the last attempt begins, behind the task and the start."""
_LAST_SUM = _LAST_END + _END - 1
"""The column with the checksum of that end; the result is behind."""
_ALL = 1 << 31
_SEQ = 0xFFFFFFFF
"""The bits of an id with the number of a change, or with the position of a task."""
_EVENT_KINDS: Mapping[str, EventKind] = {kind.value: kind for kind in EventKind}
"""By the stored words. A look-up is several times as fast as a call of the class."""
P = ParamSpec("P")
T = TypeVar("T")


def read(
    connection: sqlite3.Connection,
    function: Callable[Concatenate[sqlite3.Connection, P], T],
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """Return the result of `function`.

    If the file holds bytes that are no UTF-8, run `function` again with a lossy decoder. The checksum then shows the
    damaged record, and the other records can still be read.
    """
    try:
        return function(connection, *args, **kwargs)
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    except _WRONG_TYPES as error:
        raise _of_wrong_type(error) from error
    connection.text_factory = decode_lossy
    try:
        return function(connection, *args, **kwargs)
    except _WRONG_TYPES as error:
        raise _of_wrong_type(error) from error
    finally:
        connection.text_factory = str


def _of_wrong_type(error: Exception) -> StoreError:
    return StoreError(f"a stored row is damaged: a value has the wrong type ({error}); restore a copy of the store")


def read_head(connection: sqlite3.Connection, run_id: str, *, settings: bool) -> tuple[int, RunHead, Spent] | None:
    """Return the number and the head of the run with the usage of all attempts, or None if there is no such run.

    Without `settings` the settings of the head are empty: all inputs are part of the settings, up to many megabytes.
    Raises StoreError if the row is damaged.
    """
    row = connection.execute(sql.GET_HEAD, (run_id,)).fetchone()
    if row is None:
        return None
    return _head(row, _settings(connection, run_id) if settings else "")


def _settings(connection: sqlite3.Connection, run_id: str) -> str:
    settings, key, checksum, content = connection.execute(sql.GET_SETTINGS, (run_id,)).fetchone()
    if not _fits(run_id, checksum, _Stored(settings, key, content)):
        raise damaged(run_id, "the text of its settings and inputs")
    return str(settings if key is None else content)


def _head(row: Row, settings: str) -> tuple[int, RunHead, Spent]:
    number, run_id, name, created_at, status, started_at, ended_at, error, last_seq, lease_expires_at, claims = row[:11]
    policy_state, policy_seq, input_tokens, output_tokens, cache_read, cache_write, reasoning = row[11:18]
    is_partial, cost_usd, *owner, checksum = row[18:]
    if checksum != row_checksum(*row[:-1]):
        raise damaged(run_id, "its row")
    head = RunHead(
        name=name,
        settings=settings,
        created_at=created_at,
        status=status,
        started_at=started_at,
        ended_at=ended_at,
        error=error,
        last_seq=last_seq,
        owner=None if owner[0] is None else Owner(*owner),
        lease_expires_at=lease_expires_at,
        claims=tuple(Claim(seq, owner_id) for seq, owner_id in json.loads(claims)),
        policy_state=policy_state,
        policy_seq=policy_seq,
    )
    parts = cache_read, cache_write, reasoning, is_partial == 1
    return number, head, Spent(input_tokens, output_tokens, cost_usd, None, *parts)


def get_run(connection: sqlite3.Connection, run_id: str) -> RunRecord | None:
    with transaction(connection):
        found = read_head(connection, run_id, settings=True)
        return None if found is None else _run(connection, run_id, *found[1:])


def list_runs(connection: sqlite3.Connection, limit: int) -> tuple[RunRecord, ...]:
    with transaction(connection):
        rows: list[Row] = connection.execute(sql.LIST_RUNS, (max(0, limit),)).fetchall()
        return tuple(_listed(connection, row) for row in rows)


def _listed(connection: sqlite3.Connection, row: Row) -> RunRecord:
    """Return the run, without settings; marked as damaged if the row does not fit its checksum."""
    try:
        return _run(connection, row[1], *_head(row, "")[1:])
    except StoreError as error:
        head = RunHead(name="", settings="", created_at="", status="failed", error=str(error))
        return replace(head.record(str(row[1]), {}, NOTHING_SPENT), damaged=True)


def _run(connection: sqlite3.Connection, run_id: str, head: RunHead, spent: Spent) -> RunRecord:
    counts: dict[str, int] = dict(connection.execute(sql.COUNT_TASKS, (run_id,)).fetchall())
    return head.record(run_id, counts, spent)


class _Stored(NamedTuple):
    """A text as stored: in its row, or by key in `blobs`."""

    inline: str | None
    key: bytes | None
    blob: str | None
    """The text of `key` in `blobs`; None without a key, and if the text is lost."""

    @property
    def text(self) -> str | None:
        return self.inline if self.key is None else self.blob

    @property
    def content(self) -> Content:
        return self.inline if self.key is None else self.key

    @property
    def is_lost(self) -> bool:
        """Return whether the text of the key is missing or damaged."""
        return self.key is not None and (self.blob is None or blob_key(self.blob) != self.key)


def _fits(row: int | str, checksum: bytes | None, text: _Stored, data: _Stored | None = None) -> bool:
    """Return whether the texts fit the checksum of the row with this id."""
    said = None if data is None else data.content
    if text.content is None and said is None:
        return checksum is None
    if checksum != content_checksum(row, text.content, said):
        return False
    return not text.is_lost and (data is None or not data.is_lost)


def _checked_start(run_id: str, task_id: str, row: Row) -> Row:
    """Return the row without the checksum. Raises StoreError if the row is damaged."""
    if row[7] != start_checksum(*row[:7]):
        raise _damaged_start(run_id, task_id)
    return row[:7]


def _checked_end(run_id: str, task_id: str, row: Row) -> Row:
    """Return the row without the checksum. Raises StoreError if the row is damaged."""
    if row[17] != end_checksum(*row[:17]):
        raise _damaged_end(run_id, task_id)
    return row[:17]


def _damaged_start(run_id: str, task_id: str) -> StoreError:
    return damaged(run_id, f"the start of an attempt at task {task_id!r}")


def _damaged_end(run_id: str, task_id: str) -> StoreError:
    return damaged(run_id, f"the end of an attempt at task {task_id!r}")


def list_tasks(connection: sqlite3.Connection, run_id: str, task_id: str | None = None) -> tuple[TaskRecord, ...]:
    # Row by row: a list of all rows would double the number of objects for the garbage collector.
    with transaction(connection), _paused_collector():
        if task_id is None:
            found = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
        else:
            found = connection.execute(sql.GET_TASK, (run_id, task_id)).fetchone()
        if found is None:
            return ()
        ids = ids_of(found[0]) if task_id is None else {"first": found[0], "last": found[0]}
        numbered = enumerate(connection.execute(sql.LIST_TASKS, ids), ids["first"])
        return tuple(_task(run_id, task, row) for task, row in numbered)


def check_run(connection: sqlite3.Connection, run_id: str) -> tuple[TaskRecord, ...]:
    """Read everything of the run but messages, and return the tasks. Raises StoreError for a damaged row."""
    get_run(connection, run_id)
    list_attempts(connection, run_id, None)
    list_events(connection, run_id, 0, _ALL)
    list_notes(connection, run_id, 0)
    return list_tasks(connection, run_id)


@contextmanager
def _paused_collector() -> Generator[None]:
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


_STATUSES: Mapping[str | None, str] = {
    None: "running",
    "retried": "pending",
    "interrupted": "pending",
    "asked": "waiting_input",
}
"""The status of a task by the status with which the last attempt ended, where the two differ."""


def _task(run_id: str, expected: int, row: Row) -> TaskRecord:
    """Return the record of the task; `expected` is the id that the row has to have.

    All in one function, because calls and slices for each part took a fifth of the time of a resume.
    """
    task, task_id, set_to, crashes, answers, backend, added_by, edges, spec, prompt, checksum = row[:_TASK]
    start, of_task, attempt, start_backend, session_id, confirmed, started_at, start_sum = row[_TASK:_LAST_END]
    if task != expected or checksum != task_checksum(
        task, task_id, set_to, crashes, answers, backend, added_by, edges, spec, prompt
    ):
        raise damaged(run_id, f"task {task_id!r} (prompt, dependencies, options, answers)")
    upstream = () if edges == "[]" else tuple(json.loads(edges))
    given = task_id, task & _SEQ, prompt, upstream, backend, spec
    if start is None:
        return TaskRecord(*given, set_to or "pending", 0, crashes=crashes, answers=answers, added_by=added_by)
    if start_sum != start_checksum(start, of_task, attempt, start_backend, session_id, confirmed, started_at):
        raise _damaged_start(run_id, task_id)
    end = row[_LAST_END:_LAST_SUM]
    if end[0] is not None and row[_LAST_SUM] != end_checksum(*end):
        raise _damaged_end(run_id, task_id)
    ended, ended_at, duration_s, (error_kind, error, question, asked) = end[2], end[3], end[11], end[13:]
    status = set_to or _STATUSES.get(ended, ended)
    if status != "waiting_input":
        question = asked = None
    is_damaged, text, data = _result(start, status, row[_LAST_SUM + 1 :])
    spent = NOTHING_SPENT if ended is None else spent_in(end)
    # By position: keyword arguments take a third longer over 10,000 tasks.
    last = text, data, error_kind, error, session_id, spent, duration_s, started_at, ended_at, is_damaged
    more: tuple[Any, ...] = (crashes, confirmed == 1, question, asked, answers, added_by)
    return _record(*given, status, attempt, *last, *more)


_record: Callable[..., TaskRecord] = TaskRecord
"""TaskRecord for values whose types the columns guarantee."""


def _result(start: int, status: str, row: Row) -> tuple[bool, str | None, str | None]:
    """Return whether the result is damaged, and the text and the data of an undamaged result."""
    checksum, text, data, text_key, data_key, text_blob, data_blob = row
    if (checksum is None) == (status == "completed"):
        return True, None, None
    if text_key is None and data_key is None:  # usual, and twice as fast as below
        if checksum is None:
            return text is not None or data is not None, None, None
        is_damaged = text is None or checksum != content_checksum(start, text, data)
        return (True, None, None) if is_damaged else (False, text, data)
    said, value = _Stored(text, text_key, text_blob), _Stored(data, data_key, data_blob)
    return (False, said.text, value.text) if _fits(start, checksum, said, value) else (True, None, None)


def list_attempts(connection: sqlite3.Connection, run_id: str, task_id: str | None) -> tuple[AttemptRecord, ...]:
    with transaction(connection):
        if task_id is None:
            found = connection.execute(sql.GET_NUMBER, (run_id,)).fetchone()
            rows = [] if found is None else connection.execute(sql.LIST_ATTEMPTS, ids_of(found[0])).fetchall()
        else:
            found = connection.execute(sql.GET_TASK, (run_id, task_id)).fetchone()
            rows = [] if found is None else connection.execute(sql.LIST_TASK_ATTEMPTS, {"task": found[0]}).fetchall()
        return tuple(_attempt(run_id, row) for row in rows)


def _attempt(run_id: str, row: Row) -> AttemptRecord:
    task_id: str = row[0]
    traceback = _checked_traceback(run_id, task_id, row[1:4])
    row = row[3:]
    _, _, attempt, backend, session_id, _, started_at = _checked_start(run_id, task_id, row[1 : 1 + _START])
    begun = task_id, attempt
    if row[1 + _START] is None:
        return AttemptRecord(*begun, "running", backend, session_id, started_at, None, None, None, NOTHING_SPENT, None)
    end = _checked_end(run_id, task_id, row[1 + _START :])
    status, ended_at, duration_s, (error_kind, error, *_) = end[2], end[3], end[11], end[13:]
    given = status, backend, session_id, started_at
    return AttemptRecord(*begun, *given, ended_at, error_kind, error, spent_in(end), duration_s, traceback)


def _checked_traceback(run_id: str, task_id: str, row: Row) -> str | None:
    start, checksum = row[0], row[2]
    content: str | None = row[1]
    if start is not None and checksum != row_checksum(start, content):
        raise damaged(run_id, f"the traceback of an attempt of task {task_id!r}")
    return content


def list_messages(connection: sqlite3.Connection, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
    with transaction(connection):
        found = connection.execute(sql.GET_TASK, (run_id, task_id)).fetchone()
        if found is None:
            return ()
        task = {"task": found[0]}
        messages = [_message(row) for row in connection.execute(sql.LIST_MESSAGES, task)]
        for row in connection.execute(sql.LIST_END_MESSAGES, task):
            messages += _end_messages(run_id, task_id, row)
    messages.sort(key=attrgetter("place"))
    return tuple(_record_of(task_id, position, message) for position, message in enumerate(messages))


class _Placed(NamedTuple):
    """A message with its place in the conversation."""

    place: tuple[int, int]
    """The number of the change, then the part, as in the view `messages`."""
    attempt: int
    role: str
    content: str
    input_tokens: int
    output_tokens: int
    at: str
    damaged: bool


def _message(row: Row) -> _Placed:
    message, _, attempt, role, at, input_tokens, output_tokens, checksum, *texts = row
    stored = _Stored(*texts)
    is_damaged = stored.is_lost or checksum != message_checksum(row[:7], stored.content)
    shown = "" if is_damaged else stored.text or ""
    return _Placed((message & _SEQ, 0), attempt, role, shown, input_tokens, output_tokens, at, is_damaged)


def _record_of(task_id: str, position: int, message: _Placed) -> MessageRecord:
    _, attempt, role, content, input_tokens, output_tokens, at, is_damaged = message
    return MessageRecord(task_id, position, attempt, role, content, input_tokens, output_tokens, at, is_damaged)


def _end_messages(run_id: str, task_id: str, row: Row) -> list[_Placed]:
    """Return the prompt of an attempt and its answer, if there is one."""
    start, _, attempt, *_ = _checked_start(run_id, task_id, row[:_START])
    _, end, _, at, input_tokens, output_tokens, *_ = _checked_end(run_id, task_id, row[_START : _START + _END])
    checksum, text, data, text_key, data_key, text_blob, prompt_checksum, *prompts = row[_START + _END :]
    prompt, said = _Stored(*prompts), _Stored(text, text_key, text_blob)
    is_damaged = not _fits(start, prompt_checksum, prompt)
    shown = "" if is_damaged else prompt.text or ""
    found = [_Placed(((end & _SEQ) - 1, 1), attempt, "user", shown, 0, 0, at, is_damaged)]
    if checksum is not None or said.content is not None:
        data_content = data if data_key is None else data_key
        is_damaged = said.is_lost or checksum != content_checksum(start, said.content, data_content)
        shown = "" if is_damaged else said.text or ""
        place = end & _SEQ, 2
        found.append(_Placed(place, attempt, "assistant", shown, input_tokens, output_tokens, at, is_damaged))
    return found


def list_events(
    connection: sqlite3.Connection, run_id: str, after: int, limit: int, kind: EventKind | None = None
) -> tuple[EventRecord, ...]:
    with transaction(connection):
        found = connection.execute(sql.LAST_SEQ, (run_id,)).fetchone()
        if found is None or after >= found[1]:  # the usual answer for a listener that polls
            return ()
        ids = ids_of(found[0])
        ids["first"] += max(0, after) + 1
        page = {"run_id": run_id, "after": after, "limit": max(0, limit), "kind": kind, **ids}
        events = [_event(row) for row in connection.execute(sql.LIST_OTHER_EVENTS, page)]
        if kind in {None, EventKind.TASK_STARTED}:
            events += [_start_event(run_id, row) for row in connection.execute(sql.LIST_STARTS, page)]
        if kind in {None, EventKind.TASK_COMPLETED}:
            events += [_completion_event(run_id, row) for row in connection.execute(sql.LIST_COMPLETIONS, page)]
    events.sort(key=attrgetter("seq"))
    return tuple(events[: max(0, limit)])


def _event(row: Row) -> EventRecord:
    run_id, seq, at, kind, task_id, attempt, detail, checksum = row
    if checksum != row_checksum(*row[:-1]):
        raise damaged(run_id, f"event {seq}")
    return EventRecord(seq, at, _EVENT_KINDS[kind], task_id, attempt, detail)


def _start_event(run_id: str, row: Row) -> EventRecord:
    start, _, attempt, backend, _, _, at = _checked_start(run_id, row[0], row[1:])
    return EventRecord(start & _SEQ, at, EventKind.TASK_STARTED, row[0], attempt, start_detail(backend))


def _completion_event(run_id: str, row: Row) -> EventRecord:
    task_id, attempt = row[:2]
    end = _checked_end(run_id, task_id, row[2:])
    detail = completion_detail(spent_in(end))
    return EventRecord(end[1] & _SEQ, end[3], EventKind.TASK_COMPLETED, task_id, attempt, detail)


def list_notes(connection: sqlite3.Connection, run_id: str, after: int) -> tuple[NoteRecord, ...]:
    return tuple(_note(row) for row in connection.execute(sql.LIST_NOTES, (run_id, after)).fetchall())


def _note(row: Row) -> NoteRecord:
    run_id, number, kind, at, task_id, body, checksum = row
    if checksum != message_checksum((run_id, number, kind, at, task_id), body):
        raise damaged(run_id, f"note {number}")
    return NoteRecord(number, kind, at, task_id, body)
