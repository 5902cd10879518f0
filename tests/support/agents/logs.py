"""Plans of a few tasks on a fake agent, run by `plait`, for tests of what `plait log` tells of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.agents.homes import Home, make_home
from tests.support.processes.command import PLAIT, environment
from tests.support.processes.warm import Warm

HEAD = """
name: agents
backends:
  coder: {kind: claude-code, command: ./claude, concurrency: 4}
  echo: {kind: function, call: "functions.py:echo"}
defaults: {backend: coder}
tasks:
"""
FUNCTIONS = """
async def echo(prompt):
    return "re: " + prompt
"""
LIMIT = 120.0
"""Seconds."""


def make_log_home(path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A home at `path` for the agents of the plans."""
    home = make_home(path, monkeypatch)
    (path / "functions.py").write_text(FUNCTIONS)
    return home


def plan(home: Home, tasks: str) -> Path:
    """The folder that now has a plan of these tasks."""
    (home.path / "plan.yaml").write_text(HEAD + tasks)
    return home.path


def untimed(log: str) -> list[str]:
    """The lines without their times, and without the days."""
    return [line[10:] for line in log.splitlines() if not line.startswith("-- ")]


def outputs(folder: Path) -> list[Path]:
    """The files of all calls, in the order in which they began."""
    return sorted((folder / ".plait" / "plait.db.files").rglob("stdout"), key=lambda path: path.stat().st_ctime_ns)


@contextmanager
def running(folder: Path) -> Iterator[Warm]:
    """`plait run` of the plan, as another process."""
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=folder, env=environment()) as process:
        try:
            wait_for((folder / "calls.jsonl").exists)
            yield process
        finally:
            process.kill()


def wait_for(true: Callable[[], bool]) -> None:
    """Waits for what can be seen."""
    ends = time.monotonic() + LIMIT
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)
