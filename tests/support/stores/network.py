"""A network in front of a server's socket that can be cut: connections stay open, and nothing passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from urllib.parse import parse_qs, urlsplit


class Network:
    """Forwards TCP connections to the server at `dsn`."""

    def __init__(self, dsn: str) -> None:
        self._server = urlsplit(dsn)
        self._passes = asyncio.Event()
        self._passes.set()
        self.dsn = ""

    def cut(self) -> None:
        """Let nothing pass from now on."""
        self._passes.clear()

    def heal(self) -> None:
        """Let everything pass again, also what was sent in the meantime."""
        self._passes.set()

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection until one side closes it."""
        if (folder := parse_qs(self._server.query).get("host")) is not None:
            there, to_server = await asyncio.open_unix_connection(f"{folder[0]}/.s.PGSQL.5432")
        else:
            there, to_server = await asyncio.open_connection(self._server.hostname, self._server.port or 5432)
        ways = [asyncio.create_task(self._forward(*way)) for way in ((reader, to_server), (there, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            writer.close()
            to_server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65_536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()


@asynccontextmanager
async def network(dsn: str) -> AsyncGenerator[Network]:
    """Yield a network in front of the server at `dsn`."""
    found = Network(dsn)
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        with suppress(asyncio.CancelledError):
            await found.handle(reader, writer)
        handlers.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found.dsn = f"postgresql://postgres@127.0.0.1:{port}{urlsplit(dsn).path}"
    try:
        yield found
    finally:
        server.close()
        for task in tuple(handlers):
            task.cancel()
        if handlers:
            await asyncio.wait(handlers)
        await server.wait_closed()
