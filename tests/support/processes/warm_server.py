"""Forks a process for every program that warm.py asks for; what plait needs is loaded here, once.

A request is a length, JSON, and four descriptors: standard input, output and error, and a pipe on which the pid is
told, and the exit status when the process has been waited for.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parents[3]
LOADED = (
    "plait.runner.cli.command_line",
    "plait.runner.cli.run_commands",
    "plait.runner.cli.steer_commands",
    "plait.runner.cli.live_display",
    "plait.runner.cli.show_commands",
    "tests.faults.crashtest.command",
    "plait.runner.cli.serve_commands",
    "plait.runner.serving.http_server",
    "tests.faults.crashtest.campaign",
    "plait.safe_text",
    "plait.runner.policies.step_workflow",
    "plait.runner.plan.plan_tasks",
    "anyio._backends._asyncio",
    "anyio._core._signals",
    "anyio.to_thread",
    "jsonschema_rs",
    "structlog",
    "uvicorn.protocols.http.h11_impl",
    "uvicorn.lifespan.on",
    "plait.backends.models.openai_api",
    "aiohttp",
)


class Server:
    """Serves until nobody can ask any more, and leaves no process behind."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._waking, self._waker = os.pipe()
        self._told: dict[int, int] = {}

    def serve(self) -> Mapping[str, Any] | None:
        """In a process that was forked, the request that it is for; None in ours, at the end."""
        for end in (self._waking, self._waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        while True:
            ready, _, _ = select.select([self._requests, self._waking], [], [])
            if self._waking in ready:
                os.read(self._waking, 4096)
                self._wait_for_the_dead()
            if self._requests not in ready:
                continue
            length, descriptors, _, _ = socket.recv_fds(self._requests, 4, 4)
            if not length:
                break
            request = json.loads(self._received(int.from_bytes(length)))
            if self._fork(descriptors):
                return request
        self._requests.close()
        for pid in self._told:
            os.kill(pid, signal.SIGKILL)
        return None

    def _received(self, length: int) -> bytes:
        text = b""
        while len(text) < length:
            text += self._requests.recv(length - len(text))
        return text

    def _fork(self, descriptors: list[int]) -> bool:
        """Whether this is the new process."""
        pid = os.fork()
        if pid:
            self._told[pid] = descriptors.pop()
            os.write(self._told[pid], b"%d\n" % pid)
            for one in descriptors:
                os.close(one)
            return False
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for standard, one in enumerate(descriptors[:3]):
            os.dup2(one, standard)
        for one in {*descriptors, *self._told.values(), self._waking, self._waker, self._requests.detach()} - {0, 1, 2}:
            os.close(one)
        return True

    def _wait_for_the_dead(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                told = self._told.pop(found[0])
                with contextlib.suppress(BrokenPipeError):
                    os.write(told, b"%d\n" % os.waitstatus_to_exitcode(found[1]))
                os.close(told)


def load(others: Sequence[str]) -> None:
    """Import all of it. Raises RuntimeError where that leaves a process that is not fit to fork."""
    for name in (*LOADED, *others):
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    if threading.active_count() > 1:
        raise RuntimeError(f"imports that start threads: {threading.enumerate()}")
    gc.collect()
    gc.freeze()


def become(request: Mapping[str, Any]) -> None:
    """Make of this process what a new interpreter would be, and run its program in it."""
    if request["new_session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    option, program, *arguments = request["words"]
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    others = [path for path in sys.path if path not in {*paths, str(ROOT)}]
    sys.path[:] = [str(Path.cwd()) if option == "-m" else "", *paths, *others]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        setattr(sys, name, standard(number, getattr(sys, name)))
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(compile(program, "<string>", "exec"), main.__dict__)


def run(request: Mapping[str, Any]) -> None:
    """Run the program of the request and exit as an interpreter does, but without taking the modules apart: that
    touches all the memory that was loaded here once, and takes longer than most commands.
    """
    code: object = None
    try:
        become(request)
    except SystemExit as ended:
        code = ended.code
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    gc.collect()  # what was not closed is told
    if not isinstance(code, int | None):
        sys.exit(str(code))
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(code)  # the interpreter reports it
    os._exit(code or 0)


def standard(number: int, before: TextIO) -> TextIO:
    """The stream of a descriptor that has become something else."""
    encoding, errors = before.encoding, before.errors
    if number == 0:
        return open(0, encoding=encoding, errors=errors, closefd=False)
    by_line = number == 2 or os.isatty(number)
    return open(number, "w", 1 if by_line else -1, encoding, errors, closefd=False)


if __name__ == "__main__":
    load(sys.argv[2:])
    if mine := Server(socket.socket(fileno=int(sys.argv[1]))).serve():
        run(mine)
