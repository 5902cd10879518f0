"""The fork server: fork children and wait for the end of each child, with a time limit.

Forking is only sound in a process without threads, and SQLite connections do not survive a fork. Therefore the parent
has no thread, no event loop and no open database, and imports the modules of the children before the first fork.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from typing import Literal

from tests.faults.crashtest.child import ProcessStart, be_child

HANG_SECONDS, HANG_SECONDS_A_TASK = 20.0, 0.05
"""The time limit of a child: a fixed part and a part per task, where a task of a fake backend takes milliseconds. On a
machine whose cores have to be shared, as many times as long.
"""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child."""

    pid: int
    how: Literal["exit", "killed", "hung", "error"]
    """"exit": exit code 0. "killed": ended by a signal. "hung": killed after the time limit. "error": other codes."""
    forked_at: float
    """The time of the fork, in monotonic seconds."""


class ForkedProcess:
    """A process under test."""

    def __init__(self, start: ProcessStart) -> None:
        # The child holds the other end of a pipe until death, so that `wait` needs no busy loop.
        self._alive, writing = os.pipe()
        self._status: int | None = None
        shared = max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
        self._limit = shared * (HANG_SECONDS + HANG_SECONDS_A_TASK * len(start.case.dag))
        self.forked_at = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._alive)
            be_child(start)
        os.close(writing)

    def wait(self) -> Ended:
        """Wait for the end of the child, and return the end. Kill the child after the time limit or an interrupt."""
        try:
            over, _, _ = select.select([self._alive], [], [], self._limit)
        except BaseException:  # interrupted: no other process would end the child
            os.kill(self.pid, signal.SIGKILL)
            raise
        if not over:
            os.kill(self.pid, signal.SIGKILL)
        status = os.waitpid(self.pid, 0)[1] if self._status is None else self._status
        self._status = status
        os.close(self._alive)
        if not over:
            return Ended(self.pid, "hung", self.forked_at)
        if os.WIFSIGNALED(status):
            return Ended(self.pid, "killed", self.forked_at)
        return Ended(self.pid, "exit" if os.WEXITSTATUS(status) == 0 else "error", self.forked_at)

    def wait_until_stopped(self) -> bool:
        """Wait until the child is stopped by SIGSTOP. Return False if the child ended or the time limit passed."""
        ends = time.monotonic() + self._limit
        while time.monotonic() < ends:
            found, status = os.waitpid(self.pid, os.WUNTRACED | os.WNOHANG)
            if found and os.WIFSTOPPED(status):
                return True
            if found:
                self._status = status
                return False
            time.sleep(0.0005)
        return False

    def end(self) -> None:
        """Kill the child unless the child has ended. A stopped process would stay for ever otherwise."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wake(self) -> None:
        """Continue the stopped child."""
        os.kill(self.pid, signal.SIGCONT)


def get_ready() -> None:
    """Prepare this process for forking: import modules and collect garbage. Raises RuntimeError if threads exist."""
    if threading.active_count() > 1:
        raise RuntimeError("crash tests fork, and this process has threads already; run them in a process of their own")
    for name in ("aiosqlite", "anyio._backends._asyncio", "anyio.to_thread", "jsonschema_rs"):
        with contextlib.suppress(ImportError):  # only saves the import in the children
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
