"""A coding agent on another host: shown while at work, adopted by a resume, continued on its host."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.agents.homes import Home
from tests.support.agents.logs import LIMIT, make_log_home, running, wait_for
from tests.support.hosts.world import PLAIT, HostFolder
from tests.support.processes.command import Terminal, plait, plait_here

TASKS = [
    {"id": "a", "prompt": "A. [[tool]] [[until go]] [[say done now]]"},
    {"id": "b", "prompt": "B. [[say {{ a }}]]", "continues": "a"},
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = make_log_home(tmp_path, monkeypatch)
    world = HostFolder(tmp_path / "hosts")
    hosts = [{"name": name, "plait": PLAIT} for name in ("m1", "m2")]
    plan = {
        "hosts": {"fleet": {"kind": "ssh", "hosts": hosts, "ssh": world.ssh}},
        "backends": {"coder": {"kind": "claude-code", "command": "./claude", "on": "fleet"}},
        "tasks": TASKS,
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    return home


def test_the_output_on_the_host_is_followed_here(home: Home) -> None:
    with running(home.path) as process, Terminal(home.path, "log", "last", "-f") as log:
        log.until("> Bash: make test")
        assert b"done now" not in log.seen
        (home.path / "go").touch()
        log.until("| done now")
        assert log.wait() == 0
        assert process.wait(LIMIT) == 0
    shown = plait_here(home.path, "show", "last", "b", "--json").value
    assert home.calls[-1]["said"][0] == ["user", TASKS[0]["prompt"]]
    assert shown["session_id"] == f"{home.calls[-1]['session']}@{shown['history'][0]['place']}"
    assert (
        shown["history"][0]["place"]
        == plait_here(home.path, "show", "last", "a", "--json").value["history"][0]["place"]
    )


def test_a_killed_run_is_resumed_without_a_second_turn(home: Home) -> None:
    with running(home.path) as process:
        wait_for(lambda: "session_opened" in plait_here(home.path, "show", "last", "--events").out)
        process.kill()
        process.wait()
    said = plait_here(home.path, "resume", "last", "--dry-run").out
    assert "the attempt was placed on m" in said
    (home.path / "go").touch()
    done = plait(home.path, "resume", "last")
    assert (done.code, done.out) == (0, "done now\n")
    assert home.prompts == [TASKS[0]["prompt"], "<result done>", "B. [[say done now]]"]
    attempts = plait_here(home.path, "show", "last", "a", "--json").value["history"]
    assert [one["attempt"] for one in attempts] == [1]


def test_a_person_continues_a_conversation_on_its_host(home: Home) -> None:
    (home.path / "go").touch()
    assert plait(home.path, "run", "plan.yaml", "-q").code == 0
    done = plait(home.path, "continue", "last", "a", "More. [[say more]]")
    assert (done.code, done.out) == (0, "more\n"), done.err
    assert home.calls[-1]["session"] == home.calls[0]["session"]


def test_cancel_ends_the_agent_of_a_killed_run_on_its_host(home: Home) -> None:
    with running(home.path) as process:
        process.kill()
        process.wait()
    assert home.processes
    done = plait_here(home.path, "cancel", "last")
    assert (done.code, "is cancelled" in done.err) == (0, True)
    wait_for(lambda: not home.processes)
