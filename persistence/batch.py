"""How a store is told: changes of one run together, numbered, in the name of its owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plait.persistence.values import value

if TYPE_CHECKING:
    from plait.persistence.changes import Change


@value
class Batch:
    """Changes to one run, applied all or none.

    Change i has the sequence number `first_seq + i`; a run's numbers start at 1 and have no gap. A store skips every
    change whose number it has applied already, so a batch (or a longer one that starts with it) can be written again
    after an error without harm. `epoch` is the epoch that the writer holds, 0 before the first claim.
    """

    run_id: str
    epoch: int
    first_seq: int
    changes: tuple[Change, ...]

    @property
    def last_seq(self) -> int:
        return self.first_seq + len(self.changes) - 1
