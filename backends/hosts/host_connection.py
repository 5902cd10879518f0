"""`HostConnection`: the connection of a run to one host, over the process of a command such as `ssh m3 plait host`.

    connecting -> connected -> away -> connecting -> ...        refused: another version, or another owner

A broken connection is made again and ends no attempt. Each attempt on the host reads a frame `lost`, and decides how
long to wait.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import anyio
import anyio.abc

from plait.backends.hosts.host_frames import LONGEST, Frame, foreign_output, frame_line, read_frame
from plait.safe_text import one_line

LOST: Frame = {"op": "lost"}
"""The frame that each attempt reads when the connection breaks."""
_RETRIES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before the first, second, ... attempt to connect again; the last holds for all later ones."""
_ANSWER_S = 60.0
"""Seconds for a host to answer the first frame."""
_LAST_S = 5.0
"""Seconds for a host to read the last frames and exit, once `close` is called."""
_CLOSE_S = 2.0
"""Seconds for the process of the connection to exit once its input has ended."""
_STDERR = 2000
"""Bytes of standard error that are kept for the reason."""


class HostUnreachable(Exception):  # noqa: N818 - reads as what it is
    """A host, or the way to all hosts, cannot be used. The message has the reason."""


class Channel(Protocol):
    """The standard input and output of a process of plait on a host, whatever the way to the host."""

    code: int | None
    """The exit code, once the channel is closed; None if the connection broke before the end of the process."""
    errors: str
    """The last line of standard error, or how the process ended, once the channel is closed."""

    async def receive(self) -> bytes:
        """Return the next part of the output. Raise EndOfStream at the end."""
        ...

    async def send(self, data: bytes) -> bool:
        """Send data. Return False if the process no longer reads."""
        ...

    async def end_input(self) -> None:
        """End the input of the process."""
        ...

    async def close(self) -> None:
        """End the process, or the connection to it. Not cancelled from outside."""
        ...


class AttemptChannel:
    """The frames of one attempt on a host."""

    def __init__(self, name: str, on_report: Callable[[Frame], None], needs: Mapping[str, float]) -> None:
        self.name = name
        """`task/attempt`."""
        self.needs = needs
        """The resources that the attempt takes, where hosts have resources in place of slots."""
        self._on_report = on_report
        self._frames: deque[Frame] = deque()
        self._waiting: asyncio.Future[None] | None = None

    def put(self, frame: Frame) -> None:
        """Pass a report on at once, and keep any other frame for `next`."""
        if frame["op"] in {"session", "output", "allowance"}:
            self._on_report(frame)
        else:
            self._frames.append(frame)
            if self._waiting is not None and not self._waiting.done():  # a cancelled future is done
                self._waiting.set_result(None)

    def clear(self) -> None:
        """Forget the frames of an earlier connection."""
        self._frames.clear()

    async def next(self) -> Frame:
        """Return the next frame that is no report."""
        while not self._frames:
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        return self._frames.popleft()


class HostConnection:
    """The connection to the host `name`. `hello` returns the first frame of each connection."""

    def __init__(self, name: str, slots: int, command: Sequence[str], hello: Callable[[], Frame]) -> None:
        self.name = name
        self.slots = slots
        self._command = command
        self._hello = hello
        self.attempts: dict[str, AttemptChannel] = {}
        """The attempts that this process has on the host, by name."""
        self.kept: set[str] = set()
        """The attempts that the host is to keep when it is connected again."""
        self.is_connected = False
        self.was_connected = False
        """Whether the host has accepted a connection of this process."""
        self.tries = 0
        """The number of attempts to connect that have failed since the last connection."""
        self.away_since: float | None = None
        """The Unix time at which the host was found to be away; None while it is connected or was never asked."""
        self.reason = ""
        """Why the host is away, or why it refused."""
        self.refusal: str | None = None
        """Why the host will never accept this process, "version" or "fenced"; None if it may."""
        self.on_change: Callable[[], None] = lambda: None
        self._unsent = bytearray()
        self._to_send = anyio.Event()
        self._closing = anyio.Event()

    def send(self, frame: Frame) -> None:
        """Send a frame. Never waits. Frames for a host that is away are dropped: `hello` names the attempts to keep.

        Raise TypeError or ValueError for values that JSON cannot hold.
        """
        line = frame_line(frame)
        if self.is_connected:
            self._unsent += line
            self._to_send.set()

    def load(self, needs: Mapping[str, float]) -> float | None:  # noqa: ARG002 - for hosts with resources
        """Return the part of the host that attempts of this process take, from 0 to 1; None if there is no room for an
        attempt with `needs`, or the host is not connected.
        """
        used = len(self.attempts) / self.slots
        return used if self.is_connected and used < 1 else None

    def ask(self, attempt: AttemptChannel) -> None:
        """Ask the host for room for an attempt in `attempts`, which reads a frame `slot` once there is room."""
        self.send({"op": "ask", "attempt": attempt.name})

    def release(self, attempt: AttemptChannel) -> None:
        """Give up the room of an attempt."""
        self.attempts.pop(attempt.name, None)
        self.kept.discard(attempt.name)
        self.on_change()

    def close(self) -> None:
        """Disconnect for good. `run` returns soon."""
        self._closing.set()

    async def run(self) -> None:
        """Connect, and connect again, until `close`, or until the host refuses. Never raises."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_when_closed, group.cancel_scope)
            while self.refusal is None and not self._closing.is_set():
                await anyio.sleep(_RETRIES_S[min(self.tries, len(_RETRIES_S) - 1)])
                await self._connect()
            group.cancel_scope.cancel()

    async def _end_when_closed(self, waits: anyio.CancelScope) -> None:
        await self._closing.wait()
        if self.is_connected:
            await anyio.sleep(_LAST_S)  # `run` ends before, unless the host is silent
        waits.cancel()

    async def _connect(self) -> None:
        try:
            channel = await open_process(self._command)
        except HostUnreachable as error:
            self._lost(str(error))
        else:
            await self._talk(channel)

    async def _talk(self, channel: Channel) -> None:
        """Exchange frames until the connection ends."""
        reason = ""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write, channel)
                reason = await self._read(FrameReader(channel.receive), channel.send)
                group.cancel_scope.cancel()
        finally:
            await channel.close()
        self._lost(reason or channel.errors)

    async def _read(self, frames: FrameReader, send: Callable[[bytes], Awaitable[object]]) -> str:
        """Read frames until the connection ends. Return the reason if the host did not accept; else an empty text."""
        first = None
        with anyio.move_on_after(_ANSWER_S) as limit:
            await send(frame_line(self._hello()))
            first = await frames.next()
        if limit.cancelled_caught:
            return f"no answer within {_ANSWER_S:g} s"
        if first is None:
            return frames.problem
        if first["op"] != "ready":
            return self._refused(first)
        self._accepted()
        while (frame := await frames.next()) is not None:
            attempt = self.attempts.get(str(frame.get("attempt")))
            if attempt is not None:
                attempt.put(frame)
        self.is_connected = False
        return frames.problem

    def _accepted(self) -> None:
        self.is_connected = self.was_connected = True
        self.tries, self.away_since, self.reason = 0, None, ""
        self.on_change()

    def _refused(self, answer: Frame) -> str:
        """Note a refusal that will last. Return the reason."""
        self.reason = one_line(str(answer.get("message")))
        if answer.get("why") == "version":
            ours, theirs = self._hello()["version"], one_line(str(answer.get("version")))
            self.reason = f"plait {theirs} is installed there, and {ours} here; install the same version"
        if answer.get("why") in {"version", "fenced"}:
            self.refusal = str(answer["why"])
        return self.reason

    def _lost(self, reason: str) -> None:
        self.is_connected = False
        self._unsent.clear()
        self.reason = reason
        self.tries += 1
        if self.away_since is None:
            self.away_since = time.time()
        for attempt in list(self.attempts.values()):
            attempt.put(LOST)
        self.on_change()

    async def _write(self, channel: Channel) -> None:
        """Send the waiting frames, and end the input of the process at `close`."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._wake_at_close)
            while await self._send_waiting(channel):
                if self._closing.is_set() and not self._to_send.is_set():
                    await channel.end_input()
                    break
                await self._to_send.wait()
                self._to_send = anyio.Event()
            group.cancel_scope.cancel()

    async def _wake_at_close(self) -> None:
        await self._closing.wait()
        self._to_send.set()

    async def _send_waiting(self, channel: Channel) -> bool:
        """Send what waits. Return False if the host no longer reads."""
        data, self._unsent = bytes(self._unsent), bytearray()
        return not data or await channel.send(data)


class FrameReader:
    """Reads frames from the output of a process. `receive` returns a part of the output, as in `ByteReceiveStream`."""

    def __init__(self, receive: Callable[[], Awaitable[bytes]]) -> None:
        self._receive = receive
        self._pending = bytearray()
        self._frames: deque[Frame] = deque()
        self.problem = ""
        """Why the output is not that of a host, if it is not: a login script prints, or another program."""

    async def next(self) -> Frame | None:
        """Return the next frame; None at the end, and if the output is not that of a host."""
        while not self._frames:
            try:
                data = await self._receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                return None
            self._pending += data
            if b"\n" in data:
                *lines, rest = self._pending.split(b"\n")
                self._pending = rest
                for line in lines:
                    try:
                        self._frames.append(read_frame(line))
                    except ValueError:
                        self.problem = foreign_output(bytes(line))
                        return None
            elif len(self._pending) > LONGEST:
                return None
        return self._frames.popleft()


async def open_process(command: Sequence[str]) -> Channel:
    """Start a command of this machine, such as ssh. Raise HostUnreachable if it cannot be started."""
    read, write = os.pipe()
    try:
        process = await anyio.open_process(command, stderr=write, start_new_session=True)
    except BaseException as error:
        os.close(read)
        if isinstance(error, OSError):
            raise HostUnreachable(f"cannot start {command[0]}: {error.strerror}") from None
        raise
    finally:
        os.close(write)
    return _ProcessChannel(process, read, command[0])


class _ProcessChannel:
    """Implements Channel."""

    def __init__(self, process: anyio.abc.Process, stderr: int, name: str) -> None:
        self._process = process
        self._name = name
        self._stderr: int | None = stderr
        self._tail = bytearray()
        self.code: int | None = None
        self.errors = ""
        os.set_blocking(stderr, False)
        asyncio.get_running_loop().add_reader(stderr, self._read_errors)

    async def receive(self) -> bytes:
        assert self._process.stdout is not None
        try:
            return await self._process.stdout.receive()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise anyio.EndOfStream from None

    async def send(self, data: bytes) -> bool:
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(data)
        except (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    async def end_input(self) -> None:
        assert self._process.stdin is not None
        with suppress(OSError, anyio.BrokenResourceError):
            await self._process.stdin.aclose()

    async def close(self) -> None:
        """End the input, wait for the exit, and kill the process group if the process does not exit."""
        process = self._process
        with anyio.CancelScope(shield=True):
            await self.end_input()
            with anyio.move_on_after(_CLOSE_S):
                await process.wait()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
            if process.stdout is not None:
                await process.stdout.aclose()
        self.code = process.returncode
        if self._stderr is not None:
            self._read_errors()
            asyncio.get_running_loop().remove_reader(self._stderr)
            os.close(self._stderr)
            self._stderr = None
        last = self._tail.decode("utf-8", "replace").strip().rpartition("\n")[2]
        self.errors = one_line(last) or f"{self._name} exited with {self.code}"

    def _read_errors(self) -> None:
        """Keep the end of what the process has written to standard error, so that it is never blocked."""
        assert self._stderr is not None
        with suppress(BlockingIOError):
            while data := os.read(self._stderr, 2**16):
                self._tail += data
                del self._tail[:-_STDERR]
            asyncio.get_running_loop().remove_reader(self._stderr)
