"""Failpoints: named places on both sides of every durable step. A failpoint does nothing unless `on_reach` is set.

A crash harness kills the process at a failpoint; tests raise, block or cancel. A crash between two lines of a durable
step could not be forced otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FAILPOINTS: Final = (
    "file.before_link",  # a new database is whole, but has not got the final name yet
    "file.after_link",
    "schema.before_commit",
    "txn.begun",
    "txn.before_commit",
    "txn.after_commit",  # durable; not reported to the event loop yet
    "batch.before_write",
    "batch.after_write",  # acknowledged by the store; not reported to listeners yet
    "events.published",  # the events of a batch have been delivered to listeners
    "attempt.before_call",
    "attempt.after_call",  # paid for, not written
    "resume.read",  # the run has been read, but not claimed
    "claim.written",
    "lease.before_renewal",
    "run.ended",  # every attempt has ended and is submitted
)
"""Every name, in the order in which a run first reaches the failpoints."""
SENT: Final = "txn.sent"
"""On a server: the statement that commits is on its way, and the answer is not there yet."""
SERVER_FAILPOINTS: Final = (*(name for name in FAILPOINTS if not name.startswith(("file.", "schema."))), SENT)
"""The names that a run in a database of a server reaches."""

on_reach: Callable[[str], None] | None = None


def reached(name: str) -> None:
    """Call `on_reach`, if set, at the failpoint `name`, on the thread of the step."""
    if on_reach is not None:
        on_reach(name)
