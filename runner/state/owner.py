"""The owner of a run, and whether the owner's process is alive.

The death of an owner on the same host is detected by facts: another boot, a missing pid, or a pid reused by another
process (the start time differs). Otherwise only the lease counts. Two clocks never agree well enough to compare times,
so a process that claims the run waits for the length of a lease on the process's own clock, and checks for a renewal.
The epoch in the store makes a take-over safe; this module only decides whether an attempt is reasonable.
"""

from __future__ import annotations

import os
import platform
import secrets
from enum import Enum

from plait.backends.process.proctable import boot_id, start_time
from plait.events import Owner
from plait.persistence.store_records import RunRecord

LEASE_SECONDS = 30.0
"""Default length of a lease, in seconds. The owner renews the lease every third of the length."""

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


def seems_free(run: RunRecord) -> bool:
    """Return whether no process seems to run the run. Not enough for a claim: an owner that is late may still go on."""
    return run.owner is None or run.lease_has_expired or liveness(run.owner) is Liveness.DEAD
