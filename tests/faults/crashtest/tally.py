"""The sum of the results of many trials. Plain numbers, added up over workers and exchanged as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field, fields
from statistics import median

from plait.failpoints import FAILPOINTS


@dataclass(slots=True)
class Tally:
    """The results of trials. Fields not explained here are sums of the fields of `Verdict`."""

    boundaries: tuple[str, ...] = FAILPOINTS
    """The boundaries at which kills are to land."""
    trials: int = 0
    """The number of trials."""
    scheduled: int = 0
    """The number of planned kills."""
    landed: Counter[str] = field(default_factory=Counter[str])
    """The number of kills that ended a process, by boundary."""
    acks: int = 0
    lost: int = 0
    repeated: int = 0
    extra: int = 0
    """The maximum of `Verdict.extra`."""
    resumes_ms: list[float] = field(default_factory=list[float])
    violations: list[str] = field(default_factory=list[str])
    """Broken invariants, each with the command that repeats the trial."""
    planted: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether each planted bug was caught, by name."""
    seconds: float = 0.0
    """The duration of the campaign."""

    @property
    def kills(self) -> int:
        """The number of landed kills."""
        return self.landed.total()

    @property
    def never_hit(self) -> list[str]:
        """The boundaries without a landed kill."""
        return [name for name in self.boundaries if not self.landed[name]]

    @property
    def ok(self) -> bool:
        """Whether every invariant held, every boundary had a kill, and every planted bug was caught."""
        return not self.violations and not self.never_hit and all(self.planted.values())

    @property
    def median_resume_ms(self) -> float:
        """The median of `Verdict.resumes_ms`; 0 without a resume."""
        return median(self.resumes_ms) if self.resumes_ms else 0.0

    @property
    def bound(self) -> float:
        """The upper bound of the failure rate at 95 % confidence, given no failure in `kills` trials (3/N)."""
        return min(1.0, 3 / self.kills) if self.kills else 1.0

    def add(self, other: Tally) -> None:
        """Add the results of another worker."""
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
        """Return the tally as JSON text."""
        return json.dumps({one.name: getattr(self, one.name) for one in fields(self)})

    @classmethod
    def from_json(cls, text: str) -> Tally:
        """Return the tally in a text made by `to_json`."""
        tally = cls(**json.loads(text))
        tally.landed = Counter(tally.landed)
        tally.boundaries = tuple(tally.boundaries)
        return tally
