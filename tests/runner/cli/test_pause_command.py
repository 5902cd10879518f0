"""`plait pause`, `plait tune` and `plait retry`, on a run that another process executes, and on one that none does."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.runner.cli.test_cancel_command import asked, running, until
from tests.support.processes.command import PLAIT, environment, plait_here
from tests.support.processes.warm import Warm

PLAN = """
concurrency: 1
backends: {w: {kind: function, call: "work.py:work"}, other: {kind: function, call: "work.py:work"}}
tasks: [{id: bad, prompt: bad, backend: w}, {id: held, prompt: held, backend: w}, {id: last, prompt: last, backend: w}]
"""
WORK = """
import anyio
from pathlib import Path

async def work(prompt):
    Path(prompt).touch()
    if prompt == "bad" and not Path("mended").exists():
        raise ValueError("bad")
    while prompt == "held" and not Path("go").exists():
        await anyio.sleep(0.01)
    return prompt.upper()
"""
TOLD = "SELECT count(*) FROM events WHERE kind = 'run_tuned'"


def shown(folder: Path) -> dict[str, Any]:
    return plait_here(folder, "show", "last", "--json").value


def test_a_run_in_another_process_is_paused_tuned_and_goes_on(tmp_path: Path) -> None:
    with running(tmp_path, PLAN, WORK) as owner:
        done = plait_here(tmp_path, "pause", "last")
        assert (done.code, "is paused: process " in done.err, "--off" in done.err) == (0, True, True)
        until(lambda: asked(tmp_path, TOLD) == 1)
        (tmp_path / "go").touch()
        until(lambda: asked(tmp_path, "SELECT status FROM tasks WHERE task_id = 'held'") == "completed")
        waits = {one["task_id"]: one["waits"]["kind"] for one in shown(tmp_path)["tasks"] if one["waits"]}
        assert waits == {"last": "paused"}
        assert "tuned     the run is paused; calls under way continue\n" in plait_here(tmp_path, "show", "last").out
        assert plait_here(tmp_path, "tune", "last", "-j", "4", "--backend", "w=2", "--json").value["is_live"]
        plait_here(tmp_path, "retry", "last", "bad")
        (tmp_path / "mended").touch()
        until(lambda: asked(tmp_path, TOLD) == 3)
        assert not (tmp_path / "last").exists()
        assert plait_here(tmp_path, "pause", "last", "--off").code == 0
        assert owner.wait(60) == 0
    log = plait_here(tmp_path, "log", "last").out
    for line in (
        "the run is paused",
        "at most 4 tasks at once\n",
        "at most 2 tasks at once on w",
        "the run is no longer paused",
    ):
        assert log.count(line) == 1


def test_a_run_that_no_process_works_on_is_paused_for_the_next_one(tmp_path: Path) -> None:
    with running(tmp_path, PLAN, WORK) as owner:
        owner.kill()
        owner.wait(60)
    assert "is paused; no process works on it now" in plait_here(tmp_path, "pause", "last").err
    resumed = Warm([*PLAIT, "resume", "last"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    with resumed:
        until(lambda: asked(tmp_path, TOLD) == 1)
        assert "the run is paused since " in plait_here(tmp_path, "show", "last", "last").out
        (tmp_path / "go").touch()
        (tmp_path / "held").unlink()
        assert plait_here(tmp_path, "pause", "last", "--off").code == 0
        assert resumed.wait(60) == 1, "bad has failed"
    assert (tmp_path / "held").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pause nobody", "the store has no run 'nobody'"),
        ("pause last --off", "is failed; only a run that has not ended can be paused or tuned"),
        ("tune last", "say how many tasks run at once"),
        ("tune last -j 0", "'-j' / '--concurrency'"),
        ("tune last --backend w", "'w' is not name=value"),
        ("tune last --backend w=", "is no number of tasks at once for w"),
        ("tune last --backend w=-1", "is no number of tasks at once for w"),
        ("tune last --backend w=1 --backend w=2", "w is given twice"),
        ("retry last nobody", "'nobody'"),
        ("retry last bad", "no process works on the run; continue it: plait resume "),
        ("retry last held", "cannot run again now: it is completed"),
    ],
)
def test_what_cannot_be_done_is_one_line(ended: Path, words: str, said: str) -> None:
    done = plait_here(ended, *words.split())
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert said in done.err


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ended")
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "work.py").write_text(WORK)
    (folder / "go").touch()
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 1
    return folder
