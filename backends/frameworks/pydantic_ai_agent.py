"""An agent of pydantic-ai as a backend: any model of the library, tools, and MCP servers, without a coding agent."""

from __future__ import annotations

import secrets
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from os import environ
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from anyio import CancelScope
from anyio.to_thread import run_sync

from plait.backends.extras import require
from plait.backends.frameworks.pydantic_ai_turn import AgentConversation, failure_of, masked_line
from plait.backends.prices import Billing
from plait.backends.process.child_process import KILL_LIMIT, child_environment
from plait.backends.process.process_table import PREFIX, ProcessTag, kill_tree, members, offer_to_oom_killer
from plait.backends.process.watchdog import WATCHDOG, scratch
from plait.backends.running_turn import end_of_turn
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from plait.json_form import value

if TYPE_CHECKING:
    from pydantic_ai.agent import AbstractAgent

    from plait.backends.backend_protocol import Conversation, ConversationRequest, DetachedTurn, Files


class PydanticAIBackend:
    """Runs a pydantic-ai `agent` as a conversation: each prompt is one run of the agent, on the history so far.

    `deps` is passed to every run. The reply's `text` is the agent's output; another type than text becomes `data`, and
    `text` its JSON. With an output schema, an agent whose output is text gets it as output type, any other keeps its
    own; the value has to fit the schema, and one repair turn is made.

    If the store keeps files, an interrupted turn goes on from the last finished step: only the tools of that step are
    called twice. Otherwise the history is the stored text, and an interrupted turn starts over.

    plait retries: the model's SDK does not, where pydantic-ai can switch that off (not for Bedrock and Mistral).
    Cancellation ends the request and the MCP servers of the conversation; when the run is being cancelled, a turn stops
    between two steps.
    """

    can_fork: ClassVar[bool] = True

    def __init__(self, agent: AbstractAgent[Any, Any] | DeclaredAgent, *, deps: Any = None) -> None:
        if isinstance(agent, type) or not (isinstance(agent, DeclaredAgent) or hasattr(agent, "iter")):
            raise TypeError(f"PydanticAIBackend takes a pydantic_ai.Agent, not {agent!r:.80}")
        self._declared = agent if isinstance(agent, DeclaredAgent) else None
        self._agent: Any = None if isinstance(agent, DeclaredAgent) else agent
        self._deps = deps
        self._lock = threading.Lock()

    def new_session_id(self) -> str | None:
        """Return a random id, under which the history is kept."""
        return uuid4().hex

    @property
    def billing(self) -> Billing:
        """The facts that decide the price: pydantic-ai estimates a cost from its list where no server reports one."""
        return Billing(model=None if self._declared is None else self._declared.model.partition(":")[2], estimates=True)

    @property
    def account(self) -> str | None:
        """The model of a plan's agent: backends with the same share limits of rate. None for an agent of one's own,
        whose key and model cannot be compared.
        """
        return None if self._declared is None else f"pydantic-ai {self._declared.model}"

    @property
    def max_tokens(self) -> int | None:
        """Limit of one answer of a plan's agent, in tokens; None if unknown."""
        return None if self._declared is None else self._declared.max_tokens

    def inspect(self, files: Files) -> DetachedTurn | None:  # noqa: ARG002
        """Return None: a turn never outlives the process. With this method the runner gives the conversation files."""
        return None

    def check(self) -> None:
        """Raise BackendUnavailable if the extra, an MCP server's command or an environment variable is missing. Needs
        no network. The model's own key is checked when the first conversation is opened.
        """
        require("pydantic_ai", "pydantic-ai")
        for server in () if self._declared is None else self._declared.servers:
            server.check()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation, and start the MCP servers of a plan for it. Raises BackendUnavailable if a package, a
        key or a command is missing, or a server does not start.
        """
        self.check()
        ends = end_of_turn(request)
        agent = self._agent
        if agent is None:
            agent = await run_sync(self._make, abandon_on_cancel=True)
        servers = () if self._declared is None else self._declared.servers
        async with running(servers) as toolsets, _running_agent(agent):
            yield AgentConversation(agent, toolsets, self._deps, request, ends)

    def _make(self) -> Any:
        with self._lock:  # the import takes seconds, and is made once
            if self._agent is None and (declared := self._declared) is not None:
                from pydantic_ai import Agent  # noqa: PLC0415
                from pydantic_ai.models import infer_model  # noqa: PLC0415
                from pydantic_ai.settings import ModelSettings  # noqa: PLC0415

                limit = None if declared.max_tokens is None else ModelSettings(max_tokens=declared.max_tokens)
                try:
                    model = infer_model(declared.model)
                    self._agent = Agent(
                        model, instructions=declared.instructions, tools=declared.tools, model_settings=limit
                    )
                except Exception as error:  # a missing key or provider's package, or a tool that cannot be described
                    text = f"cannot make the agent of model {declared.model}: {masked_line(str(error), 600)}"
                    raise BackendUnavailable(text) from error
            return self._agent


@asynccontextmanager
async def _running_agent(agent: Any) -> AsyncGenerator[None]:
    """Keep the agent's own MCP servers and the model's connections, until no conversation is open any more."""
    try:
        await agent.__aenter__()
    except Exception as error:  # of the agent's own servers, or of its model's connections
        raise failure_of(error) from error
    try:
        yield
    finally:
        with CancelScope(shield=True):
            await agent.__aexit__(None, None, None)


@value
class McpServer:
    """An MCP server: a command to start, or the URL of a running server."""

    name: str
    """The name in the plan. The model sees the server's tools as `<name>_<tool>`."""
    command: tuple[str, ...] = ()
    """The program and its arguments, for a server that speaks over its standard input and output."""
    url: str | None = None
    """The URL of a server that speaks HTTP."""
    cwd: Path = Path()
    """The working folder of the command."""
    pass_env: tuple[str, ...] = ()
    """Names of environment variables for the command, besides those that any program needs."""
    api_key_env: str | None = None
    """The environment variable whose value is sent to `url` as bearer token."""

    def check(self) -> None:
        """Raise BackendUnavailable if the command, or an environment variable, is missing."""
        wanted = (*self.pass_env, *([self.api_key_env] if self.api_key_env else []))
        missing = [name for name in wanted if not environ.get(name)]
        if missing:
            raise BackendUnavailable(f"MCP server {self.name!r} needs the environment variable {missing[0]}; set it")
        if self.command and shutil.which(self.program) is None:
            raise BackendUnavailable(
                f"the command {self.command[0]!r} of MCP server {self.name!r} was not found; install it, or write "
                "its path relative to the plan"
            )

    @property
    def program(self) -> str:
        """The command's program: a name on PATH, or a path relative to `cwd`."""
        program = self.command[0]
        return str(self.cwd.absolute() / Path(program).expanduser()) if "/" in program else program


@value
class DeclaredAgent:
    """A plan's agent, made when first used: importing pydantic-ai takes a second."""

    model: str
    """The model as named by pydantic-ai: `provider:model`."""
    instructions: str | None = None
    """Instructions of every request."""
    tools: tuple[Callable[..., Any], ...] = ()
    """Functions that the model may call. Their signatures and docstrings describe them to the model."""
    servers: tuple[McpServer, ...] = ()
    """MCP servers, started anew for each conversation."""
    max_tokens: int | None = None
    """Limit of one answer, in tokens; None for the default of the library or the provider."""


# MCP servers of a plan's agent: started for a conversation, and ended with it, whole process trees included.
#
# The library starts a command with an environment of few variables and ends it in an orderly way: its input is closed,
# then it is asked to end, then it is killed. Each command is also marked, as the children of coding agents are, so that
# whatever it started ends as well: on leaving, cancellation included, and by the watchdog if this process is killed.

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
    await run_sync(import_module, "pydantic_ai.mcp", abandon_on_cancel=True)  # takes seconds
    with scratch() as folder:
        async with AsyncExitStack() as stack:
            yield [await stack.enter_async_context(_running(server, folder)) for server in servers]


@asynccontextmanager
async def _running(server: McpServer, folder: Path) -> AsyncGenerator[Any]:
    from fastmcp.client.transports import StdioTransport  # noqa: PLC0415
    from pydantic_ai.mcp import MCPToolset  # noqa: PLC0415

    made = partial(MCPToolset, id=server.name, init_timeout=START_LIMIT)
    if server.url is not None:
        token = environ.get(server.api_key_env or "")
        headers = {"Authorization": f"Bearer {token}"} if token else None
        async with _connected(server, made(server.url, headers=headers)) as toolset:
            yield toolset
        return
    tag, log = ProcessTag(secrets.token_hex(8)), folder / f"{server.name}.log"
    variables = {**child_environment(server.pass_env), PREFIX + tag.marker: "1"}
    program = StdioTransport(
        server.program, list(server.command[1:]), variables, str(server.cwd), keep_alive=False, log_file=log
    )
    with suppress(OSError):  # no watchdog can be started; the server then ends when its input does
        WATCHDOG.watch(tag)
    try:
        async with _connected(server, made(program), log) as toolset:
            with suppress(OSError):  # when memory runs out, the kernel kills the server's processes before this one
                for process in await run_sync(members, (tag,)):
                    offer_to_oom_killer(process.pid)
            yield toolset
    finally:
        with CancelScope(shield=True):
            await run_sync(kill_tree, (tag,), KILL_LIMIT)
        WATCHDOG.unwatch(tag.marker)


@asynccontextmanager
async def _connected(server: McpServer, toolset: Any, log: Path | None = None) -> AsyncGenerator[Any]:
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


def _not_started(server: McpServer, error: Exception, log: Path | None) -> Exception:
    reason = masked_line(str(error) or type(error).__name__)
    if log is None:
        return BackendError(
            ErrorKind.TRANSIENT, f"MCP server {server.name!r} at {server.url} does not answer: {reason}"
        )
    lines = log.read_text(errors="replace").split("\n") if log.is_file() else []
    last = next((masked_line(line) for line in reversed(lines) if line.strip()), "")
    ending = f"; its last line: {last}" if last else ""
    return BackendUnavailable(f"MCP server {server.name!r} ({server.command[0]}) did not start: {reason}{ending}")
