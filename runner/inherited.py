"""What a process that resumes a run takes over from those before it, beside what the run's state says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from backends.protocol import LeftTurn


@dataclass(frozen=True, slots=True)
class Inherited:
    """`unasked`: tasks whose end the run's policy has not been asked about. `next_tries`: when (Unix time) tasks are
    tried again whose last attempt failed, by position. `adopted`: what is left of turns that have outlived the process
    which began them, by position.
    """

    unasked: Sequence[str] = ()
    next_tries: Mapping[int, float] = field(default_factory=dict[int, float])
    adopted: Mapping[int, LeftTurn] = field(default_factory=dict[int, LeftTurn])


NOTHING = Inherited()
