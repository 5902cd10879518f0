"""Children by fork, as many as a race needs, from a process that has no threads and no database open."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio


@dataclass(frozen=True, slots=True)
class Gate:
    """A pipe that many wait at. Whoever waits reads; when the writing end is closed, all go at the same moment."""

    reading: int
    writing: int

    @classmethod
    def shut(cls) -> Gate:
        return cls(*os.pipe())

    def open(self) -> None:
        os.close(self.writing)

    def wait(self) -> None:
        os.read(self.reading, 1)

    async def passed(self) -> None:
        """The same for any number of an event loop's tasks, which must not all wait for one descriptor."""
        while not select.select([self.reading], [], [], 0)[0]:  # noqa: ASYNC110 - the event is another process's
            await anyio.sleep(0.005)


class Child:
    """A forked process that runs `function(say)`; `say` sends a line to us. What it returns is its last line."""

    def __init__(self, function: Callable[[Callable[[str], None]], str], gates: Iterable[Gate] = ()) -> None:
        self._pipe, writing = os.pipe()
        self._lines = b""
        self.pid = os.fork()
        if self.pid:
            os.close(writing)
            return
        code = 1
        try:
            os.close(self._pipe)
            for gate in gates:
                os.close(gate.writing)  # or the gate would not open as long as we live

            def say(text: str) -> None:
                os.write(writing, json.dumps(text).encode() + b"\n")

            say(function(say))
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(code)

    def line(self, deadline: float) -> str | None:
        """The next line; None when it ended, or when `deadline` (monotonic) has come, without one."""
        while b"\n" not in self._lines:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._pipe], [], [], left)[0]:
                return None
            data = os.read(self._pipe, 65536)
            if not data:
                return None
            self._lines += data
        line, _, self._lines = self._lines.partition(b"\n")
        text: str = json.loads(line)
        return text

    def wait(self) -> int:
        """Wait for its end; its exit code, negative for a signal."""
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def end(self) -> None:
        """Have it gone, if it is not."""
        self.signal(signal.SIGKILL)  # a dead child that was not waited for takes it
        self.wait()

    def wait_until_stopped(self) -> bool:
        """Wait until it stopped itself; False if it ended instead."""
        return os.WIFSTOPPED(os.waitpid(self.pid, os.WUNTRACED)[1])

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def lines_of(children: Iterable[Child], enough: int, deadline: float) -> dict[Child, str]:
    """The next line of `enough` of the children, whichever come first; of fewer at `deadline` (monotonic)."""
    waiting: list[Child] = list(children)
    lines: dict[Child, str] = {}
    while len(lines) < enough and waiting and time.monotonic() < deadline:
        for child in waiting:
            line = child.line(time.monotonic() + 0.005)
            if line is not None:
                lines[child] = line
        waiting = [child for child in waiting if child not in lines]
    return lines
