"""All crash tests, one certificate: `python -m tests.faults.campaigns [--quick|--nightly] [--seed S] [--json FILE]`."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.faults.campaigns.bugs import unseen
from tests.faults.campaigns.goals import reached
from tests.faults.campaigns.report import Report, Scale

METHODS = (
    "kills",
    "server_kills",
    "money",
    "parking",
    "notice_kills",
    "power",
    "files",
    "two",
    "frequent",
    "children",
    "adoptions",
    "hosts",
    "partitions",
    "cluster",
    "servers",
    "fleet",
    "edits",
    "schedules",
    "acts",
    "cancels",
    "slow",
    "machine",
    "accounts",
)
"""Modules of this folder. The kills come first: they fork, which needs a process without threads."""
_MOST_SHOWN = 20


def main(arguments: Sequence[str]) -> int:
    """0 when every method found nothing, saw all of its planted bugs and, nightly, reached its goals; 1 otherwise."""
    options = _options(arguments)
    # The campaigns damage stores on purpose: thousands of warnings would hide the certificate.
    logging.getLogger("plait").addHandler(logging.NullHandler())
    by_name: dict[str, Report] = {}
    for name in METHODS:
        by_name[name] = _report(name, options.scale, options.seed)
        _show(by_name[name])
    reports, missed = list(by_name.values()), unseen(by_name)
    for mistake in missed:
        print(f"no method sees this mistake: {mistake}")
    goals = reached(by_name) if options.scale == "nightly" else []
    for goal in goals:
        print(goal)
    sentence = in_one_sentence(reports)
    print(sentence, flush=True)
    if options.json is not None:
        value = {
            "sentence": sentence,
            "seed": options.seed,
            "unseen": missed,
            "goals": [goal.as_json() for goal in goals],
            "reports": [report.as_json() for report in reports],
        }
        options.json.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    held = all(report.ok for report in reports) and all(goal.ok for goal in goals)
    return 0 if held and not missed else 1


def _report(name: str, scale: Scale, seed: int) -> Report:
    method = importlib.import_module(f"tests.faults.campaigns.{name}")
    try:
        report: Report = method.run(scale=scale, seed=seed)
    except Exception as error:
        # The other methods' findings are not lost because one gave up.
        traceback.print_exc()
        return Report(method=name, unit="cases", cases=0, violations=(f"it gave up: {type(error).__name__}: {error}",))
    return report


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.campaigns", description="Run every kind of crash test."
    )
    scale = parser.add_mutually_exclusive_group()
    scale.add_argument("--quick", dest="scale", action="store_const", const="quick", help="a few minutes; the default")
    scale.add_argument("--nightly", dest="scale", action="store_const", const="nightly", help="the stated numbers")
    parser.add_argument("--seed", type=int, default=0, help="where the random cases begin")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the certificate there as well")
    parser.set_defaults(scale="quick")
    return parser.parse_args(arguments)


def _show(report: Report) -> None:
    caught = sum(report.planted.values())
    bugs = f", {caught} of {len(report.planted)} planted bugs caught" if report.planted else ""
    verdict = "held" if report.ok else "FAILED"
    print(f"{report.method:<22} {report.cases:>9,} {report.unit}{bugs}, {report.seconds:.0f} s: {verdict}")
    for name, figure in report.figures.items():
        print(f"    {name}: {figure:,}")
    for name in (name for name, seen in report.planted.items() if not seen):
        print(f"    planted bug not caught: {name}")
    for violation in report.violations[:_MOST_SHOWN]:
        print(f"    {violation}")
    if len(report.violations) > _MOST_SHOWN:
        print(f"    and {len(report.violations) - _MOST_SHOWN:,} more")
    sys.stdout.flush()


def in_one_sentence(reports: Sequence[Report]) -> str:
    """What the README says, with the numbers of `reports`."""
    tried = [f"{report.cases:,} {report.unit}{_where(report)}" for report in reports]
    broken = sum(len(report.violations) for report in reports)
    planted = [seen for report in reports for seen in report.planted.values()]
    held = "nothing broke" if not broken else f"{broken:,} violations"
    for figures in (report.figures for report in reports if report.method == "kills"):
        held = (
            f"{figures['acknowledged results lost']} acknowledged results lost, "
            f"{figures['completed tasks executed again']} completed tasks executed again, at most "
            f"{figures['extra attempts per task in flight']} extra attempt per task in flight, {held}"
        )
    return f"{', '.join(tried)}: {held}. {sum(planted)} of {len(planted)} planted bugs caught."


def _where(report: Report) -> str:
    if report.method == "kills":
        return f" at {report.figures.get('boundaries', 0)} named boundaries"
    return f" of {report.method}" if report.unit in {"rounds", "runs"} else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
