"""The slots of a host: locks on files."""

from __future__ import annotations

import errno
import fcntl
import platform
from pathlib import Path

import pytest

from plait.backends.hosts.probe import probe_hosts
from plait.backends.hosts.slots import Slots, slots_taken
from plait.runner import DAG, ParallelRunner, Task
from tests.support.hosts import functions
from tests.support.hosts.world import HostFolder


def test_machines_with_one_home_folder_have_slots_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    for machine in ("m1", "m2", "m1"):
        monkeypatch.setattr(platform, "node", lambda machine=machine: machine)
        slots = Slots(tmp_path, 1)
        taken.append(slots.take(f"{len(taken)}/1"))
        assert slots_taken(tmp_path) == 1
    assert taken == [True, True, False]


def test_a_slot_that_cannot_be_locked_is_not_taken_for_one_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_descriptor: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    slots = Slots(tmp_path, 1)
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match=f"this host cannot lock files in {tmp_path}/slots/.*: No locks available"):
        slots.take("a/1")


async def test_a_host_that_cannot_lock_files_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = HostFolder(tmp_path / "hosts")
    monkeypatch.setenv("HOST_MODULE", "tests.support.hosts.lockless")
    hosts = world.hosts("m1")
    result = await ParallelRunner(hosts.placed(functions.echo)).run(DAG([Task("a", "x", retry=0)]))
    said = f"no host can be used: m1: this host cannot lock files in {world.folder}/m1/plait/hosts/"
    assert (result["a"].error or "").startswith(said)
    slots = Slots(world.folder / "m1" / "plait" / "hosts", 1)
    slots.take("a/1")
    slots.free("a/1")
    async with hosts.reachable() as reachable:
        (state,) = await probe_hosts(reachable)
    assert (state.problem or "").startswith("this host cannot lock files in ")
