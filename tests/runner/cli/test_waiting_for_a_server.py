"""A command whose run has ended while its store, a server, is away."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import PIPE

from tests.support.processes.away_at_the_end import FAILED
from tests.support.processes.command import environment, plait_here
from tests.support.processes.warm import Warm

PLAN = 'backends: {w: {kind: function, call: "work.py:work"}}\ntasks: [{id: a, prompt: hello}]\n'
WORK = "async def work(prompt):\n    open('away', 'w').close()\n    return prompt\n"


@contextmanager
def waiting(folder: Path, *words: str) -> Generator[tuple[Warm, str, Iterator[str]]]:
    """The command while its run waits at the end, the line that says so, and the lines that follow."""
    command = [sys.executable, "-m", "tests.support.processes.away_at_the_end", *words]
    with Warm(command, cwd=folder, env=environment(), stdout=PIPE, stderr=PIPE) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            yield process, next(line for line in lines if "waiting up to 5m00s" in line), lines
        finally:
            process.kill()


def write_plan(folder: Path) -> None:
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "work.py").write_text(WORK)


def test_ctrl_c_ends_the_wait_and_the_loss_is_said(tmp_path: Path) -> None:
    """The tasks have completed, but not in the store."""
    write_plan(tmp_path)
    with waiting(tmp_path, "run", "plan.yaml") as (process, line, _):
        assert "Ctrl-C ends the wait" in line
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (3, "hello\n")
    assert "changes not stored: the server is away" in said


def test_a_worker_that_is_stopped_stores_the_run_first(tmp_path: Path) -> None:
    write_plan(tmp_path)
    assert plait_here(tmp_path, "run", "plan.yaml", "--queue").code == 0
    with waiting(tmp_path, "worker") as (process, line, lines):
        assert "a second signal ends the wait" in line
        process.send_signal(signal.SIGTERM)
        assert any(line.startswith("stopping, and storing the state") for line in lines)
        assert [next(lines).strip() for _ in range(2)] == [FAILED, FAILED]
        (tmp_path / "away").unlink()
        _, said = process.communicate(timeout=60)
    assert (process.returncode, "not stored" in said) == (0, False), said
    assert plait_here(tmp_path, "show", "last", "--json").value["status"] == "completed"
