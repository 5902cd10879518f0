"""The fork server: one child at a time, waited for with a limit.

Forking is only sound in a process without threads, and SQLite's connections do not survive it: so the parent has no
thread, no event loop and no open database, and imports all that children need before the first of them.
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
"""A child that takes longer than this hangs: a task of a stand-in takes milliseconds."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended, and when it was forked (monotonic seconds)."""

    pid: int
    how: Literal["exit", "killed", "hung", "error"]
    forked_at: float


class Child:
    """A process under test."""

    def __init__(self, start: Start) -> None:
        # The child holds the other end of a pipe until it dies: its end can be waited for without a busy loop.
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
        """Its end; it is ended by force when it hangs."""
        try:
            over, _, _ = select.select([self._alive], [], [], self._limit)
        except BaseException:  # we are told to leave, and nobody else would look after it
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
        """Wait until it stands still; False when it ended instead, or takes too long."""
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
        """End it by force, unless it has ended: a process that stands still would stay for ever."""
        if self._status is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wake(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)


def get_ready() -> None:
    """Make this process fit to fork from. Raises RuntimeError when it has threads."""
    if threading.active_count() > 1:
        raise RuntimeError("crash tests fork, and this process has threads already; run them in a process of their own")
    for name in ("aiosqlite", "anyio._backends._asyncio", "anyio.to_thread", "jsonschema"):
        with contextlib.suppress(ImportError):  # only so that the children need not
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
