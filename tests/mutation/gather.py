"""A plugin of pytest that records, for each test, its seconds and what it reaches of the mutated modules: lines in its
own process, functions in the processes that it starts.

The file named by `PLAIT_REACHED` is read as a list of modules and written as JSON beside it, one file a worker.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

from tests.mutation import served

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Records the lines and seconds of each passed test of this process."""

    def __init__(self, modules: list[str], out: Path) -> None:
        self._out = out
        self._tests: dict[str, dict[str, object]] = {}
        self._failed: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._processor: dict[str, float] = {}
        """Seconds of a processor, which depend less on what else the machine does."""
        self._coverage = Coverage(data_file=None, config_file=False, include=[str(ROOT / name) for name in modules])
        self._coverage.start()
        self._in_children = out.with_suffix(".children")
        codes = out.with_suffix(".codes")
        codes.mkdir()
        for module in modules:
            served.serve(codes, module, served.marked(module, (ROOT / module).read_text()))
        os.environ |= {"MUTANT_HOOK": served.__file__, "SERVED": str(codes), "REACHED": str(self._in_children)}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        before = sum(os.times()[:4])
        try:
            return (yield)
        finally:
            self._processor[item.nodeid] = sum(os.times()[:4]) - before
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        children = self._functions_in_children()
        for test in (data.measured_contexts() | children.keys()) & self._seconds.keys() - self._failed:
            data.set_query_context(test)
            lines = {os.path.relpath(name, ROOT): sorted(data.lines(name) or ()) for name in data.measured_files()}
            self._tests[test] = {
                "seconds": round(self._seconds[test], 3),
                "processor": round(self._processor[test], 3),
                "lines": {name: reached for name, reached in lines.items() if reached},
                "children": {name: sorted(functions) for name, functions in children[test].items()},
            }
        self._out.write_text(json.dumps(self._tests))

    def _functions_in_children(self) -> defaultdict[str, defaultdict[str, set[str]]]:
        """Return for each test the functions of each module."""
        functions = defaultdict[str, defaultdict[str, set[str]]](lambda: defaultdict(set))
        for file in self._in_children.parent.glob(f"{self._in_children.name}.*"):
            for line in file.read_text().splitlines():
                test, module, function = line.split("\t")
                functions[test.rpartition(" ")[0]][module].add(function)  # behind the blank is the phase
        return functions


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None) is None:
        modules = Path(os.environ["PLAIT_REACHED"])
        out = modules.with_suffix(f".{os.getpid()}.json")
        config.pluginmanager.register(Recorder(modules.read_text().split(), out))
