"""Sums over many trials: plain numbers that can be added across workers and stored as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from statistics import median

from plait.persistence.failpoints import FAILPOINTS


@dataclass(slots=True)
class Tally:
    """Sums over trials."""

    trials: int = 0
    scheduled: int = 0
    """The number of kills set up."""
    landed: Counter[str] = field(default_factory=Counter[str])
    """The number of kills that ended a process, by failpoint."""
    acks: int = 0
    lost: int = 0
    repeated: int = 0
    extra: int = 0
    resumes_ms: list[float] = field(default_factory=list[float])
    violations: list[str] = field(default_factory=list[str])
    planted: dict[str, bool] = field(default_factory=dict[str, bool])
    seconds: float = 0.0

    @property
    def kills(self) -> int:
        return self.landed.total()

    @property
    def never_hit(self) -> list[str]:
        """The failpoints without a landed kill."""
        return [name for name in FAILPOINTS if not self.landed[name]]

    @property
    def ok(self) -> bool:
        """True if every invariant held, every failpoint was hit, and every planted bug was caught."""
        return not self.violations and not self.never_hit and all(self.planted.values())

    @property
    def median_resume_ms(self) -> float:
        """The median of `Verdict.resumes_ms`."""
        return median(self.resumes_ms) if self.resumes_ms else 0.0

    @property
    def bound(self) -> float:
        """The highest failure rate compatible with an equal number of trials without failures, at 95 % confidence."""
        return min(1.0, 3 / self.kills) if self.kills else 1.0

    def add(self, other: Tally) -> None:
        """Add the sums of another worker."""
        self.trials += other.trials
        self.scheduled += other.scheduled
        self.landed.update(other.landed)
        self.acks += other.acks
        self.lost += other.lost
        self.repeated += other.repeated
        self.extra = max(self.extra, other.extra)
        self.resumes_ms += other.resumes_ms
        self.violations += other.violations
        self.planted.update(other.planted)

    def to_json(self) -> str:
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> Tally:
        tally = cls(**json.loads(text))
        tally.landed = Counter(tally.landed)
        return tally
