"""Coding agents and agents of pydantic-ai as named in a plan file."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from plait.backends.agents.agent_catalog import ACP_AGENTS, agent
from plait.backends.specs.backend_spec import BASE_URL, CALL, RatePart, Spec

if TYPE_CHECKING:
    from plait.backends.agents.cli_agent import AgentBackend
    from plait.backends.frameworks.pydantic_ai_agent import PydanticAIBackend

_OWN = frozenset({"kind", "concurrency", "on", "needs"})
_HARMLESS = frozenset({"kind", "concurrency", "model", "system", "turn_timeout", "idle_timeout", "on_runner_death",
                       "on_lost_session"})  # fmt: skip


if TYPE_CHECKING:
    AcpAgent: TypeAlias = str
else:
    AcpAgent = Literal[ACP_AGENTS]


class AgentSpec(Spec):
    """Common settings of all coding agents run as a command."""

    adjustable: ClassVar[frozenset[str]] = frozenset({"model", "system"})
    takes_files: ClassVar[Literal["contents", "paths"] | None] = "paths"
    command: str | None = Field(
        default=None,
        min_length=1,
        description="The executable, a name on PATH or a path. Default: the agent's usual name.",
    )
    model: str | None = Field(default=None, description="The model's name. Default: the agent's own choice.")
    cwd: str | None = Field(
        default=None,
        description="Folder in which the agent works, relative to the plan. Default: the plan's own folder.",
    )
    pass_env: list[str] = Field(
        default_factory=list,
        description="Names of further environment variables for the agent, besides its own keys.",
    )
    turn_timeout: float = Field(default=3600.0, gt=0, description="Limit of one whole turn, in seconds.")
    idle_timeout: float = Field(default=900.0, gt=0, description="Limit without any output of the agent, in seconds.")
    on_runner_death: Literal["adopt", "kill"] = Field(
        default="adopt",
        description="If the runner is killed during a turn: adopt lets the agent work on, and a resume adopts the "
        "turn; kill ends the agent.",
    )
    on_lost_session: Literal["replay", "fail"] = Field(
        default="replay",
        description="If the agent no longer has the session: a fresh session receives the history, or the task fails.",
    )

    def make(self, folder: Path) -> AgentBackend:
        """Return the backend. Paths are relative to `folder`, the folder of the plan."""
        raise NotImplementedError

    @property
    def is_harmless(self) -> bool:
        """Whether no setting determines the executed command, its folder, or its permissions. A harmless spec may come
        from an untrusted database.
        """
        usual = type(self).model_fields
        return all(
            getattr(self, name) == usual[name].get_default(call_default_factory=True)
            for name in self.model_fields_set - _HARMLESS
        )

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the backend's keyword arguments for the given settings."""
        dumped = self.model_dump(exclude=set(_OWN), exclude_none=True)
        arguments = {
            name: tuple(cast("list[object]", value)) if isinstance(value, list) else value
            for name, value in dumped.items()
        }
        arguments["cwd"] = folder / Path(self.cwd or ".").expanduser()
        if isinstance(self.command, str) and "/" in self.command:
            arguments["command"] = str(folder / Path(self.command).expanduser())
        return arguments


class ClaudeCodeSpec(AgentSpec):
    """Claude Code, run as `claude -p`."""

    kind: Literal["claude-code"]
    system: str | None = Field(default=None, description="System prompt of every conversation.")
    permission_mode: str | None = Field(
        default=None,
        description="One of Claude Code's own modes, such as acceptEdits. Default: tool uses that need permission are "
        "denied.",
    )
    allowed_tools: list[str] = Field(
        default_factory=list, description='Tools allowed without asking, such as "Read" or "Bash(git *)".'
    )
    disallowed_tools: list[str] = Field(default_factory=list, description="Tools denied in any case.")
    ask_for: list[str] = Field(
        default_factory=list,
        description="Tools whose every use needs a person's answer, for which the task waits; AskUserQuestion "
        "lets the agent ask questions of its own.",
    )
    tools: list[str] | None = Field(default=None, description="All built-in tools of the agent; [] for none.")
    append_system: str | None = Field(default=None, description="Added to the agent's own system prompt.")
    max_turns: int | None = Field(default=None, ge=1, description="Limit of model requests in one turn.")
    max_budget_usd: float | None = Field(
        default=None, gt=0, description="Limit of the cost of one turn, in US dollars."
    )
    bare: bool = Field(default=False, description="Without hooks, memory, plugins and CLAUDE.md files.")
    base_url: str | None = Field(default=None, pattern=BASE_URL, description="Another server for the agent's requests.")

    def make(self, folder: Path) -> AgentBackend:
        from plait.backends.agents.claude_code import ClaudeCodeBackend  # noqa: PLC0415

        return ClaudeCodeBackend(**self.options(folder))


class CodexSpec(AgentSpec):
    """Codex, run as `codex exec`."""

    kind: Literal["codex"]
    system: str | None = Field(default=None, description="System prompt of every conversation.")
    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = Field(
        default="read-only", description="Rights of the agent's commands."
    )
    append_system: str | None = Field(default=None, description="Added to the agent's own instructions.")
    config: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Further settings, as in Codex's config.toml."
    )
    base_url: str | None = Field(default=None, pattern=BASE_URL, description="Another server for the agent's requests.")
    api_key_env: str | None = Field(
        default=None, description="The environment variable that holds the key for base_url; never the key itself."
    )

    def make(self, folder: Path) -> AgentBackend:
        from plait.backends.agents.codex import CodexBackend  # noqa: PLC0415

        return CodexBackend(**self.options(folder))


class AcpSpec(AgentSpec):
    """An agent that speaks the Agent Client Protocol, such as Gemini CLI, goose, opencode or Qwen Code."""

    kind: Literal["acp"]
    adjustable: ClassVar[frozenset[str]] = frozenset({"model"})
    agent: AcpAgent | None = Field(default=None, description="A known agent, started by its usual command.")
    command: list[str] | None = Field(  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
        default=None, min_length=1, description="Command to start another agent, such as [goose, acp]."
    )
    mode: str | None = Field(default=None, description="One of the agent's modes. Default: the agent's own choice.")
    auth_method: str | None = Field(
        default=None, description="Id of one of the agent's login methods, if the agent is not logged in yet."
    )
    permissions: Literal["deny", "allow", "ask"] = Field(
        default="deny", description="Decision on permission requests; with ask a person decides."
    )

    @model_validator(mode="after")
    def _has_one_command(self) -> AcpSpec:
        if (self.agent is None) == (self.command is None):
            raise ValueError("needs either `agent: NAME` or `command: [...]`")
        return self

    def options(self, folder: Path) -> dict[str, Any]:
        arguments = super().options(folder)
        entry = agent(arguments.pop("agent", ""))
        if entry is not None:
            arguments["command"] = (entry.program, *entry.arguments)
        return arguments

    def make(self, folder: Path) -> AgentBackend:
        from plait.backends.agents.acp_agent import AcpBackend  # noqa: PLC0415

        return AcpBackend(**self.options(folder))


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
        from plait.backends.frameworks.pydantic_ai_agent import (  # noqa: PLC0415
            DeclaredAgent,
            McpServer,
            PydanticAIBackend,
        )

        servers = tuple(
            McpServer(name, tuple(one.command or ()), one.url, folder, tuple(one.pass_env), one.api_key_env)
            for name, one in self.mcp_servers.items()
        )
        return PydanticAIBackend(DeclaredAgent(self.model, self.instructions, tools, servers, self.max_tokens))
