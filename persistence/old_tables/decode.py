"""Records of rows: each row is checked by its checksum, and turned into the record that a store returns."""

from __future__ import annotations

import gc
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from plait.persistence.errors import StoreError
from plait.persistence.event_log import completion_detail, start_detail
from plait.persistence.old_tables.checksum import (
    blob_key,
    content_checksum,
    damaged,
    end_checksum,
    message_checksum,
    row_checksum,
    start_checksum,
    task_checksum,
)
from plait.persistence.old_tables.rows import spent_in
from plait.persistence.records import (
    AttemptRecord,
    EventKind,
    EventRecord,
    MessageRecord,
    NoteRecord,
    Owner,
    TaskRecord,
)
from plait.persistence.rules import Claim, RunHead
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from plait.persistence.old_tables.checksum import Content

Row = tuple[Any, ...]
_START = 8
"""The number of columns of a start with its checksum."""
_END = 18
_SEQ = 0xFFFFFFFF
"""The bits of an id with the number of a change, or with the position of a task."""
COUNTED = frozenset({"pending", "running", "waiting_input", "completed", "failed", "skipped", "cancelled"})
"""The statuses of tasks. No flipped bit turns one into another."""
_EVENT_KINDS: Mapping[str, EventKind] = {kind.value: kind for kind in EventKind}
"""By the stored words. A look-up is several times as fast as a call of the class."""


def of_wrong_type(error: Exception) -> StoreError:
    return StoreError(f"a stored row is damaged: a value has the wrong type ({error}); restore a copy of the store")


def run_head(row: Row, settings: str) -> tuple[int, RunHead, Usage]:
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
    return number, head, Usage(input_tokens, output_tokens, cost_usd, None, *parts)


class StoredText(NamedTuple):
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


def fits(row: int | str, checksum: int | None, text: StoredText, data: StoredText | None = None) -> bool:
    """Return whether the texts fit the checksum of the row with this id."""
    said = None if data is None else data.content
    if text.content is None and said is None:
        return checksum is None
    if checksum != content_checksum(row, text.content, said):
        return False
    return not text.is_lost and (data is None or not data.is_lost)


def whole_settings(run_id: str, settings: str, checksum: int, pieces: Iterable[Row]) -> str:
    """Return the settings, put together from their pieces if they are large. Raises StoreError if damaged."""
    text = settings or "".join(piece or "" for (piece,) in pieces)
    if checksum != content_checksum(run_id, text):
        raise damaged(run_id, "the text of its settings and inputs")
    return text


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


_STATUSES: Mapping[str | None, str] = {
    None: "running",
    "retried": "pending",
    "interrupted": "pending",
    "asked": "waiting_input",
}
"""The status of a task by the status with which the last attempt ended, where the two differ."""


def task_record(run_id: str, expected: int, row: Row) -> TaskRecord:
    """Return the record of the task; `expected` is the id that the row has to have.

    All in one function, because calls and slices for each part took a fifth of the time of a resume.
    """
    # fmt: off
    (task, task_id, set_to, crashes, answers, backend, added_by, edges, spec, prompt, task_sum,
     start, of_task, attempt, start_backend, session_id, confirmed, started_at, start_sum,
     end, end_id, ended, ended_at, tokens_in, tokens_out, cache_read, cache_write, reasoning, is_partial, cost, took,
     model, error_kind, error, question, asked, end_sum,
     result_sum, text, data, text_key, data_key, text_blob, data_blob) = row
    if task != expected or task_sum != task_checksum(
        task, task_id, set_to, crashes, answers, backend, added_by, edges, spec, prompt
    ):
        raise damaged(run_id, f"task {task_id!r} (prompt, dependencies, options, answers)")
    upstream = () if edges == "[]" else tuple(json.loads(edges))
    if start is None:
        given = task_id, task & _SEQ, prompt, upstream, backend, spec
        return TaskRecord(*given, set_to or "pending", 0, crashes=crashes, answers=answers, added_by=added_by)
    if start_sum != start_checksum(start, of_task, attempt, start_backend, session_id, confirmed, started_at):
        raise _damaged_start(run_id, task_id)
    if end is not None and end_sum != end_checksum(
        end, end_id, ended, ended_at, tokens_in, tokens_out, cache_read, cache_write, reasoning, is_partial, cost,
        took, model, error_kind, error, question, asked,
    ):
        raise _damaged_end(run_id, task_id)
    status = set_to or _STATUSES.get(ended, ended)
    if status != "waiting_input":
        question = asked = None
    if status == "completed" and text_key is data_key is None is not text and result_sum is not None:  # usual
        is_damaged = result_sum != content_checksum(start, text, data)
    else:
        said, value = StoredText(text, text_key, text_blob), StoredText(data, data_key, data_blob)
        is_damaged = (result_sum is None) == (status == "completed") or not fits(start, result_sum, said, value)
        text, data = said.text, value.text
    if is_damaged:
        text = data = None
    spent = NO_USAGE
    if tokens_in or tokens_out or cache_read or cache_write or reasoning or model is not None or cost is not None:
        spent = Usage(tokens_in, tokens_out, cost, model, cache_read, cache_write, reasoning, is_partial == 1)
    # By position: keyword arguments take a third longer over 10,000 tasks.
    return _record(
        task_id, task & _SEQ, prompt, upstream, backend, spec, status, attempt, text, data, error_kind, error,
        session_id, spent, took, started_at, ended_at, is_damaged, crashes, confirmed == 1, question, asked, answers,
        added_by,
    )
    # fmt: on


_record: Callable[..., TaskRecord] = TaskRecord
"""TaskRecord for values whose types the columns guarantee."""


def attempt_record(run_id: str, row: Row) -> AttemptRecord:
    # fmt: off
    (task_id, traceback_of, traceback, traceback_sum, start, task, attempt, backend, session_id, confirmed,
     started_at, start_sum,
     end, end_id, status, ended_at, tokens_in, tokens_out, cache_read, cache_write, reasoning, is_partial, cost, took,
     model, error_kind, error, question, asked, end_sum) = row
    if traceback_of is not None and traceback_sum != row_checksum(traceback_of, traceback):
        raise damaged(run_id, f"the traceback of an attempt of task {task_id!r}")
    if start_sum != start_checksum(start, task, attempt, backend, session_id, confirmed, started_at):
        raise _damaged_start(run_id, task_id)
    if end is None:
        open_ended = None, None, None, NO_USAGE, None
        return AttemptRecord(task_id, attempt, "running", backend, session_id, started_at, *open_ended)
    if end_sum != end_checksum(
        end, end_id, status, ended_at, tokens_in, tokens_out, cache_read, cache_write, reasoning, is_partial, cost,
        took, model, error_kind, error, question, asked,
    ):
        raise _damaged_end(run_id, task_id)
    # fmt: on
    spent = NO_USAGE
    if tokens_in or tokens_out or cache_read or cache_write or reasoning or model is not None or cost is not None:
        spent = Usage(tokens_in, tokens_out, cost, model, cache_read, cache_write, reasoning, is_partial == 1)
    given = status, backend, session_id, started_at, ended_at, error_kind, error, spent, took
    return AttemptRecord(task_id, attempt, *given, traceback)


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


def placed_message(row: Row) -> _Placed:
    message, _, attempt, role, at, input_tokens, output_tokens, checksum, *texts = row
    stored = StoredText(*texts)
    is_damaged = stored.is_lost or checksum != message_checksum(row[:7], stored.content)
    shown = "" if is_damaged else stored.text or ""
    return _Placed((message & _SEQ, 0), attempt, role, shown, input_tokens, output_tokens, at, is_damaged)


def message_record(task_id: str, position: int, message: _Placed) -> MessageRecord:
    _, attempt, role, content, input_tokens, output_tokens, at, is_damaged = message
    return MessageRecord(task_id, position, attempt, role, content, input_tokens, output_tokens, at, is_damaged)


def placed_end_messages(run_id: str, task_id: str, row: Row) -> list[_Placed]:
    """Return the prompt of an attempt and its answer, if there is one."""
    start, _, attempt, *_ = _checked_start(run_id, task_id, row[:_START])
    _, end, _, at, input_tokens, output_tokens, *_ = _checked_end(run_id, task_id, row[_START : _START + _END])
    checksum, text, data, text_key, data_key, text_blob, prompt_checksum, *prompts = row[_START + _END :]
    prompt, said = StoredText(*prompts), StoredText(text, text_key, text_blob)
    is_damaged = not fits(start, prompt_checksum, prompt)
    shown = "" if is_damaged else prompt.text or ""
    found = [_Placed(((end & _SEQ) - 1, 1), attempt, "user", shown, 0, 0, at, is_damaged)]
    if checksum is not None or said.content is not None:
        data_content = data if data_key is None else data_key
        is_damaged = said.is_lost or checksum != content_checksum(start, said.content, data_content)
        shown = "" if is_damaged else said.text or ""
        place = end & _SEQ, 2
        found.append(_Placed(place, attempt, "assistant", shown, input_tokens, output_tokens, at, is_damaged))
    return found


def event_record(row: Row) -> EventRecord:
    run_id, seq, at, kind, task_id, attempt, detail, checksum = row
    if checksum != row_checksum(*row[:-1]):
        raise damaged(run_id, f"event {seq}")
    return EventRecord(seq, at, _EVENT_KINDS[kind], task_id, attempt, detail)


def start_event(run_id: str, row: Row) -> EventRecord:
    start, _, attempt, backend, _, _, at = _checked_start(run_id, row[0], row[1:])
    return EventRecord(start & _SEQ, at, EventKind.TASK_STARTED, row[0], attempt, start_detail(backend))


def completion_event(run_id: str, row: Row) -> EventRecord:
    task_id, attempt = row[:2]
    end = _checked_end(run_id, task_id, row[2:])
    detail = completion_detail(spent_in(end))
    return EventRecord(end[1] & _SEQ, end[3], EventKind.TASK_COMPLETED, task_id, attempt, detail)


def note_record(row: Row) -> NoteRecord:
    run_id, number, kind, at, task_id, body, checksum = row
    if checksum != message_checksum((run_id, number, kind, at, task_id), body):
        raise damaged(run_id, f"note {number}")
    return NoteRecord(number, kind, at, task_id, body)
