"""The work that a resuming process takes over from earlier processes, beside the run's state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.backends.backend_protocol import DetachedTurn


@dataclass(frozen=True, slots=True)
class AdoptedAttempt:
    """An attempt that outlived the process which started the attempt."""

    session_id: str | None
    """The id of the session, as stored."""
    confirmed: bool
    """See SessionOpened."""
    since: float | None
    """The Unix time of the start, in seconds, if known."""
    detached: DetachedTurn
    """The state of the attempt's turn, read from files: "alive", or "ended" with an answer still to be read."""

    @property
    def has_ended(self) -> bool:
        """True if the attempt has ended and only the answer has to be read."""
        return self.detached.state == "ended"


@dataclass(frozen=True, slots=True)
class Handover:
    """Unfinished work of earlier processes of a run."""

    policy_backlog: Sequence[str] = ()
    """Ids of ended tasks for which the run's policy has not been called."""
    next_tries: Mapping[int, float] = field(default_factory=dict[int, float])
    """The Unix time of the next attempt, in seconds, by position, for tasks whose last attempt failed."""
    adopted: Mapping[int, AdoptedAttempt] = field(default_factory=dict[int, AdoptedAttempt])
    """Attempts still under way or ended unread, by position."""


NO_HANDOVER = Handover()
