"""Stored runs, tasks and events as values for display."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import anyio.to_thread

from plait.clock_and_ids import Clock, iso
from plait.errors import RunNotFound, StoreError
from plait.events import OWN_LIMITS, RUN_ENDS, BackendThrottled, HostAway, Owner, RunCreated, RunResumed, TasksAdded
from plait.json_form import JsonValue, from_json
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import EventRecord, RunRecord, TaskRecord
from plait.runner.domain.asked_question import AnsweredQuestion, OpenQuestion, answers_of, asking_of, parse_time
from plait.runner.domain.wait_reasons import WaitingRun, WaitReason, Waits, stored_limits
from plait.runner.engine.lease import liveness, seems_free
from plait.runner.engine.policy_driver import read_policy_state
from plait.runner.policies.goal_policy import Loop, OrchestratorPolicy
from plait.runner.state.codec import decode_dag
from plait.runner.state.stored_run import StoredPolicy, next_tries
from plait.statuses import RUN_DONE, TASK_DONE, UNDER_WAY, RunStatus, TaskStatus
from plait.usage import Usage

ANSWERED = "answered, to be resumed"
"""A run that is waiting_input although no task asks: no process has resumed the run since the last answer."""
_LOOKS_A_RECORD = 25


@dataclass(frozen=True, slots=True)
class TaskInfo:
    """A task as stored. `as_json` is the JSON form for `plait show --json` and for HTTP."""

    task_id: str
    """Id of the task."""
    position: int
    """Index of the task in the DAG, from 0."""
    status: TaskStatus
    """Status of the task."""
    depends_on: tuple[str, ...]
    """Ids of the dependencies."""
    backend: str | None
    """Name of the backend; None for the default backend."""
    prompt: str
    """The prompt template."""
    attempts: int
    """Number of attempts started."""
    crashes: int
    """Number of process deaths during the task."""
    text: str | None
    """Result of the task; None before there is a result, and if the result is `damaged`."""
    data: JsonValue
    """Result as JSON if the task has an output schema, else None."""
    damaged: bool
    """True if the stored result does not match its checksum."""
    error_kind: str | None
    """Kind of the error, an `ErrorKind` value."""
    error: str | None
    """Error message."""
    next_try_at: str | None
    """Time of the next attempt, if the last attempt failed and another attempt follows."""
    question: str | None
    """Question to a person, while the task is waiting_input."""
    waits: WaitReason | None
    """The reason for which the task is not running, or waits for a host that is away; None for any other task."""
    asks: OpenQuestion | None
    """The same question with its schema, default and deadline. None if the task does not ask, but a crash interrupted
    it and a person has to decide.
    """
    answers: tuple[AnsweredQuestion, ...]
    """Answers to earlier questions of the task."""
    session_id: str | None
    """The backend's id of the conversation, if known."""
    session_confirmed: bool
    """True if the backend has named the session; False if only the runner has chosen its id."""
    usage: Usage
    """The usage of the last attempt."""
    duration_s: float | None
    """The duration of the last attempt, in seconds."""
    started_at: str | None
    """UTC in ISO 8601, like all times."""
    ended_at: str | None
    added_by: str | None
    """Id of the task that added this task to the run."""
    spec: Mapping[str, JsonValue]
    """Further settings of the task, such as its retry policy."""

    def as_json(self) -> dict[str, Any]:
        """Return the task as a JSON object."""
        return {
            "task_id": self.task_id,
            "position": self.position,
            "status": self.status.value,
            "depends_on": list(self.depends_on),
            "backend": self.backend,
            "model": self.usage.model,
            "prompt": self.prompt,
            "attempts": self.attempts,
            "crashes": self.crashes,
            "text": self.text,
            "data": self.data,
            "damaged": self.damaged,
            "error_kind": self.error_kind,
            "error": self.error,
            "next_try_at": self.next_try_at,
            "question": self.question,
            "waits": None if self.waits is None else self.waits.as_json(),
            "asks": None if self.asks is None else asks_as_json(self.asks),
            "answers": [{**asdict(answer), "way": answer.way.value} for answer in self.answers],
            "session_id": self.session_id,
            "session_confirmed": self.session_confirmed,
            **usage_as_json(self.usage),
            "duration_s": self.duration_s,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "added_by": self.added_by,
            "spec": dict(self.spec),
        }


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run as stored. Times are UTC in ISO 8601."""

    run_id: str
    """The id of the run."""
    name: str
    """The name of the DAG."""
    status: RunStatus
    """The status; interrupted if the run is stored as running or cancelling without a live owner."""
    created_at: str
    """Time of the creation."""
    started_at: str | None
    """Time of the first start; None before."""
    ended_at: str | None
    """Time of the end; None before."""
    error: str | None
    """The reason for a failure, in one line."""
    counts: Mapping[TaskStatus, int]
    """The number of tasks by status; statuses without tasks are omitted."""
    usage: Usage
    """The sum over all attempts. Turns of `continue_task` are counted only in the messages of the task."""
    owner: Owner | None = None
    """The process that owns the run, dead or alive; None without an owner."""
    tasks: Mapping[str, TaskInfo] = field(default_factory=dict[str, TaskInfo])
    """Every task by id, in the order of the DAG; empty in lists of runs."""
    throttled: tuple[BackendThrottled, ...] = ()
    """The throttled backends of a running run, each with its last event; empty in lists of runs."""
    loop: Loop | None = None
    """The progress towards the goal, for a run of `Orchestrator`; None for every other run."""

    @property
    def done(self) -> int:
        """The number of ended tasks, whatever their status."""
        return sum(self.counts.get(status, 0) for status in TASK_DONE)

    @property
    def status_text(self) -> str:
        """The status for a person: a run whose questions are all answered no longer waits for input."""
        is_answered = self.status is RunStatus.WAITING_INPUT and not self.counts.get(TaskStatus.WAITING_INPUT)
        return ANSWERED if is_answered else self.status.value

    @property
    def reason(self) -> str | None:
        """The reason for the status, in a few words; None if the status needs none."""
        asking = self.counts.get(TaskStatus.WAITING_INPUT, 0)
        loop = None if self.loop is None else self.loop.description
        asks = None if not asking else "1 task asks a person" if asking == 1 else f"{asking:,} tasks ask a person"
        owner = "" if self.owner is None else f" (process {self.owner.pid} on {self.owner.host})"
        reasons = {
            RunStatus.QUEUED: "no process has started the run",
            RunStatus.INTERRUPTED: f"owner dead{owner}; resume the run",
            RunStatus.CANCELLING: "running attempts may end by themselves for a grace time",
            RunStatus.RUNNING: asks or loop,
            RunStatus.COMPLETED: loop,
            RunStatus.WAITING_INPUT: asks or ANSWERED,
            RunStatus.FAILED: self.error,
        }
        return reasons.get(self.status)

    def as_json(self) -> dict[str, Any]:
        """Return the run as a JSON object without its tasks, as lists of runs show it."""
        return {
            "run_id": self.run_id,
            "name": self.name,
            "status": self.status.value,
            "created_at": self.created_at,
            "started_at": self.started_at,
            "ended_at": self.ended_at,
            "error": self.error,
            "reason": self.reason,
            "owner": None if self.owner is None else _owner_as_json(self.owner),
            "done": self.done,
            "total": sum(self.counts.values()),
            "counts": {status.value: number for status, number in self.counts.items()},
            "loop": None if self.loop is None else loop_as_json(self.loop),
            **usage_as_json(self.usage),
        }

    def as_json_with_tasks(self) -> dict[str, Any]:
        """Return the run as a JSON object, `tasks` and `throttled` included."""
        return {
            **self.as_json(),
            "throttled": [asdict(one) for one in self.throttled],
            "tasks": [task.as_json() for task in self.tasks.values()],
        }


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """An entry of the history of a run."""

    seq: int
    """The number of the event, increasing within the run, with gaps."""
    at: str
    """The time, UTC in ISO 8601."""
    kind: str
    """The kind of the event, such as `task_completed`."""
    task_id: str | None
    """Id of the task; None for an event of the whole run."""
    attempt: int | None
    """Number of the attempt, from 1, if the event belongs to an attempt."""
    detail: Mapping[str, JsonValue]
    """Further values, depending on `kind`."""

    @property
    def is_last(self) -> bool:
        """Whether it ends the run: nothing follows, unless a person reopens the run."""
        return self.kind in RUN_ENDS


def loop_as_json(loop: Loop) -> dict[str, Any]:
    """Return the progress towards a goal as a JSON object."""
    return {"phase": loop.phase.value, "iteration": loop.iteration, "ended_by": loop.ended_by}


def _loop_of(run: RunRecord) -> Loop | None:
    """Return the loop of a run that plans towards a goal; None for every other run, and if the state is damaged. In a
    list of runs, whose records have no settings, a loop is known once its planner has answered.
    """
    if run.policy_state is None:
        policy = StoredPolicy.of(run) if run.settings else None
        return Loop() if policy is not None and policy.kind == OrchestratorPolicy.kind else None
    try:
        return Loop.found_in(read_policy_state(run.policy_state).state)
    except (ValueError, KeyError, TypeError):
        return None


def _owner_as_json(owner: Owner) -> dict[str, Any]:
    return {"host": owner.host, "pid": owner.pid, "liveness": liveness(owner).value}


def shown_status(run: RunRecord) -> RunStatus:
    """Return the status of the run: interrupted if stored as running or cancelling without a live owner."""
    status = RunStatus(run.status)
    if status in UNDER_WAY and seems_free(run):
        return RunStatus.INTERRUPTED
    return status


async def look_up(store: Store, run_id: str, now: float, with_tasks: bool) -> RunInfo:
    """Return the run at Unix time `now`, with its tasks if `with_tasks`. Raises RunNotFound, StoreError."""
    record = await _record(store, run_id)
    throttled = await throttled_backends(store, record, now)
    tasks = await task_infos(store, record, await store.list_tasks(run_id), now) if with_tasks else {}
    if shown_status(record) is RunStatus.INTERRUPTED:
        record = await _record(store, run_id)  # the run may have ended since the record was read
    return run_info(record, tasks, throttled)


async def throttled_backends(store: Store, run: RunRecord, now: float) -> tuple[BackendThrottled, ...]:
    """Return the last event of each backend that is throttled at Unix time `now`; none unless the run is running.

    A pause that is over has no `until`. Raises StoreError.
    """
    found = (_at(one, now) for one in (await _throttlings(store, run)).values())
    return tuple(one for one in found if one.until is not None or one.slots < one.total)


async def _throttlings(store: Store, run: RunRecord) -> Mapping[str, BackendThrottled]:
    """Return the last event of each backend of a running run since its last resume; none unless the run is running."""
    found = [stored_throttling(*one) async for one in _events_of_owner(store, run, BackendThrottled.kind)]
    return {one.backend: one for one in found}


async def away_hosts(store: Store, run: RunRecord) -> Mapping[str, HostAway]:
    """Return the last event of each host that tasks wait for, by name; none unless the run is running. Raises
    StoreError.
    """
    found = [stored_away(*one) async for one in _events_of_owner(store, run, HostAway.kind)]
    last = {one.host: one for one in found}
    return {name: one for name, one in last.items() if one.since is not None}


async def _events_of_owner(store: Store, run: RunRecord, kind: str) -> AsyncGenerator[tuple[str, Mapping[str, Any]]]:
    """Yield time and detail of the events of a running run since its last resume; none unless the run is running."""
    if shown_status(run) is not RunStatus.RUNNING:
        return
    begun = [event.seq for event in await store.list_events(run.run_id, kind=RunResumed.kind)]
    after = max(begun, default=0)
    while page := await store.list_events(run.run_id, after, kind=kind):
        for event in page:
            yield event.at, json.loads(event.detail)
        after = page[-1].seq


def _at(throttled: BackendThrottled, now: float) -> BackendThrottled:
    over = throttled.until is not None and parse_time(throttled.until) <= now
    return replace(throttled, until=None) if over else throttled


def stored_throttling(at: str, detail: Mapping[str, Any]) -> BackendThrottled:
    """Return the event that was stored at time `at` with `detail`."""
    return from_json(BackendThrottled, {"at": at, **detail})


def stored_away(at: str, detail: Mapping[str, Any]) -> HostAway:
    """Return the event that was stored at time `at` with `detail`."""
    return from_json(HostAway, {"at": at, **detail})


async def task_infos(
    store: Store, run: RunRecord, records: Sequence[TaskRecord], now: float, only: str | None = None
) -> dict[str, TaskInfo]:
    """Return the tasks in `records`, all tasks of `run`, by id; with `only` that task alone. Raises StoreError."""
    retrying = () if RunStatus(run.status) in RUN_DONE else records
    tries = await next_tries(store, run.run_id, retrying)
    throttlings = await _throttlings(store, run)
    away = await away_hosts(store, run)
    chosen = [task for task in records if only in (None, task.task_id)]

    def make_infos() -> dict[str, TaskInfo]:
        waits = _waits(run, records, tries, (throttlings, away), now)
        infos: dict[str, TaskInfo] = {}
        for task in chosen:
            reason = None if waits is None else waits.reason(task.task_id)
            next_try = iso(tries[task.task_id]) if task.task_id in tries else None
            infos[task.task_id] = task_info(run.run_id, task, next_try, reason)
        return infos

    # In a worker thread: thousands of tasks take long to decode, and other runs of this process would stand still.
    return await anyio.to_thread.run_sync(make_infos) if records else {}


def _waits(
    run: RunRecord,
    records: Sequence[TaskRecord],
    tries: Mapping[str, float],
    reported: tuple[Mapping[str, BackendThrottled], Mapping[str, HostAway]],
    now: float,
) -> Waits | None:
    """Return the reasons of the tasks; None if every task has ended, or if the stored run is damaged."""
    statuses = {task.task_id: TaskStatus(task.status) for task in records}
    if all(status in TASK_DONE for status in statuses.values()):
        return None
    try:
        dag = decode_dag(run, tuple(records))
    except StoreError:  # everything else can still be shown
        return None
    throttlings, away = reported
    waiting = WaitingRun(
        shown_status(run),
        dag,
        statuses,
        stored_limits(json.loads(run.settings)),
        {name: _at(one, now) for name, one in throttlings.items()},
        [name for name, one in throttlings.items() if one.cause == OWN_LIMITS],
        tries,
        {task.task_id: _deadline(task) for task in records if task.asked is not None},
        "" if run.owner is None else f"process {run.owner.pid} on {run.owner.host}",
        away,
    )
    return Waits(waiting, now)


def _deadline(task: TaskRecord) -> str | None:
    asks = _asks("", task)
    return None if asks is None else asks.deadline_at


def run_info(
    run: RunRecord, tasks: Mapping[str, TaskInfo] | None = None, throttled: tuple[BackendThrottled, ...] = ()
) -> RunInfo:
    """Return the values of the record `run`."""
    return RunInfo(
        run.run_id,
        run.name,
        shown_status(run),
        run.created_at,
        run.started_at,
        run.ended_at,
        run.error,
        {TaskStatus(status): number for status, number in run.counts.items()},
        run.usage,
        run.owner,
        tasks or {},
        throttled,
        _loop_of(run),
    )


def task_info(
    run_id: str, task: TaskRecord, next_try_at: str | None = None, waits: WaitReason | None = None
) -> TaskInfo:
    """Return the task of the run `run_id` that the record describes."""
    return TaskInfo(
        task_id=task.task_id,
        position=task.position,
        status=TaskStatus(task.status),
        depends_on=task.depends_on,
        backend=task.backend,
        prompt=task.prompt,
        attempts=task.attempt,
        crashes=task.crashes,
        text=task.text,
        data=None if task.data is None else json.loads(task.data),
        damaged=task.damaged,
        error_kind=task.error_kind,
        error=task.error,
        next_try_at=next_try_at,
        question=task.question,
        waits=waits,
        asks=_asks(run_id, task),
        answers=_answers(task),
        session_id=task.session_id,
        session_confirmed=task.session_confirmed,
        usage=task.usage,
        duration_s=task.duration_s,
        started_at=task.started_at,
        ended_at=task.ended_at,
        added_by=task.added_by,
        spec=json.loads(task.spec),
    )


def _asks(run_id: str, task: TaskRecord) -> OpenQuestion | None:
    if task.question is None or task.asked is None:
        return None
    try:
        return OpenQuestion.of(run_id, task.task_id, task.attempt, asking_of(task.question, task.asked))
    except (ValueError, KeyError, TypeError):  # damaged: the text of the question alone is better than nothing
        return None


def _answers(task: TaskRecord) -> tuple[AnsweredQuestion, ...]:
    try:
        return answers_of(task.answers)
    except (ValueError, KeyError, TypeError):  # damaged
        return ()


def asks_as_json(question: OpenQuestion | None) -> dict[str, Any]:
    """Return the schema, the default and the deadline of a question as a JSON object; each is null if absent."""
    if question is None:
        return {"schema": None, "default": None, "deadline_at": None}
    schema = None if question.schema is None else dict(question.schema)
    return {"schema": schema, "default": question.default, "deadline_at": question.deadline_at}


_COUNTED = [one.name for one in fields(Usage) if one.name != "model"]


def usage_as_json(usage: Usage) -> dict[str, Any]:
    """Return tokens and cost as fields of a JSON object."""
    return {name: getattr(usage, name) for name in _COUNTED}


async def history(store: Store, run_id: str, after: int, clock: Clock, poll: float) -> AsyncGenerator[StoredEvent]:
    """Yield the stored events numbered above `after`, and until the end of the run also new events, polled every `poll`
    s.

    Raises RunNotFound, StoreError.
    """
    ended, looks = False, 0
    while not ended:
        if looks % _LOOKS_A_RECORD == 0:
            # Read the record before the events: if the run had ended by then, its last event is among the events read
            # next. Not every time, because the record's query counts the tasks, while a query without new events costs
            # almost nothing.
            ended = RunStatus((await _record(store, run_id)).status) in RUN_DONE
        looks += 1
        while records := await store.list_events(run_id, after):
            for record in records:
                event = _event(record)
                after = event.seq
                if event.task_id is None:  # a person's message to a task does not reopen an ended run
                    ended = event.is_last
                yield event
        if not ended:
            await clock.sleep(poll)


async def _record(store: Store, run_id: str) -> RunRecord:
    record = await store.get_run(run_id)
    if record is None:
        raise RunNotFound(f"the store has no run {run_id!r}")
    return record


def _event(record: EventRecord) -> StoredEvent:
    detail = json.loads(record.detail)
    return StoredEvent(record.seq, record.at, record.kind, record.task_id, record.attempt, detail)


POLICY = "the policy"


async def find_adders(store: Store, run: RunRecord, tasks: Sequence[TaskRecord]) -> dict[str, str]:
    """Return the origin of each added task by id: the id of the task that added it, or `POLICY`."""
    by_policy = await _added_by_policy(store, run) if run.policy_state is not None else set[int]()
    found = {task.task_id: POLICY if task.position in by_policy else task.added_by for task in tasks}
    return {task_id: by for task_id, by in found.items() if by is not None}


async def _added_by_policy(store: Store, run: RunRecord) -> set[int]:
    """Return the positions of tasks that the policy added. Only the events of the run record this."""
    positions: set[int] = set()
    end = after = 0
    while page := await store.list_events(run.run_id, after):
        for event in page:
            if event.kind in {RunCreated.kind, TasksAdded.kind}:
                start, end = end, end + json.loads(event.detail)["tasks"]
                if event.kind == TasksAdded.kind and event.task_id is None:
                    positions.update(range(start, end))
        after = page[-1].seq
    return positions
