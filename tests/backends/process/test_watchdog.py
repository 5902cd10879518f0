"""The guard that ends children with their parent, however that ends, and nobody else."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.backends.process import process_table
from plait.backends.process.child_process import sweep
from plait.backends.process.process_table import PREFIX, start_time
from tests.support.processes.room import (  # fmt: skip
    ROOT,
    WORST,
    Kin,
    Moment,
    Parent,
    Witnesses,
    guards_of,
    nothing_left,
    soon,
    within,
    witnesses,
)

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs procfs")]


@pytest.fixture(autouse=True)
def seen() -> Iterator[Witnesses]:
    """Processes beside that live on, whatever a test does; it leaves none of its own."""
    with nothing_left(), witnesses() as made:
        yield made


@pytest.mark.parametrize("moment", WORST)
def test_a_guarded_child_dies_with_its_parent(moment: Moment, tmp_path: Path, holds: Kin) -> None:
    parent = Parent(tmp_path, moment, [WORST[moment]], holds, guarded=True)
    parent.kill()
    assert holds.is_gone(soon())
    assert within(soon(), lambda: not guards_of(parent))


def test_fifty_guarded_children_die_at_once(tmp_path: Path, holds: Kin) -> None:
    parent = Parent(tmp_path, "at work", ["deaf"] * 25 + ["escapes"] * 25, holds, guarded=True)
    parent.kill()
    assert holds.is_gone(soon())
    assert within(soon(), lambda: not guards_of(parent))


def kill_guard(parent: Parent) -> int:
    """Kill the guard of a parent; which it was. What is said to it while it is still dying, it takes along."""
    (guard,) = guards_of(parent)
    os.kill(guard, signal.SIGKILL)
    assert within(soon(), lambda: is_dead(guard))
    return guard


def is_dead(pid: int) -> bool:
    """Whether it has closed all that it had open, be it a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
    except OSError:
        return True


def test_another_guard_takes_the_place_of_one_that_was_killed(tmp_path: Path, holds: Kin) -> None:
    parent = Parent(tmp_path, "one by one", ["escapes", "vanishes"], holds, guarded=True)
    parent.come()
    guard = kill_guard(parent)
    parent.go_on()
    parent.kill()
    assert guard not in guards_of(parent)
    assert holds.is_gone(soon())
    assert within(soon(), lambda: not guards_of(parent))


async def test_what_guard_and_parent_leave_together_is_swept(tmp_path: Path, holds: Kin) -> None:
    parent = Parent(tmp_path, "one by one", ["escapes", "vanishes"], holds, guarded=True)
    parent.go_on()
    parent.come()
    kill_guard(parent)
    parent.kill()
    assert not holds.is_gone(0.1)
    assert await sweep(tmp_path, []) == 4
    assert holds.is_gone(0)


def test_a_copy_of_the_parent_does_not_hide_its_end(tmp_path: Path, holds: Kin) -> None:
    parent = Parent(tmp_path, "copied", ["escapes"], holds, guarded=True)
    copy = int(parent.come())
    parent.kill()
    try:
        assert holds.is_gone(soon())
        os.kill(copy, 0)  # it lives
    finally:
        os.kill(copy, signal.SIGKILL)


ELSEWHERE = f"""
import runpy, sys
sys.path.append({str(ROOT / "backends" / "process")!r})
import process_table
process_table.HAS_PROC = False
runpy.run_path({str(ROOT / "backends" / "process" / "_watchdog_main.py")!r}, run_name="__main__")
"""


@pytest.mark.parametrize("by_psutil", [False, True], ids=["procfs", "psutil"])
def test_a_guard_that_hears_nothing_more_kills_nobody_as_long_as_its_parent_lives(
    by_psutil: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the parent closes descriptors that it knows nothing of."""
    parent = subprocess.Popen(["/bin/sleep", "60"])
    child = subprocess.Popen(["/bin/sleep", "60"], env={f"{PREFIX}00000000deadbeef": "1"})
    if by_psutil:
        monkeypatch.setattr(process_table, "HAS_PROC", False)
    program = ["-c", ELSEWHERE] if by_psutil else [str(ROOT / "backends" / "process" / "_watchdog_main.py")]
    watched = [str(parent.pid), start_time(parent.pid) or "", process_table.library()]
    words = [sys.executable, "-I", "-S", *program, *watched]
    try:
        with subprocess.Popen(words, stdin=subprocess.PIPE, text=True) as guard:
            assert guard.stdin is not None
            guard.stdin.write(json.dumps(["00000000deadbeef", 0, "", None]) + "\n")
            guard.stdin.close()
            assert not within(0.5, lambda: child.poll() is not None)
            parent.kill()
            assert within(soon(), lambda: child.poll() is not None)
    finally:
        for process in (parent, child):
            process.kill()
            process.wait()


def test_a_temporary_folder_goes_with_the_process_that_made_it(tmp_path: Path, holds: Kin) -> None:
    parent = Parent(tmp_path, "at work", ["deaf"], holds, guarded=True)
    parent.come()
    assert [one.name for one in tmp_path.glob("plait-*/*")] == ["file"]
    parent.kill()
    assert within(soon(), lambda: not list(tmp_path.glob("plait-*")))
