"""Which signal an agent receives when its run is cancelled, and when."""

from __future__ import annotations

import sys

import anyio
import pytest

from plait import DAG, MemoryStore, ParallelRunner, RunStatus, Task
from plait.backends import ClaudeCodeBackend, CodexBackend
from tests.support.agents.homes import Home, until

_AGENT = """
import pathlib, signal, sys, time

def note(number, frame):
    pathlib.Path("signals").write_text(signal.Signals(number).name)
    sys.exit(1)

signal.signal(signal.SIGINT, note)
signal.signal(signal.SIGTERM, note)
pathlib.Path("begun").touch()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("backend", "grace", "signal"),
    [(ClaudeCodeBackend, 600, "SIGINT"), (CodexBackend, 600, "SIGINT")],
)
async def test_the_first_signal_after_the_cancel_of_the_run(
    home: Home, backend: type[ClaudeCodeBackend | CodexBackend], grace: float, signal: str
) -> None:
    agent = home.path / "agent"
    agent.write_text(f"#!{sys.executable} -S\n{_AGENT}")
    agent.chmod(0o755)
    runner = ParallelRunner(backend(command=str(agent), cwd=home.path), store=MemoryStore(), cancel_grace=grace)
    async with runner.start(DAG([Task("a", prompt="Work.")])) as run:
        await until((home.path / "begun").exists)
        run.cancel()
        with anyio.fail_after(60):
            result = await run.result()
    assert result.status is RunStatus.CANCELLED
    assert (home.path / "signals").read_text() == signal
