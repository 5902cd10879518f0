"""MCP servers of a plan's agent: started for a conversation, and ended with it, whole process trees included.

The library starts a command with an environment of few variables and ends it in an orderly way: its input is closed,
then it is asked to end, then it is killed. Each command is also marked, as the children of coding agents are, so that
whatever it started ends as well: on leaving, cancellation included, and by the watchdog if this process is killed.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from importlib import import_module
from os import environ
from pathlib import Path
from typing import Any

from anyio import CancelScope
from anyio.to_thread import run_sync

from plait.backends.frameworks.pydantic_ai_declared import McpServer
from plait.backends.frameworks.pydantic_ai_failures import safe_line
from plait.backends.process.child_process import KILL_LIMIT, child_environment
from plait.backends.process.process_table import PREFIX, ProcessTag, kill_tree, members, offer_to_oom_killer
from plait.backends.process.watchdog import WATCHDOG, scratch
from plait.errors import BackendError, BackendUnavailable, ErrorKind

START_LIMIT = 30.0
"""Seconds for starting a server, or connecting to it, up to its first answer."""


@asynccontextmanager
async def running(servers: Sequence[McpServer]) -> AsyncGenerator[Sequence[Any]]:
    """Start the servers, and yield their toolsets. Leaving ends the servers.

    Raises BackendUnavailable if a command does not start, and BackendError (transient) if a URL does not answer.
    """
    if not servers:
        yield ()
        return
    await run_sync(_load, abandon_on_cancel=True)
    with scratch() as folder:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(_running(server, folder)) for server in servers]


def _load() -> None:
    import_module("pydantic_ai.mcp")  # takes seconds


@asynccontextmanager
async def _running(server: McpServer, folder: Path) -> AsyncGenerator[Any]:
    if server.url is not None:
        async with _entered(server, _remote(server, server.url)) as toolset:
            yield toolset
        return
    tag, log = ProcessTag(secrets.token_hex(8)), folder / f"{server.name}.log"
    with suppress(OSError):  # no watchdog can be started; the server then ends when its input does
        WATCHDOG.watch(tag)
    try:
        async with _entered(server, _local(server, tag, log), log) as toolset:
            await run_sync(_offer_to_oom_killer, tag)
            yield toolset
    finally:
        with CancelScope(shield=True):
            await run_sync(kill_tree, (tag,), KILL_LIMIT)
        WATCHDOG.unwatch(tag.marker)


def _offer_to_oom_killer(tag: ProcessTag) -> None:
    """Let the kernel kill the server's processes before this process when memory runs out."""
    with suppress(OSError):
        for process in members((tag,)):
            offer_to_oom_killer(process.pid)


@asynccontextmanager
async def _entered(server: McpServer, toolset: Any, log: Path | None = None) -> AsyncGenerator[Any]:
    try:
        await toolset.__aenter__()
    except Exception as error:
        raise await run_sync(_not_started, server, error, log) from error
    try:
        yield toolset.prefixed(server.name)
    finally:
        # The server may be gone by now, and the connection broken.
        with CancelScope(shield=True), suppress(Exception):
            await toolset.__aexit__(None, None, None)


def _local(server: McpServer, tag: ProcessTag, log: Path) -> Any:
    from fastmcp.client.transports import StdioTransport  # noqa: PLC0415
    from pydantic_ai.mcp import MCPToolset  # noqa: PLC0415

    environment = {**child_environment(server.pass_env), PREFIX + tag.marker: "1"}
    transport = StdioTransport(
        server.program, list(server.command[1:]), environment, str(server.cwd), keep_alive=False, log_file=log
    )
    return MCPToolset(transport, id=server.name, init_timeout=START_LIMIT)


def _remote(server: McpServer, url: str) -> Any:
    from pydantic_ai.mcp import MCPToolset  # noqa: PLC0415

    token = environ.get(server.api_key_env or "")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    return MCPToolset(url, id=server.name, headers=headers, init_timeout=START_LIMIT)


def _not_started(server: McpServer, error: Exception, log: Path | None) -> Exception:
    reason = safe_line(str(error) or type(error).__name__)
    if log is None:
        return BackendError(
            ErrorKind.TRANSIENT, f"MCP server {server.name!r} at {server.url} does not answer: {reason}"
        )
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((safe_line(line) for line in reversed(lines) if line.strip()), "")
    said = f"; its last line: {last}" if last else ""
    return BackendUnavailable(f"MCP server {server.name!r} ({server.command[0]}) did not start: {reason}{said}")
