"""How the tasks of a run stand at the start of its schedule. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from plait.runner.domain.status import TaskStatus


@dataclass(frozen=True, slots=True)
class Outset:
    """How the tasks of a run stand at the start: their `statuses` (all pending if there are none); the positions of
    those that run with nothing beside them, and after everything else that can run (`alone`); of those that are set
    aside though they could start (`later`), and of those among them whose backend asked for it (`throttled`); and of
    those that hold a place already (`held`), which may be more than there are: then nothing starts before enough of
    them have ended.
    """

    statuses: Sequence[TaskStatus] = ()
    alone: Collection[int] = ()
    later: Collection[int] = ()
    throttled: Collection[int] = ()
    held: Collection[int] = ()


AFRESH = Outset()
"""No task has been started yet."""
