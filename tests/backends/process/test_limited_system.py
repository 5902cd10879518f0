"""The process room where the machine gives less than it might, and where numbers are not what they seem."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from anyio.to_thread import run_sync

from plait.backends.process import child_process, process_table
from plait.backends.process.child_manifest import read_manifest
from plait.backends.process.child_process import Child, adopted, running, sweep
from tests.support.processes.room import ROOT, Kin, nasty, nothing_left, witnesses

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs procfs")


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(child_process, "GRACE", 0.3)
    with nothing_left():
        yield


async def whole_turn(name: str, folder: Path, holds: Kin) -> Child:
    """With a child that is at its worst when it is left."""
    async with running(nasty(name, holds, folder), folder / "t") as child:
        await child.follow(lambda line: line == b"ready", idle=60, until=anyio.current_time() + 60)
    assert holds.is_gone(0)
    return child


def refuse(*_: Any) -> None:
    raise PermissionError


def be_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """As on macOS: the table is psutil's, no process has a second mark, and signals go by number."""
    patch.setattr(process_table, "HAS_PROC", False)
    patch.delattr(resource, "prlimit")
    patch.delattr(os, "pidfd_open")


MISSING = ["pidfd", "pidfd, by a sandbox", "limits", "environments", "procfs"]
CHILDREN = ["escapes", "cleared", "orphans", "stopped", "regroups", "bears", "guards_itself"]


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        *(("escapes", missing) for missing in MISSING),
        *((name, "procfs") for name in CHILDREN[1:]),
        ("cleared", "environments"),
        ("orphans", "limits"),
    ],
)
async def test_less_of_linux_is_enough(
    missing: str, name: str, tmp_path: Path, holds: Kin, monkeypatch: pytest.MonkeyPatch
) -> None:
    match missing:
        case "pidfd":
            monkeypatch.delattr(os, "pidfd_open")
        case "pidfd, by a sandbox":
            monkeypatch.setattr(os, "pidfd_open", refuse)
        case "limits":
            monkeypatch.delattr(resource, "prlimit")
        case "procfs":
            be_elsewhere(monkeypatch)
        case _:  # as of a program that has painted over its own
            monkeypatch.setattr(child_process, "PREFIX", "ANOTHER_")
            name = {"escapes": "vanishes"}.get(name, name)  # which waits for the other mark: it comes after the start
    with witnesses():
        assert (await whole_turn(name, tmp_path, holds)).is_gone


async def test_who_takes_its_time_to_die_is_waited_for(
    tmp_path: Path, holds: Kin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its parent is over by then, so that without a mark nothing tells any more to whom it belongs."""
    deaths: list[threading.Timer] = []

    def send_late(pid: int, started: int, number: int) -> bool:
        if not deaths and os.getsid(pid) == pid and psutil.Process(pid).ppid() == os.getpid():
            return send(pid, started, number)  # the first one, to whom all others belong
        deaths.append(threading.Timer(0.3, send, (pid, started, number)))
        deaths[-1].start()
        return True

    send = process_table.send_signal
    monkeypatch.delattr(resource, "prlimit")
    monkeypatch.setattr(process_table, "send_signal", send_late)
    try:
        await whole_turn("cleared", tmp_path, holds)
        assert deaths
    finally:
        for death in deaths:
            death.join()


async def test_without_procfs_a_child_is_known_to_other_processes(
    tmp_path: Path, holds: Kin, monkeypatch: pytest.MonkeyPatch
) -> None:
    be_elsewhere(monkeypatch)
    with witnesses():
        async with running(nasty("deaf", holds, tmp_path), tmp_path / "t") as child:
            await child.follow(lambda line: line == b"ready", idle=60, until=anyio.current_time() + 60)
            async with adopted(tmp_path / "t") as same:
                assert same is not None and same.manifest == child.manifest and same.manifest.is_alive
                assert not replace(same.manifest, pid=os.getpid()).is_alive
            assert holds.is_gone(0)
    assert child.status == -signal.SIGKILL and child.is_gone


@pytest.mark.parametrize("environment", [{"PLAIT_TURN_00000000deadbeef": "1"}, {"PLAIT_TURN_00000000deadbee": "1"}])
def test_both_tables_have_the_same_lines(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The start times count from different moments, and stay the same in either table."""
    tag = process_table.ProcessTag("00000000deadbeef")
    living = subprocess.Popen(["/bin/sleep", "60"], env=environment, start_new_session=True)
    over = subprocess.Popen(["/bin/true"])
    os.waitid(os.P_PID, over.pid, os.WEXITED | os.WNOWAIT)
    pids = (os.getpid(), living.pid, over.pid)
    try:
        by_procfs = [process_table._look(pid)._replace(started=0) for pid in pids]
        marked = [one.pid for one in process_table.members([tag])]
        be_elsewhere(monkeypatch)
        assert [process_table._look(pid)._replace(started=0) for pid in pids] == by_procfs
        assert [one.pid for one in process_table.members([tag])] == marked
        assert marked == [pid for pid in (living.pid,) if f"PLAIT_TURN_{tag.marker}" in environment]
        assert process_table.start_time(living.pid) == process_table.start_time(living.pid) != ""
        assert process_table.start_time(over.pid) is None and process_table.first_start_time(over.pid)
    finally:
        for process in (living, over):
            process.kill()
            process.wait()
    assert process_table.start_time(living.pid) is None and process_table.first_start_time(living.pid) == ""


async def test_all_threads_at_work_keep_no_child_alive(tmp_path: Path, holds: Kin) -> None:
    free = threading.Event()
    async with anyio.create_task_group() as group:
        for _ in range(int(anyio.to_thread.current_default_thread_limiter().total_tokens)):
            group.start_soon(run_sync, free.wait)
        try:
            assert (await whole_turn("escapes", tmp_path, holds)).is_gone
        finally:
            free.set()


async def test_a_child_that_somebody_else_has_waited_for_is_over(tmp_path: Path, holds: Kin) -> None:
    async with running(nasty("dies", holds, tmp_path), tmp_path / "t") as child:
        await child.follow(lambda _: False, idle=60, until=anyio.current_time() + 60)
        os.waitpid(child.manifest.pid, 0)  # noqa: ASYNC222 - it is over
    assert child.is_gone


NO_DESCRIPTOR = """
import resource, sys, anyio
from pathlib import Path
from plait.backends.process.child_process import running
from plait.backends.process import child_process
from tests.support.processes.room import *
async def main():
    child_process.GRACE = 0.3
    with kin() as holds:
        folder = Path(sys.argv[1])
        async with running(nasty("deaf", holds, folder), folder / "t") as child:
            await child.follow(lambda line: line == b"ready", idle=60, until=anyio.current_time() + 60)
            holds.is_gone(0)  # our end is closed
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            assert child.manifest.is_alive
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        print(child.status, child.is_gone, holds.is_gone(5))
anyio.run(main)
"""


async def test_with_no_descriptor_left_the_child_itself_is_ended(tmp_path: Path) -> None:
    words = [sys.executable, "-c", NO_DESCRIPTOR, str(tmp_path)]
    done = await anyio.run_process(words, cwd=ROOT)
    assert done.stdout.decode().split() == ["-9", "False", "True"]
    known = read_manifest(tmp_path / "t")
    assert known is not None and (tmp_path / "t" / "child.json").exists()
    assert await sweep(tmp_path, []) == 0


def test_a_signal_meets_the_very_process_that_was_seen() -> None:
    with witnesses() as seen:
        number = seen.take_number(0)
        (process,) = process_table.members([process_table.ProcessTag("0" * 16, number, started(number))])
        assert process_table.send_signal(process.pid, process.started - 1, signal.SIGKILL)
        assert seen.are_alive
        assert process_table.members([process_table.ProcessTag("0" * 16, number, str(process.started - 1))]) == []
        assert seen.are_alive


def started(number: int) -> str:
    found = process_table.start_time(number)
    assert found
    return found


def test_whoever_ends_a_turn_that_it_is_part_of_lives_on(tmp_path: Path) -> None:
    """As when an agent runs plait itself, which finds that the agent's own turn is to be ended."""
    text = "from plait.backends.process.process_table import *; print(kill_tree([ProcessTag('0123456789abcdef')], 5))"
    environment = {**os.environ, "PLAIT_TURN_0123456789abcdef": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "(0, True)\n"
