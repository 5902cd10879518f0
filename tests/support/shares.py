"""Each worker of pytest-xdist finds and plays a share of the test files, with `-p tests.support.shares --dist each`.

Otherwise each finds all tests, eleven seconds of a processor, and imports and starts what any test uses. A share is a
range of the files in the order of their paths, for neighbours use the same libraries, servers and processes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
RATES = {
    "architecture": 6,
    "backends/agents": 2,
    "backends/frameworks": 2,
    "backends/hosts": 5,
    "faults": 2,
}
"""Folders whose tests take longer than others: how many times as long, for each character of their text."""


class Progress:
    """Counts the tests of all workers. pytest-xdist takes those of one worker for all there are."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._tests = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._tests += len(ids)

    def pytest_runtest_logstart(self) -> None:
        self._session.testscollected = self._tests


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(Progress(session))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    worker = getattr(config, "workerinput", None)
    if worker is None or not collection_path.match("test_*.py"):
        return None
    shares = shares_of(worker["workercount"], config.option.markexpr)
    return shares.get(collection_path) != int(worker["workerid"].removeprefix("gw")) or None


def has_no_test(file: Path, marks: str) -> bool:
    """Whether none of the file's tests has the marks that `-m` asks for, as its text shows."""
    if marks not in {"slow", "not slow"}:
        return False
    text = file.read_text(encoding="utf-8")
    if marks == "slow":
        return "mark.slow" not in text
    return re.search(r"^pytestmark = .*mark\.slow", text, re.MULTILINE) is not None


@cache
def shares_of(workers: int, marks: str) -> dict[Path, int]:
    """Return the number of the worker that plays each file."""
    files = [file for file in sorted(TESTS.rglob("test_*.py")) if not has_no_test(file, marks)]
    ends = list(accumulate(_weight(file) for file in files))
    return {file: workers * (end - 1) // ends[-1] for file, end in zip(files, ends, strict=True)}


def _weight(file: Path) -> int:
    return file.stat().st_size * RATES.get(str(file.parent.relative_to(TESTS)), 1)
