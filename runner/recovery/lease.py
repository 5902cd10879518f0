"""Who runs a run: waiting until nobody does, and claiming it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import anyio

from plait.persistence.changes import Batch, Change, RunClaimed, RunReleased
from plait.persistence.errors import Conflict, Fenced, StoreError
from plait.persistence.failpoints import reached
from plait.persistence.protocol import Store
from plait.persistence.records import Owner, RunRecord
from plait.runner.clock import iso
from plait.runner.domain import events
from plait.runner.engine.checkpointer import Position
from plait.runner.engine.config import Config
from plait.runner.engine.feed import Feed
from plait.runner.engine.run_control import Control
from plait.runner.errors import RunOwned
from plait.runner.state.orphans import has_files, kill_orphans
from plait.runner.state.owner import Liveness, claim_for_this_process, forget, liveness
from plait.runner.state.stored_run import StoredRun


async def wait_for_expiry(config: Config, run: StoredRun, feed: Feed, control: Control | None = None) -> bool:
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


async def with_lease(config: Config, run: StoredRun, then: Sequence[Change], keep: Sequence[tuple[str, int]]) -> None:
    """Claim the run, which nobody runs, with `then` in the same transaction, and leave it: in that transaction, too, or
    behind it where something may be left of its attempts. All but those in `keep` are ended meanwhile, as long as
    nobody else can begin any. Raises as `claim`.
    """
    store, record = run.store, run.record
    leaving = RunReleased(iso(config.clock.wall()))
    if not has_files(store, record.run_id):
        forget((await acquire(config, store, record, [*then, leaving]))[0])
        return
    owner, position = await acquire(config, store, record, then)
    try:
        await kill_orphans(store, record.run_id, keep)
    finally:
        forget(owner)
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await store.write(Batch(record.run_id, position.epoch, position.next_seq, (leaving,)))


async def acquire(config: Config, store: Store, record: RunRecord, then: Sequence[Change]) -> tuple[Owner, Position]:
    """Make this process the owner, with `then` in the same transaction; where the run's changes go on."""
    at = iso(config.clock.wall())
    owner = claim_for_this_process(at)
    claimed = RunClaimed(at, owner, config.clock.wall() + config.lease)
    batch = Batch(record.run_id, record.epoch, record.last_seq + 1, (claimed, *then))
    try:
        await store.write(batch)
    except (Conflict, Fenced) as error:
        forget(owner)
        raise RunOwned(f"another process took run {record.run_id} over at this very moment; it runs there") from error
    except BaseException:
        # Cancelled or failed, the claim may stand all the same: leave the run to others, if it is ours at all. That is
        # told by the claim, which is written along: behind that of somebody else the batch is refused.
        forget(owner)
        release = replace(batch, changes=(*batch.changes, RunReleased(at)))
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await store.write(release)
        raise
    reached("claim.written")
    return owner, Position(record.epoch + 1, batch.last_seq + 1)
