"""A host that is away is named in each output, read by another process than that of the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.agents.logs import LIMIT, wait_for
from tests.support.hosts.world import PLAIT, HostFolder
from tests.support.processes.command import Terminal, plait_here
from tests.support.processes.served import served

pytestmark = pytest.mark.slow

FUNCTIONS = """
from pathlib import Path
import anyio

async def hold(prompt):
    Path(f"at-{prompt}").touch()
    while not Path("go").exists():
        await anyio.sleep(0.01)
    return prompt
"""


@pytest.fixture
def world(tmp_path: Path) -> HostFolder:
    world = HostFolder(tmp_path / "hosts")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    fleet = {"kind": "ssh", "hosts": [{"name": "m1", "plait": PLAIT}], "ssh": world.ssh, "patience": LIMIT}
    plan = {
        "hosts": {"fleet": fleet},
        "backends": {"work": {"kind": "function", "call": "functions.py:hold", "on": "fleet"}},
        "tasks": [{"id": name, "prompt": name, "retry": 2} for name in "ab"],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    return world


def waits(folder: Path) -> dict[str, tuple[str, str]]:
    tasks = plait_here(folder, "show", "last", "--json").value["tasks"]
    return {one["task_id"]: (one["waits"]["kind"], one["waits"]["text"]) for one in tasks if one["waits"]}


def away_events(folder: Path) -> list[dict[str, object]]:
    lines = plait_here(folder, "log", "last", "--json").out.splitlines()
    return [one["detail"] for one in map(json.loads, lines) if one["kind"] == "host_away"]


def is_there(*paths: Path) -> Callable[[], bool]:
    return lambda: all(path.exists() for path in paths)


def test_each_output_says_for_which_host_a_task_waits(world: HostFolder, tmp_path: Path) -> None:
    with Terminal(tmp_path, "run", "plan.json") as run:
        wait_for(is_there(tmp_path / "at-a", tmp_path / "at-b"))
        assert waits(tmp_path) == {}
        world.set_away("m1")
        world.kill("m1")
        wait_for(lambda: len(waits(tmp_path)) == 2)
        found = waits(tmp_path)
        kind, text = found["a"]
        assert (kind, found["b"]) == ("host", ("host", text))
        assert text.startswith("waiting for m1, away since ")
        run.until(f"  {text}")
        shown = plait_here(tmp_path, "show", "last").out
        assert shown.count(text) == 2
        assert f"waits     {text}" in plait_here(tmp_path, "show", "last", "a").out
        logged = plait_here(tmp_path, "log", "last").out
        since = text.rpartition(" ")[2]
        assert f"m1 away since {since} (" in logged
        assert "); a, b wait" in logged
        assert logged.count(text) == 2
        listed = plait_here(tmp_path, "doctor", "--hosts", "plan.json")
        assert (listed.code, "away: ssh: connect" in " ".join(listed.out.split())) == (3, True)
        with served(tmp_path) as server, server.client() as client:
            (listed,) = client.get("/api/runs").json()["runs"]
            tasks = client.get(f"/api/runs/{listed['run_id']}").json()["tasks"]
        assert [(one["waits"]["kind"], one["waits"]["text"]) for one in tasks] == [("host", text)] * 2
        (tmp_path / "go").touch()
        world.set_back("m1")
        assert run.wait() == 0
    assert waits(tmp_path) == {}
    assert "m1 is back" in plait_here(tmp_path, "log", "last").out
    away, back = away_events(tmp_path)
    assert (away["host"], away["tasks"]) == ("m1", ["a", "b"])
    assert back == {"host": "m1", "since": None, "reason": "", "tasks": []}
