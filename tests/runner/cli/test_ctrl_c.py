"""A second Ctrl-C or SIGTERM: what becomes of the agents that were at work."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from plait.runner.cli.command_line import CANCELLED
from tests.support.agents.homes import Home
from tests.support.processes.command import environment, plait

pytestmark = pytest.mark.slow

_LIMIT = 60.0  # seconds
PATIENT = """
from plait.backends.process import child_process
child_process.GRACE = 600.0
from plait.runner.cli import main
main()
"""
"""The command, which gives an agent so long to end that the second signal comes first on any machine."""
SEIZE = """
import pathlib
import anyio

async def seize(prompt):
    while not pathlib.Path(prompt).exists():  # the agent's first answer
        await anyio.sleep(0.01)
    pathlib.Path("seized").touch()
    if not pathlib.Path("go").exists():
        sum(range(10**13))  # holds the interpreter: no handler in Python runs
    return "done"
"""


def within(true: Callable[[], object]) -> bool:
    ends = time.monotonic() + _LIMIT
    while not true():
        if time.monotonic() > ends:
            return False
        time.sleep(0.01)
    return True


def started(home: Home, folder: Path, *words: str, seizes: bool = False, **options: str) -> subprocess.Popen[bytes]:
    """`plait run`, with an agent at work that ends at SIGKILL only, or with the file `go`."""
    coder = {"kind": "claude-code", "command": str(home.path / "claude"), "cwd": str(folder), **options}
    backends = {"coder": coder, "function": {"kind": "function", "call": "functions.py:seize"}}
    prompt = f"Work. [[deaf]] [[immortal]] [[until {folder}/go]]"
    tasks = [{"id": "a", "prompt": prompt, "backend": "coder"}]
    if seizes:
        tasks.append({"id": "b", "prompt": f"{home.path}/begun.jsonl", "backend": "function"})
    (folder / "functions.py").write_text(SEIZE)
    (folder / "plan.yaml").write_text(yaml.safe_dump({"backends": backends, "tasks": tasks}))
    argv = [sys.executable, "-W", "error", "-c", PATIENT, "run", "plan.yaml", *words]
    process = subprocess.Popen(argv, cwd=folder, env=environment(HOME=str(home.path)), stderr=subprocess.DEVNULL)
    assert within((folder / "seized").exists if seizes else lambda: home.begun == 1)
    return process


def is_default(pid: int, number: int) -> bool:
    """Whether the first signal was delivered, so that the system ends the process at the next one."""
    status = Path(f"/proc/{pid}/status").read_text()
    return not int(re.findall(r"SigCgt:\s*(\w+)", status)[0], 16) >> (number - 1) & 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", [(), ("--no-store",)])
def test_agents_that_were_being_ended_are_gone(
    home: Home, tmp_path: Path, number: signal.Signals, words: tuple[str, ...]
) -> None:
    """The second signal comes while the agent has been asked to end, and has not."""
    with started(home, tmp_path, *words) as process:
        process.send_signal(number)
        assert within(lambda: home.noted("terminated"))
        assert home.processes
        process.send_signal(number)
        assert process.wait(_LIMIT) == -number
    assert within(lambda: not home.processes)


def end_while_seized(process: subprocess.Popen[bytes]) -> None:
    """Two signals, of which the process can act on none."""
    with process:
        process.send_signal(signal.SIGINT)
        assert within(lambda: is_default(process.pid, signal.SIGINT))
        process.send_signal(signal.SIGINT)
        assert process.wait(_LIMIT) == -signal.SIGINT


@pytest.mark.parametrize(("words", "options"), [(("--no-store",), {}), ((), {"on_runner_death": "kill"})])
def test_agents_that_die_with_their_runner_are_gone(
    home: Home, tmp_path: Path, words: tuple[str, ...], options: dict[str, str]
) -> None:
    end_while_seized(started(home, tmp_path, *words, seizes=True, **options))
    assert within(lambda: not home.processes)


def test_agents_that_outlive_their_runner_are_followed_by_the_resume(home: Home, tmp_path: Path) -> None:
    """The process could ask no agent to end: as at a kill."""
    end_while_seized(started(home, tmp_path, seizes=True))
    assert len(home.processes) == 1
    (tmp_path / "go").touch()
    assert plait(tmp_path, "resume", "--json", HOME=str(home.path)).code == 0
    assert len(home.calls) == 1
    assert home.processes == []


AT_ONCE = """
import sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "plait.runner.cli.command_line":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupted())
from plait.runner.cli import main
main()
"""


def test_ctrl_c_while_the_command_is_loaded_prints_no_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", AT_ONCE], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (CANCELLED, "", "")
