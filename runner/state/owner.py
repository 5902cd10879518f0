"""Who runs a run, and whether that process still lives.

A claim on the same host can be judged by facts: another boot, a pid that is gone, or a pid that was given to another
process since (its start time differs). Otherwise only the lease tells, and no two clocks agree well enough to compare
times: whoever wants the run watches for as long as a lease lasts, on their own clock, whether the owner renews it. The
epoch in the store is what makes a take-over safe; this page only decides whether trying is reasonable.
"""

from __future__ import annotations

import os
import platform
import secrets
from enum import Enum

from plait.backends.process.proctable import boot_id, start_time
from plait.persistence.records import Owner

LEASE_SECONDS = 30.0
"""How long a claim holds without renewal, unless a runner is told otherwise. It is renewed at a third of this."""

_live_here: set[str] = set()


class Liveness(Enum):
    """What is known of an owner's process."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def claim_for_this_process(at: str) -> Owner:
    """A fresh owner for this process; call `forget` when the run is left. By the owner's id alone a store tells two
    claims apart: it comes from the system, so that no seed and no fork gives two processes the same.
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


def forget(owner: Owner) -> None:
    """This process runs the owner's run no more."""
    _live_here.discard(owner.owner_id)


def liveness(owner: Owner) -> Liveness:
    """Whether `owner`'s process is known to be alive or dead, seen from here."""
    if owner.host != platform.node():
        return Liveness.UNKNOWN
    boot, _, pids = boot_id().partition("/")
    its_boot, _, its_pids = owner.boot_id.partition("/")
    if boot and its_boot and boot != its_boot:
        return Liveness.DEAD
    if pids and its_pids and pids != its_pids:
        return Liveness.UNKNOWN  # two containers of one name: its pid means nothing here
    if owner.pid == os.getpid():
        return Liveness.ALIVE if owner.owner_id in _live_here else Liveness.DEAD
    started = start_time(owner.pid)
    if started is None or (started and owner.process_started and started != owner.process_started):
        return Liveness.DEAD
    return Liveness.ALIVE


def seems_free(owner: Owner | None, lease_expires_at: float | None, now: float) -> bool:
    """Whether nobody seems to run a run with this owner at Unix time `now`. Only for showing: clocks can be wrong."""
    if owner is None or liveness(owner) is Liveness.DEAD:
        return True
    return lease_expires_at is None or lease_expires_at < now
