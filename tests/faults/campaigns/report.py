"""What every method of the crash tests hands back: how much was tried, what broke, which planted bugs it saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

Scale: TypeAlias = Literal["quick", "nightly"]
"""`quick` takes seconds and runs with the suite; `nightly` reaches the numbers that the README states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The outcome of one method: a module of this folder with `run(*, scale: Scale, seed: int = 0) -> Report`."""

    method: str
    unit: str
    """What one case is, in the plural: "power losses", "cancellations", "schedules"."""
    cases: int
    violations: tuple[str, ...] = ()
    """One line each: what broke, with the seed and the command that shows it again."""
    planted: Mapping[str, bool] = field(default_factory=dict[str, bool])
    """Each planted bug that this method is to see, and whether it was caught."""
    seconds: float = 0.0
    figures: Mapping[str, float | int] = field(default_factory=dict[str, float | int])
    """Numbers worth printing, by name: "boundaries", "median resume ms"."""

    @property
    def ok(self) -> bool:
        """Nothing broke and every planted bug was caught."""
        return not self.violations and all(self.planted.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "unit": self.unit,
            "cases": self.cases,
            "violations": list(self.violations),
            "planted": dict(self.planted),
            "seconds": self.seconds,
            "figures": dict(self.figures),
            "ok": self.ok,
        }
