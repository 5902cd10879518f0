"""A child that runs: its output followed, its tree ended. `process.py` starts and adopts them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.to_thread import run_sync

from plait.backends.errors import BackendError, ErrorKind
from plait.backends.process.lines import Lines
from plait.backends.process.manifest import Known
from plait.backends.process.proctable import Process, end, tell

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL: agents end their tools themselves meanwhile."""
MOST_OUTPUT = 4 * 2**30
"""Bytes that a child may write; then it is ended, before the disk is full."""
KILL_LIMIT = 5.0
"""Seconds; processes that are not gone by then hang in the kernel."""
_QUICK, _SLOW = 0.02, 1.0
"""Seconds between two looks at the output. A look may be late by a fifth of the silence before."""
_POLL = 0.3  # seconds between two looks for the end of a child where the system does not tell of it


@dataclass(eq=False)
class Child:
    """A running program and its files; `ours` is None for one that another process started."""

    folder: Path
    known: Known
    ours: subprocess.Popen[bytes] | None
    status: int | None = None
    """The exit status, negative for a signal; None until it was stopped, and for one that was not ours."""
    skipped: int = 0
    """Lines that were left out because they were too long."""
    is_gone: bool = False
    """Whether it was stopped and nothing of it is left."""
    _ended: anyio.Event = field(default_factory=anyio.Event, repr=False)
    _told: Sequence[Process] = ()
    """Who was asked to end: nothing else may tell of them once their parents have."""

    async def follow(self, on_line: Callable[[bytes], bool], *, idle: float, until: float) -> None:
        """Hand on every line of the output, from the first, until the child has ended and all is read, or `on_line`
        says True: enough. BackendError (timeout) after `idle` seconds without output, or when `until`, a time of
        `anyio.current_time`, has come; (invalid_output) for one that writes more than MOST_OUTPUT. Cancellation leaves
        the child as it is.
        """
        failure: Exception | None = None
        async with self._watched():
            try:
                with (self.folder / "stdout").open("rb", buffering=0) as output:
                    await self._read(output, on_line, idle, until)
            except Exception as error:
                failure = error
        if failure is not None:  # out here, where no task group wraps it
            raise failure

    async def wait(self, seconds: float) -> None:
        """Give it that long to end by itself."""
        with anyio.move_on_after(seconds):
            async with self._watched():
                await self._ended.wait()

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        """Somebody looks for its end."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            yield
            group.cancel_scope.cancel()

    async def _read(self, output: FileIO, on_line: Callable[[bytes], bool], idle: float, until: float) -> None:
        lines = Lines(output.read, on_line)
        heard, last = anyio.current_time(), None
        while True:
            # In this order: when it has ended, all that it wrote itself is there. What strays write may never end.
            ended, now = self._ended.is_set(), anyio.current_time()
            size = os.fstat(output.fileno()).st_size
            if ended and last is None:
                last = size
            if size < lines.total:  # somebody has emptied the file, as `> /dev/stdout` does
                output.seek(0)
                lines.restart()
            more = lines.total < (size if last is None else min(size, last))
            if more:
                heard = now
                lines.pump()
            elif ended:
                lines.flush()
            self.skipped = lines.skipped
            if lines.enough or (ended and not more):
                return
            self._check(size, now - heard, idle, now >= until)
            if more:
                await anyio.lowlevel.checkpoint()
            else:
                await self._nap(now - heard, min(heard + idle, until))

    async def _nap(self, silent: float, until: float) -> None:
        now, pause = anyio.current_time(), min(max(silent / 5, _QUICK), _SLOW)
        # All that are silent look at the same moments: a hundred of them wake the loop once.
        awake = now + pause if pause < _SLOW else (now // _SLOW + 1) * _SLOW
        with anyio.move_on_after(min(awake, until) - now):
            await self._ended.wait()

    def _check(self, written: int, silent: float, idle: float, late: bool) -> None:
        with suppress(OSError):
            written += os.stat(f"{self.folder}/stderr").st_size  # noqa: PTH116 - it is looked at all the time
        if written > MOST_OUTPUT:
            raise BackendError(ErrorKind.INVALID_OUTPUT, f"it wrote more than {MOST_OUTPUT >> 30} GiB", goes_on=True)
        if late:
            raise BackendError(ErrorKind.TIMEOUT, "the turn took longer than its turn_timeout", goes_on=True)
        if silent >= idle:
            raise BackendError(ErrorKind.TIMEOUT, f"no output for {idle:g} s (idle_timeout)", goes_on=True)

    def tail(self, name: str, size: int = 2**16) -> str:
        """The last `size` bytes of its file `name`, as text."""
        with suppress(OSError), (self.folder / name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace")
        return ""

    async def stop(self) -> None:
        """End the child, if it lives, and everything that it started; returns when all of it is gone: SIGTERM, GRACE
        seconds, SIGKILL to all that belong to the turn, until there is none. It is reaped last: until then its number
        is its own, so nothing else can be hit. No scope's cancellation shortens that; a native one has it kill at once.
        A child of another boot is nobody here, and nothing is touched.
        """
        if not self.known.is_of_this_boot:
            return
        try:
            with anyio.CancelScope(shield=True):
                if not self._has_ended():
                    self._ask_to_end()
                    await self.wait(GRACE)
                # A thread of its own: it must not have to wait until other work gives one back.
                self.is_gone = await run_sync(self._kill, KILL_LIMIT, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            self.kill_at_once()
            raise
        finally:
            self._reap()

    def kill_at_once(self) -> None:
        """The same without asking, and in this thread, for at most two seconds."""
        self.is_gone = self._kill(2.0)
        self._reap()

    def _ask_to_end(self) -> None:
        with suppress(OSError):
            self._told = tell([self.known.turn], signal.SIGTERM, signal.SIGCONT)  # one that is stopped hears nothing

    def _kill(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        try:
            is_gone = end([self.known.turn], seconds, self._told)[1]
        except OSError:  # no descriptor is left to look at processes with: at least what is surely its own
            is_gone = False
            if self.ours is not None and self.ours.returncode is None:
                with suppress(OSError):
                    os.killpg(self.ours.pid, signal.SIGKILL)
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(0.01)  # where nobody could see it die
        return is_gone

    def _has_ended(self) -> bool:
        if self.ours is None:
            return not self.known.is_alive
        if self.ours.returncode is not None:
            return True
        try:
            # It stays a zombie: until all of it is gone, its number must not become another's.
            return os.waitid(os.P_PID, self.ours.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # something else in this process has waited for it
            return True
        except AttributeError:  # macOS before Python 3.13
            return self.ours.poll() is not None

    def _reap(self) -> None:
        if self.ours is not None and self._has_ended():
            self.status = self.ours.wait()

    async def _watch(self) -> None:
        """Set `_ended` when the child has ended; it stays a zombie, if it is ours."""
        try:
            descriptor = os.pidfd_open(self.known.pid)
        except (OSError, AttributeError):
            descriptor = None
        try:
            while not self._has_ended():
                if descriptor is None:
                    await anyio.sleep(_POLL)
                else:
                    await anyio.wait_readable(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._ended.set()
