"""Permanent cancellation of a stored run: by its live owner, or else by this process."""

from __future__ import annotations

from plait.clock_and_ids import iso
from plait.errors import RunOwned
from plait.runner.engine.event_feed import Feed
from plait.runner.engine.inbox import wake
from plait.runner.engine.lease import is_live, owner_is_gone, seems_free, wait_for_expiry
from plait.runner.engine.run_options import RunOptions
from plait.runner.recovery.resume import OnUnreached, end_run_on_hosts, finish_cancelling
from plait.runner.state.attempt_files import kill_orphans
from plait.runner.state.stored_run import asks_for_cancel, cancel_note, stored_record, stored_run
from plait.statuses import RUN_DONE, RunStatus

_LOOK_AGAIN_S = 0.2


async def cancel_run(config: RunOptions, run_id: str, wait: float, on_unreached: OnUnreached) -> RunStatus:
    """Cancel the run. See `Runs.cancel`."""
    ends = config.clock.monotonic() + wait
    told, watched = False, None
    while True:
        store, record = await stored_record(config.store, run_id)
        if RunStatus(record.status) in RUN_DONE:
            if record.owner is None and RunStatus(record.status) is RunStatus.CANCELLED:
                await kill_orphans(store, run_id)  # the cancelling process may have died before
                await end_run_on_hosts(config, record, record.epoch, on_unreached)
            return RunStatus(record.status)
        if not (told or owner_is_gone(record)):
            asked = RunStatus(record.status) is RunStatus.CANCELLING
            if not (asked or await asks_for_cancel(store, run_id, await store.list_notes(run_id))):
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
