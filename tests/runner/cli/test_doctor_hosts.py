"""Plans whose backends run on other hosts, and the commands about hosts."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.hosts.world import PLAIT, HostFolder
from tests.support.processes.command import plait

pytestmark = pytest.mark.slow

FUNCTIONS = """
import os
from pathlib import Path

async def where(prompt):
    return f"{prompt} on {Path(os.environ['XDG_STATE_HOME']).name}"
"""


@pytest.fixture
def world(tmp_path: Path) -> HostFolder:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return HostFolder(tmp_path / "hosts")


def write_plan(world: HostFolder, hosts: str = "hosts", on: str = "fleet") -> Path:
    """Write a plan, with the group `fleet` of m1 and m2 under the key `hosts`, or in a file `hosts.json`."""
    folder = world.folder.parent
    names = [{"name": "m1", "slots": 2, "plait": PLAIT}, {"name": "m2", "slots": 3, "plait": PLAIT}]
    groups = {"fleet": {"kind": "ssh", "hosts": names, "ssh": world.ssh, "patience": 20}}
    plan: dict[str, object] = {
        "backends": {"work": {"kind": "function", "call": "functions.py:where", "on": on}},
        "tasks": [{"id": "a", "prompt": "hello"}, {"id": "b", "prompt": "{{ a }}; again", "depends_on": "a"}],
    }
    if hosts == "hosts":
        plan["hosts"] = groups
    else:
        (folder / "hosts.json").write_text(json.dumps(groups if hosts == "part" else {"hosts": groups}))
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


@pytest.mark.parametrize("hosts", ["hosts", "file", "part"])
def test_a_plan_runs_on_the_hosts_that_it_names_or_that_a_file_names(world: HostFolder, hosts: str) -> None:
    folder = write_plan(world, hosts)
    named = () if hosts == "hosts" else ("--hosts", "hosts.json")
    done = plait(folder, "run", "plan.json", "-v", *named)
    assert done.code == 0, done.err
    assert done.out.startswith("hello on m")
    shown = plait(folder, "show", "last", "a", "--json").value
    place = shown["history"][0]["place"]
    assert place in {"m1", "m2"}
    assert f" a runs on {place}\n" in done.err
    assert f"work on {place}" in plait(folder, "show", "last", "a").out
    assert f"runs on {place}" in plait(folder, "log", "last").out


def test_a_run_like_another_takes_the_answers_of_other_hosts(world: HostFolder) -> None:
    folder = write_plan(world)
    first = plait(folder, "run", "plan.json", "-q")
    plan = json.loads((folder / "plan.json").read_text())
    del plan["backends"]["work"]["on"]
    (folder / "plan.json").write_text(json.dumps(plan))
    again = plait(folder, "run", "plan.json", "--like", "last")
    assert (again.code, again.out) == (0, first.out)
    assert "2 reused" in again.err


def test_the_number_of_tasks_at_once_is_the_sum_of_the_slots(world: HostFolder) -> None:
    folder = write_plan(world)
    assert plait(folder, "run", "plan.json", "-q").code == 0
    with closing(sqlite3.connect(folder / ".plait" / "plait.db")) as database:
        (settings,) = database.execute("SELECT settings FROM runs").fetchone()
    assert json.loads(settings)["concurrency"] == 5
    assert "ssh.py" not in settings


def test_a_resume_takes_the_hosts_from_files_alone(world: HostFolder) -> None:
    folder = write_plan(world, "file")
    assert plait(folder, "run", "plan.json", "--queue").code == 0
    refused = plait(folder, "resume", "last")
    assert (refused.code, refused.out) == (2, "")
    assert "backend 'work' runs on the hosts 'fleet', which are not given" in refused.err
    assert "--hosts" in refused.err
    done = plait(folder, "resume", "last", "--hosts", "hosts.json")
    assert (done.code, done.out.partition(" on ")[0]) == (0, "hello")


def test_a_plan_names_its_hosts_rightly(world: HostFolder) -> None:
    folder = write_plan(world, on="flet")
    done = plait(folder, "check", "plan.json")
    assert (done.code, "backends.work.on: unknown hosts 'flet'; did you mean 'fleet'?" in done.err) == (2, True)
    (folder / "plan.json").write_text(
        json.dumps({"hosts": {"x": {"kind": "ssh", "hosts": ["a b"]}}, "tasks": [{"id": "a", "prompt": "p"}]})
    )
    done = plait(folder, "check", "plan.json")
    assert (done.code, "the host name 'a b' must have" in done.err) == (2, True)
    (folder / "plan.json").write_text(
        json.dumps({"backends": {"me": {"kind": "person", "on": "x"}}, "tasks": [{"id": "a", "prompt": "p"}]})
    )
    done = plait(folder, "check", "plan.json")
    assert (done.code, "a person is asked by the run itself" in done.err) == (2, True)


def test_hosts_and_their_state_are_listed(world: HostFolder) -> None:
    folder = write_plan(world)
    done = plait(folder, "doctor", "--hosts", "plan.json")
    assert done.code == 0, done.err
    rows = [line.split() for line in done.out.partition("\n\n")[0].splitlines()]
    assert rows == [
        ["hosts", "name", "slots", "at", "work", "version", "state"],
        ["fleet", "m1", "2", "0", "0.1.0", "ready"],
        ["fleet", "m2", "3", "0", "0.1.0", "ready"],
    ]
    world.set_away("m2")
    done = plait(folder, "doctor", "--hosts", "plan.json", "--json")
    assert done.code == 3
    assert [(one["name"], one["at_work"], one["problem"]) for one in done.value["hosts"]] == [
        ("m1", 0, None),
        ("m2", None, "away: ssh: connect to host m2 port 22: No route to host"),
    ]


def test_a_host_whose_folder_cannot_be_written_is_named(world: HostFolder) -> None:
    folder = write_plan(world)
    (world.folder / "m2").touch()  # a file in place of the folder of the host's state
    why = f"{world.folder}/m2/plait cannot be used: Not a directory"
    done = plait(folder, "doctor", "--hosts", "plan.json", "--json")
    assert (done.code, [one["problem"] for one in done.value["hosts"]]) == (3, [None, why])


def test_hosts_are_listed_although_the_store_cannot_be_read(world: HostFolder) -> None:
    folder = write_plan(world)
    world.set_away("m2")
    (folder / "other").write_text("no store")
    done = plait(folder, "doctor", "--hosts", "plan.json", "--store", "other")
    assert (done.code, "No route to host" in done.out) == (3, True)


def test_a_store_in_which_nothing_has_run_yet_is_not_missed(world: HostFolder) -> None:
    folder = write_plan(world)
    world.set_away("m2")
    done = plait(folder, "doctor", "--hosts", "plan.json", PLAIT_STORE="runs/new.db")
    assert (done.code, done.err) == (3, "")
    assert not (folder / "runs").exists()


def test_the_doctor_visits_the_hosts(world: HostFolder) -> None:
    folder = write_plan(world)
    world.set_away("m2")
    done = plait(folder, "doctor", "--hosts", "plan.json", "--json", HOME=str(folder))
    checks = {one["check"] for one in done.value["checks"]}
    assert done.code == 3
    assert "m1: codex" in checks
    assert not any(check.startswith("m2: ") for check in checks)


@pytest.mark.parametrize("file", ["missing.json", "empty.json", "plan.json"])
def test_a_file_without_hosts_is_refused(tmp_path: Path, file: str) -> None:
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "plan.json").write_text('{"name": "x", "tasks": [{"id": "a", "prompt": "p"}]}')
    done = plait(tmp_path, "doctor", "--hosts", file)
    assert (done.code, done.out) == (2, "")
    assert ("cannot be read" if file == "missing.json" else "names no hosts") in done.err


def test_check_says_that_no_folder_is_locked_on_workers_of_dask(tmp_path: Path) -> None:
    plan = {
        "hosts": {"lab": {"kind": "ssh", "hosts": ["a", "b"]}, "pool": {"kind": "dask", "address": "tls://a:8786"}},
        "backends": {
            "far": {"kind": "command", "on": "lab"},
            "near": {"kind": "command"},
            "pooled": {"kind": "command", "on": "pool"},
        },
        "tasks": [{"id": name, "run": ["true"], "backend": name} for name in ("far", "near", "pooled")],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = plait(tmp_path, "check", "plan.json")
    assert done.code == 0, done.err
    assert done.out.splitlines()[-3:] == [
        "  backend       far: command on lab, 1 task",
        "  backend       near: command, 1 task",
        "  backend       pooled: command on pool, 1 task; no folder is locked there, so two may write in one",
    ]
