"""The figures that a nightly run has to reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from plait.failpoints import FAILPOINTS
from tests.faults.campaigns.report import Report


@dataclass(frozen=True, slots=True)
class Goal:
    """`figure` of the method in `module` (of this folder) has to be within `least` and `most`. None stands for its
    cases, "" for what broke in it.
    """

    what: str
    module: str
    figure: str | None
    least: float = 0.0
    most: float = float("inf")


@dataclass(frozen=True, slots=True)
class Reached:
    """A goal and how far it was reached: None where there was nothing to measure."""

    goal: Goal
    value: float | None

    @property
    def ok(self) -> bool:
        return self.value is not None and self.goal.least <= self.value <= self.goal.most

    def __str__(self) -> str:
        goal = self.goal
        wanted = f"at least {goal.least:,.15g}" if goal.most == float("inf") else f"at most {goal.most:,.15g}"
        value = "not measured" if self.value is None else f"{self.value:,.15g}"
        return f"goal: {goal.what}: {value} ({wanted}): {'reached' if self.ok else 'NOT REACHED'}"

    def as_json(self) -> dict[str, Any]:
        return {"what": self.goal.what, "value": self.value, "ok": self.ok}


GOALS = (
    Goal("SIGKILLs that landed", "kills", None, 10_000),
    Goal("named boundaries", "kills", "boundaries", len(FAILPOINTS)),
    Goal("acknowledged results lost by SIGKILLs", "kills", "acknowledged results lost", most=0),
    Goal("completed tasks executed again", "kills", "completed tasks executed again", most=0),
    Goal("extra attempts per task in flight at a kill", "kills", "extra attempts per task in flight", most=1),
    Goal("plans with two limits, completed with nobody there", "parking", None, 40),
    Goal("calls beyond those under way and a probe for each opening", "parking", "", most=0),
    Goal("power losses", "power", None, 50_000),
    Goal("acknowledged results lost by power losses", "power", "acknowledged lost", most=0),
    Goal("schedules", "schedules", None, 10_000),
    Goal("deadlocks and broken invariants of schedules", "schedules", "", most=0),
    Goal("plans that act", "acts", None, 500),
    Goal("tasks that ended otherwise than foretold, or work done again", "acts", "", most=0),
    Goal("cancellations", "cancels", None, 2_000),
    Goal("transactions left open, and whatever else a cancellation left", "cancels", "", most=0),
    Goal("rounds of simultaneous resumes", "two", "rounds of race", 50),
    Goal("processes in each of them", "two", "processes that resume at once", 20),
    Goal("rounds of SIGSTOP past the lease", "two", "rounds of pause", 20),
    Goal("double owners and double records", "two", "", most=0),
    Goal("runs that lose their runners and agents", "adoptions", None, 300),
    Goal("promises broken to them", "adoptions", "", most=0),
    Goal("rounds with agents on hosts", "hosts", None, 40),
    Goal("agents begun twice, ended or left there", "hosts", "", most=0),
    Goal("partitions of 2 of 4 hosts", "partitions", None, 10),
    Goal("attempts beyond one for each lost one, and whatever else a partition left", "partitions", "", most=0),
    Goal("rounds with agents on a cluster", "cluster", None, 41),
    Goal("agents that lose runner and cluster at once", "cluster", "agents of the round without survivors", 100),
    Goal("agents of the cluster begun twice, not adopted or left there", "cluster", "", most=0),
    Goal("tasks of a run on a server that is killed, replaced or away", "servers", "tasks in each run", 3_000),
    Goal("kills of that server during a run", "servers", "kills", 30),
    Goal("changes lost, and tasks called twice, there", "servers", "", most=0),
    Goal("runs of a fleet", "fleet", None, 120),
    Goal("its tasks executed again, and late take-overs", "fleet", "", most=0),
    Goal("edited plans", "edits", None, 1_000),
    Goal("calls and previews that differ from the oracle", "edits", "", most=0),
    Goal("event-loop lag with syncs of 0.3 s, p99 in ms", "slow", "event-loop lag p99 ms", most=10),
)


def reached(reports: Mapping[str, Report]) -> list[Reached]:
    """How far each goal was reached; `reports` are by module."""
    goals = [Reached(goal, _value(goal, reports.get(goal.module))) for goal in GOALS]
    planted = [seen for report in reports.values() for seen in report.planted.values()]
    return [*goals, Reached(Goal("planted bugs that were missed", "", None, most=0), planted.count(False))]


def _value(goal: Goal, report: Report | None) -> float | None:
    if report is None or not report.cases:
        return None
    if goal.figure is None:
        return report.cases
    return len(report.violations) if goal.figure == "" else report.figures.get(goal.figure)
