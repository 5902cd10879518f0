"""`plait log -f`: a run is followed while its agents work, whoever runs them."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.agents.homes import Home
from tests.support.agents.logs import LIMIT, make_log_home, plan, running
from tests.support.processes.command import PLAIT, Terminal, environment, plait_here


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    return make_log_home(tmp_path, monkeypatch)


def test_a_run_of_another_process_is_followed_to_its_end(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A. [[tool]] [[until go]] [[say done now]]"}\n')
    with running(folder) as process, Terminal(folder, "log", "last", "-f") as log:
        log.until("> Bash: make test")
        assert b"done now" not in log.seen
        (folder / "go").touch()
        log.until("| done now")
        assert log.wait() == 0
        assert process.wait(LIMIT) == 0
    assert re.search(rb"run \S+ \x1b\[32mcompleted", log.seen)


def test_an_agent_whose_runner_was_killed_is_followed_too(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A. [[tool]] [[until go]] [[say done now]]"}\n')
    with running(folder) as process, Terminal(folder, "log", "last", "-f") as log:
        log.until("> Bash: make test")
        process.kill()
        process.wait()
        [run] = plait_here(folder, "runs", "--json").value
        assert run["status"] == "interrupted"
        (folder / "go").touch()
        log.until("| done now")
        assert log.wait() == 6
    said = log.seen.decode()
    assert f"run {run['run_id']} is interrupted, and no process works on it" in said
    assert f"plait resume {run['run_id']}" in said


@pytest.mark.parametrize(
    ("tasks", "code"),
    [
        ('  - {id: a, prompt: "A. [[error 400]]"}\n', 1),
        ('  - {id: a, prompt: "A.", backend: echo}\n', 0),
        ('  - {id: a, prompt: "A. [[ask]]"}\n', 4),
    ],
)
def test_the_exit_code_of_a_followed_run_is_the_runs(home: Home, tasks: str, code: int) -> None:
    folder = plan(home, tasks)
    path = folder / "plan.yaml"
    path.write_text(path.read_text().replace("concurrency: 4", "concurrency: 4, ask_for: [Bash]"))
    assert plait_here(folder, "run", "plan.yaml", "-q").code == code
    followed = plait_here(folder, "log", "last", "-f")
    assert followed.code == code, followed.out
    assert ("plait answer" in followed.err) == (code == 4)
    assert plait_here(folder, "log", "last").code == 0


def test_one_task_is_followed_to_its_own_end(home: Home) -> None:
    tasks = '  - {id: a, prompt: "A. [[until go]]"}\n  - {id: b, prompt: "B. [[until never]]"}\n'
    folder = plan(home, tasks)
    with running(folder) as process:
        with Terminal(folder, "log", "last", "a", "-f") as log:
            log.until("started")
            (folder / "go").touch()
            assert log.wait() == 0
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT) == 6


def test_following_ends_when_nobody_reads_it_any_more(home: Home) -> None:
    folder = plan(home, '  - {id: a, prompt: "A. [[tool]] [[until never]]"}\n')
    with running(folder) as process:
        words = [*PLAIT, "log", "last", "-f"]
        with subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE) as log:
            assert log.stdout is not None
            log.stdout.readline()
            log.stdout.close()
            assert log.wait(LIMIT) == 6
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(LIMIT)
