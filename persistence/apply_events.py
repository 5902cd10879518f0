"""What each change does to a run: checked against the states of the tasks, noted in them, and turned into rows. Pure.

Theory: rows are gathered by statement, so that each statement runs once for many rows, and the statements may run in
any order. Two changes of one task would meet in another order than they were written; the rows so far are therefore
written before the second of them. Only an attempt that starts and ends in one batch, as one that takes an answer over,
is one change: the row of its start gets the status of its end.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field, replace
from json.encoder import encode_basestring
from typing import TYPE_CHECKING, Final, NamedTuple

from plait import events
from plait.persistence import tables, write_rules
from plait.persistence.store_records import THOUGHTS, RunRecord
from plait.persistence.tables import SHORT, checksum, digest
from plait.statuses import TASK_DONE
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plait.dialogue import Message
    from plait.persistence.tables import Row, Write

    Rows = dict[Write, list[Row]]
    """The rows of each statement; some statements may have none."""


@dataclass(slots=True)
class TaskState:
    """What the next change of a task needs."""

    position: int
    status: str
    attempt: int
    crashes: int = 0
    started: Row = (None, None, None, None)
    """Backend, session, time and change number of the last attempt."""
    usage: Usage = NO_USAGE
    """Of the last attempt, for a task that waits for a person."""
    duration_s: float | None = None


@dataclass(slots=True)
class CachedRun:
    """A run after the owner's last batch: the head, and the tasks that have not ended.

    A store keeps it as long as the head in the database says that nobody else has written.
    """

    head: RunRecord
    tasks: dict[str, TaskState] = field(default_factory=dict[str, TaskState])
    new: dict[str, int] = field(default_factory=dict[str, int])
    """The positions of the tasks without an attempt, which are not in `tasks`. A number takes a tenth of the memory of
    a state, and no time of the garbage collector.
    """
    size: int | None = None
    """The number of tasks of the run; None if it has to be read."""

    def missing(self, batch: Sequence[events.Event]) -> set[str]:
        """Return the ids of the tasks that the changes name and `tasks` lacks."""
        named = {one.task_id for one in batch if isinstance(one, events.TaskEvent)}
        for one in batch:
            if type(one) is events.TasksAdded:
                named.update(write_rules.mentioned_task_ids(one))
        return named.difference(self.tasks).difference(self.new)  # one by one: of two, it would go through all keys

    def needs_size(self, batch: Sequence[events.Event]) -> bool:
        """Return whether `size` has to be read before the changes."""
        return self.size is None and any(isinstance(one, events.TasksAdded) for one in batch)


class Applied(NamedTuple):
    """What a batch makes of a run."""

    run: CachedRun
    segments: list[Rows]
    """The rows to be written, one segment after the other."""
    head: tuple[Write, Row]
    """The statement for the head, and its values but the key."""
    before: RunRecord | None
    """The head before the batch; None for a new run."""


def apply_events(run_id: str, run: CachedRun | None, first_seq: int, batch: Sequence[events.Event]) -> Applied:
    """Apply the events, numbered from `first_seq`. Raises Conflict if one is not allowed; the run is then good for
    nothing.
    """
    before = None if run is None else run.head
    if run is None:  # `write_rules.count_applied` refuses a batch for an unknown run that begins otherwise
        created = batch[0]
        assert isinstance(created, events.RunCreated)
        head = RunRecord(run_id, created.name, "queued", created.at, settings=created.settings)
        run = CachedRun(head, size=0)
    applier = _Applier(run_id, run)
    segments = applier.apply(first_seq, batch)
    head = run.head
    spent = _usage(head.usage)
    sums = *spent[:3], *spent[4:]  # all but the model
    if not applier.changes_head:
        return Applied(run, segments, (tables.SET_LAST_SEQ, (head.last_seq, *sums)), before)
    owner, lease = head.owner, head.lease_expires_at
    owned: Row = (None,) * 6
    if owner is not None:
        owned = owner.owner_id, owner.host, owner.boot_id, owner.pid, owner.process_started, owner.claimed_at
    state = head.status, head.started_at, head.ended_at, head.error, head.epoch, json.dumps(head.claims)
    decided = head.policy_state, head.policy_seq
    values = *state, *owned, None if lease is None else float(lease), *decided, head.last_seq, *sums
    return Applied(run, segments, (tables.SET_HEAD, values), before)


class _Applier:
    """Applies the events of a batch to a run, and gathers their rows."""

    def __init__(self, run_id: str, run: CachedRun) -> None:
        self.changes_head = False
        self._run_id = run_id
        self._run = run
        self._tasks = run.tasks
        self._usage = run.head.usage
        self._segments: list[Rows] = []
        self._rows: Rows = defaultdict(list)
        self._touched: set[str] = set()
        self._begun: dict[str, tuple[Write, int]] = {}
        """The row of each task that has started, and nothing more, since the rows were last written."""
        self._ended: list[str] = []
        self._input_tokens = self._output_tokens = 0

    def apply(self, first_seq: int, batch: Sequence[events.Event]) -> list[Rows]:
        run, head = self._run, self._run.head
        history: list[Row] = []
        for seq, event in enumerate(batch, first_seq):
            apply, shown = self._OF_TASKS.get(type(event)), event
            if apply is not None:
                shown = apply(self, seq, event) or event
            else:
                advanced = write_rules.advance_head(head, event, seq)
                self.changes_head |= advanced is not head
                head = advanced
                if type(event) is events.RunCreated:
                    self._create_run(event)
            if shown.shown:
                history.append((self._run_id, seq, *events.columns_of(shown)))
        if self._input_tokens or self._output_tokens:  # of unknown cost: one addition for the batch
            self._usage += Usage(self._input_tokens, self._output_tokens)
        run.head = replace(head, last_seq=first_seq + len(batch) - 1, usage=self._usage)
        if history:
            self._rows[tables.ADD_EVENT] = history
        self._flush()
        for task_id in self._ended:  # a task that was reopened in the same batch stays
            if task_id in run.tasks and run.tasks[task_id].status in TASK_DONE:
                del run.tasks[task_id]
        return self._segments

    def _flush(self) -> None:
        if self._rows:
            self._segments.append(self._rows)
            self._rows = defaultdict(list)
        self._touched.clear()
        self._begun.clear()

    def _touch(self, task_id: str) -> None:
        if task_id in self._touched or tables.ADD_TASK in self._rows:
            self._flush()
        self._touched.add(task_id)

    def _state_of(self, task_id: str) -> TaskState | None:
        state = self._tasks.get(task_id)
        if state is None and (position := self._run.new.pop(task_id, None)) is not None:
            state = self._tasks[task_id] = TaskState(position, "pending", 0)
        return state

    def _require(
        self, change: events.TaskTransition, attempt: int | None = None, *, joins_start: bool = False
    ) -> TaskState:
        """Return the state of the task. Raises Conflict if the change does not follow from it. With `joins_start` the
        change is written with a start of the task by `_set_status`.
        """
        task_id = change.task_id
        state = self._tasks.get(task_id) or self._state_of(task_id)
        if state is None:
            raise write_rules.conflict(self._run_id, change, None)
        before = write_rules.statuses_before(change)
        if (attempt is not None and attempt != state.attempt) or state.status not in before:
            raise write_rules.conflict(self._run_id, change, (state.status, state.attempt))
        if not (joins_start and task_id in self._begun):
            self._touch(task_id)
        return state

    def _set_status(self, task_id: str, state: TaskState, status: str) -> None:
        state.status = status
        self._ended.append(task_id)
        if (begun := self._begun.pop(task_id, None)) is None:
            self._rows[tables.SET_STATUS].append((status, self._run_id, state.position))
        else:
            rows, index = self._rows[begun[0]], begun[1]
            rows[index] = (status, *rows[index][1:])

    def _text(self, text: str) -> tuple[bytes | None, str | None]:
        """Return the key of a large text, or the text itself."""
        key = digest(text)
        if key is None:
            return None, text
        row = key, text
        if row not in self._rows[tables.ADD_TEXT]:  # no statement may meet a row twice
            self._rows[tables.ADD_TEXT].append(row)
        return key, None

    def _create_run(self, change: events.RunCreated) -> None:
        write_rules.check_added(self._run_id, change, ())
        settings = checksum(self._run_id, change.settings), *self._text(change.settings)
        self._rows[tables.ADD_RUN].append((self._run_id, change.name, "queued", change.at, *settings))
        self._insert(change.tasks, None)

    def _add_tasks(self, _seq: int, change: events.TasksAdded) -> None:
        mentioned = write_rules.mentioned_task_ids(change)
        stored = {task_id for task_id in mentioned if task_id in self._tasks or task_id in self._run.new}
        write_rules.check_added(self._run_id, change, stored)
        self._insert(change.tasks, change.added_by)

    def _insert(self, tasks: Sequence[events.NewTask], added_by: str | None) -> None:
        run, rows, usual = self._run, self._rows[tables.ADD_TASK], self._rows[tables.ADD_TASK_USUALLY]
        assert run.size is not None
        for position, new in enumerate(tasks, run.size):
            task_id, prompt, spec, edges = new.task_id, new.prompt, new.spec, "[]"
            if new.depends_on:
                edges = f"[{', '.join(map(encode_basestring, new.depends_on))}]"  # three times as fast as json.dumps
            columns = self._run_id, position, task_id, edges, spec, checksum(task_id, edges, spec)
            if new.backend is added_by is None and len(prompt) <= SHORT:
                usual.append((*columns, checksum(task_id, prompt), prompt))
            else:
                rows.append((*columns, checksum(task_id, prompt), *self._text(prompt), new.backend, added_by))
            run.new[task_id] = position
        run.size += len(tasks)

    def _start(self, seq: int, change: events.TaskStarted) -> None:
        attempt = change.attempt
        state = self._require(change, attempt - 1)
        position, backend, session_id, at = state.position, change.backend, change.session_id, change.at
        values = "running", attempt, int(change.confirmed), backend, at, seq
        if session_id is None is state.started[1]:
            write = tables.START_TASK
            session: Row = ()
        else:
            write, session = tables.START_IN_SESSION, (session_id,)
        rows = self._rows[write]
        self._begun[change.task_id] = write, len(rows)
        rows.append((*values, *session, self._run_id, position))
        state.status, state.attempt, state.started = "running", attempt, (backend, session_id, at, seq)

    def _open_session(self, _seq: int, change: events.SessionOpened) -> None:
        state = self._state_of(change.task_id)
        if state is None or not state.attempt or change.attempt not in {0, state.attempt}:
            raise write_rules.conflict(self._run_id, change, (state.status, state.attempt) if state else None)
        self._touch(change.task_id)
        key, (backend, _, *began) = (self._run_id, state.position), state.started
        state.started = backend, change.session_id, *began
        if change.attempt:
            self._rows[tables.CONFIRM_SESSION].append((change.session_id, 1, *key))
        else:
            self._rows[tables.SET_SESSION].append((change.session_id, *key))
        if state.status != "running":
            self._rows[tables.SET_ENDED_SESSION].append((change.session_id, *key, state.attempt))

    def _append(self, seq: int, change: events.MessageAppended) -> None:
        state = self._state_of(change.task_id)
        if state is None:
            raise write_rules.conflict(self._run_id, change, None)
        self._add_messages(seq, change, state, (change.message,))

    def _add_messages(self, seq: int, change: events.TaskEvent, state: TaskState, messages: Sequence[Message]) -> None:
        """Add the messages, each after the thoughts that the model wrote with it."""
        rows, task_id = self._rows[tables.ADD_MESSAGE], change.task_id
        part = 0
        for message in messages:
            tokens = message.usage.input_tokens, message.usage.output_tokens
            texts = (message.role, message.content, *tokens), (THOUGHTS, message.thoughts, 0, 0)
            for role, text, *counts in reversed(texts) if message.thoughts else texts[:1]:
                place = self._run_id, state.position, task_id, seq, part, change.attempt, role, change.at
                rows.append((*place, *counts, checksum(task_id, text, role), *self._text(text)))
                part += 1

    def _complete(self, seq: int, change: events.TaskCompleted) -> events.Event:
        task_id, text, usage, prompt = change.task_id, change.text, change.usage, change.turn
        state = self._require(change, change.attempt, joins_start=True)
        if not isinstance(prompt, str) or change.data_json is not None or len(text) > SHORT or len(prompt) > SHORT:
            return self._complete_unusually(seq, change, state)
        if usage.cache_read_tokens or usage.cache_write_tokens or usage.reasoning_tokens or usage.cost_is_partial:
            return self._complete_unusually(seq, change, state)
        # The one path that is written out, because nearly all of the changes that a run pays for take it. The task is
        # running, because the completion brings the prompt.
        run_id, position, cost = self._run_id, state.position, usage.cost_usd
        backend, session_id, *began = state.started
        self._set_status(task_id, state, "completed")
        row = (
            run_id, position, task_id, state.attempt, backend, *began, "completed", change.at, seq,
            usage.input_tokens, usage.output_tokens, change.duration_s,
            checksum(task_id, prompt), prompt, checksum(task_id, text), text,
        )  # fmt: skip
        if session_id is None and cost is None and usage.model is None:
            self._rows[tables.COMPLETE_FUNCTION].append(row)
        else:
            self._rows[tables.COMPLETE_USUALLY].append((*row, session_id, cost, usage.model))
        if cost is None:
            self._input_tokens += usage.input_tokens
            self._output_tokens += usage.output_tokens
        else:
            self._usage += usage
        return change

    def _complete_unusually(self, seq: int, change: events.TaskCompleted, state: TaskState) -> events.Event:
        task_id, text, data = change.task_id, change.text, change.data_json
        if isinstance(change.turn, str):
            prompt: Row = checksum(task_id, change.turn), *self._text(change.turn)
        else:
            prompt = None, None, None
        result = checksum(task_id, text, data), *self._text(text), data
        usage = self._end(seq, change, state, "completed", turn=(*prompt, *result))
        self._set_ended(change, state, "completed")
        return change if usage is change.usage else replace(change, usage=usage)

    def _set_ended(self, change: events.AttemptEnd, state: TaskState, status: str) -> None:
        if state.status == "waiting_input":
            self._rows[tables.LEAVE_QUESTION].append((status, None, None, self._run_id, state.position))
            state.status = status
            self._ended.append(change.task_id)
        else:
            self._set_status(change.task_id, state, status)

    def _end(
        self,
        seq: int,
        change: events.AttemptEnd,
        state: TaskState,
        status: str,
        error: Row = (None, None, None),
        turn: Row = (None,) * 7,
    ) -> Usage:
        """End the attempt, with the kind of the error, its text and the traceback, or with the prompt and the result.
        Return the usage of the whole attempt.
        """
        if turn[0] is None:  # else the conversation is the prompt and the result
            self._add_messages(seq, change, state, getattr(change, "messages", ()))
        usage: Usage = getattr(change, "usage", NO_USAGE)
        took: float | None = getattr(change, "duration_s", None)
        if usage is not NO_USAGE:
            self._usage += usage
        if state.status == "waiting_input":
            usage = state.usage + usage
            took = took if state.duration_s is None else state.duration_s + (took or 0.0)
        key = self._run_id, state.position, change.task_id, state.attempt
        ended = change.at, seq, *_usage(usage), took
        self._rows[tables.END_ATTEMPT].append((*key, status, *state.started, *ended, *error, *turn))
        return usage

    def _fail(self, seq: int, change: events.TaskFailed) -> None:
        state, status = self._require(change, change.attempt, joins_start=True), change.status.value
        self._end(seq, change, state, status, (change.error_kind, change.error, change.traceback))
        self._set_ended(change, state, status)

    def _retry(self, seq: int, change: events.TaskRetried) -> None:
        state = self._require(change, change.attempt)
        self._end(seq, change, state, "retried", (change.error_kind, change.error, change.traceback))
        state.status = "pending"
        self._rows[tables.RETRY].append(("pending", int(change.continues_session), self._run_id, state.position))

    def _interrupt(self, seq: int, change: events.TaskInterrupted) -> None:
        state = self._require(change, change.attempt)
        self._end(seq, change, state, "interrupted", (None, change.reason, None))
        state.status, state.crashes = "pending", state.crashes + change.crashed
        self._rows[tables.INTERRUPT].append(("pending", state.crashes, self._run_id, state.position))

    def _wait(self, seq: int, change: events.TaskWaiting) -> None:
        state = self._require(change, change.attempt)
        state.usage = self._end(seq, change, state, "interrupted" if change.asked is None else "asked")
        state.status, state.duration_s = "waiting_input", change.duration_s
        state.crashes += change.crashed
        columns = "waiting_input", change.question, change.asked, state.crashes
        self._rows[tables.ASK].append((*columns, self._run_id, state.position))

    def _cancel(self, seq: int, change: events.TaskCancelled) -> None:
        state = self._require(change)
        if state.status == "running":
            self._end(seq, change, state, "cancelled")
        self._set_ended(change, state, "cancelled")

    def _answer(self, _seq: int, change: events.TaskAnswered) -> None:
        state = self._require(change)
        state.status = "pending"
        key = self._run_id, state.position
        if change.answers is None:
            self._rows[tables.LEAVE_QUESTION].append(("pending", None, None, *key))
        else:
            answers = change.answers, checksum(change.task_id, change.answers)
            self._rows[tables.ANSWER].append(("pending", None, None, *answers, *key))

    def _reopen(self, _seq: int, change: events.TaskReopened) -> None:
        state = self._require(change)
        state.status = "pending"
        key, reopened = (self._run_id, state.position), ("pending", 0, None, None)
        if change.prompt is None:
            self._rows[tables.REOPEN].append((*reopened, *key))
        else:
            prompt = checksum(change.task_id, change.prompt), *self._text(change.prompt)
            self._rows[tables.REOPEN_CHANGED].append((*reopened, *prompt, *key))
        if change.damaged:
            self._rows[tables.DROP_RESULT].append((None, None, None, None, *key, state.attempt))

    _OF_TASKS: Final[dict[type, Callable[..., events.Event | None]]] = {
        events.TasksAdded: _add_tasks,
        events.TaskStarted: _start,
        events.SessionOpened: _open_session,
        events.MessageAppended: _append,
        events.TaskCompleted: _complete,
        events.TaskFailed: _fail,
        events.TaskSkipped: _fail,
        events.TaskRetried: _retry,
        events.TaskInterrupted: _interrupt,
        events.TaskWaiting: _wait,
        events.TaskCancelled: _cancel,
        events.TaskAnswered: _answer,
        events.TaskReopened: _reopen,
    }
    """The method for each change that concerns tasks; it returns the change as its event shows it, if the two differ.
    Other changes concern the head of the run, or add an event only.
    """


def _usage(usage: Usage) -> Row:
    """Return the values of the columns of an attempt; those of a run have no model."""
    if usage is NO_USAGE:
        return 0, 0, None, None, 0, 0, 0, 0, 0
    parts = usage.cache_read_tokens, usage.cache_write_tokens, usage.reasoning_tokens, int(usage.cost_is_partial)
    return usage.input_tokens, usage.output_tokens, usage.cost_usd, usage.model, *parts, usage.cache_write_1h_tokens
