"""A trial: a case and the disturbance of the processes, with a name that repeats the trial on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from plait.failpoints import FAILPOINTS, SERVER_FAILPOINTS


class Kind(StrEnum):
    """The kind of disturbance."""

    KILLS = "kills"
    """Each process except the last is killed at a point."""
    CRASHER = "crasher"
    """Every execution of one task kills the process."""
    UNSURE = "unsure"
    """A commit takes effect, but the store raises StoreError."""
    RIVAL = "rival"
    """The owner is stopped at a point; other processes try to resume, before and after the end of the owner's lease;
    then the owner continues.
    """
    ROT = "rot"
    """A stored result is damaged in the database file between two processes."""


@dataclass(frozen=True, slots=True)
class Point:
    """A hit of a boundary by a process."""

    name: str
    """The boundary, one of FAILPOINTS or SERVER_FAILPOINTS."""
    hit: int
    """The number of the hit, from 1."""

    def __str__(self) -> str:
        return f"{self.name}:{self.hit}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial over one case."""

    kind: Kind
    seed: int
    """The seed of the case."""
    points: tuple[Point, ...] = ()
    """The points of disturbance, one per process, in the order of the processes."""

    def __str__(self) -> str:
        return "-".join([self.kind, str(self.seed), *map(str, self.points)])


_POINT = re.compile(r"([a-z._]+):([1-9][0-9]{0,8})")


def parse_trial(word: str) -> Trial:
    """Return the trial with the name `word`, as returned by `str(trial)`. Raises ValueError for an invalid name."""
    kind, _, rest = word.partition("-")
    seed, *points = rest.split("-")
    found = [_POINT.fullmatch(point) for point in points]
    if kind not in set(Kind) or not seed.isdecimal():
        raise ValueError(
            f"{word!r} names no case: a case is {', '.join(Kind)}, a number and failpoints, "
            f"as in kills-17-events.published:2"
        )
    stops: list[Point] = []
    for match, point in zip(found, points, strict=True):
        if match is None or match[1] not in {*FAILPOINTS, *SERVER_FAILPOINTS}:
            raise ValueError(f"{point!r} is no failpoint with a number, as in {FAILPOINTS[0]}:1")
        stops.append(Point(match[1], int(match[2])))
    if kind in {Kind.RIVAL, Kind.UNSURE} and not stops:
        raise ValueError(f"{word!r} names no failpoint, and a trial of that kind needs one, as in -{FAILPOINTS[6]}:2")
    return Trial(Kind(kind), int(seed), tuple(stops))
