"""A trial: a case and the events for its processes, with a text form that can be typed to repeat the trial."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from plait.persistence.failpoints import FAILPOINTS


class Kind(StrEnum):
    """The kind of a trial."""

    KILLS = "kills"
    """Each process except the last kills itself at its point."""
    CRASHER = "crasher"
    """A task kills its process at each execution."""
    UNSURE = "unsure"
    """A commit takes effect and then raises."""
    RIVAL = "rival"
    """The owner is stopped at its point. Other processes try to resume, before and after the end of the lease. Then the
    owner continues.
    """
    ROT = "rot"
    """A stored result is damaged between two processes."""


@dataclass(frozen=True, slots=True)
class Point:
    """The `hit`-th time, from 1, that a process reaches the failpoint `name`."""

    name: str
    hit: int

    def __str__(self) -> str:
        return f"{self.name}:{self.hit}"


@dataclass(frozen=True, slots=True)
class Trial:
    """A trial of `kind` with the case of `seed`. `points[i]` is the point of the i-th process."""

    kind: Kind
    seed: int
    points: tuple[Point, ...] = ()

    def __str__(self) -> str:
        return "-".join([self.kind, str(self.seed), *map(str, self.points)])


_POINT = re.compile(r"([a-z._]+):([1-9][0-9]{0,8})")


def parse_trial(word: str) -> Trial:
    """Return the trial with the text form `word`. Raises ValueError."""
    kind, _, rest = word.partition("-")
    seed, *points = rest.split("-")
    found = [_POINT.fullmatch(point) for point in points]
    if kind not in set(Kind) or not seed.isdecimal():
        raise ValueError(
            f"{word!r} names no case: it starts with {', '.join(Kind)}, then a number, as in kills-17-told:2"
        )
    places: list[Point] = []
    for match, point in zip(found, points, strict=True):
        if match is None or match[1] not in FAILPOINTS:
            raise ValueError(f"{point!r} is no place to stop at: a boundary and a number, as in {FAILPOINTS[0]}:1")
        places.append(Point(match[1], int(match[2])))
    if kind in {Kind.RIVAL, Kind.UNSURE} and not places:
        raise ValueError(f"{word!r} names no place to stop at, and a trial of that kind needs one: -{FAILPOINTS[6]}:2")
    return Trial(Kind(kind), int(seed), tuple(places))
