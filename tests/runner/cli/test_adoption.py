"""`plait resume` of turns that outlived their runner: foretold, followed and told of in the command's words."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.agents.outliving import World
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm

AGENT = """
from pathlib import Path
from tests.support.agents.detached_backend import Outliver

agent = Outliver(Path(__file__).parent)
"""
PLAN = """
name: agents
backends:
  agent: {kind: function, call: "agents.py:agent"}
tasks:
  - {id: work, prompt: "work [[until go]]", at_most_once: %s}
  - {id: use, prompt: "use {{ work }}", depends_on: work}
"""


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """A run that was killed while its agent is at work."""
    (tmp_path / "agents.py").write_text(AGENT)
    (tmp_path / "plan.yaml").write_text(PLAN % getattr(request, "param", "false"))
    world = World(tmp_path)
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as running:
        ends = time.monotonic() + 60
        while not world.turns:
            assert time.monotonic() < ends
            assert running.poll() is None
            time.sleep(0.01)
        running.kill()
    yield world
    world.allow("go")


def test_what_a_resume_does_is_said_before_meanwhile_and_after(world: World) -> None:
    (pid,) = world.alive()
    foretold = plait_here(world.folder, "resume", "last", "--dry-run").out.splitlines()
    assert foretold[0] == f"adopt       work: the agent is still running (outliver, pid {pid})"
    assert foretold[1] == "start       use: never started"
    assert foretold[2].endswith(": 1 adopt, 1 start; nothing billed twice")
    value = plait_here(world.folder, "resume", "last", "--dry-run", "--json").value
    assert (value["adopted"], value["runs"], value["possibly_billed_twice"]) == (1, 1, 0)
    world.allow("go")
    done = plait(world.folder, "resume", "last")
    assert (done.code, done.out) == (0, "re: use re: work\n")
    assert " work is taken over (agent): the agent has outlived the process that started it\n" in done.err
    assert "2 of 2 tasks completed, reused 0, adopted 1, ran 1, possibly billed twice 0" in done.err
    assert (len(world.turns), world.alive()) == (2, [])


def test_without_the_backend_only_what_is_stored_is_known(world: World) -> None:
    (world.folder / "agents.py").rename(world.folder / "elsewhere.py")
    foretold = plait(world.folder, "resume", "last", "--dry-run")
    assert foretold.code == 0
    assert foretold.err.startswith("plait: backends of the run cannot be reached, so its stored state counts: ")
    assert foretold.out.split()[0] in {"continue", "start"}
    (world.folder / "elsewhere.py").rename(world.folder / "agents.py")
    world.allow("go")
    assert plait_here(world.folder, "resume", "last", "--json").value["adopted"] == 1


@pytest.mark.parametrize("world", ["true"], indirect=True)
def test_nobody_need_say_what_became_of_an_agent_at_work(world: World) -> None:
    refused = plait(world.folder, "answer", "last", "work", "--done", "it is")
    assert (refused.code, refused.out) == (2, "")
    assert "needs no answer: the agent is still running (outliver, pid" in refused.err
    assert len(world.alive()) == 1
    assert plait(world.folder, "cancel", "last").code == 0
    assert world.alive() == []
