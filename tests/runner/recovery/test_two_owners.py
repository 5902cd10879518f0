"""Several real processes that want the same run, and what the command says when it lost one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait.events import Owner, RunClaimed
from plait.persistence import Batch, SQLiteStore
from plait.runner.engine.lease import Liveness, claim_for_this_process, liveness, unregister
from tests.faults.campaigns import two
from tests.support.plans import logged as plans
from tests.support.processes.command import PLAIT, environment
from tests.support.processes.warm import Warm

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="judges processes through procfs")


@linux
@pytest.mark.parametrize("kind", two.ROUNDS["quick"])
def test_a_run_has_one_owner_and_records_no_other(kind: two.Kind) -> None:
    wrong = [line for facts in two.play(kind, range(two.ROUNDS["quick"][kind])) for line in two.judged(kind, facts)]
    assert wrong == []


def test_the_command_says_with_its_exit_code_that_another_took_the_run(tmp_path: Path) -> None:
    plans.make(
        tmp_path, "  - {id: a, prompt: a}\n  - {id: b, prompt: b, backend: wait, depends_on: [a]}\n", wait="wait"
    )
    command = [*PLAIT, "run", "plan.yaml", "--store", "runs.db"]
    process = Warm(command, cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    try:
        plans.wait_for_call(tmp_path, "b")  # so everything before is stored, and the file is not locked
        process.send_signal(signal.SIGSTOP)
        anyio.run(claim_last, tmp_path / "runs.db")
        (tmp_path / "go").touch()
        process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 5, said
    assert "taken over by another process" in said


async def claim_last(path: Path) -> None:
    """Make a process on another host the owner of the last run."""
    async with SQLiteStore(path, mode="existing") as store:
        (run,) = await store.list_runs(1)
        owner = Owner("somebody-else", "another host", "another boot", 1, "1", run.created_at)
        await store.write(Batch(run.run_id, run.epoch, run.last_seq + 1, (RunClaimed(run.created_at, owner, 0.0),)))


@contextmanager
def owned_by_child() -> Generator[tuple[Owner, subprocess.Popen[bytes]]]:
    """A claim of a live child of ours."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    stat = Path(f"/proc/{child.pid}/stat").read_text()

    ours = claim_for_this_process("2026-01-01T00:00:00.000Z")
    unregister(ours)
    with child:
        yield replace(ours, pid=child.pid, process_started=stat.rpartition(")")[2].split()[19]), child
        child.kill()


@linux
def test_an_owner_is_judged_by_its_process() -> None:
    with owned_by_child() as (owner, child):
        assert liveness(owner) is Liveness.ALIVE
        assert liveness(replace(owner, process_started="1")) is Liveness.DEAD, "its pid was given to another process"
        assert liveness(replace(owner, boot_id="another")) is Liveness.DEAD
        assert liveness(replace(owner, host="another", pid=4_190_000)) is Liveness.UNKNOWN
        assert liveness(replace(owner, boot_id="", process_started="")) is Liveness.ALIVE, "nothing speaks against it"
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED)
        assert liveness(owner) is Liveness.ALIVE, "a process that is stopped may wake up"
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert liveness(owner) is Liveness.DEAD, "though nobody has waited for it yet"
        child.wait()
        assert liveness(owner) is Liveness.DEAD
