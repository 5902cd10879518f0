"""Planted bugs: each is looked for in the one kind of case that shows it, and has to show as what it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shown:
    """Where a planted bug has to show, and as what."""

    case: str
    """The kind of case, as the campaign names it."""
    verdict: str
    """A part of the violation."""

    def within(self, violations: Iterable[str]) -> bool:
        """Return whether one of the violations is the expected one."""
        return any(self.verdict in line for line in violations)


def try_planted(bugs: Mapping[str, Shown], play: Callable[[str], Iterable[str]]) -> int:
    """Play the case of each bug with the bug, and print what is found. Return 1 if a bug is not caught, else 0."""
    unseen = 0
    for bug, shown in bugs.items():
        found = list(play(bug))
        line = next((line for line in found if shown.verdict in line), None)
        unseen += line is None
        print(f"{bug}: {f'NOT CAUGHT, {found}' if line is None else f'caught: {line}'}", flush=True)
    print(f"{len(bugs) - unseen} of {len(bugs)} planted bugs caught")
    return int(unseen > 0)


_MISFITS = ("AttributeError", "TypeError")


def shows(violations: Sequence[object]) -> bool:
    """Return whether a case breaks with a planted bug by what the bug does: one that no longer fits the code names what
    is gone, and breaks any case with an error of its own.
    """
    return bool(violations) and not any(error in str(line) for line in violations for error in _MISFITS)
