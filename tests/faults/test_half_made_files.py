"""What a process leaves that is killed while it makes the store, or stopped while it holds it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from plait.persistence import SQLiteStore, sqlite_file
from tests.support.plans.logged import make, wait_for_call
from tests.support.processes.command import PLAIT, environment, plait_here
from tests.support.processes.warm import Warm
from tests.support.stores.database import in_child

OPEN = """
import asyncio, os, signal, sys
from plait.persistence import SQLiteStore, sqlite_file
from plait import failpoints

def on_reach(name):
    if name == sys.argv[2]:
        os.kill(os.getpid(), signal.SIGKILL)

async def main():
    async with SQLiteStore(sys.argv[1]):
        pass

failpoints.on_reach = on_reach
asyncio.run(main())
"""


def names(path: Path) -> set[str]:
    return {one.name for one in path.parent.iterdir()}


@pytest.mark.parametrize("boundary", ["file.before_link", "schema.before_commit"])
async def test_half_made_files_are_removed_when_nobody_makes_them_any_more(path: Path, boundary: str) -> None:
    child = in_child(OPEN, str(path), boundary)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    left = names(path)
    assert left
    assert all(name.startswith(f".{path.name}.") for name in left)
    other = path.with_name(f".{path.name}.not-ours.new")
    other.touch()
    async with SQLiteStore(path):
        assert left < names(path), "somebody may be making it at this moment"
    long_ago = time.time() - 2 * 3600
    for one in path.parent.iterdir():
        os.utime(one, (long_ago, long_ago))
    async with SQLiteStore(path, mode="read"):
        assert left < names(path), "who only reads removes nothing"
    async with SQLiteStore(path, mode="existing"):
        assert not left & names(path)
    assert names(path) == {path.name, other.name}


STOPPED = """
import signal, sys, threading
from plait import failpoints
from plait.runner.cli import main

passed = []

def on_reach(name):
    if name == "txn.before_commit":
        passed.append(name)
        if len(passed) == 3:
            # Sent to the process, it would leave this thread time to commit until another one has taken it.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

failpoints.on_reach = on_reach
sys.argv[1:] = ["run", "plan.yaml", "-q"]
main()
"""


def test_an_owner_that_is_stopped_within_a_transaction_is_told_and_keeps_nothing_back(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: wait, backend: hold}\n", hold="hold")
    with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as first:
        wait_for_call(tmp_path, "wait")
        first.kill()
    (cut,) = plait_here(tmp_path, "runs", "--json").value
    (tmp_path / "go").touch()
    with subprocess.Popen([sys.executable, "-c", STOPPED], cwd=tmp_path, env=environment()) as owner:
        try:
            assert os.WIFSTOPPED(os.waitpid(owner.pid, os.WUNTRACED)[1])
            with mock.patch.object(sqlite_file, "BUSY_TIMEOUT_S", 0.1):
                refused = plait_here(tmp_path, "resume", cut["run_id"])
            assert (refused.code, refused.out, len(refused.err.splitlines())) == (3, "", 1)
            assert "database is locked; another process has been writing" in refused.err
            assert refused.err.endswith("try again\n")
            owner.send_signal(signal.SIGCONT)
            assert owner.wait(60) == 0
        finally:
            owner.kill()
    assert plait_here(tmp_path, "resume", cut["run_id"]).code == 0
    assert {run["status"] for run in plait_here(tmp_path, "runs", "--json").value} == {"completed"}
