"""Processes that tests fork from one that has loaded everything are like those of an interpreter of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.command import environment
from tests.support.processes.warm import Warm

CODE = """
import asyncio, json, os, signal, sys, threading


def is_open(descriptor):
    try:
        return bool(os.fstat(descriptor))
    except OSError:
        return False


state = {
    "arguments": sys.argv,
    "path": sys.path[:2],
    "folder": os.getcwd(),
    "environment": {name: value for name, value in os.environ.items() if name != "LC_CTYPE"},
    "heard": sys.stdin.read(),
    "streams": [
        (one.fileno(), one.isatty(), one.encoding, one.errors, one.line_buffering, one.write_through)
        for one in (sys.stdin, sys.stdout, sys.stderr)
    ],
    "open": [one for one in range(3, 100) if is_open(one)],
    "signals": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
    "threads": threading.active_count(),
    "session": os.getsid(0) == os.getpid(),
    "main": __name__,
}
print(json.dumps(state))
sys.exit(7)
"""


@pytest.mark.parametrize("own_session", [True, False])
def test_what_a_program_sees_is_the_same(tmp_path: Path, own_session: bool) -> None:
    command = [sys.executable, "-W", "error", "-c", CODE, "one", "two words"]
    variables = {name: value for name, value in environment(MINE="ä").items() if name != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": variables, "start_new_session": own_session}
    with Warm(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options) as process:
        warm = process.communicate("ü\n", timeout=60)[0]
    cold = subprocess.run(command, input="ü\n", capture_output=True, text=True, check=False, **options)
    assert cold.returncode == process.returncode == 7, cold.stderr
    assert json.loads(warm) == json.loads(cold.stdout)
