"""Campaigns of one random run a seed, killed at random boundaries: the processes, the report, and the command.

`python -m tests.faults.campaigns.METHOD SEED ...` plays seeds, `--count N` those from 0 on, `--planted` the bugs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests.faults.campaigns.report import Report, Scale


@dataclass
class Told:
    """What one run showed."""

    method: str
    seed: int
    kills: Counter[str] = field(default_factory=Counter[str])
    violations: list[str] = field(default_factory=list[str])

    def broken(self, what: str) -> None:
        self.violations.append(f"seed {self.seed}: {what} (python -m tests.faults.campaigns.{self.method} {self.seed})")


T = TypeVar("T", bound=Told)


def in_a_process(work: Callable[[], Any], folder: Path) -> dict[str, Any] | str:
    """Run `work` in a process, and return what it returned; the name of the boundary at which it was killed."""
    return ended(begin(work, folder), folder)


def begin(work: Callable[[], Any], folder: Path) -> int:
    """Begin `work` in a process with a folder of its own, and return the number of the process."""
    said = folder / "said"
    said.unlink(missing_ok=True)
    if child := os.fork():
        return child
    try:
        said.with_suffix(".new").write_text(json.dumps(work()))
        said.with_suffix(".new").replace(said)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended(child: int, folder: Path) -> dict[str, Any] | str:
    """Wait for the end of a process that was begun, and return the same as `in_a_process`."""
    said = folder / "said"
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return (folder / "boundary").read_text()
    return json.loads(said.read_text()) if said.exists() else {"status": "broken", "problem": "a process raised"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign(Generic[T]):
    """A method of the crash tests. Play it in a process without threads, because it forks."""

    method: str
    unit: str
    runs: Mapping[Scale, int]
    tell: Callable[[int, str | None], T]
    """Plays one seed to its end, with the planted bug of that name."""
    bugs: Collection[str]
    tried: int
    """The number of seeds of which one has to show a planted bug."""
    figures: Callable[[Sequence[T]], Mapping[str, int]]
    """The further figures of the report, beside kills and boundaries."""

    def is_caught(self, bug: str) -> bool:
        """Return whether one of the first seeds shows the planted bug."""
        return any(self.tell(seed, bug).violations for seed in range(self.tried))

    def run(self, *, scale: Scale, seed: int = 0, planted: bool = True) -> Report:
        """The runs that `scale` says, and the planted bugs."""
        began = time.monotonic()
        told = [self.tell(one, None) for one in range(seed, seed + self.runs[scale])]
        return Report(
            method=self.method,
            unit=self.unit,
            cases=len(told),
            violations=tuple(line for one in told for line in one.violations),
            planted={bug: self.is_caught(bug) for bug in self.bugs} if planted else {},
            seconds=time.monotonic() - began,
            figures=self._figures(told),
        )

    def main(self, arguments: Sequence[str]) -> int:
        """Play seeds, or the planted bugs; 0 if nothing broke, and every bug showed."""
        parser = argparse.ArgumentParser(prog=f"python -m tests.faults.campaigns.{self.method}")
        parser.add_argument("seeds", nargs="*", type=int)
        parser.add_argument("--count", type=int, default=0)
        parser.add_argument("--planted", action="store_true")
        options = parser.parse_args(arguments)
        if options.planted:
            caught = {bug: self.is_caught(bug) for bug in self.bugs}
            for bug, seen in caught.items():
                print(f"{bug}: {'caught' if seen else 'NOT CAUGHT'}")
            return 0 if all(caught.values()) else 1
        told = [self.tell(seed, None) for seed in options.seeds or range(options.count or self.runs["quick"])]
        for line in (line for one in told for line in one.violations):
            print(line)
        figures = ", ".join(f"{number:,} {name}" for name, number in self._figures(told).items())
        broken = sum(bool(one.violations) for one in told)
        print(f"{len(told):,} {self.unit}, {figures}: {broken} broken")
        return int(broken > 0)

    def _figures(self, told: Sequence[T]) -> dict[str, int]:
        kills = sum((one.kills for one in told), Counter[str]())
        return {"kills": kills.total(), "boundaries": len(kills), **self.figures(told)}
