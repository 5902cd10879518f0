"""Named boundaries: both sides of every durable step. They do nothing, unless a crash harness has set `on_reach`.

What may go wrong between two lines of a durable step can only be tried if the place has a name. A harness kills the
process there; tests raise, block or cancel there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FAILPOINTS: Final = (
    "file.before_link",  # a new database is whole, but not under its name yet
    "file.after_link",
    "schema.before_commit",
    "txn.begun",
    "txn.before_commit",
    "txn.after_commit",  # durable; the event loop does not know yet
    "batch.before_write",
    "batch.after_write",  # acknowledged by the store; nobody was told yet
    "told",  # the events of a batch are with those who listen
    "attempt.before_call",
    "attempt.after_call",  # paid for, nothing written
    "resume.read",  # the run was read, but not claimed
    "claim.written",
    "lease.before_renewal",
    "run.leaving",  # all that was under way is settled and submitted
)
"""Every name, in the order in which a run first comes to them."""

on_reach: Callable[[str], None] | None = None


def reached(name: str) -> None:
    """The process is at the boundary `name`, on whichever thread does the step."""
    if on_reach is not None:
        on_reach(name)
