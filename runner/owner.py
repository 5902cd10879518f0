"""Who runs a run, and whether that process still lives.

A claim on the same host can be judged by facts: another boot, a pid that is gone, or a pid that was given to another
process since (its start time differs). Otherwise only the lease tells, and no two clocks agree well enough to compare
times: whoever wants the run watches for as long as a lease lasts, on their own clock, whether the owner renews it. The
epoch in the store is what makes a take-over safe; this page only decides whether trying is reasonable.
"""

from __future__ import annotations

import os
import platform
import random
from enum import Enum
from pathlib import Path

from persistence.changes import Owner

LEASE_SECONDS = 30.0
"""How long a claim holds without renewal, unless a runner is told otherwise. It is renewed at a third of this."""

_live_here: set[str] = set()


class Liveness(Enum):
    """What is known of an owner's process."""

    ALIVE = "alive"
    DEAD = "dead"
    UNKNOWN = "unknown"


def claim_for_this_process(rng: random.Random, at: str) -> Owner:
    """A fresh owner for this process; call `forget` when the run is left."""
    owner = Owner(
        owner_id=f"{rng.getrandbits(128):032x}",
        host=platform.node(),
        boot_id=_boot_id(),
        pid=os.getpid(),
        process_started=_process_started(os.getpid()) or "",
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
    boot, _, pids = _boot_id().partition("/")
    its_boot, _, its_pids = owner.boot_id.partition("/")
    if boot and its_boot and boot != its_boot:
        return Liveness.DEAD
    if pids and its_pids and pids != its_pids:
        return Liveness.UNKNOWN  # two containers of one name: its pid means nothing here
    if owner.pid == os.getpid():
        return Liveness.ALIVE if owner.owner_id in _live_here else Liveness.DEAD
    started = _process_started(owner.pid)
    if started is None or (started and owner.process_started and started != owner.process_started):
        return Liveness.DEAD
    return Liveness.ALIVE


def seems_free(owner: Owner | None, lease_expires_at: float | None, now: float) -> bool:
    """Whether nobody seems to run a run with this owner at Unix time `now`. Only for showing: clocks can be wrong."""
    if owner is None or liveness(owner) is Liveness.DEAD:
        return True
    return lease_expires_at is None or lease_expires_at < now


def _boot_id() -> str:
    """The boot of this machine and, behind a slash, the namespace that pids belong to; "" where neither is told."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _process_started(pid: int) -> str | None:
    """The process's start time as its host counts it, "" where the host does not tell, None when it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _probe(pid)
    except OSError:  # no file descriptor is left, or we may not look: that says nothing of it
        return ""
    # The command's name, in parentheses, may hold spaces: count fields behind it. proc(5): state is 3, start time 22.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in {"Z", "X"} else fields[19]


def _probe(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        return ""
    return ""
