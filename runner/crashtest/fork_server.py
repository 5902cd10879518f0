"""The fork server: one child at a time, awaited with a time limit.

Forking is safe only in a process without threads, and SQLite connections do not survive a fork. The parent therefore
has no threads, no event loop and no open database, and imports all modules needed by children before the first fork.
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

from plait.runner.crashtest.child import Start, be_child

HANG_SECONDS, HANG_SECONDS_A_TASK = 20.0, 0.05
"""Time limit of a child, base and addition per task, in seconds. Tasks of a fake backend take milliseconds."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a child."""

    pid: int
    how: Literal["exit", "killed", "hung", "error"]
    forked_at: float
    """The time of the fork, in monotonic seconds."""


class Child:
    """A process under test."""

    def __init__(self, start: Start) -> None:
        # The child holds the other end of a pipe until its death, so the parent can wait without a busy loop.
        self._alive, writing = os.pipe()
        self._status: int | None = None
        self._limit = HANG_SECONDS + HANG_SECONDS_A_TASK * len(start.case.dag)
        self.forked_at = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._alive)
            be_child(start)
        os.close(writing)

    def wait(self) -> Ended:
        """Wait for the end of the child and return it. A hanging child is killed."""
        try:
            over, _, _ = select.select([self._alive], [], [], self._limit)
        except BaseException:  # kill the child before leaving: no other code would
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
        """Wait until the child is stopped by a signal. Return False if the child ended instead or takes too long."""
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
        """Kill the child unless it has ended. A stopped child would otherwise stay forever."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wake(self) -> None:
        """Resume the stopped child."""
        os.kill(self.pid, signal.SIGCONT)


def get_ready() -> None:
    """Prepare this process for forking. Raises RuntimeError in a process with threads."""
    if threading.active_count() > 1:
        raise RuntimeError("crash tests fork, and this process has threads already; run them in a process of their own")
    for name in ("aiosqlite", "anyio._backends._asyncio", "anyio.to_thread", "jsonschema"):
        with contextlib.suppress(ImportError):  # saves the children the import
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
