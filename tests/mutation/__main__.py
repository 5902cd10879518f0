"""Mutation testing: `python -m tests.mutation [--seed S] [--sample N] [--module PREFIX] [--tests PREFIX] ...`."""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.mutation.mutants import FOLDER, MODULES, ROOT, Mutant, drawn, mutants_of, mutated_source
from tests.mutation.reached import FOLDERS, Reached

GOAL = 0.95
"""The share of the mutants that tests kill, equivalent ones left out."""
EQUIVALENT = Path(__file__).parent / "equivalent.yaml"
_RESULTS = FOLDER / "results.jsonl"


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the tests kill enough of the sample, else 1."""
    options = _options(arguments)
    every = [mutant for module in MODULES if module.startswith(tuple(options.module)) for mutant in mutants_of(module)]
    equivalent = _equivalent()
    if options.show is not None:
        _show([mutant for mutant in every if options.show in mutant.key])
        return 0
    FOLDER.mkdir(exist_ok=True)
    reached = Reached(options.tests)
    reached.update(options.jobs)
    sample = drawn(every, options.seed, options.sample)
    plans = {mutant.key: _plan(mutant, reached, options.seconds) for mutant in sample if mutant.key not in equivalent}
    results = _results()
    due = [plan for plan in plans.values() if not _holds(plan, results.get(plan["key"]))]
    print(f"{len(sample)} of {len(every)} mutants drawn, {len(due)} to try", flush=True)
    _try(due, reached.seconds(), options)
    results = _results()
    survivors = [mutant for mutant in sample if mutant.key in plans and results[mutant.key]["killer"] is None]
    for mutant in survivors:
        plan = plans[mutant.key]
        is_reached = plan["tests"] or plan["with_children"]
        print(f"survived: {mutant.key}" + ("" if is_reached else " (no test reaches it)"))
    for key in sorted(equivalent - {mutant.key for mutant in every}) if not options.module[0] else ():
        print(f"listed as equivalent, but there is no such mutant: {key}")
    return 0 if _table(sample, survivors, equivalent) >= GOAL else 1


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing.")
    parser.add_argument("--seed", type=int, default=19, help="draws the sample")
    parser.add_argument("--sample", type=int, default=1000, help="how many mutants")
    parser.add_argument("--module", action="append", help="only modules that begin so, such as runner/scheduling/")
    parser.add_argument("--tests", action="append", help="only tests of files that begin so")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of a processor, of tests for each mutant, the fastest first"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--show", metavar="TEXT", help="print the changes whose names contain TEXT, and try nothing")
    options = parser.parse_args(arguments)
    options.module = options.module or [""]
    options.tests = options.tests or FOLDERS
    return options


def _equivalent() -> set[str]:
    entries: list[dict[str, Any]] = yaml.safe_load(EQUIVALENT.read_text())
    return {key for entry in entries for key in entry["mutants"] if entry["reason"]}


def _results() -> dict[str, dict[str, Any]]:
    """Return the last result of each mutant ever tried."""
    if not _RESULTS.exists():
        return {}
    return {result["key"]: result for result in map(json.loads, _RESULTS.read_text().splitlines())}


def _plan(mutant: Mutant, reached: Reached, seconds: float) -> dict[str, Any]:
    """Return the trial of the mutant. `state` changes with the tests."""
    tests, with_children = reached.tests(mutant), reached.tests_with_children(mutant)
    state = f"{reached.state([*tests, *with_children])} {seconds:g}"
    plan = {"key": mutant.key, "module": mutant.module, "basis": mutant.basis, "state": state}
    return {**plan, "tests": tests, "with_children": with_children}


def _holds(plan: dict[str, Any], result: dict[str, Any] | None) -> bool:
    """Return whether the result still holds: until the function changes, and for a survivor until its tests change."""
    if result is None or result["basis"] != plan["basis"]:
        return False
    return result["killer"] is not None or result["state"] == plan["state"]


def _try(due: list[dict[str, Any]], seconds: dict[str, tuple[float, float]], options: argparse.Namespace) -> None:
    workers: list[subprocess.Popen[bytes]] = []
    for number in range(min(options.jobs, len(due))):
        plans = due[number :: options.jobs]
        named = {test: seconds[test] for plan in plans for test in plan["tests"] + plan["with_children"]}
        whole = {"out": str(_RESULTS), "limit": options.seconds, "seconds": named, "plans": plans}
        path, log = FOLDER / f"plan.{number}.json", FOLDER / f"worker.{number}.log"
        path.write_text(json.dumps(whole))
        with log.open("w") as output:
            command = [sys.executable, "-m", "tests.mutation.worker", str(path)]
            workers.append(subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output))
    statuses = {worker.wait() for worker in workers}
    if statuses - {0, 5}:  # 5: pytest itself ran no test
        raise SystemExit(f"a worker failed; see {FOLDER}/worker.*.log")


def _show(mutants: list[Mutant]) -> None:
    results = _results()
    for mutant in mutants:
        result = results.get(mutant.key)
        print(f"{mutant.key}\n# {'not tried' if result is None else result['killer'] or 'survived'}")
        print("\n".join(_diff(mutant)), end="\n\n")


def _diff(mutant: Mutant) -> Iterator[str]:
    before = (ROOT / mutant.module).read_text().splitlines()
    return difflib.unified_diff(before, mutated_source(mutant).splitlines(), mutant.module, "mutant", lineterm="", n=2)


def _table(sample: list[Mutant], survivors: list[Mutant], equivalent: set[str]) -> float:
    print(f"\n{'module':<42}{'drawn':>7}{'equivalent':>12}{'survived':>10}{'killed':>9}")
    rows = [(module, [mutant for mutant in sample if mutant.module == module]) for module in MODULES]
    rate = 1.0
    for name, mutants in [*rows, ("all", sample)]:
        if mutants:
            listed = sum(mutant.key in equivalent for mutant in mutants)
            alive = sum(mutant in survivors for mutant in mutants)
            rate = 1 - alive / max(1, len(mutants) - listed)
            print(f"{name:<42}{len(mutants):>7}{listed:>12}{alive:>10}{rate:>9.1%}")
    return rate


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
