"""The part of plait that runs in a Dask worker: a process of plait on the worker's machine, and the room for attempts.

    runner -> worker    data     for the standard input of the process; empty for its end
                        free     attempts that need no room any longer
    worker -> runner    data     from the standard output of the process
                        held     an attempt that has room
                        exit     the exit code, and the last line of standard error; the last message

A relay ends with its connection, and its process with the relay. The process is no part of the worker: code of users
does not run in the worker, and a worker that is killed ends no agent.

The room for an attempt is a Dask task, `hold`, which takes the resources of the attempt and does nothing. A `hold` that
Dask begins again, or that the runner no longer wants, holds nothing and ends.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

import anyio

from plait.backends.hosts.host_connection import Channel, open_process

CLOSE_S = 2.0
"""Seconds for the process to exit once its input has ended, and for the connection to close."""


Comm: TypeAlias = Any
"""A connection of Dask, which has no types. Its methods raise OSError once it is broken."""


class RemoteProcess:
    """The runner's side of a relay; implements Channel. `on_room` gets the attempts that have room."""

    def __init__(self, comm: Comm, on_room: Callable[[str], None] = lambda _: None) -> None:
        self._comm = comm
        self._on_room = on_room
        self.code: int | None = None
        self.errors = "the connection to the worker broke"

    async def receive(self) -> bytes:
        """Return the next part of the output. Raise EndOfStream at the end."""
        while self.code is None:
            try:
                message = await self._comm.read()
            except OSError:
                break
            if "data" in message:
                data: bytes = message["data"]
                return data
            if "held" in message:
                self._on_room(message["held"])
            else:
                self.code = message["exit"]
                self.errors = message["errors"]
        raise anyio.EndOfStream

    async def send(self, data: bytes) -> bool:
        return await self.write({"data": data})

    async def end_input(self) -> None:
        await self.write({"data": b""})

    async def write(self, message: Mapping[str, Any]) -> bool:
        """Send a message. Return False if the connection is broken."""
        try:
            await self._comm.write(message)
        except OSError:
            return False
        return True

    async def close(self) -> None:
        with anyio.move_on_after(CLOSE_S, shield=True), suppress(OSError):
            await self._comm.close()
        self._comm.abort()


HANDLER = "plait"
"""The operation of the worker that opens a relay."""
_relays: dict[tuple[str, str], _Relay] = {}
"""The relays by the address of the worker and the token of the runner."""


def prepare(dask_worker: Any) -> str:
    """Make the worker open relays. Return the address on which the worker listens."""

    async def relay(comm: Comm, words: Sequence[str], token: str) -> Any:
        await _serve(dask_worker.address, comm, words, token)
        return import_module("distributed.core").Status.dont_reply

    dask_worker.handlers[HANDLER] = relay
    return str(dask_worker.listen_address)


async def hold(token: str, attempt: str, key: str) -> None:
    """Take the resources of an attempt until the runner frees them. Returns at once without the connection."""
    worker = import_module("distributed").get_worker()
    relay = _relays.get((worker.address, token))
    if relay is not None:
        # The resources alone limit the attempts, and not the threads of the worker.
        secede = import_module("distributed.worker_state_machine").SecedeEvent
        worker.handle_stimulus(secede(stimulus_id=f"plait-{key}", key=key, compute_duration=0.0))
        await relay.hold(attempt)


async def _serve(address: str, comm: Comm, words: Sequence[str], token: str) -> None:
    """Run `plait` with `words` on the machine of the worker, until the process or the connection ends."""
    command = [sys.executable, "-m", "plait", *words]
    relay = _relays[address, token] = _Relay(comm, await open_process(command))
    try:
        await relay.run()
    finally:
        del _relays[address, token]


class _Relay:
    def __init__(self, comm: Comm, process: Channel) -> None:
        self._comm = comm
        self._process = process
        self._unsent: deque[dict[str, Any]] = deque()
        self._to_send = anyio.Event()
        self._holds: dict[str, anyio.Event] = {}

    async def run(self) -> None:
        """Pass on messages until the process or the connection ends."""
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._read_comm, group.cancel_scope)
                group.start_soon(self._read_process)
                await self._send()
                await self._comm.close()
                group.cancel_scope.cancel()
        finally:
            for event in self._holds.values():
                event.set()
            await self._process.close()

    async def hold(self, attempt: str) -> None:
        """Report that an attempt has room, and wait until the attempt needs none."""
        if attempt in self._holds:
            self._holds[attempt].set()
        event = self._holds[attempt] = anyio.Event()
        self._queue({"held": attempt})
        try:
            await event.wait()
        finally:  # also if Dask cancels the task
            if self._holds.get(attempt) is event:
                del self._holds[attempt]

    def _queue(self, message: dict[str, Any]) -> None:
        self._unsent.append(message)
        self._to_send.set()

    async def _send(self) -> None:
        """Send messages until the last one is sent."""
        while True:
            await self._to_send.wait()
            self._to_send = anyio.Event()
            while self._unsent:
                message = self._unsent.popleft()
                with suppress(OSError):  # `_read_comm` ends the relay
                    await self._comm.write(message)
                if "exit" in message:
                    return

    async def _read_comm(self, relay: anyio.CancelScope) -> None:
        """Serve the runner. Cancel the relay at the end of the connection."""
        with suppress(OSError):
            while True:
                message = await self._comm.read()
                for attempt in message.get("free", ()):
                    if attempt in self._holds:
                        self._holds[attempt].set()
                data = message.get("data")
                if data:
                    await self._process.send(data)
                elif data is not None:
                    await self._process.end_input()
        relay.cancel()

    async def _read_process(self) -> None:
        with suppress(anyio.EndOfStream):
            while True:
                data = await self._process.receive()
                if self._unsent and "data" in self._unsent[-1]:
                    self._unsent[-1]["data"] += data
                else:
                    self._queue({"data": data})
        await self._process.close()
        self._queue({"exit": self._process.code, "errors": self._process.errors})
