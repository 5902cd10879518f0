"""The room of a host: locked files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, ParallelRunner, Task
from plait.backends.hosts.host_process import Slots, slots_folder, slots_taken
from tests.support.hosts import functions
from tests.support.hosts.world import PLAIT, HostFolder

ONE = {"slots": 1}


def slots_in(state: Path) -> Slots:
    return Slots(slots_folder(state), ONE)


def test_machines_with_one_home_folder_have_slots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    for machine in ("m1", "m2", "m1"):
        monkeypatch.setattr(platform, "node", lambda machine=machine: machine)
        taken.append(slots_in(tmp_path).take(f"{len(taken)}/1", ONE))
        assert slots_taken(tmp_path) == 1
    assert taken == [True, True, False]


def test_attempts_take_what_they_need_as_long_as_their_process_lives(tmp_path: Path) -> None:
    offer = {"agents": 0.3, "gpus": 1}
    mine, other = Slots(tmp_path, offer), Slots(tmp_path, offer)
    tenth, gpu = {"agents": 0.1}, {"agents": 0.1, "gpus": 1}
    assert [mine.take("a/1", tenth), mine.take("a/1", tenth), other.take("b/1", gpu)] == [True] * 3
    assert not mine.take("c/1", gpu)
    assert mine.take("c/1", tenth)
    assert not other.take("d/1", tenth)
    other.free("b/1")
    assert mine.take("d/1", gpu)
    assert not other.take("e/1", {"memory": 1})
    for file in tmp_path.glob("*.json"):  # as a process leaves it that is killed
        (tmp_path / f"left{file.name}").write_text(file.read_text())
    mine.free("c/1")
    assert other.take("e/1", tenth)
    assert len([*tmp_path.glob("*.json")]) == 3


def test_a_slot_that_cannot_be_locked_is_not_taken_for_one_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    slots = slots_in(tmp_path)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=f"this host cannot lock files in {tmp_path}/slots/.*: No locks available"):
        slots.take("a/1", ONE)


async def test_a_host_that_cannot_lock_files_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = HostFolder(tmp_path / "hosts")
    monkeypatch.setenv("HOST_MODULE", "tests.support.hosts.lockless")
    hosts = world.hosts("m1")
    result = await ParallelRunner(hosts.placed(functions.echo)).run(DAG([Task("a", "x", retry=0)]))
    said = f"no host can be used: m1: this host cannot lock files in {world.folder}/m1/plait/hosts/"
    assert (result["a"].error or "").startswith(said)
    slots = slots_in(world.folder / "m1" / "plait" / "hosts")
    slots.take("a/1", ONE)
    async with hosts.reachable() as reachable:
        state = await reachable[0].probe()
    assert (state.problem or "").startswith("this host cannot lock files in ")


def frame(op: str, attempt: str, **more: Any) -> dict[str, Any]:
    return {"op": op, "attempt": attempt, "needs": ONE, **more}


def go(attempt: str, prompt: str, function: str = "until_file", **request: Any) -> dict[str, Any]:
    backend = {"call": f"tests.support.hosts.functions:{function}"}
    return frame("go", attempt, backend=backend, request=request, prompt=prompt, answers=[])


ASKS = (("ask", "x/1"), ("ask", "a/1"))
HELD = {
    "while it waits for the slot": (
        [frame("ask", "x/1"), frame("ask", "a/1"), frame("cancel", "a/1"), frame("cancel", "x/1")]
    ),
    "once it has the slot": [frame("ask", "a/1"), frame("cancel", "a/1")],
    "in the moment in which it may go": [frame("ask", "a/1"), go("a/1", "/nowhere/file"), frame("cancel", "a/1")],
    "while it is handed over": [go("a/1", "/nowhere/file", attaches=True), frame("cancel", "a/1")],
}


@pytest.mark.parametrize(("when", "idle"), [*((when, False) for when in HELD), ("once it has the slot", True)])
def test_an_attempt_cancelled_before_its_work_began_leaves_its_slot(tmp_path: Path, when: str, idle: bool) -> None:
    """All frames arrive at once, so nothing of the attempt has begun. `idle`: a worker of an earlier attempt waits."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(
        [PLAIT, "host"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def send(*frames: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write("".join(f"{json.dumps(one)}\n" for one in frames))
        process.stdin.flush()

    def read_until(op: str, attempt: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            found = json.loads(line)
            if (found["op"], found.get("attempt")) == (op, attempt):
                return
        raise AssertionError(f"the host ended without {op} of {attempt}")

    with process:
        hello = {"key": "0" * 32, "host": "m1", "epoch": 1, "keep": [], "version": version("plait")}
        hello |= {"pool": "", "resources": ONE}
        send({"op": "hello", **hello})
        if idle:
            send(frame("ask", "i/1"), go("i/1", "done", "echo"))
            read_until("reply", "i/1")
        send(*HELD[when])
        read_until("ended", "a/1") if when != "while it waits for the slot" else read_until("ended", "x/1")
        assert slots_taken(tmp_path / "plait" / "hosts") == 0
        send(frame("ask", "b/1"))
        read_until("slot", "b/1")
        process.stdin.close()
