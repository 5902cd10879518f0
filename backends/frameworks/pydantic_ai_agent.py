"""An agent of pydantic-ai as a backend: any model of the library, tools, and MCP servers, without a coding agent."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from anyio import CancelScope
from anyio.to_thread import run_sync

from plait.backends.extras import require
from plait.backends.frameworks.pydantic_ai_declared import DeclaredAgent
from plait.backends.frameworks.pydantic_ai_failures import failure_of, safe_line
from plait.backends.frameworks.pydantic_ai_servers import running
from plait.backends.frameworks.pydantic_ai_session import Sessions
from plait.backends.frameworks.pydantic_ai_turn import AgentConversation, end_of_turn
from plait.backends.prices import Billing
from plait.errors import BackendUnavailable

if TYPE_CHECKING:
    from pydantic_ai.agent import AbstractAgent

    from plait.backends.backend_protocol import Conversation, ConversationRequest, DetachedTurn, Files


class PydanticAIBackend:
    """Runs a pydantic-ai `agent` as a conversation: each prompt is one run of the agent, on the history so far.

    `deps` is passed to every run, as the agent's tools and instructions expect.

    The reply's `text` is the agent's output. An output of another type than text becomes `data`, and `text` is the
    JSON. With an output schema, an agent whose output is text gets the schema as output type; an agent with an output
    type of its own keeps it. Either way the value has to fit the schema, and one repair turn is made.

    The history, tool calls included, is kept in a file for each session, if the store keeps files. An interrupted turn
    goes on from the last finished step: answers of the model are not paid for again, and only the tools of the
    interrupted step are called twice. Without files, the history is the stored text of the conversation, and an
    interrupted turn starts over.

    The retries of the model's SDK are switched off, where pydantic-ai can do so (not for Bedrock and Mistral). The
    agent's own corrections, such as a second try after invalid arguments, stay as the agent sets them.

    Cancellation ends the request and the MCP servers started for the conversation. When the run is being cancelled, a
    turn stops between two steps: requests to the model, and calls of tools.
    """

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
    def can_fork(self) -> bool:
        """Whether a history can be copied: always."""
        return True

    @property
    def billing(self) -> Billing:
        """The facts that decide the price: pydantic-ai estimates a cost from its list where no server reports one."""
        return Billing(model=None if self._declared is None else self._declared.model.partition(":")[2], estimates=True)

    @property
    def account(self) -> str | None:
        """The model of a plan's agent, whose key is that of the environment: backends with the same model share limits
        of rate. None for an agent of one's own, whose key and model cannot be compared.
        """
        return None if self._declared is None else f"pydantic-ai {self._declared.model}"

    @property
    def max_tokens(self) -> int | None:
        """Limit of one answer of a plan's agent, in tokens, for the first estimate at a limit of rate; None if
        unknown.
        """
        return None if self._declared is None else self._declared.max_tokens

    def inspect(self, files: Files) -> DetachedTurn | None:  # noqa: ARG002
        """Return None: a turn never outlives the process. With this method the runner gives the conversation files."""
        return None

    def check(self) -> None:
        """Raise BackendUnavailable if the extra, an MCP server's command or an environment variable is missing.

        Imports nothing, needs no network. The model's own key is checked when the first conversation is opened.
        """
        require("pydantic_ai", "pydantic-ai")
        if self._declared is not None:
            self._declared.check()

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        """Open a conversation, and start the MCP servers of a plan for it.

        Raises BackendUnavailable if a package, a key or a command is missing, or if an MCP server does not start.
        """
        self.check()
        ends = end_of_turn(request)
        agent = self._agent
        if agent is None:
            agent = await run_sync(self._make, abandon_on_cancel=True)
        servers = () if self._declared is None else self._declared.servers
        sessions = None if request.files is None else Sessions(request.files.sessions)
        async with running(servers) as toolsets, _entered(agent):
            yield AgentConversation(agent, toolsets, self._deps, request, sessions, ends)

    def _make(self) -> Any:
        with self._lock:  # the import takes seconds, and is made once
            if self._agent is None and self._declared is not None:
                import_module("pydantic_ai")
                try:
                    self._agent = self._declared.make()
                except BackendUnavailable:
                    raise
                except Exception as error:  # a missing key or provider's package, or a tool that cannot be described
                    text = f"cannot make the agent of model {self._declared.model}: {safe_line(str(error), 600)}"
                    raise BackendUnavailable(text) from error
            return self._agent


@asynccontextmanager
async def _entered(agent: Any) -> AsyncGenerator[None]:
    """Keep the agent's own MCP servers and the model's connections, until no conversation is open any more."""
    try:
        await agent.__aenter__()
    except Exception as error:
        raise failure_of(error) from error
    try:
        yield
    finally:
        with CancelScope(shield=True):
            await agent.__aexit__(None, None, None)
