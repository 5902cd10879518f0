"""`HostConnection`: the connection of a run to one host, over the process of a command such as `ssh m3 plait host`.

    connecting -> connected -> away -> connecting -> ...        refused: another version, or another owner

A broken connection is made again and ends no attempt. Each attempt on the host reads a frame `lost`, and decides how
long to wait. Outside of any run, `ReachableHost` asks a host for its state.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from importlib.metadata import version
from typing import Any, Protocol, TypeAlias

import anyio
import anyio.abc

from plait.backends.backend_protocol import RunOnHosts
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import as_json, from_json, value
from plait.safe_text import one_line
from plait.usage import Usage

# Frames: the JSON objects, one a line, that a runner and a host process exchange. Values are written and read here.
#
#     runner -> host    probe                          how many attempts are at work; the answer is `state`
#                       hello                          the version, the run, the epoch, the room, the attempts to keep
#                       ask, go, cancel                an attempt asks for room and its folder, begins, is ended
#                       wind_down                      the run is being cancelled
#                       remove_files                   the run is over: its files are removed
#     host -> runner    ready, refused                 the answers to hello
#                       slot                           the answer to ask
#                       session, output, allowance     reports of an attempt under way
#                       reply, error, asked, ended     the end of an attempt
#
# Every frame has its name as `op`, and a frame about an attempt has `attempt`. Values have the form of `as_json`.
# Nothing but JSON crosses: no code, and no values of the environment.

Frame: TypeAlias = dict[str, Any]
_MAX_FOREIGN = 80
"""Characters of foreign output in a message."""
LONGEST = 2**30
"""Bytes of a frame. A longer one ends the connection."""
_ENCODER = json.JSONEncoder(separators=(",", ":"))


def frame_line(frame: Mapping[str, Any]) -> bytes:
    """Return `frame` as a line. Raise TypeError or ValueError for values that JSON cannot hold."""
    return _ENCODER.encode(frame).encode() + b"\n"


def read_frame(line: bytes | bytearray) -> Frame:
    """Return the frame in `line`. Raise ValueError if the line is no frame."""
    frame = json.loads(line.decode())  # from bytes, json would guess the encoding
    if not isinstance(frame, dict) or not isinstance(frame.get("op"), str):  # pyright: ignore[reportUnknownMemberType]
        raise ValueError("a line is no frame of plait")
    return frame  # pyright: ignore[reportUnknownVariableType]


def foreign_output(line: bytes) -> str:
    """Return the reason why a host that printed `line`, which is no frame, cannot be used."""
    text = one_line(line.decode("utf-8", "replace"))
    return f"the output is not that of plait: {text[:_MAX_FOREIGN]!r}; login scripts of the host must print nothing"


def error_json(error: BackendError) -> Frame:
    """Return the form of an error."""
    form: Frame = {"kind": ErrorKind(error.kind).value, "message": error.message}
    for name in ("retry_after", "continues_session", "traceback", "status"):
        if part := getattr(error, name):
            form[name] = part
    return {**form, "usage": as_json(error.usage), "messages": [as_json(message) for message in error.messages]}


def read_error(form: Mapping[str, Any]) -> BackendError:
    """Return the error. Raise ValueError, KeyError or TypeError for anything else."""
    parts = dict(form)
    status = parts.pop("status", None)
    parts["usage"] = from_json(Usage, parts["usage"])
    parts["messages"] = tuple(from_json(Message, one) for one in parts["messages"])
    error = BackendError(ErrorKind(parts.pop("kind")), parts.pop("message"), **parts)
    error.status = status
    return error


# The connection.

LOST: Frame = {"op": "lost"}
"""The frame that each attempt reads when the connection breaks."""
_RETRIES_S = (0.0, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds before the first, second, ... attempt to connect again; the last holds for all later ones."""
_ANSWER_S = 60.0
"""Seconds for a host to answer the first frame."""
END_S = 20.0
"""Seconds for a host to end an attempt: more than an agent has between SIGTERM and SIGKILL."""
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
    """The frames of one attempt, and its room on the host of `connection`, which is set before any frame arrives."""

    connection: HostConnection

    def __init__(
        self, name: str, on_report: Callable[[Frame], None], needs: Mapping[str, float], writes: Frame | None = None
    ) -> None:
        self.name = name
        """`task/attempt`."""
        self.needs = needs
        """The resources that the attempt takes."""
        self.writes = writes
        """The backend and the workspace, from which the host knows the folder in which no other may write meanwhile."""
        self._on_report = on_report
        self._frames: deque[Frame] = deque()
        self._arrived = anyio.Event()

    def put(self, frame: Frame) -> None:
        """Pass a report on at once, and keep any other frame for `next`."""
        if frame["op"] in {"session", "output", "allowance"}:
            self._on_report(frame)
        else:
            self._frames.append(frame)
            self._arrived.set()

    def clear(self) -> None:
        """Forget the frames of an earlier connection."""
        self._frames.clear()

    async def next(self) -> Frame:
        """Return the next frame that is no report."""
        while not self._frames:
            self._arrived = anyio.Event()
            await self._arrived.wait()
        return self._frames.popleft()

    def cancel(self) -> None:
        """Ask the host to end the attempt. A host that is away ends the attempt when connected again."""
        self.connection.send({"op": "cancel", "attempt": self.name})

    def release(self) -> None:
        """Free the room of the attempt."""
        self.connection.release(self)

    async def end(self) -> bool:
        """End the attempt on the host. Return whether the host has confirmed the end. Not cancelled from outside."""
        with anyio.move_on_after(END_S, shield=True):
            self.cancel()
            while self.connection.is_connected:
                if (await self.next())["op"] in {"ended", "reply", "error", "asked"}:
                    return True
        return False


class HostConnection:
    """The connection of a run to the host `name`, with its `resources` for attempts, which other runs may share.

    `connect` starts `plait host` there. It returns None to begin again, as with another address, and raises
    HostUnreachable. The room is that of the machine, or of `pool`, one of several on the machine.
    """

    def __init__(
        self,
        name: str,
        run: RunOnHosts,
        resources: Mapping[str, float],
        connect: Callable[[], Awaitable[Channel | None]],
        pool: str = "",
    ) -> None:
        self.name = name
        self.resources = resources
        self.busy_until = 0.0
        """The time, of the event loop, until which other runs are taken to have the room."""
        self._pool = pool
        self._connect = connect
        self._run = run
        self.attempts: dict[str, AttemptChannel] = {}
        """The attempts that this process has on the host, by name."""
        self.keeps = set(run.adopted.get(name, ()))
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

    def ask(self, attempt: AttemptChannel) -> None:
        """Ask the host for room for an attempt in `attempts`, and for the folder in which the attempt writes. The
        attempt reads a frame `slot` once there is room.
        """
        self.send({"op": "ask", "attempt": attempt.name, "needs": attempt.needs, "writes": attempt.writes})

    def send(self, frame: Frame) -> None:
        """Send a frame. Never waits. Frames for a host that is away are dropped: `hello` names the attempts to keep.

        Raise TypeError or ValueError for values that JSON cannot hold.
        """
        line = frame_line(frame)
        if self.is_connected:
            self._unsent += line
            self._to_send.set()

    def offers(self, needs: Mapping[str, float]) -> bool:
        """Return whether the host has the resources `needs`, taken or not."""
        return all(self.resources.get(name, 0) >= need for name, need in needs.items())

    def load(self, needs: Mapping[str, float]) -> float | None:
        """Return the largest part of a needed resource that attempts of this process take; None if there is no room for
        an attempt with `needs`, other runs are taken to have it, or the host is not connected.
        """
        if not self.is_connected or anyio.current_time() < self.busy_until:
            return None
        parts: list[float] = []
        for name, amount in needs.items():
            used = sum(attempt.needs.get(name, 0) for attempt in self.attempts.values())
            if used + amount > self.resources.get(name, 0):
                return None
            parts.append(used / self.resources[name])
        return max(parts)

    def release(self, attempt: AttemptChannel) -> None:
        """Give up the room of an attempt."""
        self.attempts.pop(attempt.name, None)
        self.keeps.discard(attempt.name)
        self.on_change()

    def close(self) -> None:
        """Disconnect for good. `run` returns soon."""
        self._closing.set()
        self._to_send.set()

    async def run(self) -> None:
        """Connect, and connect again, until `close`, or until the host refuses. Never raises."""
        async with anyio.create_task_group() as group:
            group.start_soon(self._end_when_closed, group.cancel_scope)
            while self.refusal is None and not self._closing.is_set():
                await anyio.sleep(_RETRIES_S[min(self.tries, len(_RETRIES_S) - 1)])
                try:
                    channel = await self._connect()
                except HostUnreachable as error:
                    self._lost(str(error))
                else:
                    if channel is not None:
                        await self._talk(channel)
            group.cancel_scope.cancel()

    async def _end_when_closed(self, waits: anyio.CancelScope) -> None:
        await self._closing.wait()
        if self.is_connected:
            await anyio.sleep(_LAST_S)  # `run` ends before, unless the host is silent
        waits.cancel()

    async def _talk(self, channel: Channel) -> None:
        """Exchange frames until the connection ends."""
        reason = ""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._write, channel)
                async with aclosing(_frames(channel)) as frames:
                    try:
                        reason = await self._read(frames, channel)
                    except HostUnreachable as error:
                        reason = str(error)
                self.is_connected = False
                group.cancel_scope.cancel()
        finally:
            await channel.close()
        self._lost(reason or channel.errors)

    async def _read(self, frames: AsyncGenerator[Frame], channel: Channel) -> str:
        """Read frames until the connection ends. Return the reason if the host did not accept; else an empty text."""
        ours, first = version("plait"), None
        with anyio.move_on_after(_ANSWER_S) as limit:
            hello: Frame = {
                "op": "hello",
                "version": ours,
                "key": self._run.key,
                "host": self.name,
                "epoch": self._run.epoch,
                "pool": self._pool,
                "resources": dict(self.resources),
                "keep": sorted(self.keeps),  # the host ends the other attempts of the run
            }
            await channel.send(frame_line(hello))
            first = await anext(frames, None)
        if limit.cancelled_caught:
            return f"no answer within {_ANSWER_S:g} s"
        if first is None:
            return ""
        if first["op"] != "ready":
            if first.get("why") in {"version", "fenced"}:
                self.refusal = str(first["why"])
            theirs = one_line(str(first.get("version")))
            self.reason = differs(theirs, ours) if self.refusal == "version" else one_line(str(first.get("message")))
            return self.reason
        self.is_connected = self.was_connected = True
        self.tries, self.away_since, self.reason = 0, None, ""
        self.on_change()
        async for frame in frames:
            attempt = self.attempts.get(str(frame.get("attempt")))
            if attempt is not None:
                attempt.put(frame)
        return ""

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
        """Send the waiting frames until the host no longer reads. At `close`, end the input of the process."""
        while True:
            data, self._unsent = bytes(self._unsent), bytearray()
            if data and not await channel.send(data):
                return
            if self._closing.is_set() and not self._to_send.is_set():
                await channel.end_input()
                return
            await self._to_send.wait()
            self._to_send = anyio.Event()


def differs(theirs: str, ours: str) -> str:
    """Return the reason why a host with another version of plait cannot be used."""
    return f"plait {theirs} is installed there, and {ours} here; install the same version"


async def _frames(channel: Channel) -> AsyncGenerator[Frame]:
    """Yield the frames in the output of a process until its end. Raise HostUnreachable if the output is not that of a
    host: a login script prints, or another program.
    """
    pending = bytearray()
    while True:
        try:
            data = await channel.receive()
        except anyio.EndOfStream:
            return
        pending += data
        if b"\n" in data:
            *lines, pending = pending.split(b"\n")
            for line in lines:
                try:
                    frame = read_frame(line)
                except ValueError:
                    raise HostUnreachable(foreign_output(bytes(line))) from None
                yield frame
        elif len(pending) > LONGEST:
            return


async def open_process(command: Sequence[str]) -> Channel:
    """Start a command of this machine, such as ssh. Raise HostUnreachable if it cannot be started. A cancellation waits
    for the start: asyncio would leave the pipes of a process half started open, and nobody would wait for its end.
    """
    process: anyio.abc.Process | None = None
    read, write = os.pipe()
    try:
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(command, stderr=write, start_new_session=True)
    except BaseException as error:
        os.close(read)
        if isinstance(error, OSError):
            raise HostUnreachable(f"cannot start {command[0]}: {error.strerror}") from None
        raise
    finally:
        os.close(write)
    assert process is not None
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


# Hosts outside of any run, for `plait doctor --hosts`. Each has a connection of its own: no attempt begins or ends, and
# no fence is taken.


_PROBE_S = 30.0
"""Seconds for a host to answer a probe."""


@value
class HostState:
    """The state of a host."""

    name: str
    slots: int
    at_work: int | None = None
    """The attempts under way on the host, of all runs; None if the host does not answer."""
    version: str | None = None
    """The version of plait there; None if the host does not answer."""
    problem: str | None = None
    """Why no attempt can be placed on the host; None if attempts can."""


@value
class ReachableHost:
    """A host."""

    name: str
    slots: int
    """The number of attempts at once."""
    open: Callable[[Sequence[str]], Awaitable[Channel]]
    """Starts `plait` with these words there. Raises HostUnreachable."""

    async def run(self, words: Sequence[str], data: bytes = b"") -> tuple[bytes, Channel]:
        """Run `plait` with `words` there, with `data` as standard input. Return all of standard output, and the closed
        channel, which has the exit code. Raises HostUnreachable.
        """
        channel = await self.open(words)
        output = bytearray()
        try:
            if data:
                await channel.send(data)
            await channel.end_input()
            with suppress(anyio.EndOfStream):
                while True:
                    output += await channel.receive()
        finally:
            await channel.close()
        return bytes(output), channel

    async def probe(self) -> HostState:
        """Return the state of the host."""
        try:
            with anyio.fail_after(_PROBE_S):
                output, ended = await self.run(("host",), frame_line({"op": "probe"}))
        except TimeoutError:
            return HostState(self.name, self.slots, problem=f"away: no answer within {_PROBE_S:g} s")
        except HostUnreachable as error:
            return HostState(self.name, self.slots, problem=f"away: {error}")
        first = output.partition(b"\n")[0]
        try:
            frame = read_frame(first)
            if frame["op"] == "refused":
                return HostState(self.name, self.slots, problem=one_line(str(frame["message"])))
            theirs, at_work = str(frame["version"]), int(frame["at_work"])
        except (KeyError, TypeError, ValueError):
            why = foreign_output(first) if first else ended.errors or f"plait host exited with {ended.code}"
            return HostState(self.name, self.slots, problem=f"away: {why}")
        ours = version("plait")
        return HostState(self.name, self.slots, at_work, theirs, None if theirs == ours else differs(theirs, ours))
