"""A child that runs: its output followed, its tree ended. `process.py` starts and adopts them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.lowlevel
from anyio.to_thread import run_sync

from .errors import BackendError, ErrorKind
from .guard import GUARD
from .lines import Lines
from .proctable import HAS_PROC, boot_id, kill_members, members, send, start_time
from .values import value

GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL: agents end their tools themselves meanwhile."""
MOST_OUTPUT = 4 * 2**30
"""Bytes that a child may write; then it is ended, before the disk is full."""
_SWEEP_LIMIT = 5.0  # seconds; processes that cannot be killed hang in the kernel
_QUICK, _SLOW = 0.02, 0.3  # seconds between two looks at the output of a child that writes, and of one that is silent


@value
class Known:
    """Who a child is. `pid` is 0 while it is being started; `note` is what its starter wanted to know later."""

    marker: str
    boot: str
    pid: int
    started: str
    note: Mapping[str, str]

    @property
    def is_of_this_boot(self) -> bool:
        """Whether its numbers mean anything on this machine, since it was started."""
        return self.boot == boot_id()

    @property
    def leader(self) -> int | None:
        """The child's number, if the child still lives; no other process is taken for it."""
        if not (self.pid and self.is_of_this_boot and start_time(self.pid) == self.started):
            return None
        return self.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child lives, also when it was killed who started it before its number was written down."""
        if self.pid or not self.is_of_this_boot or not HAS_PROC:
            return self.leader is not None
        return bool(members(self.marker, None))


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
    _ended: anyio.Event = field(default_factory=anyio.Event, repr=False)

    async def follow(self, on_line: Callable[[bytes], bool], *, idle: float, until: float) -> None:
        """Hand on every line of the output, from the first, until the child has ended and all is read, or `on_line`
        says True: enough. BackendError (timeout) after `idle` seconds without output, or when `until`, a time of
        `anyio.current_time`, has come; (invalid_output) for one that writes more than MOST_OUTPUT. Cancellation leaves
        the child as it is.
        """
        failure: BackendError | None = None
        async with self._watched():
            try:
                with (self.folder / "stdout").open("rb", buffering=0) as output:
                    await self._read(Lines(output.read, on_line), idle, until)
            except BackendError as error:
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

    async def _read(self, lines: Lines, idle: float, until: float) -> None:
        heard, wait = anyio.current_time(), _QUICK
        while True:
            had_ended = self._ended.is_set()
            read = lines.pump()
            self.skipped = lines.skipped
            if had_ended and not read:
                lines.flush()
                return
            if lines.enough:
                return
            now = anyio.current_time()
            if read:
                heard, wait = now, _QUICK
            _check(lines.total, now - heard, idle, now >= until)
            if read:
                await anyio.lowlevel.checkpoint()
                continue
            with anyio.move_on_after(min(wait, until - now, heard + idle - now)):
                await self._ended.wait()
            wait = min(wait * 1.5, _SLOW)

    def tail(self, name: str, size: int = 2**16) -> str:
        """The last `size` bytes of its file `name`, as text."""
        with suppress(OSError), (self.folder / name).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - size))
            return file.read(size).decode("utf-8", "replace")
        return ""

    async def stop(self, grace: float = GRACE) -> None:
        """End the child, if it lives, and everything that it started; returns when all of it is gone: SIGTERM, `grace`
        seconds, SIGKILL to all that belong to the turn, until there is none. It is reaped last: until then its number
        is its own, so nothing else can be hit. No scope's cancellation shortens that; a native one has it kill at once.
        """
        try:
            with anyio.CancelScope(shield=True):
                if not self._has_ended():
                    self._ask_to_end()
                    await self.wait(grace)
                await self._kill_all()
        except BaseException:
            self._kill_at_once()
            raise
        finally:
            self._reap()

    def _ask_to_end(self) -> None:
        if not HAS_PROC:
            with suppress(OSError):
                os.killpg(self.known.pid, signal.SIGTERM)
            return
        for process in members(self.known.marker, self._leader()):
            send(process, signal.SIGTERM)

    async def _kill_all(self) -> None:
        with anyio.move_on_after(_SWEEP_LIMIT):
            while await run_sync(kill_members, self.known.marker, self._leader()):  # noqa: ASYNC110 - no one tells
                await anyio.sleep(0.005)

    def _kill_at_once(self) -> None:
        deadline = time.monotonic() + 0.5
        while kill_members(self.known.marker, self._leader()) and time.monotonic() < deadline:
            time.sleep(0.005)

    def _leader(self) -> int | None:
        """Its number while that cannot have become another's: it is ours and not reaped, or still lives."""
        return self.known.pid if self.ours is not None else self.known.leader

    def _has_ended(self) -> bool:
        if self.ours is None:
            return not self.known.is_alive
        return start_time(self.ours.pid) is None if HAS_PROC else self.ours.poll() is not None

    def _reap(self) -> None:
        if self.ours is not None and self._has_ended():
            self.status = self.ours.wait()
        GUARD.forget(self.known.marker)

    async def _watch(self) -> None:
        """Set `_ended` when the child has ended; it stays a zombie, if it is ours."""
        try:
            descriptor = os.pidfd_open(self.known.pid)
        except (OSError, AttributeError):
            descriptor = None
        try:
            while not self._has_ended():
                if descriptor is None:
                    await anyio.sleep(_SLOW)
                else:
                    await anyio.wait_readable(descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        self._ended.set()


def _check(written: int, silent: float, idle: float, late: bool) -> None:
    if written > MOST_OUTPUT:
        raise BackendError(ErrorKind.INVALID_OUTPUT, f"it wrote more than {MOST_OUTPUT >> 30} GiB", goes_on=True)
    if late:
        raise BackendError(ErrorKind.TIMEOUT, "the turn took longer than its turn_timeout", goes_on=True)
    if silent >= idle:
        raise BackendError(ErrorKind.TIMEOUT, f"no output for {idle:g} s (idle_timeout)", goes_on=True)
