"""What a process that resumes a run takes over from those before it, beside what the run's state says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.backends.protocol import DetachedTurn


@dataclass(frozen=True, slots=True)
class AdoptedAttempt:
    """An attempt that outlived its process: its session as the store knows it, the Unix time at which it was started,
    and what is left of it.
    """

    session_id: str | None
    confirmed: bool
    since: float | None
    left: DetachedTurn

    @property
    def has_ended(self) -> bool:
        """Whether its answer only has to be read."""
        return self.left.state == "ended"


@dataclass(frozen=True, slots=True)
class Handover:
    """`unasked`: tasks whose end the run's policy has not been asked about. By position: `next_tries`, when (Unix time)
    tasks are tried again whose last attempt failed; and the attempts that are `adopted`.
    """

    unasked: Sequence[str] = ()
    next_tries: Mapping[int, float] = field(default_factory=dict[int, float])
    adopted: Mapping[int, AdoptedAttempt] = field(default_factory=dict[int, AdoptedAttempt])


NO_HANDOVER = Handover()
