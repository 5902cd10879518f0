"""The findings of the checks of a store and of all that runs need, as `plait doctor` shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_NAMED: Final = 5
"""A finding names this number of things at most."""


class Fitness(StrEnum):
    """The meaning of a finding: fit, fit with a reservation, or unfit."""

    OK = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    """The name of the check."""
    fitness: Fitness
    found: str
    """The observation."""
    advice: str = ""
    """The remedy; empty if nothing has to be done."""


def checksums(damaged: Sequence[str], results: int, messages: int) -> Finding:
    """Return the finding about rows that were read, with the numbers of results and messages. `damaged` names the
    damaged parts.
    """
    checked = f"results: {results:,}, messages: {messages:,}"
    if not damaged:
        return Finding("checksums", Fitness.OK, f"all fit ({checked})")
    more = f" and {len(damaged) - MOST_NAMED} more" if len(damaged) > MOST_NAMED else ""
    found = f"damaged: {', '.join(damaged[:MOST_NAMED])}{more} ({checked})"
    return Finding("checksums", Fitness.BAD, found, "run these tasks again in a new run, or restore a copy")
