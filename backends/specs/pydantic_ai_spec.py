"""Agents of pydantic-ai as named in a plan file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from plait.backends.specs.backend_spec import BASE_URL, CALL, RatePart, Spec

if TYPE_CHECKING:
    from plait.backends.frameworks.pydantic_ai_agent import PydanticAIBackend


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,29}")
"""A server's name, the beginning of the names of its tools: models accept few characters in these."""


class McpServerPart(BaseModel):
    """An MCP server, by its command or its URL."""

    model_config = ConfigDict(extra="forbid")

    command: list[str] | None = Field(
        default=None, min_length=1, description="Command to start the server, such as [npx, -y, some-server]."
    )
    url: str | None = Field(
        default=None, pattern=BASE_URL, description="URL of a running server; without a user, password or query."
    )
    pass_env: list[str] = Field(
        default_factory=list,
        description="Names of environment variables for the command, besides those that any program needs.",
    )
    api_key_env: str | None = Field(
        default=None,
        min_length=1,
        description="The environment variable whose value is sent to url as bearer token; never the token itself.",
    )

    @model_validator(mode="after")
    def _is_one_of_both(self) -> McpServerPart:
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server has either command or url")
        if self.command is None and self.pass_env:
            raise ValueError("pass_env belongs to command; a url has api_key_env")
        if self.url is None and self.api_key_env is not None:
            raise ValueError("api_key_env belongs to url; a command has pass_env")
        return self


class PydanticAISpec(Spec):
    """An agent of pydantic-ai: any model that the library knows, with Python functions and MCP servers as tools."""

    kind: Literal["pydantic-ai"]
    model: str = Field(
        pattern=r"^[a-z][^:\s]*:\S+$",
        description="The model as named by pydantic-ai: provider:model, such as bedrock:..., google-vertex:... or "
        "mistral:...",
    )
    instructions: str | None = Field(default=None, description="Instructions of every request.")
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Most tokens of one answer; an answer that reaches it is an error. Default: as the library or the "
        "provider sets it.",
    )
    limits: RatePart | None = Field(
        default=None,
        description="Limits of rate, shared by all runs of a process that use this backend's name and model.",
    )
    tools: list[Annotated[str, Field(pattern=CALL)]] = Field(
        default_factory=list,
        description='Functions that the model may call, each as "file.py:name" or "package.module:name". Their '
        "signatures and docstrings describe them to the model.",
    )
    mcp_servers: dict[str, McpServerPart] = Field(
        default_factory=dict,
        description="MCP servers by name. The model sees a server's tools as name_tool.",
    )

    @field_validator("mcp_servers")
    @classmethod
    def _names_begin_tool_names(cls, servers: dict[str, McpServerPart]) -> dict[str, McpServerPart]:
        for name in servers:
            if not _NAME.fullmatch(name):
                raise ValueError(
                    f"{name!r} is no name for a server: a letter, then letters, digits, _ or -, at most 30"
                )
        return servers

    @property
    def is_harmless(self) -> bool:
        """Whether the agent runs no code and connects to no server but the model's. See `AgentSpec.is_harmless`."""
        return not (self.tools or self.mcp_servers)

    def make(self, folder: Path, tools: tuple[Callable[..., Any], ...]) -> PydanticAIBackend:
        """Return the backend with the functions `tools`. The servers' commands work in `folder`, the plan's folder."""
        from plait.backends.frameworks.pydantic_ai_agent import PydanticAIBackend  # noqa: PLC0415
        from plait.backends.frameworks.pydantic_ai_declared import DeclaredAgent, McpServer  # noqa: PLC0415

        servers = tuple(
            McpServer(name, tuple(one.command or ()), one.url, folder, tuple(one.pass_env), one.api_key_env)
            for name, one in self.mcp_servers.items()
        )
        return PydanticAIBackend(DeclaredAgent(self.model, self.instructions, tools, servers, self.max_tokens))
