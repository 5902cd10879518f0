"""The effect of each change on the tables: checked by the task cache, noted in the cache, and turned into rows."""

from __future__ import annotations

from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Final

from plait import events
from plait.persistence import changes, event_log, rules
from plait.persistence.old_tables import kinds
from plait.persistence.old_tables.checksum import (
    content_checksum,
    end_checksum,
    message_checksum,
    row_checksum,
    start_checksum,
    task_checksum,
)
from plait.persistence.old_tables.rows import NO_NUMBER, NO_TEXT, Row, usage_columns
from plait.statuses import AttemptStatus
from plait.usage import NO_USAGE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plait.events import NewTask
    from plait.persistence.changes import Change
    from plait.persistence.old_tables.originals import Originals
    from plait.persistence.old_tables.rows import BatchRows
    from plait.persistence.old_tables.task_cache import CachedTask, TaskCache


_NO_QUESTION: Final = (None, None)
_NO_PARTS: Final = (0, 0, 0, 0)
"""No tokens counted apart, and no partial cost."""


class ChangeApplier:
    """Applies changes one after the other, and gathers the rows in `rows`."""

    def __init__(self, run_id: str, cache: TaskCache, rows: BatchRows, originals: Originals) -> None:
        self._run_id = run_id
        self._cache = cache
        self._base = cache.base
        self._rows = rows
        self._originals = originals
        self.usage = NO_USAGE
        """The sums over the ended attempts of the batch."""

    def apply(self, first_seq: int, batch: Sequence[Change]) -> None:
        """Apply the changes, numbered from `first_seq`. Raises Conflict if a change is not allowed."""
        for seq, change in enumerate(batch, first_seq):
            kind = type(change)
            apply = _APPLY.get(kind)
            if apply is not None:
                apply(self, seq, change)
            if kind not in _WITHOUT_EVENT:
                event = event_log.event_of(change)
                if event is not None:
                    at, event_kind, *rest = event
                    row = (self._run_id, seq, at, event_kind.value, *rest)
                    self._rows.add(kinds.ADD_EVENTS, (*row, row_checksum(*row)))

    def _require_task(self, change: changes.TaskTransition, attempt: int | None = None) -> CachedTask:
        """Return the cached task.

        Raises Conflict if the change is not allowed from its status, or if `attempt` is not its last attempt.
        """
        task_id = change.task_id
        cached = self._cache.tasks.get(task_id) or self._cache.find(change, task_id)
        _, status, last, _ = cached
        if (attempt is not None and attempt != last) or status not in rules.statuses_before(change):
            raise rules.conflict(self._run_id, change, (status, last))
        return cached

    def create_run(self, _seq: int, change: changes.RunCreated) -> None:
        known = {task.task_id for task in change.tasks}
        if len(known) < len(change.tasks) or not all(known.issuperset(task.depends_on) for task in change.tasks):
            raise rules.conflict(self._run_id, change, None)
        self._insert_tasks(change.tasks, None, change.like)

    def add_tasks(self, _seq: int, change: changes.TasksAdded) -> None:
        rules.check_added(self._run_id, change, self._cache.stored(rules.mentioned_task_ids(change)))
        self._insert_tasks(change.tasks, change.added_by, change.like)

    def _insert_tasks(self, tasks: Sequence[NewTask], added_by: str | None, like: str | None) -> None:
        earlier = {} if like is None else self._originals.tasks.get(like, {})
        number, by = self._cache.number, NO_TEXT if added_by is None else added_by
        for new, task in zip(tasks, self._cache.add_tasks(tasks), strict=True):
            edges = f"[{', '.join(map(encode_basestring, new.depends_on))}]"  # JSON, three times as fast as json.dumps
            backend, spec, prompt = new.backend, new.spec, new.prompt
            checksum = task_checksum(task, new.task_id, None, 0, None, backend, added_by, edges, spec, prompt)
            named = new.task_id, NO_TEXT if backend is None else backend, by
            row, texts = (task, number, *named, checksum), (edges, spec, prompt)
            same = earlier.get(new.task_id)
            if same is not None and same.texts == texts:
                self._rows.add(kinds.ADD_TASK_COPIES, (*row, same.row))
            else:
                self._rows.add(kinds.ADD_TASKS, (*row, *texts))

    def start_task(self, seq: int, change: changes.TaskStarted) -> None:
        task_id, attempt, session_id, at = change.task_id, change.attempt, change.session_id, change.at
        task, _, _, _ = self._require_task(change, attempt - 1)
        start = self._base | seq
        self._cache.tasks[task_id] = (task, "running", attempt, start)
        backend, confirmed = change.backend, int(change.confirmed)
        checksum = start_checksum(start, task, attempt, backend, session_id, confirmed, at)
        session = NO_TEXT if session_id is None else session_id
        self._rows.add(kinds.ADD_STARTS, (start, task, attempt, backend, session, confirmed, at, checksum))
        if session_id is not None:
            self._add_session(task_id, session_id, attempt, at)
        if attempt > 1:  # the task may have been set to pending
            self._rows.set_task(task, None)

    def open_session(self, _seq: int, change: events.SessionOpened) -> None:
        task_id, attempt = change.task_id, change.attempt
        _, status, last, start = self._cache.find(change, task_id)
        if not last or attempt not in (0, last):
            raise rules.conflict(self._run_id, change, (status, last))
        self._rows.set_session(start, change.session_id, confirmed=True if attempt else None)
        self._add_session(task_id, change.session_id, attempt, change.at)

    def _add_session(self, task_id: str, session_id: str, attempt: int, at: str) -> None:
        row = self._run_id, task_id, session_id, attempt
        self._rows.add(kinds.ADD_SESSIONS, (*row, at, row_checksum(*row)))

    def append_message(self, seq: int, change: changes.MessageAppended) -> None:
        task_id, role, content = change.task_id, change.role, change.content
        task = self._cache.find(change, task_id)[0]
        blob = self._rows.blob(content)
        kind, kept = (kinds.ADD_MESSAGES, content) if blob is None else (kinds.ADD_LARGE_MESSAGES, blob)
        usage = change.input_tokens, change.output_tokens
        row = (self._base | seq, task, change.attempt, role, change.at, *usage)
        self._rows.add(kind, (*row, message_checksum(row, kept), kept))

    def complete_task(self, seq: int, change: changes.TaskCompleted) -> None:
        task_id, text, data, prompt = change.task_id, change.text, change.data, change.prompt
        task, status, last, start = self._require_task(change, change.attempt)
        self._cache.put_ended(task_id, (task, "completed", last, start))
        if status == "waiting_input":
            ended = self._end_row(seq, change, start, "completed")
            self._finish_waiting(task, ended, self._result_values(start, text, data))
            return
        end, at, spent, took = self._base | seq, change.at, change.usage, change.duration_s
        input_tokens, output_tokens, cost, model = spent.input_tokens, spent.output_tokens, spent.cost_usd, spent.model
        parts: Row = _NO_PARTS
        if spent is not NO_USAGE:
            self.usage += spent
            parts = usage_columns(spent, took)[2:6]
        usage = input_tokens, output_tokens, NO_NUMBER if cost is None else cost, took
        ended = start, end, at, *usage, NO_TEXT if model is None else model
        kept: Row = (text, NO_TEXT if data is None else data, NO_TEXT if prompt is None else prompt)
        large = self._rows.blobs(text, data, prompt)
        if large is None and parts == _NO_PARTS:
            checksum = end_checksum(
                start, end, "completed", at, input_tokens, output_tokens, *_NO_PARTS, cost, took, model
            )
            asked = NO_NUMBER if prompt is None else content_checksum(start, prompt)
            said = content_checksum(start, text, data)
            same = None if change.taken_from is None else self._originals.answers.get(change.taken_from)
            if same is not None and same.texts == (text, data, prompt):
                self._rows.add(kinds.ADD_COMPLETION_COPIES, (*ended, checksum, said, asked, same.row))
            else:
                self._rows.add(kinds.ADD_COMPLETIONS, (*ended, checksum, said, asked, *kept))
        else:
            large = (None, None, None) if large is None else large
            columns: Row = (start, end, "completed", at, *usage_columns(spent, took), None, None, None, None)
            checksum = end_checksum(*columns)
            texts = text, data, prompt
            text_or_key, data_or_key, asked_or_key = (key or one for key, one in zip(large, texts, strict=True))
            asked = NO_NUMBER if prompt is None else content_checksum(start, asked_or_key)
            said = content_checksum(start, text_or_key, data_or_key)
            short = (NO_TEXT if key is not None else value for key, value in zip(large, kept, strict=True))
            self._rows.add(kinds.ADD_LARGE_COMPLETIONS, (*ended, *parts, checksum, said, asked, *short, *large))

    def _result_values(self, start: int, text: str, data: str | None) -> Row:
        """Return the checksum, text and data for their row, None for a large value, and the keys of the blobs."""
        keys = self._rows.blob(text), self._rows.blob(data)
        short = (None if key is not None else value for key, value in zip(keys, (text, data), strict=True))
        return (content_checksum(start, keys[0] or text, keys[1] or data), *short, *keys)

    def _finish_waiting(self, task: int, ended: Row, result: Row) -> None:
        """End a task whose last attempt ended with a question, without another attempt."""
        self._rows.finish(ended, result)
        self._rows.set_task(task, None)

    def fail_task(self, seq: int, change: changes.TaskFailed) -> None:
        rules.check_failed(self._run_id, change)
        task, status, last, start = self._require_task(change, change.attempt)
        self._cache.put_ended(change.task_id, (task, change.status, last, start))
        ended = self._end_row(seq, change, start, change.status, (change.error_kind, change.error))
        if status == "waiting_input":
            self._finish_waiting(task, ended, _NO_RESULT)
        else:
            self._add_end(ended)
            self._add_traceback(start, change.traceback)

    def _add_traceback(self, start: int, traceback: str | None) -> None:
        if traceback is not None:
            self._rows.add(kinds.ADD_TRACEBACKS, (start, traceback, row_checksum(start, traceback)))

    def _add_end(self, ended: Row, question: Row = _NO_QUESTION) -> None:
        row = (*ended, *question)
        self._rows.add(kinds.ADD_ENDS, (*row, end_checksum(*row)))

    def retry_task(self, seq: int, change: changes.TaskRetried) -> None:
        task, _, last, start = self._require_task(change, change.attempt)
        self._cache.tasks[change.task_id] = (task, "pending", last, start)
        ended = self._end_row(seq, change, start, AttemptStatus.RETRIED, (change.error_kind, change.error))
        self._add_end(ended)
        self._add_traceback(start, change.traceback)
        self._rows.set_session(start, confirmed=change.continues_session)

    def interrupt_task(self, seq: int, change: events.TaskInterrupted) -> None:
        task, _, last, start = self._require_task(change, change.attempt)
        self._cache.tasks[change.task_id] = (task, "pending", last, start)
        ended = self._end_row(seq, change, start, AttemptStatus.INTERRUPTED, (None, change.reason))
        self._add_end(ended)
        if change.crashed:
            self._rows.set_task(task, None, crashed=True)

    def wait_for_input(self, seq: int, change: changes.TaskWaiting) -> None:
        task, _, last, start = self._require_task(change, change.attempt)
        self._cache.tasks[change.task_id] = (task, "waiting_input", last, start)
        asked = change.asked is not None
        ended_as = AttemptStatus.ASKED if asked else AttemptStatus.INTERRUPTED
        self._add_end(self._end_row(seq, change, start, ended_as), (change.question, change.asked))
        if not asked or change.crashed:
            self._rows.set_task(task, None if asked else "waiting_input", crashed=change.crashed)

    def cancel_task(self, seq: int, change: changes.TaskCancelled) -> None:
        task, status, last, start = self._require_task(change)
        self._cache.put_ended(change.task_id, (task, "cancelled", last, start))
        if status == "running":
            self._add_end(self._end_row(seq, change, start, "cancelled"))
        else:
            self._rows.set_task(task, "cancelled")

    def _end_row(self, seq: int, change: changes.AttemptEnd, start: int, status: str, error: Row = (None, None)) -> Row:
        """Return the values that every end of an attempt has. `error` is the kind and the text."""
        took, spent = None, NO_USAGE
        if not isinstance(change, events.TaskInterrupted):
            took = None if isinstance(change, changes.TaskCancelled) else change.duration_s
            spent = change.usage
            self.usage += spent
        usage = usage_columns(spent, took)
        return (start, self._base | seq, status, change.at, *usage, *error)

    def requeue_task(self, _seq: int, change: changes.TaskReopened | changes.TaskAnswered) -> None:
        task, _, last, start = self._require_task(change)
        self._cache.tasks[change.task_id] = (task, "pending", last, start)
        if isinstance(change, changes.TaskAnswered):
            self._rows.set_task(task, "pending", answers=0 if change.answers is None else change.answers)
        else:
            self._rows.set_task(task, "pending", answers=None, prompt=change.prompt)
            self._rows.set_session(start, confirmed=False)
            if change.damaged:
                self._rows.add(kinds.DISCARD_RESULTS, (start,))


_NO_RESULT: Final = (None,) * 5
_Ends = (
    changes.TaskCompleted
    | changes.TaskFailed
    | changes.TaskRetried
    | events.TaskInterrupted
    | changes.TaskWaiting
    | changes.TaskCancelled
)
_OfTask = changes.TaskStarted | changes.TaskAnswered | changes.TaskReopened | _Ends
_APPLY: Final[dict[type, Callable[..., None]]] = {
    changes.RunCreated: ChangeApplier.create_run,
    changes.TasksAdded: ChangeApplier.add_tasks,
    changes.TaskReopened: ChangeApplier.requeue_task,
    changes.TaskStarted: ChangeApplier.start_task,
    events.SessionOpened: ChangeApplier.open_session,
    changes.MessageAppended: ChangeApplier.append_message,
    changes.TaskCompleted: ChangeApplier.complete_task,
    changes.TaskFailed: ChangeApplier.fail_task,
    changes.TaskRetried: ChangeApplier.retry_task,
    events.TaskInterrupted: ChangeApplier.interrupt_task,
    changes.TaskWaiting: ChangeApplier.wait_for_input,
    changes.TaskAnswered: ChangeApplier.requeue_task,
    changes.TaskCancelled: ChangeApplier.cancel_task,
}
"""The method for each change that concerns tasks. Other changes concern the head of the run, or add an event only."""
OF_TASKS: Final = _APPLY.keys() - {changes.RunCreated}
"""The changes that concern tasks only, and not the head of the run."""
_WITHOUT_EVENT: Final = frozenset({changes.TaskStarted, changes.TaskCompleted, changes.MessageAppended})
"""The changes without a stored event: the event is derived from the attempt, or the change has no event."""
