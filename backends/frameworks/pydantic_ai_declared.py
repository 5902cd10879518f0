"""An agent as declared in a plan: the model's name, instructions, Python functions as tools, and MCP servers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from plait.errors import BackendUnavailable
from plait.json_form import value


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
        missing = [name for name in wanted if not os.environ.get(name)]
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

    def check(self) -> None:
        """Raise BackendUnavailable if a server cannot be started."""
        for server in self.servers:
            server.check()

    def make(self) -> Any:
        """Return the agent. Raises the exceptions of pydantic-ai, such as UserError for a missing key."""
        from pydantic_ai import Agent  # noqa: PLC0415
        from pydantic_ai.models import infer_model  # noqa: PLC0415
        from pydantic_ai.settings import ModelSettings  # noqa: PLC0415

        settings = None if self.max_tokens is None else ModelSettings(max_tokens=self.max_tokens)
        return Agent(infer_model(self.model), instructions=self.instructions, tools=self.tools, model_settings=settings)
