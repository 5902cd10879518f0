"""The runner's side of a relay: the standard output of a process of plait on the machine of a worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import anyio

from plait.safe_text import one_line

CLOSE_S = 2.0
"""Seconds for the process to exit once its input has ended, and for the connection to close."""


class Comm(Protocol):
    """The parts of a connection of Dask that are used, which has no types. Methods raise OSError once it is broken."""

    async def read(self) -> Mapping[str, Any]:
        """Return the next message."""
        ...

    async def write(self, msg: Mapping[str, Any]) -> object:
        """Send a message."""
        ...

    async def close(self) -> None:
        """Send what waits, and close."""
        ...

    def abort(self) -> None:
        """Close at once."""
        ...


async def close(comm: Comm) -> None:
    """Close a connection. Not cancelled from outside."""
    with anyio.move_on_after(CLOSE_S, shield=True), suppress(OSError):
        await comm.close()
    comm.abort()


class RemoteOutput:
    """The standard output behind `comm`. `on_held` gets the attempts that have room."""

    def __init__(self, comm: Comm, on_held: Callable[[str], None] = lambda _: None) -> None:
        self._comm = comm
        self._on_held = on_held
        self.errors = ""
        """The last line of standard error, once the process has ended."""
        self.code: int | None = None
        """The exit code, once the process has ended; None if the connection broke before."""

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
                self._on_held(message["held"])
            else:
                self.code = message["exit"]
                self.errors = one_line(message["stderr"].strip().rpartition("\n")[2])
        raise anyio.EndOfStream
