"""A worker: collects the tests once, tries its mutants in turn, and appends a line of JSON for each."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trial import Trials


class Worker:
    """Takes the place of pytest's loop over the tests."""

    def __init__(self, plan: dict[str, Any], folder: Path) -> None:
        self._plan = plan
        self._folder = folder
        self._killers: defaultdict[str, list[str]] = defaultdict(list)

    def pytest_sessionstart(self) -> None:
        """Let the first example that fails be enough. A smaller one takes minutes, and a kept one is tried again."""
        from hypothesis import Phase, settings  # pytest has to be the first to import the module

        settings.register_profile("trials", database=None, phases=[Phase.explicit, Phase.generate])
        settings.load_profile("trials")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        plans = self._plan["plans"]
        if any("/postgres/" in test for plan in plans for test in plan["tests"] + plan["with_children"]):
            from tests.support.stores.postgres import worker_dsn

            os.environ["PLAIT_TEST_POSTGRES"] = worker_dsn()  # else each trial would start a server
        trials = Trials(session, {test: whole for test, (whole, _) in self._plan["seconds"].items()}, self._folder)
        by_key = {mutant.key: mutant for module in {plan["module"] for plan in plans} for mutant in mutants_of(module)}
        with Path(self._plan["out"]).open("a") as out:
            for each in plans:
                mutant = by_key[each["key"]]
                started = time.monotonic()
                tests, with_children = (self._ordered(mutant, each[key]) for key in ("tests", "with_children"))
                killer = trials.killer(mutant, tests, with_children)
                if killer in tests or killer in with_children:
                    self._killers[mutant.module].insert(0, killer)
                seconds = round(time.monotonic() - started, 2)
                result = {"key": mutant.key, "basis": mutant.basis, "state": each["state"], "killer": killer}
                out.write(json.dumps({**result, "seconds": seconds}) + "\n")
                out.flush()
        return True

    def _ordered(self, mutant: Mutant, tests: list[str]) -> list[str]:
        """Return the tests in the order to run: those that killed other mutants of the module first, then as many as
        fit into the seconds of the plan.
        """
        reaching = set(tests)
        first = [test for test in dict.fromkeys(self._killers[mutant.module][:30]) if test in reaching]
        spent, within = 0.0, list[str]()
        for test in tests:
            spent += self._plan["seconds"][test][1]
            if spent > self._plan["limit"] and within:
                break
            within.append(test)
        return list(dict.fromkeys([*first, *within]))


def main(path: str) -> int:
    plan = json.loads(Path(path).read_text())
    tests = {test for each in plan["plans"] for test in each["tests"] + each["with_children"]}
    files = sorted({test.partition("::")[0] for test in tests})
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        return pytest.main(["-s", f"--basetemp={folder}/tests", *files], plugins=[Worker(plan, Path(folder))])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
