"""A coding agent on another host: shown while at work, adopted by a resume, continued on its host."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.agents.homes import Home
from tests.support.agents.logs import LIMIT, make_log_home, running, wait_for
from tests.support.hosts.world import PLAIT, HostFolder
from tests.support.processes.command import Terminal, plait, plait_here

pytestmark = pytest.mark.slow

TASKS = [
    {"id": "a", "prompt": "A. [[tool]] [[until go]] [[say done now]]"},
    {"id": "b", "prompt": "B. [[say {{ a }}]]", "continues": "a"},
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    home = make_log_home(tmp_path, monkeypatch)
    world = HostFolder(tmp_path / "hosts")
    plan = {
        "hosts": groups("m1", "m2", world=world),
        "backends": {"coder": {"kind": "claude-code", "command": "./claude", "on": "fleet"}},
        "tasks": TASKS,
    }
    (tmp_path / "plan.yaml").write_text(json.dumps(plan))
    return home


def groups(*names: str, world: HostFolder) -> dict[str, object]:
    """Return the part `hosts` of a plan."""
    return {"fleet": {"kind": "ssh", "hosts": [{"name": name, "plait": PLAIT} for name in names], "ssh": world.ssh}}


def leave_host(home: Home) -> tuple[HostFolder, str]:
    """Take the host of the only agent away, and return it."""
    world, placed = HostFolder(home.path / "hosts"), "task_placed"
    wait_for(lambda: placed in plait_here(home.path, "log", "last", "--json").out and bool(home.processes))
    name = plait_here(home.path, "show", "last", "a", "--json").value["history"][0]["place"]
    world.set_away(name)
    world.kill(name)
    return world, name


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
        wait_for(lambda: "session_opened" in plait_here(home.path, "log", "last", "--json").out)
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


@pytest.mark.parametrize("owner", ["lives", "was killed"])
def test_cancel_names_a_host_that_is_away_and_ends_its_agent_when_it_is_back(
    home: Home, owner: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(home.path) as process:
        world, name = leave_host(home)
        if owner == "was killed":
            process.kill()
            process.wait()
        done = plait_here(home.path, "cancel", "last")
        process.wait(LIMIT)
    left = f"{name} cannot be reached; a may still be under way there\n  cancel    plait cancel "
    assert (done.code, "is cancelled\n" in done.err, left in done.err) == (0, True, True), done.err
    again = plait_here(home.path, "cancel", "last")
    assert (again.code, "is cancelled already\n" in again.err, left in again.err) == (0, True, True), again.err
    assert f"hosts=['{name}']" in caplog.text and "attempts_not_ended" in caplog.text
    done = plait(home.path, "cancel", "last", "--json")
    assert (done.value["unreached"], done.err) == ({name: ["a"]}, "")
    assert home.processes
    world.set_back(name)
    done = plait_here(home.path, "cancel", "last")
    assert (done.code, "cannot be reached" in done.err) == (0, False), done.err
    assert not home.processes


def test_cancel_reaches_hosts_that_the_plan_no_longer_has(home: Home) -> None:
    with running(home.path) as process:
        world, name = leave_host(home)
        process.kill()
        process.wait()
    plan = json.loads((home.path / "plan.yaml").read_text())
    (home.path / "plan.yaml").write_text(json.dumps({**plan, "hosts": groups("m3", world=world)}))
    (home.path / "fleet.yaml").write_text(json.dumps(groups(name, world=world)))
    assert f"{name} cannot be reached" in plait_here(home.path, "cancel", "last").err
    assert home.processes
    world.set_back(name)
    done = plait_here(home.path, "cancel", "last", "--hosts", "fleet.yaml")
    assert (done.code, "cannot be reached" in done.err) == (0, False), done.err
    assert not home.processes


def test_a_run_stopped_while_a_host_is_away_names_the_host(home: Home) -> None:
    with Terminal(home.path, "run", "plan.yaml") as run:
        wait_for((home.path / "calls.jsonl").exists)
        world, name = leave_host(home)
        run.until(f"waiting for {name}, away since ")
        run.press_ctrl_c()
        run.until(f"away      {name} cannot be reached; a may still be under way there")
        run.until("plait resume ")
        assert run.wait() == 6
    assert home.processes
    world.set_back(name)
    assert plait_here(home.path, "cancel", "last").code == 0
    assert not home.processes


def test_a_cancelled_run_that_left_nothing_names_no_host(home: Home) -> None:
    plan = json.loads((home.path / "plan.yaml").read_text())
    plan["backends"]["user"] = {"kind": "person"}
    plan["tasks"] = [TASKS[0], {"id": "c", "prompt": "Go on?", "backend": "user", "depends_on": ["a"]}]
    (home.path / "plan.yaml").write_text(json.dumps({**plan, "defaults": {"backend": "coder"}}))
    (home.path / "go").touch()
    with running(home.path) as process:
        process.wait(LIMIT)
    world = HostFolder(home.path / "hosts")
    for name in ("m1", "m2"):
        world.set_away(name)
    done = plait_here(home.path, "cancel", "last", "--json").value
    assert (done["status"], done["unreached"]) == ("cancelled", {})


def test_a_host_with_another_version_is_named_and_not_used(home: Home) -> None:
    old = home.path / "old"
    main = "from plait.runner.cli import main; main()"
    old.write_text(
        f'#!/bin/sh\nexec {PLAIT[:-5]}python -c \'import sys, importlib.metadata as m; m.version = lambda _: "0.0.9"; '
        f'sys.argv[0] = "plait"; {main}\' "$@"\n'
    )
    old.chmod(0o755)
    plan = json.loads((home.path / "plan.yaml").read_text())
    plan["hosts"]["fleet"]["hosts"][0] = {"name": "old", "plait": str(old)}
    (home.path / "plan.yaml").write_text(json.dumps(plan))
    (home.path / "go").touch()
    done = plait(home.path, "run", "plan.yaml", "-v")
    assert done.code == 0, done.err
    assert f"old is not used: plait 0.0.9 is installed there, and {version('plait')} here" in done.err
    for task in ("a", "b"):
        assert plait_here(home.path, "show", "last", task, "--json").value["history"][0]["place"] == "m2"


def test_ctrl_c_ends_the_agents_on_hosts_that_are_there(home: Home) -> None:
    with Terminal(home.path, "run", "plan.yaml") as run:
        wait_for((home.path / "calls.jsonl").exists)
        run.press_ctrl_c()
        run.until("plait resume ")
        assert run.wait() == 6
    assert not home.processes
    assert b"cannot be reached" not in run.seen
    (home.path / "go").touch()
    assert plait(home.path, "resume", "last").code == 0
