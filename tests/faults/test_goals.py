"""The certificate of a nightly run: every figure that has to be reached is in it, and a missing one is no success."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import get_args
from unittest import mock

import pytest

from plait.failpoints import FAILPOINTS
from tests.faults.campaigns import (
    accounts,
    acts,
    adoption_bugs,
    adoptions,
    cancel_bugs,
    cluster,
    edit_bugs,
    edits,
    files,
    fleet,
    frequent,
    hosts,
    kills,
    machine,
    money,
    notice_kills,
    parking,
    partitions,
    power,
    schedule_bugs,
    schedules,
    server_bugs,
    server_kill_bugs,
    servers,
    slow,
    two,
)
from tests.faults.campaigns.__main__ import METHODS
from tests.faults.campaigns.bugs import TO_BE_SEEN
from tests.faults.campaigns.goals import GOALS, reached
from tests.faults.campaigns.report import Report
from tests.faults.crashtest.mutants import MUTANTS
from tests.support.hosts import bugs as host_bugs
from tests.support.plans import engine


def reports() -> dict[str, Report]:
    """Of a night on which all was well."""
    figures = {
        "kills": {
            "boundaries": len(FAILPOINTS),
            "acknowledged results lost": 0,
            "completed tasks executed again": 0,
            "extra attempts per task in flight": 1,
        },
        "power": {"acknowledged lost": 0},
        "two": {"rounds of race": 50, "rounds of pause": 20, "processes that resume at once": 20},
        "slow": {"event-loop lag p99 ms": 0.9},
        "cluster": {"agents of the round without survivors": 100},
        "servers": {"tasks in each run": 3_000, "kills": 30},
    }
    return {
        name: Report(method=name, unit="cases", cases=50_000, planted={"a bug": True}, figures=figures.get(name, {}))
        for name in METHODS
    }


def test_a_good_night_reaches_every_goal() -> None:
    goals = reached(reports())
    assert len(goals) == len(GOALS) + 1
    assert [str(goal) for goal in goals if not goal.ok] == []
    assert str(goals[0]) == "goal: SIGKILLs that landed: 50,000 (at least 10,000): reached"
    assert goals[-1].as_json() == {"what": "planted bugs that were missed", "value": 0, "ok": True}


def test_too_little_or_nothing_is_not_reached() -> None:
    night = reports()
    night["power"] = Report(method="power", unit="cases", cases=0)
    night["cancels"] = Report(method="cancels", unit="cases", cases=1_999, violations=("left open",))
    night["slow"] = Report(method="slow", unit="cases", cases=1, figures={"event-loop lag p99 ms": 10.1})
    night["two"] = Report(method="two", unit="cases", cases=1, planted={"a bug": False})
    missed = {goal.goal.what: goal.value for goal in reached(night) if not goal.ok}
    assert missed == {
        "power losses": None,
        "acknowledged results lost by power losses": None,
        "cancellations": 1_999,
        "transactions left open, and whatever else a cancellation left": 1,
        "rounds of simultaneous resumes": None,
        "processes in each of them": None,
        "rounds of SIGSTOP past the lease": None,
        "event-loop lag with syncs of 0.3 s, p99 in ms": 10.1,
        "planted bugs that were missed": 1,
    }


def test_the_stated_numbers_are_asked_for() -> None:
    assert kills.KILLS["nightly"] >= 10_000
    assert power.IMAGES["nightly"] >= 50_000
    assert schedules.CASES["nightly"] >= 10_000
    assert two.ROUNDS["nightly"]["race"] >= 50
    assert two.ROUNDS["nightly"]["pause"] >= 20
    assert frequent.RUNS["nightly"] >= 200
    assert adoptions.CASES["nightly"] >= 300
    assert hosts.ROUNDS["nightly"] >= 10
    assert hosts.AGENTS["nightly"] >= 100
    assert partitions.ROUNDS["nightly"] >= 10
    assert cluster.ROUNDS["nightly"] >= 10
    assert cluster.AT_ONCE["nightly"] >= 100
    assert servers.TASKS["nightly"] >= 3_000
    assert servers.KILLS["nightly"] >= 30
    assert servers.AWAY_S["nightly"] >= 60
    assert fleet.RUNS["nightly"] >= 60
    assert accounts.TASKS["nightly"] >= 500
    assert edits.PLANS["nightly"] >= 1_000
    assert slow.DELAY_MS == 300


def test_every_mistake_has_a_method_that_plants_it() -> None:
    planted = {
        "kills": {bug.name for bug in MUTANTS},
        "server_kills": {bug.name for bug in server_kill_bugs.BUGS},
        "power": set(get_args(power.Sabotage)),
        "files": set(get_args(files.Sabotage)),
        "two": two.PLANTED.keys(),
        "frequent": frequent.BUGS.keys(),
        "children": set(get_args(engine.Sabotage)),
        "adoptions": adoption_bugs.BUGS.keys(),
        "hosts": hosts.SHOWN.keys(),
        "partitions": partitions.SHOWN.keys(),
        "cluster": cluster.PLANTED.keys(),
        "servers": server_bugs.SHOWN.keys(),
        "fleet": fleet.SHOWN.keys(),
        "edits": edit_bugs.BUGS.keys(),
        "schedules": schedule_bugs.BUGS.keys(),
        "acts": acts.BUGS.keys(),
        "cancels": cancel_bugs.BUGS.keys(),
        "slow": slow.PLANTED.keys(),
        "machine": machine.BUGS.keys(),
        "money": money.BUGS.keys(),
        "parking": parking.BUGS.keys(),
        "notice_kills": notice_kills.BUGS.keys(),
        "accounts": accounts.BUGS.keys(),
    }
    assert planted.keys() == set(METHODS)
    for mistake, (module, name) in TO_BE_SEEN.items():
        assert name in planted[module], mistake
    for name in METHODS:
        assert callable(importlib.import_module(f"tests.faults.campaigns.{name}").run)


PLANTINGS: dict[str, dict[str, Callable[[], AbstractContextManager[object]]]] = {
    "accounts": {name: plant for name, (plant, _, _) in accounts.BUGS.items()},
    "acts": {name: partial(mock.patch.object, where, what, **how) for name, (where, what, how) in acts.BUGS.items()},
    "adoptions": {name: bug.planted for name, bug in adoption_bugs.BUGS.items()},
    "cancels": {**cancel_bugs.BUGS},
    "hosts": {**host_bugs.BUGS},
    "machine": {**machine.BUGS},
    "money": {**money.BUGS},
    "notice_kills": {**notice_kills.BUGS},
    "parking": {**parking.BUGS},
    "schedules": {**schedule_bugs.BUGS},
    "servers": {**server_bugs.BUGS},
}


@pytest.mark.parametrize("method", PLANTINGS)
def test_what_is_changed_by_a_planted_bug_is_there(method: str) -> None:
    """They are played at night alone, and code that was renamed is noticed here."""
    for plant in PLANTINGS[method].values():
        with plant():
            pass
