"""`Descendants`: the processes that a trial leaves behind, found and killed.

A test starts agents that are to outlive their parent, in sessions of their own. The test ends them, unless a mutant
lets the test fail beforehand. The worker becomes the parent of every orphan below it (Linux: a subreaper), so the
children of the worker are all that a trial can leave.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36


class Descendants:
    """The children that this process gets after the object was made, and theirs."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._before = set(psutil.Process().children())

    def reap(self, trial: int) -> None:
        """Wait for the orphans that have ended, as init would: tests look whether a process is gone. The fork of the
        trial itself is left to the caller.
        """
        with suppress(ChildProcessError):
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid == trial:
                    return
                os.waitpid(ended.si_pid, 0)

    def kill(self) -> None:
        """Kill all of them. A killed process leaves its own children to this process, for the next round."""
        while left := set(psutil.Process().children()) - self._before:
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            for process in left:
                with suppress(ChildProcessError):
                    os.waitpid(process.pid, 0)
