"""A plugin of pytest that records, for each test, the lines of the mutated modules that it reaches, and its seconds.

The file named by `PLAIT_REACHED` is read as a list of modules and written as JSON beside it, one file a worker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from coverage import Coverage

ROOT = Path(__file__).resolve().parents[2]


class Recorder:
    """Records the lines and seconds of each passed test of this process."""

    def __init__(self, modules: list[str], out: Path) -> None:
        self._out = out
        self._tests: dict[str, dict[str, object]] = {}
        self._failed: set[str] = set()
        self._seconds: dict[str, float] = {}
        self._coverage = Coverage(data_file=None, config_file=False, include=[str(ROOT / name) for name in modules])
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        for test in data.measured_contexts() & self._seconds.keys() - self._failed:
            data.set_query_context(test)
            lines = {os.path.relpath(name, ROOT): sorted(data.lines(name) or ()) for name in data.measured_files()}
            self._tests[test] = {
                "seconds": round(self._seconds[test], 3),
                "lines": {name: reached for name, reached in lines.items() if reached},
            }
        self._out.write_text(json.dumps(self._tests))


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or config.getoption("numprocesses", None) is None:
        modules = Path(os.environ["PLAIT_REACHED"])
        out = modules.with_suffix(f".{os.getpid()}.json")
        config.pluginmanager.register(Recorder(modules.read_text().split(), out))
