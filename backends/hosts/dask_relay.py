"""The part of plait that runs in a Dask worker: a process of plait on the worker's machine, and the room for attempts.

    runner -> worker    data     for the standard input of the process; empty for its end
                        free     attempts that need no room any longer
    worker -> runner    data     from the standard output of the process
                        held     an attempt that has room
                        exit     the exit code, and the end of standard error; the last message

A relay ends with its connection, and its process with the relay. The process is no part of the worker: code of users
does not run in the worker, and a worker that is killed ends no agent.

The room for an attempt is a Dask task, `hold`, which takes the resources of the attempt and does nothing. A `hold` that
Dask begins again, or that the runner no longer wants, holds nothing and ends.
"""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import anyio
import anyio.abc
import distributed
from distributed.core import Status
from distributed.worker_state_machine import SecedeEvent

from plait.backends.hosts.dask_remote import Comm
from plait.backends.hosts.host_connection import end_process

HANDLER = "plait"
"""The operation of the worker that opens a relay."""
_STDERR = 2000
"""Bytes of standard error that are kept."""
_relays: dict[tuple[str, str], _Relay] = {}
"""The relays by the address of the worker and the token of the runner."""


def prepare(dask_worker: Any) -> str:
    """Make the worker open relays. Return the address on which the worker listens."""

    async def relay(comm: Comm, words: Sequence[str], token: str) -> Status:
        await _serve(dask_worker.address, comm, words, token)
        return Status.dont_reply

    dask_worker.handlers[HANDLER] = relay
    return str(dask_worker.listen_address)


async def hold(token: str, attempt: str, key: str) -> None:
    """Take the resources of an attempt until the runner frees them. Returns at once without the connection."""
    worker = cast("Any", distributed).get_worker()
    relay = _relays.get((worker.address, token))
    if relay is not None:
        # The resources alone limit the attempts, and not the threads of the worker.
        worker.handle_stimulus(SecedeEvent(stimulus_id=f"plait-{key}", key=key, compute_duration=0.0))
        await relay.hold(attempt)


async def _serve(address: str, comm: Comm, words: Sequence[str], token: str) -> None:
    """Run `plait` with `words` on the machine of the worker, until the process or the connection ends."""
    command = [sys.executable, "-m", "plait", *words]
    process = await anyio.open_process(command, stderr=subprocess.PIPE, start_new_session=True)
    relay = _relays[address, token] = _Relay(comm, process)
    try:
        await relay.run()
    finally:
        del _relays[address, token]


class _Relay:
    def __init__(self, comm: Comm, process: anyio.abc.Process) -> None:
        self._comm = comm
        self._process = process
        self._unsent: deque[dict[str, Any]] = deque()
        self._to_send = anyio.Event()
        self._held: dict[str, anyio.Event] = {}

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
            for event in self._held.values():
                event.set()
            with anyio.CancelScope(shield=True):
                await end_process(self._process)

    async def hold(self, attempt: str) -> None:
        """Report that an attempt has room, and wait until the attempt needs none."""
        if attempt in self._held:
            self._held[attempt].set()
        event = self._held[attempt] = anyio.Event()
        self._queue({"held": attempt})
        try:
            await event.wait()
        finally:  # also if Dask cancels the task
            if self._held.get(attempt) is event:
                del self._held[attempt]

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
        assert self._process.stdin is not None
        with suppress(OSError):
            while True:
                message = await self._comm.read()
                for attempt in message.get("free", ()):
                    if attempt in self._held:
                        self._held[attempt].set()
                data = message.get("data")
                if data:
                    with suppress(anyio.BrokenResourceError):
                        await self._process.stdin.send(data)
                elif data is not None:
                    await self._process.stdin.aclose()
        relay.cancel()

    async def _read_process(self) -> None:
        errors = bytearray()
        async with anyio.create_task_group() as group:
            group.start_soon(self._read_errors, errors)
            await self._read_output()
        code = await self._process.wait()
        self._queue({"exit": code, "stderr": errors.decode("utf-8", "replace")})

    async def _read_output(self) -> None:
        assert self._process.stdout is not None
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                data = await self._process.stdout.receive()
                if self._unsent and "data" in self._unsent[-1]:
                    self._unsent[-1]["data"] += data
                else:
                    self._queue({"data": data})

    async def _read_errors(self, errors: bytearray) -> None:
        assert self._process.stderr is not None
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                errors += await self._process.stderr.receive()
                del errors[:-_STDERR]
