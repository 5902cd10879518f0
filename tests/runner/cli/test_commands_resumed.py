"""Commands of a `plait` that was killed with SIGKILL: adopted, begun once, and taken from the plan file alone."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.backends.process.process_table import start_time
from tests.support.agents.homes import make_home
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm

PLAN = """
tasks:
  - id: build
    run: [sh, -c, "echo $$ >> begun; while [ ! -e go ]; do sleep 0.01; done; echo built; exit $(cat code)"]
  - {id: use, run: [cat], prompt: "{{ build.stdout }}", depends_on: build}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run whose `plait` was killed during its command, which goes on to wait for the file `go`."""
    kill_during_the_command(tmp_path, PLAN)
    yield tmp_path
    (tmp_path / "go").touch()


def kill_during_the_command(folder: Path, plan: str) -> None:
    (folder / "plan.yaml").write_text(plan)
    (folder / "code").write_text("0")
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=folder, env=environment()) as running:
        ends = time.monotonic() + 30
        while not (folder / "begun").exists() or not (folder / "begun").read_text():
            assert time.monotonic() < ends and running.poll() is None
            time.sleep(0.01)
        running.kill()


@pytest.mark.parametrize("at_work", [True, False], ids=["at work", "ended meanwhile"])
def test_a_command_that_outlived_its_runner_is_adopted_and_not_begun_again(folder: Path, at_work: bool) -> None:
    foretold = plait_here(folder, "resume", "last", "--dry-run").out.splitlines()
    assert foretold[0].startswith("adopt       build: ")
    (folder / "go").touch()
    if not at_work:
        ends = time.monotonic() + 60
        while not [*folder.rglob("build/1/1/code")]:
            assert time.monotonic() < ends
            time.sleep(0.01)
    done = plait(folder, "resume", "last")
    assert (done.code, done.out.count('"stdout":"built\\n"')) == (0, 1)
    assert len((folder / "begun").read_text().split()) == 1
    assert "adopted 1, ran 1" in done.err


def test_the_exit_code_is_known_after_the_death_of_the_runner(folder: Path) -> None:
    (folder / "code").write_text("7")
    (folder / "go").touch()
    assert plait(folder, "resume", "last").code == 1
    assert "command_failed: sh ended with exit code 7: built" in plait_here(folder, "show", "last", "build").out


def test_a_cancel_ends_the_command_of_a_dead_runner(folder: Path) -> None:
    (pid,) = map(int, (folder / "begun").read_text().split())
    assert plait(folder, "cancel", "last").code == 0
    assert start_time(pid) is None


def test_a_command_that_only_the_store_has_is_not_run(folder: Path) -> None:
    (store,) = folder.rglob("*.db")
    plan = (folder / "plan.yaml").read_text()
    (folder / "plan.yaml").write_text(plan.replace("[cat]", "[wc]"))
    with sqlite3.connect(store) as connection:
        assert connection.execute("SELECT count(*) FROM tasks").fetchone() == (2,)
    refused = plait(folder, "resume", "last")
    assert refused.code == 2
    assert "the command of task 'use'" in refused.err
    allows = "backends: {command: {kind: command, allows: [[cat]]}}\ntasks: []\n"
    (folder / "backends.yaml").write_text(allows)
    (folder / "plan.yaml").write_text(plan)
    (folder / "go").touch()
    assert plait(folder, "resume", "last").code == 0


@pytest.mark.parametrize("key", ["cwd: .", "env: {LD_PRELOAD: evil.so}"])
def test_a_folder_or_a_variable_that_only_the_store_has_is_not_used(tmp_path: Path, key: str) -> None:
    plan = PLAN.replace("run: [cat]", f"run: [cat], {key}")
    kill_during_the_command(tmp_path, plan)
    (tmp_path / "go").touch()
    (tmp_path / "plan.yaml").write_text(PLAN)
    refused = plait(tmp_path, "resume", "last")
    assert (refused.code, "cwd and env of task 'use'" in refused.err) == (2, True)
    (tmp_path / "plan.yaml").write_text(plan)
    assert plait(tmp_path, "resume", "last").code == 0


CHECKED = """
backends: {coder: {kind: claude-code, command: ./home/claude}}
tasks:
  - id: work
    backend: coder
    prompt: do it
    check: {run: [sh, -c, "echo begun >> begun; while [ ! -e go ]; do sleep 0.01; done; [ $(wc -l < begun) -ge 2 ]"]}
"""


def test_after_a_kill_during_a_check_neither_the_agent_nor_the_check_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(tmp_path / "home", monkeypatch)
    (tmp_path / "plan.yaml").write_text(CHECKED)
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as running:
        ends = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < ends and running.poll() is None
            time.sleep(0.01)
        running.kill()
    (tmp_path / "go").touch()
    done = plait(tmp_path, "resume", "last")
    assert done.code == 0, done.err
    assert (tmp_path / "begun").read_text() == "begun\n" * 2
    assert [prompt.splitlines()[0][:30] for prompt in home.prompts] == ["do it", "The check of the answer failed"]
    shown = plait_here(tmp_path, "show", "last", "work").out
    assert shown.count("sh ended with exit code 1\n") >= 1
    assert shown.count("\nexit code 0\n") == 1


def test_the_log_has_both_streams_while_the_command_runs(tmp_path: Path) -> None:
    script = "echo out; echo err >&2; while [ ! -e go ]; do sleep 0.01; done"
    (tmp_path / "plan.yaml").write_text(f"tasks: [{{id: build, run: [sh, -c, {script!r}]}}]")
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as running:
        ends, log = time.monotonic() + 60, ""
        while not ("| out" in log and "| err" in log):
            assert time.monotonic() < ends and running.poll() is None
            log = plait_here(tmp_path, "log", "last").out
        (tmp_path / "go").touch()
        assert running.wait() == 0
