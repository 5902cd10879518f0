"""The rows of a batch, gathered by statement.

Theory: the cost of binding a value depends on the type. The sqlite3 module searches an adapter for every None, bool and
bytes, five times as slow (0.3 microseconds) as an int. A value that is usually missing is therefore bound as a value of
another type, `NO_TEXT` or `NO_NUMBER`, and the statement turns the substitute into NULL. The rows of a statement are
one flat list of values, because a tuple for each row would be a thousand more objects for the garbage collector.
"""

from __future__ import annotations

import json
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Final

from plait.persistence.old_tables import kinds
from plait.persistence.old_tables.checksum import (
    WRONG_TYPES,
    damaged,
    end_checksum,
    row_checksum,
    start_checksum,
    task_checksum,
)
from plait.usage import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from plait.persistence.rules import RunHead

Row = tuple[Any, ...]
NO_TEXT: Final = 0
NO_NUMBER: Final = ""
_INLINE_BYTES: Final = 64 * 1024
_SHORT: Final = _INLINE_BYTES // 4  # characters of at most four bytes each in UTF-8


class BatchRows:
    """The rows that a batch adds and changes.

    Statements run in a fixed order, whatever the order of the calls. A row that changes twice is therefore written
    once, with its last values.
    """

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.blobs_by_key: dict[bytes, tuple[int, str]] = {}
        """The size in bytes and the text of each large text, by the key in `blobs`."""
        self.waiting: dict[kinds.RowKind, list[Any]] = {kind: [] for kind in kinds.IN_ORDER}
        """The values of all rows of each kind, in one flat list."""
        self._sessions: dict[int, tuple[str | None, bool | None]] = {}
        self._tasks: dict[int, tuple[str | None, int, str | int | None, str | None]] = {}
        self._finished: dict[int, tuple[Row, Row]] = {}

    def add(self, kind: kinds.RowKind, row: Row) -> None:
        """Gather a row of the kind."""
        self.waiting[kind].extend(row)

    def set_session(self, start: int, session_id: str | None = None, *, confirmed: bool | None = None) -> None:
        """Set the session of a start; None keeps the stored value."""
        before = self._sessions.get(start, (None, None))
        kept = before[0] if session_id is None else session_id
        self._sessions[start] = kept, before[1] if confirmed is None else confirmed

    def set_task(
        self,
        task: int,
        set_to: str | None,
        *,
        crashed: bool = False,
        answers: str | int | None = 0,
        prompt: str | None = None,
    ) -> None:
        """Set the values of a task that do not follow from attempts. `answers` 0 keeps the stored answers, and None the
        stored prompt.
        """
        _, crashes, kept, before = self._tasks.get(task, (None, 0, 0, None))
        set_answers = kept if answers == 0 else answers
        self._tasks[task] = set_to, crashes + crashed, set_answers, before if prompt is None else prompt

    def finish(self, ended: Row, result: Row) -> None:
        """End an attempt that ended with a question. `ended` is an end; usage is added to the stored usage."""
        self._finished[ended[0]] = ended, result

    def blobs(self, *texts: str | None) -> tuple[bytes | None, ...] | None:
        """Return the key of `blob` for each text, or None if no text is large."""
        for text in texts:
            if text is not None and len(text) > _SHORT:
                keys = tuple(map(self.blob, texts))
                return keys if any(keys) else None
        return None

    def blob(self, text: str | None) -> bytes | None:
        """Store a large text as a blob and return the key. Return None for a text that belongs into its row."""
        if text is None or len(text) <= _SHORT:
            return None
        encoded = text.encode()
        if len(encoded) <= _INLINE_BYTES:
            return None
        key = sha256(encoded).digest()
        self.blobs_by_key.setdefault(key, (len(encoded), text))
        return key

    def to_renew(self) -> dict[kinds.RowKind, list[int]]:
        """Return the ids of the stored rows that change, by the kind of the change, for `renew`.

        The rows are read after the addition of the new rows, because this batch may add them.
        """
        wanted: dict[kinds.RowKind, Iterable[int]] = {
            kinds.FINISH_ENDS: self._finished,
            kinds.SET_SESSIONS: self._sessions,
            kinds.SET_TASKS: self._tasks,
        }
        return {kind: list(ids) for kind, ids in wanted.items() if ids}

    def renew(self, kind: kinds.RowKind, stored: Iterable[Row]) -> None:
        """Gather the changed rows, with new checksums. Raises StoreError if a stored row does not fit its checksum."""
        _RENEW[kind](self, stored)

    def renew_starts(self, stored_rows: Iterable[Row]) -> None:
        for row in stored_rows:
            self._require_fit(start_checksum, row, "the start of an attempt")
            start, task, attempt, backend, session_id, confirmed, at, _ = row
            new_id, now_confirmed = self._sessions[start]
            session_id = session_id if new_id is None else new_id
            confirmed = confirmed if now_confirmed is None else int(now_confirmed)
            checksum = start_checksum(start, task, attempt, backend, session_id, confirmed, at)
            self.add(kinds.SET_SESSIONS, (start, session_id, confirmed, checksum))

    def renew_tasks(self, stored_rows: Iterable[Row]) -> None:
        for row in stored_rows:
            task, task_id, _, crashes, stored, backend, added_by, edges, spec, prompt, _ = row
            self._require_fit(task_checksum, row, f"task {task_id!r}")
            set_to, crashed, answered, changed = self._tasks[task]
            prompt = prompt if changed is None else changed
            crashes += crashed
            answers = stored if isinstance(answered, int) else answered
            given = backend, added_by, edges, spec, prompt
            checksum = task_checksum(task, task_id, set_to, crashes, answers, *given)
            self.add(kinds.SET_TASKS, (task, set_to, crashes, answers, checksum))
            if changed is not None:
                self.add(kinds.SET_PROMPTS, (task, edges, spec, prompt))

    def renew_ends(self, stored_rows: Iterable[Row]) -> None:
        for row in stored_rows:
            self._require_fit(end_checksum, row, "the end of an attempt")
            ended, result = self._finished[row[0]]
            new = _finished(row, ended)
            self.add(kinds.FINISH_ENDS, (*new[:-2], end_checksum(*new), *result))

    def _require_fit(self, checksum: Callable[..., int], row: Row, what: str) -> None:
        """Raise StoreError unless the stored row, with the checksum behind, fits the checksum."""
        try:
            fits = row[-1] == checksum(*row[:-1])
        except WRONG_TYPES:
            fits = False
        if not fits:
            raise damaged(self._run_id, what)


_RENEW: Final[dict[kinds.RowKind, Callable[[BatchRows, Iterable[Row]], None]]] = {
    kinds.FINISH_ENDS: BatchRows.renew_ends,
    kinds.SET_SESSIONS: BatchRows.renew_starts,
    kinds.SET_TASKS: BatchRows.renew_tasks,
}


def _finished(stored: Row, ended: Row) -> Row:
    """Return the columns of an end that follows a question: usage is added, and the question is answered."""
    took, more_took = stored[11], ended[11]
    took = more_took if took is None else took if more_took is None else took + more_took
    spent = spent_in(stored) + spent_in(ended)
    return (*ended[:4], *usage_columns(spent, took), *ended[13:], None, None)


def usage_columns(spent: Usage, took: float | None) -> Row:
    """Return the values of the columns of `ends` from `input_tokens` to `model`."""
    cost = spent.cost_usd, took, spent.model
    parts = spent.cache_read_tokens, spent.cache_write_tokens, spent.reasoning_tokens, int(spent.cost_is_partial)
    return (spent.input_tokens, spent.output_tokens, *parts, *cost)


def spent_in(end: Row) -> Usage:
    """Return the usage in a row of `ends`."""
    tokens_in, tokens_out, cache_read, cache_write, reasoning, is_partial, cost, _, model = end[4:13]
    return Usage(tokens_in, tokens_out, cost, model, cache_read, cache_write, reasoning, is_partial == 1)


def run_columns(number: int, run_id: str, head: RunHead, spent: Usage) -> Row:
    """Return the values of the columns of `runs` that change, from `status` to `row_checksum`, in the order of
    SET_HEAD.
    """
    owner = head.owner
    owned_by: Row = (None,) * 6
    if owner is not None:
        owned_by = (owner.owner_id, owner.host, owner.boot_id, owner.pid, owner.process_started, owner.claimed_at)
    lease = None if head.lease_expires_at is None else head.lease_expires_at + 0.0
    claims = json.dumps([[claim.seq, claim.owner_id] for claim in head.claims])
    policy = head.policy_state, head.policy_seq
    state = (head.status, head.started_at, head.ended_at, head.error, head.last_seq, lease, claims, *policy)
    parts = spent.cache_read_tokens, spent.cache_write_tokens, spent.reasoning_tokens, int(spent.cost_is_partial)
    usage = spent.input_tokens, spent.output_tokens, *parts, spent.cost_usd
    checksum = row_checksum(number, run_id, head.name, head.created_at, *state, *usage, *owned_by)
    return (*state, *usage, *owned_by, checksum)
