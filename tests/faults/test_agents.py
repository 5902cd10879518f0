"""Agents at work when the command that runs them is killed: none of their turns is lost, and none is paid for twice."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from tests.support.agents.homes import Home, make_home
from tests.support.processes.command import PLAIT, environment, plait, plait_here

pytestmark = pytest.mark.slow

TURNS = 6
_STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Home]:
    home = make_home(tmp_path, monkeypatch)
    tasks = "".join(f'  - {{id: t{n}, prompt: "Turn {n}. [[tool]] [[until go]]"}}\n' for n in range(TURNS))
    (home.path / "plan.yaml").write_text(
        f"backends:\n  coder: {{kind: claude-code, command: ./claude}}\nconcurrency: {TURNS}\ntasks:\n{tasks}"
    )
    yield home
    for run in _STARTED:
        run.kill()
    _STARTED.clear()
    for pid in home.processes:  # of a test that failed
        os.kill(pid, signal.SIGKILL)


def _until(true: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def _start(home: Home, *words: str) -> subprocess.Popen[str]:
    _STARTED.append(
        subprocess.Popen(
            [*PLAIT, *words],
            cwd=home.path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    )
    return _STARTED[-1]


def _kill_at_work(home: Home) -> None:
    """`plait run`, killed when the model has been asked for the second time in every turn."""
    run = _start(home, "run", "plan.yaml")
    _until(lambda: home.begun == 2 * TURNS)
    run.kill()
    run.communicate()


def _judged(home: Home) -> dict[str, str]:
    verdicts = plait_here(home.path, "resume", "--dry-run", "--json").value["tasks"]
    return {task_id: one["action"] for task_id, one in verdicts.items()}


def _told(done: Any) -> dict[str, Any]:
    return {task["task_id"]: task for task in done["tasks"]}


def _sent(home: Home, prompt: str) -> int:
    """How many times the model was asked first for what `prompt` says."""
    return sum(call["said"][-1] == ["user", prompt] for call in home.calls)


def test_a_resume_adopts_the_agents_that_are_at_work(home: Home) -> None:
    _kill_at_work(home)
    assert set(_judged(home).values()) == {"adopt"}
    resume = _start(home, "resume")
    assert resume.stderr is not None
    heard = ""
    while heard.count("is taken over") < TURNS:
        line = resume.stderr.readline()
        assert line, heard
        heard += line
    (home.path / "go").touch()
    out, err = resume.communicate(timeout=60)
    assert resume.returncode == 0, heard + err
    assert "Turn 0." in out
    assert len(home.calls) == 2 * TURNS
    assert home.processes == []


def test_a_resume_collects_what_was_finished_meanwhile(home: Home) -> None:
    _kill_at_work(home)
    (home.path / "go").touch()
    _until(lambda: not home.processes)
    done = plait(home.path, "resume", "--json")
    assert done.code == 0, done.err
    tasks = _told(done.value)
    assert {task["status"] for task in tasks.values()} == {"completed"}
    assert {task["input_tokens"] for task in tasks.values()} == {20}
    assert len(home.calls) == 2 * TURNS


def test_a_resume_that_would_be_refused_is_foretold_as_such(home: Home) -> None:
    _kill_at_work(home)
    plan = home.path / "plan.yaml"
    as_it_was = plan.read_text()
    plan.write_text(as_it_was.replace("./claude", "./another"))
    foretold, refused = (plait_here(home.path, "resume", *words) for words in (["--dry-run"], []))
    assert foretold.out.count("adopt ") == TURNS
    assert (foretold.code, refused.code) == (2, 2)
    assert foretold.err == refused.err.replace("plait: ", "plait: a resume would be refused: ")
    assert "are not those of the plan file" in refused.err
    plan.write_text(as_it_was)
    (home.path / "go").touch()
    assert plait(home.path, "resume", "--json").code == 0


def test_agents_that_were_killed_too_go_on_in_their_sessions(home: Home) -> None:
    _kill_at_work(home)
    for pid in home.processes:
        os.kill(pid, signal.SIGKILL)
    _until(lambda: not home.processes)
    assert set(_judged(home).values()) == {"continue"}
    (home.path / "go").touch()
    done = plait(home.path, "resume", "--json")
    assert done.code == 0, done.err
    for n in range(TURNS):
        assert _sent(home, f"Turn {n}. [[tool]] [[until go]]") == 1
    tasks = _told(done.value)
    assert {task["input_tokens"] for task in tasks.values()} == {30}


def test_ctrl_c_leaves_no_agent_and_the_resume_goes_on(home: Home) -> None:
    run = _start(home, "run", "plan.yaml")
    _until(lambda: home.begun == 2 * TURNS)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=60)
    assert run.returncode == 6
    assert home.processes == []
    (home.path / "go").touch()
    done = plait(home.path, "resume", "--json")
    assert done.code == 0, done.err
    for n in range(TURNS):
        assert _sent(home, f"Turn {n}. [[tool]] [[until go]]") == 1
