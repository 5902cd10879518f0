"""`StoredRun`: a run read from the store, its DAG, the times of its next attempts, and the check whether any work is
left.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import field, fields, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias, TypeVar

from plait.backends.backend_protocol import DetachedTurn
from plait.clock_and_ids import parse_time
from plait.errors import (
    ErrorKind,
    PlaitError,
    RunNotFound,
    RunNotResumable,
    StoreError,
    StoreRequired,
    TaskNotFound,
    nearest,
)
from plait.events import RUN_ENDS, Event, NewTask, TaskInterrupted, TaskPlaced, TaskRetried, TaskStarted
from plait.failpoints import reached
from plait.json_form import JsonValue, as_json, from_json, to_json, value
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import (
    AttemptRecord,
    EventRecord,
    MessageRecord,
    Note,
    NoteRecord,
    RunRecord,
    TaskRecord,
)
from plait.runner.domain.dag import DAG, RowsFile, part_number
from plait.runner.domain.notify_target import NOTIFY, NotifyTarget
from plait.runner.domain.run_result import RunResult
from plait.runner.state.run_state import RunState
from plait.statuses import RUN_DONE, TASK_STATUSES, AttemptStatus, RunStatus, TaskStatus
from plait.task import GrowthLimits, Task, read_spec, with_prompt

MOST_RUNS_SEARCHED = 10_000
"""The number of runs that a search reads, the newest first."""
POSTED = "posted"
"""The key in the settings of a run that was sent to a server, and runs on the backends of the server."""
PARK, PRIORITY = "park", "priority"
"""The key in the settings of a run that parks, and goes on by itself: see `ParallelRunner`."""
ROWS_FILE = "rows_file"
"""The key in the settings of a run that reads its rows from a file as it goes."""
SETTINGS_FORMAT = 100
"""The format of the JSON in a run's settings and in a task's spec. Formats 1 and 2 were used in development."""


def read_settings(run: RunRecord) -> Mapping[str, Any]:
    """Return the settings of a run, which are parsed once for all who ask. Raises ValueError if they are damaged."""
    return _parse_settings(run.settings)


@lru_cache(maxsize=1)
def _parse_settings(text: str) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = json.loads(text)
    return settings


def stores_backends(run: RunRecord) -> bool:
    """Return whether the stored settings name the backends of the run, as for every run made by the command. Only such
    runs can be resumed by the command. `run` includes its settings.
    """
    settings = read_settings(run)
    kinds = {"backends": dict, "default_backend": str, "folder": str}
    return all(isinstance(settings.get(name), kind) for name, kind in kinds.items())


@value
class StoredRun:
    """A run as read from the store."""

    store: Store
    record: RunRecord
    tasks: tuple[TaskRecord, ...]
    state: RunState
    """The state loaded from `tasks`."""
    notes: Sequence[NoteRecord] = ()
    """The inbox of a run that has not ended, or has an open question."""
    to_be_cancelled: bool = False
    """Whether the run has not ended, and somebody has asked for its cancellation."""
    detached: Mapping[str, DetachedTurn] = field(default_factory=dict[str, DetachedTurn])
    """The states of attempts recorded as running, read from files, by task id: see `with_detached_turns`."""

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.record.status)

    def statuses_of_resume(self, *, retry_failed: bool) -> list[TaskStatus]:
        """Return the status of each task once a resume has begun, by position. A running task stays running: events
        report whether its backend still works.
        """
        return [
            TaskStatus.PENDING
            if retry_failed and status is TaskStatus.FAILED and not (record.damaged and task.at_most_once)
            else status
            for task, record, status in zip(self.state.dag, self.tasks, self.state.statuses, strict=True)
        ]

    def require_task(self, task_id: str) -> None:
        """Raise TaskNotFound unless the run has the task."""
        if task_id not in self.state.dag:
            raise task_not_found(self.record.run_id, task_id, (task.id for task in self.state.dag))


def task_not_found(run_id: str, task_id: str, there: Iterable[str]) -> TaskNotFound:
    """Return the error for a task that is not `there` in the run."""
    known = list(there)
    parts = [name for name in known if part_number(name) and name.rpartition(".")[0] == task_id]
    hint = nearest(task_id, known) or f"; `plait show {run_id}` lists them"
    if parts:
        hint = f"; name one of its {len(parts):,} parts, such as {parts[0]!r}"
    return TaskNotFound(f"run {run_id} has no task {task_id!r}{hint}")


@value
class StoredPolicy:
    """The stored form of a run's policy, from which `policy_of` builds the policy."""

    kind: str
    settings: Mapping[str, JsonValue]

    @classmethod
    def of(cls, record: RunRecord) -> StoredPolicy | None:
        """Return the policy of the run; None for a run without a policy. `record` must include the settings."""
        stored = read_settings(record).get("policy")
        return None if stored is None else cls(stored["kind"], stored["settings"])


def stored_targets(run: RunRecord) -> tuple[NotifyTarget | None, ...]:
    """Return where the notices of the run go, None in place of each that this version of plait cannot read."""
    targets: list[NotifyTarget | None] = []
    for form in read_settings(run).get(NOTIFY) or ():
        try:
            targets.append(NotifyTarget.of(form))
        except (ValueError, AttributeError):
            targets.append(None)
    return tuple(targets)


PolicyEnd: TypeAlias = Literal[RunStatus.COMPLETED, RunStatus.FAILED]


@value
class PolicyState:
    """The outcome of a policy's decisions so far."""

    state: JsonValue = None
    """The state for the next decision."""
    end: PolicyEnd | None = None
    """The end of the run, if decided."""
    error: str | None = None
    """The reason for the end."""
    idle: bool = False
    """True if the policy was called with nothing left to run, and added nothing."""
    failed_on: str | None = None
    """The id of the task after whose end the policy raised or returned an invalid decision."""

    def encoded(self) -> str:
        """Return the JSON for `PolicyDecided.state_json`. Raises TypeError or ValueError for a value outside JSON."""
        return to_json(as_json(self))


def read_policy_state(encoded: str | None) -> PolicyState:
    """Return the decoded state; the initial state for None. Raises ValueError if damaged."""
    return PolicyState() if encoded is None else from_json(PolicyState, json.loads(encoded))


async def stored_record(store: Store | None, run_id: str) -> tuple[Store, RunRecord]:
    """Return the store and the record of a run. Raises StoreRequired if `store` is None, RunNotFound, StoreError."""
    if store is None:
        raise StoreRequired("this runner has no store, so no run can be read; give the runner a store with store=...")
    record = await store.get_run(run_id)
    if record is None:
        raise RunNotFound(f"the store has no run {run_id!r}; `plait runs` lists those that it has")
    return store, record


async def stored_run(
    store: Store | None, run_id: str, record: RunRecord | None = None, *, plan: DAG | None = None
) -> StoredRun:
    """Return a run with tasks and state; `record` is its record if it has been read already, and `plan` a graph that
    has most of its tasks. Raises StoreRequired if `store` is None, RunNotFound, StoreError.

    A task with a damaged conversation that another task is to continue counts as damaged.
    """
    if store is None or record is None:
        store, record = await stored_record(store, run_id)
    rows_file = rows_file_of(record)
    tasks = await (store.list_tasks(run_id) if rows_file is None else _tasks_to_load(store, record, rows_file))
    if not tasks:
        raise RunNotFound(f"run {run_id!r} was deleted from the store just now")
    dag = decode_dag(record, tasks, plan)
    usage = record.usage
    unloaded = {} if rows_file is None else unlisted(record, tasks)
    state = RunState(dag, tasks, usage=usage, unloaded=unloaded)
    if damaged := await _with_damaged_talk(store, run_id, state):
        tasks = tuple(replace(task, damaged=True) if task.task_id in damaged else task for task in tasks)
        state = RunState(dag, tasks, usage=usage, unloaded=unloaded)
    if (spares := (slots := read_settings(record).get("slots", {})).get("spares")) is not None:
        state.load_moved(await store.list_attempts(run_id), spares, slots["default"])
    reached("resume.read")
    return await with_notes(StoredRun(store, record, tasks, state))


def rows_file_of(run: RunRecord) -> RowsFile | None:
    """Return the file of which the run reads rows as it goes; None for any other run. `run` includes its settings."""
    stored = read_settings(run).get(ROWS_FILE)
    return None if stored is None else RowsFile(**stored)


def unlisted(run: RunRecord, tasks: Iterable[TaskRecord]) -> dict[TaskStatus, int]:
    """Return the number of tasks of the run by status without those in `tasks`."""
    others = Counter(run.counts) - Counter(task.status for task in tasks)
    return {TaskStatus(status): number for status, number in others.items()}


MOST_LISTED = 1_000
"""Tasks of a run that reads its rows as it goes that a list of tasks shows."""
TASKS_AT_ONCE = 10_000
"""Tasks of a run with many rows that are read at once."""


async def pages_of_tasks(store: Store, run: RunRecord, file: RowsFile) -> AsyncGenerator[tuple[TaskRecord, ...]]:
    """Yield all tasks of the run: those of no row, then some whole rows at a time. Raises StoreError."""
    size, count = TASKS_AT_ONCE // file.width * file.width, sum(run.counts.values())
    if file.first:
        yield await store.list_tasks(run.run_id, range(file.first))
    for first in range(file.first, count, size):
        yield await store.list_tasks(run.run_id, range(first, first + size))


async def listed_tasks(store: Store, run: RunRecord) -> tuple[TaskRecord, ...]:
    """Return all tasks of the run, or the last ones of a run that reads its rows as it goes. Raises StoreError."""
    if (file := rows_file_of(run)) is None:
        return await store.list_tasks(run.run_id)
    count = sum(run.counts.values())
    first = file.first + max(0, count - file.first - MOST_LISTED) // file.width * file.width
    return await _with_tasks_of_no_row(store, run, file, range(first, count))


async def _with_tasks_of_no_row(store: Store, run: RunRecord, file: RowsFile, rows: range) -> tuple[TaskRecord, ...]:
    others = await store.list_tasks(run.run_id, range(file.first)) if file.first else ()
    return (*others, *await store.list_tasks(run.run_id, rows))


async def chosen_tasks(store: Store, run: RunRecord, is_chosen: Callable[[TaskRecord], bool]) -> tuple[TaskRecord, ...]:
    """Return all tasks of the run, or the first that are chosen of a run that reads its rows as it goes. Raises
    StoreError.
    """
    if (file := rows_file_of(run)) is None:
        return await store.list_tasks(run.run_id)
    chosen: list[TaskRecord] = []
    async with aclosing(pages_of_tasks(store, run, file)) as pages:
        async for page in pages:
            chosen += [task for task in page if is_chosen(task)][: MOST_LISTED - len(chosen)]
            if len(chosen) == MOST_LISTED:
                break
    return tuple(chosen)


async def tasks_beside(store: Store, run: RunRecord, task: TaskRecord) -> tuple[TaskRecord, ...]:
    """Return the tasks on which the reason may depend for which `task` waits: those of its row, or all. Raises
    StoreError.
    """
    if (file := rows_file_of(run)) is None:
        return await store.list_tasks(run.run_id)
    first = file.first + (task.position - file.first) // file.width * file.width
    return await _with_tasks_of_no_row(store, run, file, range(max(first, file.first), first + file.width))


async def _tasks_to_load(store: Store, run: RunRecord, file: RowsFile) -> tuple[TaskRecord, ...]:
    """Return the tasks of no row, of the first row, after which those of others are made, and of each row that is not
    done.
    """
    tasks: list[TaskRecord] = []
    async for page in pages_of_tasks(store, run, file):
        is_done = [task.status in _COMPLETED_OR_SKIPPED and not task.damaged for task in page]
        for first in range(0, len(page), file.width):
            if len(tasks) <= file.first or not all(is_done[first : first + file.width]):
                tasks += page[first : first + file.width]
    return tuple(tasks)


_COMPLETED_OR_SKIPPED = frozenset({TaskStatus.COMPLETED.value, TaskStatus.SKIPPED.value})


async def with_notes(run: StoredRun) -> StoredRun:
    """Return the run with its inbox as it is now. Raises StoreError."""
    if (ended := run.status in RUN_DONE) and not run.state.asking:
        return run
    run_id = run.record.run_id
    notes = await run.store.list_notes(run_id)
    has_cancel = not ended and (run.status is RunStatus.CANCELLING or await asks_for_cancel(run.store, run_id, notes))
    return replace(run, notes=notes, to_be_cancelled=has_cancel)


CANCEL = "cancel"
"""The kind of note that requests the cancellation of the run."""


def cancel_note(record: RunRecord, at: str) -> Note:
    """Return the note that requests the cancellation of the run in the state of `record`.

    It carries the number of the last change of the run that the sender has read. If the run has ended since, the
    request is void: a late request must not cancel a run that a person has reopened. No clocks are compared.
    """
    return Note(CANCEL, at, body=to_json({"seq": record.last_seq}))


async def asks_for_cancel(store: Store, run_id: str, notes: Sequence[NoteRecord]) -> bool:
    """Return whether a valid request to cancel the run is among its `notes`. Raises StoreError."""
    seen = max((_seen(note) for note in notes if note.kind == CANCEL), default=None)
    if seen is None:
        return False
    return not [event async for event in events_after(store, run_id, seen) if event.kind in RUN_ENDS]


def _seen(note: NoteRecord) -> int:
    """Return the number of the last change that the sender had read; 0 if the note does not say."""
    try:
        return int(json.loads(note.body)["seq"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return 0


def with_prompts(run: StoredRun, prompts: Mapping[str, str]) -> StoredRun:
    """Return the run with new prompts of failed tasks. Raises DAGError for an invalid prompt, TaskNotFound, and
    PlaitError for a task that has not failed.
    """
    for task_id in prompts:
        run.require_task(task_id)
        status = run.state.statuses[run.state.dag.position(task_id)]
        if status is not TaskStatus.FAILED:
            raise PlaitError(
                f"task {task_id!r} of run {run.record.run_id} is {status.value}, and only a failed task takes a new "
                f"prompt; a fork changes the prompts of other tasks (plait fork --prompt)"
            )
        with_prompt(run.state.dag[task_id], prompts[task_id])
    if not prompts:
        return run
    tasks = tuple(replace(task, prompt=prompts.get(task.task_id, task.prompt)) for task in run.tasks)
    unloaded = run.state.unloaded
    state = RunState(decode_dag(run.record, tasks), tasks, usage=run.record.usage, unloaded=unloaded)
    return replace(run, tasks=tasks, state=state)


async def _with_damaged_talk(store: Store, run_id: str, state: RunState) -> set[str]:
    """Return the completed tasks with a damaged conversation that an unfinished task continues."""
    links: set[str] = set()
    for task, status in zip(state.dag, state.statuses, strict=True):
        before = None if status in {TaskStatus.COMPLETED, TaskStatus.SKIPPED} else task.continues
        while before is not None and before not in links and state.is_completed(before):
            links.add(before)
            before = state.dag[before].continues
    return {name for name in links if _is_damaged(await store.list_messages(run_id, name))}


def _is_damaged(messages: Sequence[MessageRecord]) -> bool:
    last = max((message.attempt for message in messages), default=0)
    return any(message.damaged for message in messages if message.attempt == last)


def has_ended(record: RunRecord, tasks: Sequence[TaskRecord], retry_failed: bool) -> bool:
    """Return whether the run has ended and is not reopened. `retry_failed` reopens a failed run and damaged results."""
    status = RunStatus(record.status)
    reopens = retry_failed and (status is RunStatus.FAILED or any(task.damaged for task in tasks))
    return status in RUN_DONE and not reopens


def needs_no_work(run: StoredRun, retry_failed: bool) -> bool:
    """Return whether the run has ended and is not reopened. Raises RunNotResumable if the run was cancelled."""
    if run.status is RunStatus.CANCELLED:
        raise RunNotResumable(f"run {run.record.run_id} was cancelled and cannot be resumed; start a new run")
    return has_ended(run.record, run.tasks, retry_failed)


def require_unfailed(run: StoredRun) -> None:
    """Raise RunNotResumable if the run has failed: answers alone do not resume a failed run."""
    if run.status is RunStatus.FAILED:
        raise RunNotResumable(
            f"run {run.record.run_id} has failed ({run.record.error}), so answers alone do not resume the run; "
            f"resume with retry_failed (plait resume --retry-failed), then answer the open questions"
        )


def ended_result(run: StoredRun) -> RunResult:
    """Return the stored result of an ended run. A completed run with damaged results counts as failed."""
    run_id, damaged = run.record.run_id, [record.task_id for record in run.tasks if record.damaged]
    if not damaged:
        return run.state.result(run_id, run.status, run.record.error)
    error = (
        f"the stored results of {', '.join(damaged[:5])} are damaged; resume with retry_failed to run the tasks again"
    )
    return run.state.result(run_id, RunStatus.FAILED, error)


async def next_tries(
    store: Store, run_id: str, tasks: Collection[TaskRecord], now: float = math.inf
) -> dict[str, float]:
    """Return the Unix time of the next attempt, by task id, for each task that waits for a retry, or after the death of
    its process.

    The time may be in the past. If the clock was set back, the delay counts from `now` and is thus never longer than
    recorded. Raises StoreError.
    """
    pending = [task for task in tasks if TASK_STATUSES[task.status] is TaskStatus.PENDING]
    waiting = {
        TaskRetried.kind: {task.task_id: task.attempt for task in pending if task.error_kind is not None},
        TaskInterrupted.kind: {
            task.task_id: task.attempt for task in pending if task.crashes and task.error_kind is None
        },
    }
    times: dict[str, float] = {}
    for kind, attempts in waiting.items():
        if not attempts:
            continue
        async for event in events_after(store, run_id, kind=kind):
            delay_s = json.loads(event.detail).get("delay_s")
            if delay_s is not None and event.task_id and attempts.get(event.task_id) == event.attempt:
                times[event.task_id] = min(parse_time(event.at), now) + delay_s
    return times


_E = TypeVar("_E", bound=Event)
_STORED_COLUMNS = frozenset({"at", "task_id", "attempt"})


async def events_after(
    store: Store, run_id: str, after: int = 0, kind: str | None = None
) -> AsyncGenerator[EventRecord]:
    """Yield the stored events numbered above `after`, oldest first; with `kind` those alone. Raises StoreError."""
    while page := await store.list_events(run_id, after, kind=kind):
        for record in page:
            yield record
        after = page[-1].seq


async def stored_events(store: Store, run_id: str, kind: type[_E], after: int = 0) -> AsyncGenerator[_E]:
    """Do as `events_after`, with the events of one kind as `stored_event` gives them."""
    async for record in events_after(store, run_id, after, kind.kind):
        yield stored_event(kind, record)


def stored_event(kind: type[_E], record: EventRecord) -> _E:
    """Return the event that was stored as `record`, without what the history leaves out."""
    columns = {one.name: getattr(record, one.name) for one in fields(kind) if one.name in _STORED_COLUMNS}
    return from_json(kind, {**columns, **json.loads(record.detail)})


_WITHOUT_HOST = frozenset({ErrorKind.CRASHED, ErrorKind.TIMEOUT, ErrorKind.UNAVAILABLE})
"""The kinds of errors that an attempt may have although its host reported no end."""


async def placed_attempts(store: Store, run_id: str) -> dict[tuple[str, int], TaskPlaced]:
    """Return the events of attempts on other hosts by task id and number of the attempt. Raises StoreError."""
    return {(one.task_id, one.attempt): one async for one in stored_events(store, run_id, TaskPlaced)}


async def moved_attempts(store: Store, run: RunRecord, task_id: str) -> dict[int, str]:
    """Return the backend of the task by the numbers of the attempts that called a spare in its place. Raises
    StoreError.
    """
    if "spares" not in read_settings(run).get("slots", {}):
        return {}
    starts = stored_events(store, run.run_id, TaskStarted)
    return {one.attempt: one.moved_from async for one in starts if one.moved_from and one.task_id == task_id}


async def unfinished_on_hosts(store: Store, run_id: str) -> Mapping[str, Sequence[str]]:
    """Return the ids of the tasks with attempts that may be under way, for each host that had attempts. Raises
    StoreError.

    An attempt has certainly ended if the host reported its end: an answer, a question or an error. An attempt of which
    the runner itself has stored the end may have been left on a host that was away.
    """
    placed = await placed_attempts(store, run_id)
    if not placed:
        return {}
    ended = {(one.task_id, one.attempt) for one in await store.list_attempts(run_id) if _reported_by_host(one)}
    unfinished: dict[str, dict[str, None]] = {}
    for attempt, at in placed.items():
        on_host = unfinished.setdefault(at.place, {})
        if attempt not in ended:
            on_host[attempt[0]] = None
    return {host: tuple(ids) for host, ids in unfinished.items()}


def _reported_by_host(attempt: AttemptRecord) -> bool:
    if attempt.error_kind is not None:
        return attempt.error_kind not in _WITHOUT_HOST
    return AttemptStatus(attempt.status) in {AttemptStatus.COMPLETED, AttemptStatus.ASKED}


def decode_task(record: TaskRecord | NewTask) -> Task:
    """Return the task as given at the creation of the run."""
    return Task(record.task_id, record.prompt, record.depends_on, record.backend, **read_spec(record.spec))


def decode_dag(run: RunRecord, tasks: tuple[TaskRecord, ...], plan: DAG | None = None) -> DAG:
    """Return the DAG of a stored run, with the very tasks of `plan` where their rows are the same. Raises StoreError if
    the run is damaged, or is stored in another format.
    """
    try:
        settings = read_settings(run)
        if (format_number := settings.get("format")) != SETTINGS_FORMAT:
            raise _of_another_format(run, format_number)
        growth = GrowthLimits(**settings["growth"]) if "growth" in settings else None
        mine = [decode_task(record) if (same := _same(record, plan)) is None else same for record in tasks]
        inputs = settings.get("inputs", {})
        gathered, rows_file = _parts(mine, tasks), rows_file_of(run)
        if plan is not None and not gathered and (graph := plan.with_items_of(mine, inputs)) is not None:
            graph.name, graph.growth = run.name, growth
            return graph
        return DAG(mine, name=run.name, inputs=inputs, growth=growth, rows_file=rows_file, gathered=gathered)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"the stored data of run {run.run_id!r} is damaged ({error}); restore a copy of the store"
        ) from error


def _same(record: TaskRecord, plan: DAG | None) -> Task | None:
    """Return the task of `plan` that has the same row."""
    if plan is None or record.task_id not in plan:
        return None
    _, rows = plan.stored
    row = rows[position := plan.position(record.task_id)]
    is_same = row.prompt == record.prompt and row.spec == record.spec and row.depends_on == record.depends_on
    return plan.tasks[position] if is_same and row.backend == record.backend else None


def _parts(mine: Sequence[Task], tasks: Sequence[TaskRecord]) -> dict[str, list[str]]:
    """Return the ids of the parts of each expanded task, by task id."""
    whole = {task.id for task in mine if task.gathers}
    parts: dict[str, list[str]] = {}
    for record in tasks:
        if record.added_by in whole:
            parts.setdefault(record.added_by, []).append(record.task_id)
    return parts


def _of_another_format(run: RunRecord, format_number: object) -> StoreError:
    maker, advice = "a development version of plait", "Start a new run"
    if isinstance(format_number, int) and format_number > SETTINGS_FORMAT:
        maker, advice = "a newer plait", "Upgrade plait"
    made = f"{maker} ({'no format' if format_number is None else f'format {format_number!r}'})"
    reads = f"this plait reads format {SETTINGS_FORMAT} only"
    return StoreError(f"run {run.run_id!r} was stored by {made}; {reads}. {advice}")
