"""Taking a stored run over: read it, judge its owner, claim it, and settle what its last owner left under way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import anyio

from backends.errors import ErrorKind
from persistence.boundaries import reached
from persistence.changes import Batch, Change, Owner, RunClaimed, RunReleased
from persistence.errors import Conflict, Fenced, StoreError
from persistence.protocol import Store
from persistence.records import MessageRecord, RunRecord, TaskRecord
from runner import events
from runner.checkpoint import Position
from runner.clock import iso
from runner.conversation import load_past
from runner.drive import Config, Prepared, backend_names
from runner.errors import RunNotFound, RunNotResumable, RunOwned, StoreRequired
from runner.feed import Feed
from runner.owner import Liveness, claim_for_this_process, forget, liveness
from runner.result import RunResult, TaskResult
from runner.run import Control
from runner.state import Past, RunState
from runner.status import RUN_DONE, RUN_REOPENINGS, TASK_DONE, TASK_REOPENINGS, RunStatus, TaskStatus
from runner.task import FailureMode
from runner.translate import changes, dag_of
from runner.verdict import Action, Verdict, judge


@dataclass(frozen=True, slots=True)
class StoredRun:
    """A run as it was read: its record, its tasks, and the state they are in."""

    store: Store
    record: RunRecord
    tasks: tuple[TaskRecord, ...]
    state: RunState

    @property
    def status(self) -> RunStatus:
        return RunStatus(self.record.status)


async def stored_record(config: Config, run_id: str) -> tuple[Store, RunRecord]:
    """Read a run's record alone. Raises StoreRequired, RunNotFound, StoreError."""
    store = config.store
    if store is None:
        raise StoreRequired("this runner has no store, so there is nothing to read; give it one with store=...")
    record = await store.get_run(run_id)
    if record is None:
        raise RunNotFound(f"the store has no run {run_id!r}; `plait runs` lists those that it has")
    return store, record


async def stored_run(config: Config, run_id: str) -> StoredRun:
    """Read a run. Raises StoreRequired, RunNotFound, StoreError."""
    store, record = await stored_record(config, run_id)
    tasks = await store.list_tasks(run_id)
    if not tasks:
        raise RunNotFound(f"run {run_id!r} was deleted from the store just now")
    dag = dag_of(record, tasks)
    state = RunState(dag, tasks)
    tasks = await _with_damaged_talk(store, run_id, state, tasks)
    reached("resume.read")
    return StoredRun(store, record, tasks, RunState(dag, tasks))


async def _with_damaged_talk(
    store: Store, run_id: str, state: RunState, tasks: tuple[TaskRecord, ...]
) -> tuple[TaskRecord, ...]:
    """A task whose conversation others are to go on with, and which does not fit its checksums, counts as damaged."""
    links: set[str] = set()
    for task, status in zip(state.dag, state.statuses, strict=True):
        before = None if status in {TaskStatus.COMPLETED, TaskStatus.SKIPPED} else task.continues
        while before is not None and before not in links and state.is_completed(before):
            links.add(before)
            before = state.dag[before].continues
    damaged = {name for name in links if _is_damaged(await store.list_messages(run_id, name))}
    return tuple(replace(task, damaged=True) if task.task_id in damaged else task for task in tasks)


def _is_damaged(said: Sequence[MessageRecord]) -> bool:
    last = max((message.attempt for message in said), default=0)
    return any(message.damaged for message in said if message.attempt == last)


def has_ended(record: RunRecord, tasks: Sequence[TaskRecord], retry_failed: bool) -> bool:
    """Whether the run is over and is not to be reopened, as one that failed or has damaged results can be."""
    status = RunStatus(record.status)
    reopens = retry_failed and (status in RUN_REOPENINGS or any(task.damaged for task in tasks))
    return status in RUN_DONE and not reopens


def needs_no_work(run: StoredRun, retry_failed: bool) -> bool:
    """Whether the run has ended and is to stay so. Raises RunNotResumable for a cancelled one."""
    if run.status is RunStatus.CANCELLED:
        raise RunNotResumable(f"run {run.record.run_id} was cancelled for good; start a new run")
    return has_ended(run.record, run.tasks, retry_failed)


def ended_result(run: StoredRun) -> RunResult:
    """What the store holds of a run that has ended. A completed run with damaged results counts as failed."""
    results = run.state.all_results()
    damaged = [record.task_id for record in run.tasks if record.damaged]
    if not damaged:
        return RunResult(run.record.run_id, run.status, results, run.record.error)
    error = f"the stored results of {', '.join(damaged[:5])} are damaged; resume with retry_failed runs them again"
    return RunResult(run.record.run_id, RunStatus.FAILED, results, error)


async def take_over(config: Config, run: StoredRun, retry_failed: bool) -> Prepared:
    """Claim a free run and make it ready to go on, in one transaction. Raises RunOwned, BackendMissing, StoreError."""
    state, record = run.state, run.record
    verdicts = judge(state.dag, run.tasks, retry_failed=retry_failed)
    at = iso(config.clock.wall())
    happened: list[events.Event] = []
    for position, verdict in enumerate(verdicts):
        event = _settled(state, run.tasks[position], verdict, at)
        if event is not None:
            happened.append(event)
    state.repeats = frozenset(position for position, verdict in enumerate(verdicts) if verdict.repeats)
    names = backend_names(state.dag, config, state.statuses)
    reused = sum(status is TaskStatus.COMPLETED for status in state.statuses)
    if run.status is RunStatus.QUEUED:
        happened.insert(0, events.RunStarted(at, record.run_id))
    else:
        happened.insert(0, events.RunResumed(at, record.run_id, run.status, reused))
    await _load_conversations(run)
    await _load_failures(run)
    owner, goes_on = await claim(config, run.store, record, [change for e in happened for change in changes(e)])
    return Prepared(record.run_id, state, names, owner, happened, (), goes_on)


def _settled(state: RunState, record: TaskRecord, verdict: Verdict, at: str) -> events.Event | None:
    """Bring `state` in line with `verdict`; the event that says so, if something changed."""
    position, task_id, attempt = record.position, record.task_id, record.attempt
    under_way = state.statuses[position] is TaskStatus.RUNNING
    if verdict.action is Action.CONTINUE and record.session_id is not None:
        state.interrupted[position] = record.session_id
    if under_way and verdict.action is Action.ASK:
        state.ask(position, verdict.reason)
        return events.TaskWaiting(at, task_id, attempt, verdict.reason, crashed=True)
    if under_way and verdict.action is Action.FAIL:
        return _crashed(state, position, verdict, at)
    if under_way:
        state.statuses[position] = TaskStatus.PENDING
        state.crashes[position] = record.crashes + 1
        return events.TaskInterrupted(at, task_id, attempt, "its process ended", crashed=True)
    if verdict.action is Action.START_OVER and state.statuses[position] in TASK_REOPENINGS:
        state.reopen(position)
        return events.TaskReopened(at, task_id, attempt, damaged=record.damaged)
    return None


def _crashed(state: RunState, position: int, verdict: Verdict, at: str) -> events.TaskFailed:
    task, attempt, kind = state.dag.tasks[position], state.attempts[position], ErrorKind.CRASHED.value
    status = TaskStatus.SKIPPED if task.failure_mode is FailureMode.SKIP else TaskStatus.FAILED
    result = TaskResult(task.id, status, error_kind=kind, error=verdict.reason, attempts=attempt)
    state.settle(position, result)
    return events.TaskFailed(at, task.id, attempt, status, kind, verdict.reason, 0.0)


async def wait_until_free(config: Config, run: StoredRun, feed: Feed, control: Control | None = None) -> bool:
    """Return once nobody runs the run: at once where its owner left or is provably dead, else after a whole lease in
    which nothing was heard of it. False if `control` was told to stop meanwhile. Raises RunOwned while it lives,
    StoreError.
    """
    record, control = run.record, control or Control()
    owner = record.owner
    if owner is None or liveness(owner) is Liveness.DEAD:
        return True
    if is_live(record, config.clock.wall()):
        raise _owned(record, owner)
    # Clocks jump and differ between hosts. What counts is whether the owner is heard of while we watch.
    at = iso(config.clock.wall())
    feed.publish(events.RunWatched(at, record.run_id, f"process {owner.pid} on {owner.host}", config.lease))
    for _ in range(_LOOKS):
        with anyio.CancelScope() as asleep:
            control.attach(partial(_wake, asleep))
            await config.clock.sleep(config.lease / _LOOKS)
        if control.ended_by == "stop":
            return False
        now = await run.store.get_run(record.run_id)
        if now is None or (now.epoch, now.last_seq) == (record.epoch, record.last_seq):
            continue
        if now.owner is None:
            raise RunOwned(f"run {record.run_id} was left by its owner, process {owner.pid}, just now; look again")
        raise _owned(now, now.owner)
    return True


def is_live(record: RunRecord, now: float) -> bool:
    """Whether the run's owner is known to live, and has renewed its lease in time, at Unix time `now`."""
    owner, expires = record.owner, record.lease_expires_at
    return owner is not None and expires is not None and expires > now and liveness(owner) is Liveness.ALIVE


_LOOKS = 3


def _wake(asleep: anyio.CancelScope, how: Literal["stop", "cancel"]) -> None:
    if how == "stop":
        asleep.cancel()


def _owned(record: RunRecord, owner: Owner) -> RunOwned:
    return RunOwned(
        f"run {record.run_id} is being run by process {owner.pid} on {owner.host} since {owner.claimed_at}. "
        f"Stop that process first, or wait for it"
    )


async def claim(config: Config, store: Store, record: RunRecord, then: Sequence[Change]) -> tuple[Owner, Position]:
    """Make this process the owner, with `then` in the same transaction; where the run's changes go on."""
    at = iso(config.clock.wall())
    owner = claim_for_this_process(config.rng, at)
    claimed = RunClaimed(at, owner, config.clock.wall() + config.lease)
    batch = Batch(record.run_id, record.epoch, record.last_seq + 1, (claimed, *then))
    try:
        await store.write(batch)
    except (Conflict, Fenced) as error:
        forget(owner)
        raise RunOwned(f"another process took run {record.run_id} over at this very moment; it runs there") from error
    except BaseException:
        # Cancelled or failed, the claim may stand all the same: leave the run to others, if it is ours at all.
        forget(owner)
        release = Batch(record.run_id, record.epoch + 1, batch.last_seq + 1, (RunReleased(at),))
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await store.write(release)
        raise
    reached("claim.written")
    return owner, Position(record.epoch + 1, batch.last_seq + 1)


async def _load_conversations(run: StoredRun) -> None:
    """Read the conversations that tasks still to run go on with."""
    state = run.state
    for task, status in zip(state.dag, state.statuses, strict=True):
        if task.continues is None or status in TASK_DONE:
            continue
        position = state.dag.position(task.continues)
        if state.statuses[position] is TaskStatus.COMPLETED and position not in state.conversations:
            past = await load_past(run.store, run.record.run_id, state, task.continues)
            state.conversations[position] = Past(run.tasks[position].session_id, past.messages)


async def _load_failures(run: StoredRun) -> None:
    """Count the failed attempts of earlier processes: a crash gives a task no new tries."""
    state = run.state
    for position, record in enumerate(run.tasks):
        if not record.attempt or state.statuses[position] in TASK_DONE:
            continue
        for attempt in await run.store.list_attempts(run.record.run_id, record.task_id):
            if attempt.status == "retried" and attempt.error_kind != ErrorKind.SESSION_LOST.value:
                state.failures[position] += 1
            elif attempt.status in {TaskStatus.FAILED.value, TaskStatus.COMPLETED.value}:  # reopened since, by a person
                state.failures[position] = 0
