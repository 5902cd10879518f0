"""The store for runs that need not outlive the process: the same guarantees as SQLite's, in plain dictionaries.

A batch is checked and applied on a staged copy of what it touches; only a batch that went through is published, with
plain assignments that cannot fail. There is no await in between, so no other task ever sees half of it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from persistence import rules
from persistence.changes import (
    RunCreated,
    SessionOpened,
    TaskCancelled,
    TaskCompleted,
    TaskFailed,
    TaskInterrupted,
    TaskReopened,
    TaskRetried,
    TaskStarted,
    TurnAppended,
)
from persistence.records import AttemptRecord, EventRecord, MessageRecord, RunRecord, TaskRecord

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from persistence.changes import Batch, Change
    from persistence.rules import RunHead

AttemptKey = tuple[str, int]


@dataclass(slots=True)
class _Run:
    head: RunHead
    tasks: dict[str, TaskRecord] = field(default_factory=dict[str, TaskRecord])
    attempts: dict[AttemptKey, AttemptRecord] = field(default_factory=dict[AttemptKey, AttemptRecord])
    messages: dict[str, list[MessageRecord]] = field(default_factory=dict[str, list[MessageRecord]])
    events: list[EventRecord] = field(default_factory=list[EventRecord])


class MemoryStore:
    """Keeps runs in memory, for as long as the object lives. Fulfils `Store`; `async with` is allowed and does nothing.

    A write is final when it returns, though of course no power loss is survived.
    """

    def __init__(self) -> None:
        self._runs: dict[str, _Run] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    async def write(self, batch: Batch) -> None:
        run = self._runs.get(batch.run_id)
        skipped = rules.first_unapplied(batch, None if run is None else run.head)
        changes = batch.changes[skipped:]
        if not changes:
            return
        run = run or _Run(rules.new_head(changes[0], batch.run_id))
        staged = _Staged(batch.run_id, run)
        for seq, change in enumerate(changes, batch.first_seq + skipped):
            staged.apply(seq, change)
        staged.publish(batch.last_seq)
        self._runs[batch.run_id] = run

    async def get_run(self, run_id: str) -> RunRecord | None:
        run = self._runs.get(run_id)
        return None if run is None else _record(run_id, run)

    async def list_runs(self, limit: int = 50) -> tuple[RunRecord, ...]:
        # Reversed before the stable sort, so that of two runs of one millisecond the later one comes first.
        latest_first = reversed(self._runs.items())
        newest_first = sorted(latest_first, key=lambda item: item[1].head.created_at, reverse=True)
        return tuple(replace(_record(run_id, run), settings="") for run_id, run in newest_first)[: max(0, limit)]

    async def list_tasks(self, run_id: str) -> tuple[TaskRecord, ...]:
        run = self._runs.get(run_id)
        return () if run is None else tuple(_with_attempt(run, task) for task in run.tasks.values())

    async def list_attempts(self, run_id: str, task_id: str | None = None) -> tuple[AttemptRecord, ...]:
        run = self._runs.get(run_id)
        attempts: Iterable[AttemptRecord] = () if run is None else run.attempts.values()
        return tuple(attempt for attempt in attempts if task_id in {None, attempt.task_id})

    async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
        run = self._runs.get(run_id)
        return () if run is None else tuple(run.messages.get(task_id, ()))

    async def list_events(self, run_id: str, after: int = 0, limit: int = 1000) -> tuple[EventRecord, ...]:
        run = self._runs.get(run_id)
        events = () if run is None else tuple(event for event in run.events if event.seq > after)
        return events[: max(0, limit)]


def _record(run_id: str, run: _Run) -> RunRecord:
    head, attempts = run.head, run.attempts.values()
    costs = [attempt.cost_usd for attempt in attempts if attempt.cost_usd is not None]
    return RunRecord(
        run_id=run_id,
        name=head.name,
        status=head.status,
        created_at=head.created_at,
        started_at=head.started_at,
        ended_at=head.ended_at,
        error=head.error,
        settings=head.settings,
        epoch=head.epoch,
        last_seq=head.last_seq,
        owner=head.owner,
        lease_expires_at=head.lease_expires_at,
        counts=dict(Counter(task.status for task in run.tasks.values())),
        input_tokens=sum(attempt.input_tokens for attempt in attempts),
        output_tokens=sum(attempt.output_tokens for attempt in attempts),
        cost_usd=sum(costs) if costs else None,
    )


def _with_attempt(run: _Run, task: TaskRecord) -> TaskRecord:
    last = run.attempts.get((task.task_id, task.attempt))
    if last is None:
        return task
    return replace(
        task,
        error_kind=last.error_kind,
        error=last.error,
        session_id=last.session_id,
        input_tokens=last.input_tokens,
        output_tokens=last.output_tokens,
        cost_usd=last.cost_usd,
        duration_s=last.duration_s,
        started_at=last.started_at,
        ended_at=last.ended_at,
    )


class _Staged:
    """What a batch makes of a run, apart from it until `publish`."""

    def __init__(self, run_id: str, run: _Run) -> None:
        self._run_id = run_id
        self._run = run
        self._head = run.head
        self._tasks: dict[str, TaskRecord] = {}
        self._attempts: dict[AttemptKey, AttemptRecord] = {}
        self._messages: dict[str, list[MessageRecord]] = {}
        self._events: list[EventRecord] = []

    def publish(self, last_seq: int) -> None:
        run = self._run
        run.head = replace(self._head, last_seq=last_seq)
        run.tasks.update(self._tasks)
        run.attempts.update(self._attempts)
        for task_id, messages in self._messages.items():
            run.messages.setdefault(task_id, []).extend(messages)
        run.events.extend(self._events)

    def apply(self, seq: int, change: Change) -> None:
        self._head = rules.advance(self._head, change, seq, self._run_id)
        match change:
            case RunCreated():
                self._create(change)
            case TaskStarted():
                self._start(change)
            case SessionOpened():
                self._open_session(change)
            case TurnAppended():
                self._append(change)
            case TaskCompleted():
                task = replace(self._task(change), status="completed", text=change.text, data=change.data)
                self._end(change, task, "completed")
            case TaskFailed() | TaskRetried() | TaskInterrupted() | TaskCancelled():
                self._end_without_result(change)
            case TaskReopened():
                self._tasks[change.task_id] = replace(self._task(change), status="pending")
            case _:
                pass
        event = rules.event_of(change)
        if event is not None:
            self._events.append(EventRecord(seq, *event))

    def _create(self, change: RunCreated) -> None:
        for position, new in enumerate(change.tasks):
            if new.task_id in self._tasks:
                raise rules.refusal(self._run_id, change, None)
            self._tasks[new.task_id] = TaskRecord(
                new.task_id, position, new.prompt, tuple(new.depends_on), new.backend, new.spec, "pending", 0
            )
        if not all(upstream in self._tasks for new in change.tasks for upstream in new.depends_on):
            raise rules.refusal(self._run_id, change, None)

    def _find(self, change: Change, task_id: str) -> TaskRecord:
        task = self._tasks.get(task_id) or self._run.tasks.get(task_id)
        if task is None:
            raise rules.refusal(self._run_id, change, None)
        return task

    def _task(
        self,
        change: TaskStarted | TaskCompleted | TaskFailed | TaskRetried | TaskInterrupted | TaskCancelled | TaskReopened,
    ) -> TaskRecord:
        """The task as it stands, where the table lets `change` follow."""
        task = self._find(change, change.task_id)
        attempt = getattr(change, "attempt", task.attempt)
        expected = task.attempt + 1 if isinstance(change, TaskStarted) else task.attempt
        if task.status not in rules.TASK_MUST_BE[type(change)] or attempt != expected:
            raise rules.refusal(self._run_id, change, (task.status, task.attempt))
        return task

    def _attempt(self, task: TaskRecord, attempt: int) -> AttemptRecord | None:
        key = task.task_id, attempt
        return self._attempts.get(key) or self._run.attempts.get(key)

    def _put(self, attempt: AttemptRecord) -> None:
        self._attempts[attempt.task_id, attempt.attempt] = attempt

    def _start(self, change: TaskStarted) -> None:
        task_id, number = change.task_id, change.attempt
        self._tasks[task_id] = replace(self._task(change), status="running", attempt=number)
        ended = (None, None, None, 0, 0, None, None)
        self._put(AttemptRecord(task_id, number, "running", change.backend, change.session_id, change.at, *ended))

    def _open_session(self, change: SessionOpened) -> None:
        task = self._find(change, change.task_id)
        attempt = self._attempt(task, task.attempt)
        if attempt is None or change.attempt not in {0, task.attempt}:
            raise rules.refusal(self._run_id, change, (task.status, task.attempt))
        self._put(replace(attempt, session_id=change.session_id))

    def _append(self, change: TurnAppended) -> None:
        self._find(change, change.task_id)
        appended = self._messages.setdefault(change.task_id, [])
        position = len(self._run.messages.get(change.task_id, ())) + len(appended)
        said = change.role, change.content, change.input_tokens, change.output_tokens, change.at
        appended.append(MessageRecord(change.task_id, position, change.attempt, *said))

    def _end_without_result(self, change: TaskFailed | TaskRetried | TaskInterrupted | TaskCancelled) -> None:
        task = self._task(change)
        match change:
            case TaskFailed():
                rules.check_failed(self._run_id, change)
                self._end(change, replace(task, status=change.status), change.status)
            case TaskRetried():
                self._end(change, replace(task, status="pending"), "retried")
            case TaskInterrupted():
                self._end(change, replace(task, status="pending"), "interrupted")
            case TaskCancelled():
                self._end(change, replace(task, status="cancelled"), "cancelled")

    def _end(
        self,
        change: TaskCompleted | TaskFailed | TaskRetried | TaskInterrupted | TaskCancelled,
        task: TaskRecord,
        status: str,
    ) -> None:
        was_running = self._find(change, task.task_id).status == "running"
        self._tasks[task.task_id] = task
        attempt = self._attempt(task, task.attempt)
        if attempt is None or not was_running:
            return
        ended: dict[str, Any] = {"status": status, "ended_at": change.at}
        match change:
            case TaskCompleted() | TaskFailed() | TaskRetried():
                ended |= {"input_tokens": change.input_tokens, "output_tokens": change.output_tokens}
                ended |= {"cost_usd": change.cost_usd, "duration_s": change.duration_s}
                if not isinstance(change, TaskCompleted):
                    ended |= {"error_kind": change.error_kind, "error": change.error}
            case TaskInterrupted():
                ended["error"] = change.reason
            case TaskCancelled():
                pass
        self._put(replace(attempt, **ended))
