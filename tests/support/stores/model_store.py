"""A store in plain dictionaries that applies a batch change by change: what the stores on tables have to do as well.

It shares `write_rules.py` with the stores, and nothing of what they make of a change.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Self

from plait import events
from plait.dialogue import Message
from plait.errors import Conflict
from plait.events import Event, NewTask
from plait.persistence import write_rules
from plait.persistence.store_records import (
    THOUGHTS,
    AttemptRecord,
    Batch,
    EventRecord,
    MessageRecord,
    Note,
    NoteRecord,
    RunRecord,
    TaskRecord,
)
from plait.statuses import AttemptStatus
from plait.usage import NO_USAGE

AttemptKey = tuple[str, int]


@dataclass(slots=True)
class ModelRun:
    """A stored run."""

    head: RunRecord
    tasks: dict[str, TaskRecord] = field(default_factory=dict[str, TaskRecord])
    attempts: dict[AttemptKey, AttemptRecord] = field(default_factory=dict[AttemptKey, AttemptRecord])
    messages: dict[str, list[MessageRecord]] = field(default_factory=dict[str, list[MessageRecord]])
    events: list[EventRecord] = field(default_factory=list[EventRecord])
    notes: list[NoteRecord] = field(default_factory=list[NoteRecord])
    answers: dict[AttemptKey, int] = field(default_factory=dict[AttemptKey, int])
    """The position of an attempt's answer among the messages of the task, if the completion came with its prompt."""
    discarded: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Messages deleted with a damaged result, by task and position."""


class StagedRun:
    """The state of a run after a batch, invisible until `publish`."""

    def __init__(self, run_id: str, run: ModelRun) -> None:
        self._run_id = run_id
        self._run = run
        self._head = run.head
        self._tasks: dict[str, TaskRecord] = {}
        self._tasks_so_far = len(run.tasks)
        self._attempts: dict[AttemptKey, AttemptRecord] = {}
        self._messages: dict[str, list[MessageRecord]] = {}
        self._events: list[EventRecord] = []
        self._answers: dict[AttemptKey, int] = {}
        self._discarded: set[tuple[str, int]] = set()

    def publish(self, last_seq: int) -> None:
        """Make the state visible. Never fails."""
        run = self._run
        run.head = replace(self._head, last_seq=last_seq)
        run.tasks.update(self._tasks)
        run.attempts.update(self._attempts)
        for task_id, messages in self._messages.items():
            run.messages.setdefault(task_id, []).extend(messages)
        run.events.extend(self._events)
        run.answers.update(self._answers)
        run.discarded.update(self._discarded)

    def apply(self, seq: int, change: Event) -> None:
        """Apply the change. Raises Conflict if the change does not follow from the state."""
        self._head = write_rules.advance_head(self._head, change, seq)
        match change:
            case events.RunCreated():
                self._create_run(change)
            case events.TasksAdded():
                write_rules.check_added(self._run_id, change, self._existing(write_rules.mentioned_task_ids(change)))
                self._add_tasks(change.tasks, change.added_by)
            case events.TaskStarted():
                self._start_task(change)
            case events.SessionOpened():
                self._open_session(change)
            case events.MessageAppended():
                self._append_messages(change, (change.message,))
            case events.TaskCompleted():
                self._end_attempt(change)
                change = self._with_total_usage(change)
            case (
                events.TaskFailed()
                | events.TaskRetried()
                | events.TaskInterrupted()
                | events.TaskWaiting()
                | events.TaskCancelled()
            ):
                self._end_attempt(change)
            case events.TaskReopened() | events.TaskAnswered():
                self._requeue_task(change)
            case _:
                pass
        if change.shown:
            at, kind, task_id, attempt, detail = events.columns_of(change)
            self._events.append(EventRecord(seq, at, kind, task_id, attempt, detail))

    def _create_run(self, change: events.RunCreated) -> None:
        self._add_tasks(change.tasks)
        complete = all(upstream in self._tasks for new in change.tasks for upstream in new.depends_on)
        if not complete or len(self._tasks) < len(change.tasks):
            raise write_rules.conflict(self._run_id, change, None)

    def _add_tasks(self, tasks: Sequence[NewTask], added_by: str | None = None) -> None:
        for position, new in enumerate(tasks, self._tasks_so_far):
            given = new.prompt, tuple(new.depends_on), new.backend, new.spec
            self._tasks[new.task_id] = TaskRecord(new.task_id, position, *given, "pending", 0, added_by=added_by)
        self._tasks_so_far += len(tasks)

    def _existing(self, task_ids: Sequence[str]) -> set[str]:
        return {task_id for task_id in task_ids if task_id in self._tasks or task_id in self._run.tasks}

    def _requeue_task(self, change: events.TaskReopened | events.TaskAnswered) -> None:
        task, answers, confirmed = self._require_task(change), None, False
        if isinstance(change, events.TaskAnswered):
            answers = task.answers if change.answers is None else change.answers
            confirmed = task.session_confirmed
        elif change.damaged:
            key = task.task_id, task.attempt
            place = self._answers.get(key, self._run.answers.get(key))
            if place is not None:
                self._discarded.add((task.task_id, place))
        prompt = change.prompt if isinstance(change, events.TaskReopened) and change.prompt is not None else task.prompt
        left = replace(task, prompt=prompt, text=None, data=None, session_confirmed=confirmed, answers=answers)
        self._tasks[change.task_id] = replace(left, status="pending", question=None, asked=None)

    def _find_task(self, change: Event, task_id: str) -> TaskRecord:
        task = self._tasks.get(task_id) or self._run.tasks.get(task_id)
        if task is None:
            raise write_rules.conflict(self._run_id, change, None)
        return task

    def _require_task(self, change: events.TaskTransition) -> TaskRecord:
        """Return the task. Raises Conflict if the change is not allowed from its status and attempt."""
        task = self._find_task(change, change.task_id)
        expected = task.attempt + 1 if isinstance(change, events.TaskStarted) else task.attempt
        names_any = isinstance(change, events.TaskAnswered | events.TaskCancelled | events.TaskReopened)
        attempt = expected if names_any else change.attempt
        if task.status not in write_rules.statuses_before(change) or attempt != expected:
            raise write_rules.conflict(self._run_id, change, (task.status, task.attempt))
        return task

    def _find_attempt(self, task: TaskRecord, attempt: int) -> AttemptRecord | None:
        key = task.task_id, attempt
        return self._attempts.get(key) or self._run.attempts.get(key)

    def _put_attempt(self, attempt: AttemptRecord) -> None:
        self._attempts[attempt.task_id, attempt.attempt] = attempt

    def _start_task(self, change: events.TaskStarted) -> None:
        task_id, number = change.task_id, change.attempt
        confirmed = change.confirmed
        self._tasks[task_id] = replace(
            self._require_task(change), status="running", attempt=number, session_confirmed=confirmed
        )
        ended = (None, None, None, NO_USAGE, None)
        self._put_attempt(
            AttemptRecord(task_id, number, "running", change.backend, change.session_id, change.at, *ended)
        )

    def _open_session(self, change: events.SessionOpened) -> None:
        task = self._find_task(change, change.task_id)
        attempt = self._find_attempt(task, task.attempt)
        if attempt is None or change.attempt not in {0, task.attempt}:
            raise write_rules.conflict(self._run_id, change, (task.status, task.attempt))
        self._tasks[task.task_id] = replace(task, session_confirmed=task.session_confirmed or change.attempt > 0)
        self._put_attempt(replace(attempt, session_id=change.session_id))

    def _append_messages(self, change: events.TaskEvent, messages: Sequence[Message]) -> None:
        self._find_task(change, change.task_id)
        appended = self._messages.setdefault(change.task_id, [])
        for message in messages:
            texts = [(THOUGHTS, message.thoughts, 0, 0)] if message.thoughts else []
            texts.append((message.role, message.content, message.usage.input_tokens, message.usage.output_tokens))
            for text in texts:
                position = len(self._run.messages.get(change.task_id, ())) + len(appended)
                appended.append(MessageRecord(change.task_id, position, change.attempt, *text, change.at))

    def _end_attempt(self, change: events.AttemptEnd) -> None:
        task = self._require_task(change)
        self._append_turn(change)
        match change:
            case events.TaskCompleted():
                self._record_end(
                    change, replace(task, text=change.text, data=change.data_json), "completed", "completed"
                )
            case events.TaskFailed():
                self._record_end(change, task, change.status, change.status)
            case events.TaskRetried():
                self._record_end(
                    change, replace(task, session_confirmed=change.continues_session), "pending", AttemptStatus.RETRIED
                )
            case events.TaskInterrupted():
                self._record_end(change, _crashed(task, change), "pending", AttemptStatus.INTERRUPTED)
            case events.TaskWaiting():
                ended_as = AttemptStatus.INTERRUPTED if change.asked is None else AttemptStatus.ASKED
                self._record_end(change, _crashed(task, change), "waiting_input", ended_as)
                waiting = self._tasks[task.task_id]
                self._tasks[task.task_id] = replace(waiting, question=change.question, asked=change.asked)
            case events.TaskCancelled():
                self._record_end(change, task, "cancelled", "cancelled")

    def _append_turn(self, change: events.AttemptEnd) -> None:
        self._append_messages(change, getattr(change, "messages", ()))
        if isinstance(change, events.TaskCompleted) and isinstance(change.turn, str):
            self._answers[change.task_id, change.attempt] = self._messages[change.task_id][-1].position

    def _with_total_usage(self, change: events.TaskCompleted) -> events.TaskCompleted:
        """Return the change as its event shows it: with the usage of the whole attempt."""
        attempt = self._attempts[change.task_id, change.attempt]
        return replace(change, usage=attempt.usage)

    def _record_end(
        self,
        change: events.AttemptEnd,
        task: TaskRecord,
        status: str,
        attempt_status: str,
    ) -> None:
        """Set the statuses of the task and of the last attempt. Cancelling changes no ended attempt."""
        self._tasks[task.task_id] = replace(task, status=status, question=None, asked=None)
        attempt = self._find_attempt(task, task.attempt)
        if attempt is None or (isinstance(change, events.TaskCancelled) and task.status != "running"):
            return
        ended: dict[str, Any] = {"status": attempt_status, "ended_at": change.at}
        if isinstance(change, events.TaskInterrupted):
            ended["error"] = change.reason
        else:
            ended["usage"] = attempt.usage + change.usage
            if not isinstance(change, events.TaskCancelled):
                ended["duration_s"] = _sum(attempt.duration_s, change.duration_s)
            if isinstance(change, events.TaskFailed | events.TaskRetried):
                ended |= {"error_kind": change.error_kind, "error": change.error, "traceback": change.traceback}
        self._put_attempt(replace(attempt, **ended))


def _sum(before: float | None, more: float | None) -> float | None:
    return more if before is None else before if more is None else before + more


def _crashed(task: TaskRecord, change: events.TaskInterrupted | events.TaskWaiting) -> TaskRecord:
    return replace(task, crashes=task.crashes + change.crashed)


class ModelStore:
    """Keeps runs in memory."""

    def __init__(self) -> None:
        self.runs: dict[str, ModelRun] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def write(self, batch: Batch) -> None:
        run = self.runs.get(batch.run_id)
        skipped = write_rules.count_applied(batch, None if run is None else run.head)
        changes = batch.events[skipped:]
        if not changes:
            return
        if run is None:
            created = changes[0]
            assert isinstance(created, events.RunCreated)
            head = RunRecord(batch.run_id, created.name, "queued", created.at, settings=created.settings)
            run = ModelRun(head)
        staged = StagedRun(batch.run_id, run)
        for seq, change in enumerate(changes, batch.first_seq + skipped):
            staged.apply(seq, change)
        staged.publish(batch.last_seq)
        self.runs[batch.run_id] = run

    async def get_run(self, run_id: str) -> RunRecord | None:
        run = self.runs.get(run_id)
        return None if run is None else _record(run)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        # Reversed before the stable sort, which puts the later of two runs of one millisecond first.
        latest_first = reversed(self.runs.items())
        newest_first = sorted(latest_first, key=lambda item: item[1].head.created_at, reverse=True)
        return tuple(replace(_record(run), settings="") for _, run in newest_first)[: max(0, limit)]

    async def list_claimable(self, limit: int = 50) -> tuple[RunRecord, ...]:
        now = time.time()
        found = [(run.head.created_at, run) for run in self.runs.values() if _is_claimable(run.head, now)]
        found.sort(key=lambda one: one[0])
        return tuple(replace(_record(run), settings="") for _, run in found[: max(0, limit)])

    async def list_tasks(self, run_id: str, only: str | range | None = None) -> tuple[TaskRecord, ...]:
        run = self.runs.get(run_id)
        tasks: Iterable[TaskRecord] = () if run is None else run.tasks.values()
        if isinstance(only, range):
            return tuple(_with_attempt(run, task) for task in tasks if run is not None and task.position in only)
        return tuple(_with_attempt(run, task) for task in tasks if run is not None and only in {None, task.task_id})

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        run = self.runs.get(run_id)
        attempts: Iterable[AttemptRecord] = () if run is None else run.attempts.values()
        return tuple(attempt for attempt in attempts if task_id in {None, attempt.task_id})

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        run = self.runs.get(run_id)
        messages = [] if run is None else run.messages.get(task_id, [])
        discarded = set[tuple[str, int]]() if run is None else run.discarded
        kept = [message for message in messages if (task_id, message.position) not in discarded]
        return tuple(replace(message, position=position) for position, message in enumerate(kept))

    async def list_events(
        self, run_id: str, after: int = 0, limit: int = 1000, kind: str | None = None
    ) -> tuple[EventRecord, ...]:
        run = self.runs.get(run_id)
        if run is None:
            return ()
        first = bisect_right(run.events, after, key=lambda event: event.seq)
        found = islice(run.events, first, None) if kind is None else (e for e in run.events[first:] if e.kind == kind)
        return tuple(islice(found, max(0, limit)))

    async def send(self, run_id: str, note: Note) -> None:
        run = self.runs.get(run_id)
        if run is None:
            raise Conflict(f"run {run_id!r} is not in the store, so no note can be sent to its owner")
        run.notes.append(NoteRecord(len(run.notes) + 1, note.kind, note.at, note.task_id, note.body))

    async def list_notes(self, run_id: str, after: int = 0) -> tuple[NoteRecord, ...]:
        run = self.runs.get(run_id)
        return () if run is None else tuple(run.notes[max(0, after) :])


def _record(run: ModelRun) -> RunRecord:
    counts = dict(Counter(task.status for task in run.tasks.values()))
    spent = sum((attempt.usage for attempt in run.attempts.values()), NO_USAGE)
    has_expired = _lease_has_expired(run.head, time.time())
    return replace(run.head, counts=counts, usage=replace(spent, model=None), lease_has_expired=has_expired)


def _lease_has_expired(head: RunRecord, now: float) -> bool:
    expires = head.lease_expires_at
    return head.owner is not None and (expires is None or expires < now)


def _is_claimable(head: RunRecord, now: float) -> bool:
    """Return whether the run can go on: it has an owner whose lease has expired at `now`, or none, and is due if it
    waits: see `RunReleased.due_at`.
    """
    if head.status not in {"queued", "running", "cancelling", "waiting_input"}:
        return False
    if head.owner is not None:
        return _lease_has_expired(head, now)
    waits = head.lease_expires_at is not None or head.status == "waiting_input"
    return not waits or (head.lease_expires_at is not None and head.lease_expires_at < now)


def _with_attempt(run: ModelRun, task: TaskRecord) -> TaskRecord:
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
