"""Permanent cancellation of a stored run: by its live owner, or else by this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from plait import events
from plait.clock_and_ids import iso
from plait.errors import RunOwned
from plait.persistence.store_records import RunRecord
from plait.runner.domain.run_result import RunResult
from plait.runner.engine.event_feed import Feed
from plait.runner.engine.inbox import cancel_note, is_to_be_cancelled, wake
from plait.runner.engine.lease import Liveness, acquire, is_live, liveness, seems_free, unregister, wait_for_expiry
from plait.runner.engine.run_hosts import end_on_hosts, run_on_hosts
from plait.runner.engine.run_lifecycle import note_cancelled
from plait.runner.engine.run_options import RunOptions
from plait.runner.state.attempt_files import kill_orphans
from plait.runner.state.stored_run import StoredRun, stored_record, stored_run, unfinished_on_hosts
from plait.statuses import RUN_DONE, TASK_DONE, RunStatus

_LOOK_AGAIN_S = 0.2
OnUnreached: TypeAlias = Callable[[Mapping[str, Sequence[str]]], None]
"""Called with the hosts that cannot be reached, and the ids of the tasks that may be under way on each."""


async def cancel_run(config: RunOptions, run_id: str, wait: float, on_unreached: OnUnreached) -> RunStatus:
    """Cancel the run. See `Runs.cancel`."""
    ends = config.clock.monotonic() + wait
    told, watched = False, None
    while True:
        store, record = await stored_record(config.store, run_id)
        if RunStatus(record.status) in RUN_DONE:
            if record.owner is None and RunStatus(record.status) is RunStatus.CANCELLED:
                await kill_orphans(store, run_id)  # the cancelling process may have died before
                await _end_on_hosts(config, record, record.epoch, on_unreached)
            return RunStatus(record.status)
        if not told and record.owner is not None and liveness(record.owner) is not Liveness.DEAD:
            if not await is_to_be_cancelled(store, record):
                await store.send(run_id, cancel_note(record, iso(config.clock.wall())))
            wake(record.owner)
            told = True
        is_late = config.clock.monotonic() >= ends
        may_answer = is_live(record, config.clock.wall()) or not (is_late or seems_free(record))
        if not may_answer and (record.owner is None or record.owner != watched):
            try:
                return await _cancel_from_here(config, run_id, on_unreached)
            except RunOwned:  # another process claimed the run first, or the owner has written meanwhile
                watched = record.owner if told else None
                continue
        if is_late:
            return RunStatus.CANCELLING
        await config.clock.sleep(_LOOK_AGAIN_S)


async def _cancel_from_here(config: RunOptions, run_id: str, on_unreached: OnUnreached) -> RunStatus:
    run = await stored_run(config.store, run_id)
    if run.status in RUN_DONE:
        return run.status
    await wait_for_expiry(config, run)
    return (await finish_cancelling(config, run, Feed(), on_unreached)).status


async def finish_cancelling(
    config: RunOptions, run: StoredRun, feed: Feed, on_unreached: OnUnreached = lambda _hosts: None
) -> RunResult:
    """Cancel all unfinished tasks of a run without an owner in a single transaction: claim, cancel, release.

    Raises RunOwned if another process has just claimed the run, StoreError.
    """
    state, record = run.state, run.record
    at = iso(config.clock.wall())
    new_events: list[events.Event] = []
    sessions: dict[int, str] = {}
    for position, status in enumerate(state.statuses):
        if status not in TASK_DONE:
            new_events.append(state.cancel(position, at))
            if session_id := run.tasks[position].session_id:
                sessions[position] = session_id
    new_events.append(events.RunCancelled(at, record.run_id))
    owner, written = await acquire(config, run.store, record, new_events)
    unregister(owner)
    await kill_orphans(run.store, record.run_id)
    await _end_on_hosts(config, record, written.epoch, on_unreached)
    await note_cancelled(config, record.run_id, state, sessions)
    for event in new_events:
        feed.publish(event)
    return state.result(record.run_id, RunStatus.CANCELLED, resume_summary=state.resume_summary())


async def _end_on_hosts(config: RunOptions, record: RunRecord, epoch: int, on_unreached: OnUnreached) -> None:
    """End what a cancelled run without an owner still has on other hosts. Raises StoreError."""
    assert config.store is not None
    placed = await unfinished_on_hosts(config.store, record.run_id)
    claim = run_on_hosts(record.run_id, record.created_at, epoch)
    if missing := await end_on_hosts(config.backends.values(), claim, placed):
        on_unreached(missing)
