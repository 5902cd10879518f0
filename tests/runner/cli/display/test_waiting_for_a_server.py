"""A command whose run has ended while its store, a server, is away."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from tests.support.processes.command import environment

PLAN = 'backends: {w: {kind: function, call: "work.py:work"}}\ntasks: [{id: a, prompt: hello}]\n'
WORK = "async def work(prompt):\n    return prompt\n"


def test_ctrl_c_ends_the_wait_and_the_loss_is_said(tmp_path: Path) -> None:
    """The run has completed, so the exit code is 0."""
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK)
    command = [sys.executable, "-m", "tests.support.processes.away_at_the_end", "plan.yaml"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            waits = next(line for line in lines if "waiting up to 5m00s" in line)
            assert "Ctrl-C ends the wait" in waits
            process.send_signal(signal.SIGINT)
            out, said = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out) == (0, "hello\n")
    assert "changes not stored: the server is away" in said
