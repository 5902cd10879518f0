"""`plait cancel` against a run in another process, one that nobody runs, and one that has ended."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from plait.runner.cli import steer_commands
from plait.runner.engine.inbox import LOOK_EVERY_S
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm

PLAN = """
backends: {w: {kind: function, call: "work.py:work"}}
tasks:
  - {id: first, prompt: quick}
  - {id: held, prompt: held, depends_on: first}
  - {id: never, prompt: never, depends_on: held}
"""
WORK = """
import anyio
from pathlib import Path

async def work(prompt):
    Path(prompt).touch()
    while prompt == "held" and not Path("go").exists():
        await anyio.sleep(0.01)
    return prompt.upper()
"""
DATABASE = Path(".plait") / "plait.db"


@contextmanager
def running(folder: Path, plan: str = PLAN, work: str = WORK) -> Generator[Warm]:
    """A run in a process of its own, while the task `held` is under way."""
    (folder / "plan.yaml").write_text(plan)
    (folder / "work.py").write_text(work)
    process = Warm([*PLAIT, "run", "plan.yaml"], cwd=folder, env=environment(), stderr=subprocess.PIPE)
    with process:
        try:
            until((folder / "held").exists)
            yield process
        finally:
            process.kill()


def until(new_events: Callable[[], object]) -> None:
    """Wait for it."""
    ends = time.monotonic() + 60
    while not new_events():
        assert time.monotonic() < ends
        time.sleep(0.01)


def asked(folder: Path, question: str) -> object:
    with closing(sqlite3.connect(f"file:{folder / DATABASE}?mode=ro", uri=True)) as connection:
        return connection.execute(question).fetchone()[0]


def statuses(folder: Path) -> tuple[str, dict[str, str]]:
    value = plait_here(folder, "show", "last", "--json").value
    return value["status"], {task["task_id"]: task["status"] for task in value["tasks"]}


def test_a_run_in_another_process_is_cancelled_while_its_task_goes_on(tmp_path: Path) -> None:
    assert LOOK_EVERY_S <= 1, "the owner heeds it within two seconds"
    with running(tmp_path) as owner:
        cancel = Warm([*PLAIT, "cancel", "last"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
        until(lambda: asked(tmp_path, "SELECT status FROM runs") == "cancelling")
        (tmp_path / "go").touch()
        said = cancel.communicate(timeout=60)[1]
        assert (cancel.returncode, "is cancelled\n" in said) == (0, True)
        said = owner.communicate(timeout=60)[1]
        assert owner.returncode == 6
        assert "is being cancelled; no further task starts" in said
    assert statuses(tmp_path) == ("cancelled", {"first": "completed", "held": "completed", "never": "cancelled"})
    assert not (tmp_path / "never").exists()


def test_an_owner_that_dies_while_it_cancels_leaves_nothing_to_run(tmp_path: Path) -> None:
    with running(tmp_path) as owner:
        cancel = Warm([*PLAIT, "cancel", "last", "--json"], cwd=tmp_path, env=environment())
        until(lambda: asked(tmp_path, "SELECT status FROM runs") == "cancelling")
        cancel.send_signal(signal.SIGINT)  # what it asked for stands
        cancel.wait(60)
        owner.kill()
        owner.wait(60)
    dry = plait_here(tmp_path, "resume", "--dry-run")
    assert [line.split(":")[0] for line in dry.out.splitlines()[:3]] == [
        "keep        first",
        "cancel      held",
        "cancel      never",
    ]
    resumed = plait(tmp_path, "resume")
    assert (resumed.code, "cancelled in" in resumed.err) == (6, True)
    assert statuses(tmp_path) == ("cancelled", {"first": "completed", "held": "cancelled", "never": "cancelled"})
    assert not (tmp_path / "never").exists()


def test_a_run_that_nobody_runs_and_one_that_has_ended(tmp_path: Path) -> None:
    with running(tmp_path) as owner:
        owner.kill()
        owner.wait(60)
    cancelled = plait_here(tmp_path, "cancel", "last")
    assert (cancelled.code, "is cancelled\n" in cancelled.err, cancelled.out) == (0, True, "")
    again = plait_here(tmp_path, "cancel", "last")
    assert (again.code, "is cancelled already\n" in again.err) == (0, True)
    value = plait_here(tmp_path, "cancel", "last", "--json").value
    assert (value["status"], value["had_ended"]) == ("cancelled", True)
    refused = plait_here(tmp_path, "resume", "last")
    assert (refused.code, "was cancelled and cannot be resumed" in refused.err) == (2, True)
    unknown = plait_here(tmp_path, "cancel", "nothing")
    assert (unknown.code, "has no run 'nothing'" in unknown.err) == (2, True)


def test_an_owner_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steer_commands, "_CANCEL_WAIT", 0.3)
    with running(tmp_path) as owner:
        owner.send_signal(signal.SIGSTOP)
        cancelled = plait_here(tmp_path, "cancel", "last")
        assert cancelled.code == 0
        assert f"is to be cancelled: process {owner.pid} on " in cancelled.err
        assert "has not yet answered" in cancelled.err
        owner.kill()
        owner.wait(60)
    assert plait_here(tmp_path, "cancel", "last").code == 0
    assert statuses(tmp_path) == ("cancelled", {"first": "completed", "held": "cancelled", "never": "cancelled"})
