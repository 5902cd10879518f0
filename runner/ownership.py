"""Taking a stored run over: read it, judge its owner, claim it, and settle what its last owner left under way."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import anyio

from persistence.boundaries import reached
from persistence.changes import Batch, Change, Owner, RunClaimed, RunReleased
from persistence.errors import Conflict, Fenced, StoreError
from persistence.protocol import Store
from persistence.records import RunRecord, TaskRecord
from runner import events
from runner.checkpoint import Position
from runner.clock import iso
from runner.conversation import load_past
from runner.drive import Config, Prepared, backend_names
from runner.errors import RunNotFound, RunNotResumable, RunOwned, StoreRequired
from runner.owner import LEASE_SECONDS, claim_for_this_process, forget, may_take_over
from runner.result import RunResult
from runner.state import Past, RunState
from runner.status import RUN_DONE, RUN_REOPENINGS, TASK_DONE, TASK_REOPENINGS, RunStatus, TaskStatus
from runner.translate import changes, dag_of


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


async def stored_run(config: Config, run_id: str) -> StoredRun:
    """Read a run. Raises StoreRequired, RunNotFound, StoreError."""
    store = config.store
    if store is None:
        raise StoreRequired("this runner has no store, so there is nothing to read; give it one with store=...")
    record = await store.get_run(run_id)
    if record is None:
        raise RunNotFound(f"the store has no run {run_id!r}; `plait runs` lists those that it has")
    tasks = await store.list_tasks(run_id)
    reached("resume.read")
    return StoredRun(store, record, tasks, RunState(dag_of(record, tasks), tasks))


def has_ended(record: RunRecord, retry_failed: bool) -> bool:
    """Whether the run is over and is not to be reopened."""
    status = RunStatus(record.status)
    return status in RUN_DONE and not (retry_failed and status in RUN_REOPENINGS)


def needs_no_work(run: StoredRun, retry_failed: bool) -> bool:
    """Whether the run has ended and is to stay so. Raises RunNotResumable for a cancelled one."""
    if run.status is RunStatus.CANCELLED:
        raise RunNotResumable(f"run {run.record.run_id} was cancelled for good; start a new run")
    return has_ended(run.record, retry_failed)


def ended_result(run: StoredRun) -> RunResult:
    """What the store holds of a run that has ended. A completed run with damaged results counts as failed."""
    results = run.state.all_results()
    damaged = [record.task_id for record in run.tasks if record.damaged]
    if not damaged:
        return RunResult(run.record.run_id, run.status, results, run.record.error)
    error = f"the stored results of {', '.join(damaged[:5])} are damaged"
    return RunResult(run.record.run_id, RunStatus.FAILED, results, error)


async def take_over(config: Config, run: StoredRun, retry_failed: bool) -> Prepared:
    """Claim the run and make it ready to go on, in one transaction. Raises RunOwned, BackendMissing, StoreError."""
    state, record = run.state, run.record
    refuse_owned(config, record)
    happened: list[events.Event] = []
    at = iso(config.clock.wall())
    for i, status in enumerate(state.statuses):
        task_id, attempt = run.tasks[i].task_id, state.attempts[i]
        if status is TaskStatus.RUNNING:
            state.statuses[i] = TaskStatus.PENDING
            happened.append(events.TaskInterrupted(at, task_id, attempt, "its process ended"))
        elif retry_failed and status in TASK_REOPENINGS and not run.tasks[i].damaged:
            state.reopen(i)
            happened.append(events.TaskReopened(at, task_id, attempt))
    names = backend_names(state.dag, config, state.statuses)
    reused = sum(status is TaskStatus.COMPLETED for status in state.statuses)
    happened.insert(0, events.RunResumed(at, record.run_id, run.status, reused))
    await _load_conversations(run)
    owner, position = await claim(config, run.store, record, [change for e in happened for change in changes(e)])
    return Prepared(record.run_id, state, names, owner, happened, (), position)


def refuse_owned(config: Config, record: RunRecord) -> None:
    """Raise RunOwned while another live process runs the run."""
    owner = record.owner
    if owner is not None and not may_take_over(owner, record.lease_expires_at, config.clock.wall()):
        until = "" if record.lease_expires_at is None else f"; its claim holds until {iso(record.lease_expires_at)}"
        raise RunOwned(
            f"run {record.run_id} is being run by process {owner.pid} on {owner.host} since {owner.claimed_at}{until}. "
            f"Stop that process first, or wait for it"
        )


async def claim(config: Config, store: Store, record: RunRecord, then: Sequence[Change]) -> tuple[Owner, Position]:
    """Make this process the owner, with `then` in the same transaction; where the run's changes go on."""
    at = iso(config.clock.wall())
    owner = claim_for_this_process(config.rng, at)
    claimed = RunClaimed(at, owner, config.clock.wall() + LEASE_SECONDS)
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
            past = await load_past(run.store, run.record.run_id, state.dag, task.continues)
            state.conversations[position] = Past(run.tasks[position].session_id, past.messages)
