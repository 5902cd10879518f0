"""Ownership of a run: whether its owner lives, the claim once it does not, and the renewal of the lease."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from enum import Enum

import anyio

from plait import events
from plait.backends.process.process_table import boot_id, start_time
from plait.clock_and_ids import Clock, iso
from plait.errors import Conflict, Fenced, RunOwned, StoreError
from plait.events import Event, LeaseRenewed, Owner, RunClaimed, RunReleased
from plait.failpoints import reached
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import Batch, RunRecord
from plait.runner.engine.checkpointer import Checkpointer, WritePosition
from plait.runner.engine.live_run import LiveRun
from plait.runner.engine.run_options import RunOptions, server_of
from plait.runner.state.stored_run import StoredRun
from plait.statuses import UNDER_WAY, RunStatus

_live_here: set[str] = set()


class Liveness(Enum):
    """The state of an owner's process, as far as known."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def claim_for_this_process(at: str) -> Owner:
    """Return a new owner for this process. Call `unregister` at the end of the execution.

    A store distinguishes claims by the owner id alone. The id therefore comes from the system's random source: neither
    a seed nor a fork can give two processes the same id.
    """
    owner = Owner(
        owner_id=secrets.token_hex(16),
        host=platform.node(),
        boot_id=boot_id(),
        pid=os.getpid(),
        process_started=start_time(os.getpid()) or "",
        claimed_at=at,
    )
    _live_here.add(owner.owner_id)
    return owner


def unregister(owner: Owner) -> None:
    """Record that this process no longer runs the owner's run."""
    _live_here.discard(owner.owner_id)


def liveness(owner: Owner) -> Liveness:
    """Return whether `owner`'s process is alive or dead, as far as this host can determine."""
    if owner.host != platform.node():
        return Liveness.UNKNOWN
    boot, _, pids = boot_id().partition("/")
    its_boot, _, its_pids = owner.boot_id.partition("/")
    if boot and its_boot and boot != its_boot:
        return Liveness.DEAD
    if pids and its_pids and pids != its_pids:
        return Liveness.UNKNOWN  # two containers with the same host name: the pid means nothing here
    if owner.pid == os.getpid():
        return Liveness.ALIVE if owner.owner_id in _live_here else Liveness.DEAD
    started = start_time(owner.pid)
    if started is None or (started and owner.process_started and started != owner.process_started):
        return Liveness.DEAD
    return Liveness.ALIVE


def owner_is_gone(run: RunRecord) -> bool:
    """Return whether the run has no owner, or one whose process is known to be dead."""
    return run.owner is None or liveness(run.owner) is Liveness.DEAD


def seems_free(run: RunRecord) -> bool:
    """Return whether no process seems to run the run. Not enough for a claim: an owner that is late may still go on."""
    return run.lease_has_expired or owner_is_gone(run)


def shown_status(run: RunRecord) -> RunStatus:
    """Return the status of the run: interrupted if stored as running or cancelling without a live owner, and parked if
    the owner has left it until a time.
    """
    status = RunStatus(run.status)
    if status in UNDER_WAY and seems_free(run):
        return RunStatus.PARKED if status is RunStatus.RUNNING and due_at(run) else RunStatus.INTERRUPTED
    return status


def due_at(run: RunRecord) -> float | None:
    """Return the Unix time in seconds from which a run without an owner can go on: see `RunReleased.due_at`."""
    return run.lease_expires_at if run.owner is None else None


async def wait_for_expiry(options: RunOptions, run: StoredRun, live: LiveRun | None = None) -> bool:
    """Wait until the run has no living owner. Return False if `live` was stopped in the meantime, otherwise True.

    Returns at once without an owner and with a provably dead owner, otherwise after one lease without a change of the
    run. Raises RunOwned if the owner is alive, or if the run changes during the wait; and StoreError.
    """
    record, owner = run.record, run.record.owner
    if owner is None or liveness(owner) is Liveness.DEAD:
        return True
    if is_live(record, options.clock.wall()):
        raise _owned(record, owner)
    # Clocks jump and differ between hosts, so stored times are not compared: the owner is alive if the run changes
    # during one lease on the clock of this process. A server has one clock for all: its silence so far counts.
    lease = max(0.0, options.lease - await _silence(run.store, record.run_id))
    at = iso(options.clock.wall())
    if live is not None:
        live.feed.publish(events.RunWatched(at, record.run_id, owner.process, lease))
    for _ in range(_LOOKS):
        with anyio.CancelScope() as asleep:
            if live is not None:
                live.asleep = asleep
                if live.ended_by == "stop":
                    return False
            await options.clock.sleep(lease / _LOOKS)
        if live is not None and live.ended_by == "stop":
            return False
        now = await run.store.get_run(record.run_id)
        if now is None or (now.epoch, now.last_seq) == (record.epoch, record.last_seq):
            continue
        if now.owner is None:
            raise RunOwned(f"run {record.run_id} was released by its owner, process {owner.pid}, just now; try again")
        raise _owned(now, now.owner)
    return True


def is_live(record: RunRecord, now: float) -> bool:
    """Return whether the owner of the run is provably alive and has an unexpired lease at Unix time `now`."""
    owner, expires = record.owner, record.lease_expires_at
    return owner is not None and expires is not None and expires > now and liveness(owner) is Liveness.ALIVE


async def _silence(store: Store, run_id: str) -> float:
    """Return the seconds since the last change of the run, as far as the store can say."""
    server = server_of(store)
    if server is not None:
        with anyio.move_on_after(_ANSWER_S):
            return await server.silence(run_id)
    return 0.0


_LOOKS = 3
_ANSWER_S = 5.0


def _owned(record: RunRecord, owner: Owner) -> RunOwned:
    return RunOwned(
        f"run {record.run_id} is being run by {owner.process} since {owner.claimed_at}. "
        f"Stop that process first, or wait for it"
    )


async def write_beside(options: RunOptions, run: StoredRun, then: Sequence[Event]) -> None:
    """Claim a run without a living owner, write `then`, and release the run, in one transaction. A run that waits is
    due afterwards. Raises as `acquire`.
    """
    leaving = RunReleased(iso(options.clock.wall()), due_at=0.0)
    owner, _ = await acquire(options, run.store, run.record, [*then, leaving])
    unregister(owner)


async def acquire(
    options: RunOptions, store: Store, record: RunRecord, then: Sequence[Event]
) -> tuple[Owner, WritePosition]:
    """Make this process the owner of the run, and write `then` in the same transaction.

    Return the owner and the position of the next change of the run. Raises RunOwned if another process claimed the run
    first, and StoreError. After an error or a cancellation the run is released, in case the claim was stored.
    """
    at = iso(options.clock.wall())
    owner = claim_for_this_process(at)
    claimed = RunClaimed(at, owner, options.clock.wall() + options.lease)
    before = None if record.owner is None else record.owner.owner_id
    batch = Batch(record.run_id, record.epoch, record.last_seq + 1, (claimed, *then), before)
    try:
        await store.write(batch)
    except (Conflict, Fenced) as error:
        unregister(owner)
        raise RunOwned(
            f"another process took over run {record.run_id} at the same time; read its progress with "
            f"`plait log {record.run_id} --follow`"
        ) from error
    except BaseException:
        # After a cancellation or an error the claim may be stored all the same. Release the run, but only a run of this
        # process: the batch repeats the claim, and the store refuses the batch after a claim of another process.
        unregister(owner)
        leaving = RunReleased(at, due_at=0.0 if then else due_at(record))
        release = replace(batch, events=(*batch.events, leaving))
        with anyio.CancelScope(shield=True), suppress(StoreError):
            await store.write(release)
        raise
    reached("claim.written")
    return owner, WritePosition(record.epoch + 1, batch.last_seq + 1, owner.owner_id)


async def renew(checkpointer: Checkpointer, lease: float, clock: Clock) -> None:
    """Renew the lease of `lease` seconds until cancelled, or until the run ends or is released."""
    while True:
        await clock.sleep(lease / 3)
        if checkpointer.run_ended:
            return  # woken in the same step in which the run ended, before the cancellation
        reached("lease.before_renewal")
        checkpointer.submit([LeaseRenewed(iso(clock.wall()), clock.wall() + lease)])
