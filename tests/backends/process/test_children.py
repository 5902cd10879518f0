"""A killed command leaves no model server behind. The server's program is the real one, its engine is a stand-in."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.campaigns import children
from tests.support.plans import engine
from tests.support.processes.command import plait

pytestmark = [pytest.mark.slow, pytest.mark.skipif(engine.missing() is not None, reason=str(engine.missing()))]


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_no_server_and_the_next_start_has_its_own(tmp_path: Path, by: signal.Signals) -> None:
    engine.make(tmp_path)
    assert children.killed(tmp_path, by) == []
    engine.let_answer(tmp_path)
    done = plait(tmp_path, "resume", "last", PYTHONPATH=engine.python_path(tmp_path))
    assert done.code == 0, done.err
    servers = engine.servers(tmp_path)
    assert len(set(servers)) == 2
    assert engine.within(60, lambda: not any(engine.is_alive(pid) for pid in servers))
