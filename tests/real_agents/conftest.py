"""Tests marked `clis` run the real commands: only with PLAIT_CLIS set to the folder where they are installed.

The facts about the commands alone (test_facts_*.py) are asked at night, and whenever their files are named: nothing of
plait runs in them, so no change of ours can make one untrue. The tests of our backends run every time.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.real_agents.acp_agents import acp_environment as environment_of
from tests.real_agents.install import known
from tests.real_agents.stub import Stub, running
from tests.real_agents.world import World, make_world
from tests.support.sizes import NIGHTLY

# Read before any test starts: tests get an environment without our variables.
_CACHE = os.environ.get("PLAIT_CLIS")
_MISSING = "not installed: python -m tests.real_agents.install"
_FACTS = "test_facts_"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the folder they are deselected; with it, skipped where their commands are missing."""
    left_out: list[pytest.Item] = []
    if _CACHE is None:
        left_out = [item for item in items if item.get_closest_marker("clis")]
    elif not NIGHTLY and not any(_FACTS in argument for argument in config.args):
        left_out = [item for item in items if item.path.name.startswith(_FACTS)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    if _CACHE is None:
        return
    for item in items:
        if mark := item.get_closest_marker("clis"):
            missing = [name for name in mark.args if not known()[name].path(Path(_CACHE)).exists()]
            if missing:
                item.add_marker(pytest.mark.skip(reason=f"{_MISSING} {' '.join(missing)}"))


@pytest.fixture
def stub(tmp_path: Path) -> Generator[Stub]:
    with running(tmp_path / "requests") as stub:
        yield stub


@pytest.fixture
def world(tmp_path: Path, stub: Stub) -> World:
    assert _CACHE is not None
    return make_world(tmp_path / "world", Path(_CACHE), stub)


@pytest.fixture
def acp_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has the environment that agents which speak ACP are to have."""
    for name, value in environment_of(world).items():
        monkeypatch.setenv(name, value)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test of a real command that fails says first which fact about which version does not hold any more, and last
    what the agents of our backends printed.
    """
    report = yield
    if report.failed and isinstance(item, pytest.Function) and isinstance(world := item.funcargs.get("world"), World):
        for output in sorted((world.root / "files").rglob("stdout")):
            report.sections.append((f"the end of {output}", output.read_text(errors="replace")[-8000:]))
    mark = item.get_closest_marker("clis")
    if mark and report.failed and isinstance(item, pytest.Function):
        versions = ", ".join(f"{name} {known()[name].version}" for name in mark.args)
        fact = " ".join((item.function.__doc__ or item.name).split())
        report.longrepr = f"{versions}: this does not hold: {fact}\n\n{report.longreprtext}"
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Asked for the real commands, with none of them there: that is no success."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if _CACHE is None or reporter is None or exitstatus:
        return
    missing = [one for one in reporter.stats.get("skipped", []) if _MISSING in str(one.longrepr)]
    if missing and not any("clis" in one.keywords for one in reporter.stats.get("passed", [])):
        session.exitstatus = pytest.ExitCode.NO_TESTS_COLLECTED
