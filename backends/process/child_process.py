"""Follow the output of a running child, and end its process tree. `spawn.py` starts and adopts children."""

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

from plait.backends.process.child_manifest import ChildManifest
from plait.backends.process.lines import Lines
from plait.backends.process.process_table import Process, kill_tree, send_signal, signal_tree
from plait.backends.process.watchdog import WATCHDOG
from plait.errors import BackendError, ErrorKind

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL, for agents to end their tools."""
MOST_OUTPUT = 4 * 2**30
"""Bytes; a child with more output is ended before the disk is full."""
KILL_LIMIT = 5.0
"""Seconds; the kernel holds processes that live longer."""
_QUICK, _SLOW = 0.02, 1.0
"""Seconds between two reads of the output. A read may be late by a fifth of the silence before."""
_POLL = 0.3  # seconds between two checks for the end of a child, on a system without pidfd


@dataclass(eq=False)
class Child:
    """A running program and its files."""

    folder: Path
    manifest: ChildManifest
    ours: subprocess.Popen[bytes] | None
    """None for a child that another process started."""
    status: int | None = None
    """The exit status, negative for a signal; None before the stop, and for a child of another process."""
    skipped: int = 0
    """Lines left out because of their length."""
    is_gone: bool = False
    """Whether the child was stopped and no process of its tree is left."""
    _ended: anyio.Event = field(default_factory=anyio.Event, repr=False)
    _signalled: Sequence[Process] = ()
    """The processes with a SIGTERM; after the end of their parents, nothing else may lead to them."""

    async def follow(self, on_line: Callable[[bytes], bool], *, idle: float, until: float) -> None:
        """Hand on every line of the output, from the first, until the child has ended and all lines are read.

        Return earlier if `on_line` returns True: enough. Raise BackendError (timeout) after `idle` seconds without
        output, or at `until`, a time of `anyio.current_time`. Raise BackendError (invalid_output) for more output than
        MOST_OUTPUT. Cancellation does not touch the child.
        """
        failure: Exception | None = None
        async with self._watched():
            try:
                with (self.folder / "stdout").open("rb", buffering=0) as output:
                    await self._read(output, on_line, idle, until)
            except Exception as error:
                failure = error
        if failure is not None:  # raised here, outside the task group, to keep its type
            raise failure

    async def wait(self, seconds: float) -> None:
        """Wait until the child has ended, or `seconds` have passed."""
        with anyio.move_on_after(seconds):
            async with self._watched():
                await self._ended.wait()

    @asynccontextmanager
    async def _watched(self) -> AsyncGenerator[None]:
        """Watch for the end of the child within the context."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._watch)
            yield
            group.cancel_scope.cancel()

    async def _read(self, output: FileIO, on_line: Callable[[bytes], bool], idle: float, until: float) -> None:
        lines = Lines(output.read, on_line)
        latest, last = anyio.current_time(), None
        while True:
            # In this order: after its end, the child's own output is complete. The output of strays may never end.
            ended, now = self._ended.is_set(), anyio.current_time()
            size = os.fstat(output.fileno()).st_size
            if ended and last is None:
                last = size
            if size < lines.total:  # a process has emptied the file, as `> /dev/stdout` does
                output.seek(0)
                lines.restart()
            more = lines.total < (size if last is None else min(size, last))
            if more:
                latest = now
                lines.pump()
            elif ended:
                lines.flush()
            self.skipped = lines.skipped
            if lines.enough or (ended and not more):
                return
            self._check(size, now - latest, idle, now >= until)
            if more:
                await anyio.lowlevel.checkpoint()
            else:
                await self._nap(now - latest, min(latest + idle, until))

    async def _nap(self, silent: float, until: float) -> None:
        now, pause = anyio.current_time(), min(max(silent / 5, _QUICK), _SLOW)
        # All silent children are read at the same moments: a hundred children wake the loop once.
        awake = now + pause if pause < _SLOW else (now // _SLOW + 1) * _SLOW
        with anyio.move_on_after(min(awake, until) - now):
            await self._ended.wait()

    def _check(self, written: int, silent: float, idle: float, late: bool) -> None:
        with suppress(OSError):
            written += os.stat(f"{self.folder}/stderr").st_size  # noqa: PTH116 - called all the time
        if written > MOST_OUTPUT:
            raise BackendError(
                ErrorKind.INVALID_OUTPUT, f"more than {MOST_OUTPUT >> 30} GiB of output", continues_session=True
            )
        if late:
            raise BackendError(ErrorKind.TIMEOUT, "the turn took longer than its turn_timeout", continues_session=True)
        if silent >= idle:
            raise BackendError(ErrorKind.TIMEOUT, f"no output for {idle:g} s (idle_timeout)", continues_session=True)

    def tail(self, name: str, size: int = 2**16) -> str:
        """Return the last `size` bytes of the child's file `name`, as text."""
        with suppress(OSError), (self.folder / name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace")
        return ""

    def interrupt(self) -> None:
        """Send SIGINT to the child, not to the rest of its tree. Do nothing if the child has ended."""
        known = self.manifest
        if known.is_of_this_boot and known.started.isdecimal():
            with suppress(OSError):
                send_signal(Process(known.pid, False, 0, 0, int(known.started)), signal.SIGINT)

    async def stop(self) -> None:
        """End the child's process tree, and return when no process is left.

        Send SIGTERM, wait GRACE seconds, and send SIGKILL until the tree is empty. Reap the child last: until then the
        child keeps its number, and no other process can be hit. Cancellation by a scope does not shorten the stop;
        native cancellation kills at once; if this process is killed meanwhile, the watchdog kills the tree. Do nothing
        about a child of another boot.
        """
        if not self.manifest.is_of_this_boot:
            return
        try:
            with anyio.CancelScope(shield=True):
                if not self._has_ended():
                    with suppress(OSError):  # no process can be started
                        WATCHDOG.watch(self.manifest.tag)
                    self._terminate()
                    await self.wait(GRACE)
                # A thread outside the limit: the kill must not wait for the threads of other work.
                self.is_gone = await run_sync(self._kill, KILL_LIMIT, limiter=anyio.CapacityLimiter(1))
        except BaseException:
            self.kill_at_once()
            raise
        finally:
            self._reap()

    def kill_at_once(self) -> None:
        """Send SIGKILL to the tree without SIGTERM before, in this thread, for at most two seconds."""
        self.is_gone = self._kill(2.0)
        self._reap()

    def _terminate(self) -> None:
        with suppress(OSError):
            # SIGCONT, because a stopped process does not react to SIGTERM.
            self._signalled = signal_tree([self.manifest.tag], signal.SIGTERM, signal.SIGCONT)

    def _kill(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        try:
            is_gone = kill_tree([self.manifest.tag], seconds, self._signalled)[1]
        except OSError:  # no descriptor is left to read the table with: kill at least the child's group
            is_gone = False
            if self.ours is not None and self.ours.returncode is None:
                with suppress(OSError):
                    os.killpg(self.ours.pid, signal.SIGKILL)
        while not self._has_ended() and time.monotonic() < until:
            time.sleep(0.01)  # the table did not show the end
        return is_gone

    def _has_ended(self) -> bool:
        if self.ours is None:
            return not self.manifest.is_alive
        if self.ours.returncode is not None:
            return True
        try:
            # The child stays a zombie: its number must stay its own until the whole tree is gone.
            return os.waitid(os.P_PID, self.ours.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # other code of this process has reaped the child
            return True
        except AttributeError:  # macOS before Python 3.13
            return self.ours.poll() is not None

    def _reap(self) -> None:
        if self.ours is not None and self._has_ended():
            self.status = self.ours.wait()

    async def _watch(self) -> None:
        """Set `_ended` when the child has ended. A child of this process stays a zombie."""
        try:
            descriptor = os.pidfd_open(self.manifest.pid)
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
