"""Coding agents as named in a plan file. The other backends are in build.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from pydantic import Field

from plait.backends.spec.base import BASE_URL, Spec

if TYPE_CHECKING:
    from plait.backends.agents.backend import CliBackend

_OWN = frozenset({"kind", "concurrency"})
_HARMLESS = frozenset({"kind", "concurrency", "model", "system", "turn_timeout", "idle_timeout", "on_runner_death",
                       "on_lost_session"})  # fmt: skip


class AgentSpec(Spec):
    """Common settings of all coding agents run as a command."""

    command: str | None = Field(
        default=None,
        min_length=1,
        description="The executable, a name on PATH or a path. Default: the agent's usual name.",
    )
    model: str | None = Field(default=None, description="The model's name. Default: the agent's own choice.")
    cwd: str | None = Field(
        default=None,
        description="The folder that the agent works in, relative to the plan. Default: the plan's own folder.",
    )
    pass_env: list[str] = Field(
        default_factory=list,
        description="Names of further environment variables that the agent may have, beside its own keys.",
    )
    turn_timeout: float = Field(default=3600.0, gt=0, description="Seconds for one whole turn.")
    idle_timeout: float = Field(default=900.0, gt=0, description="Seconds without any output of the agent.")
    on_runner_death: Literal["adopt", "kill"] = Field(
        default="adopt",
        description="Of a turn whose runner is killed: it works on, and a resume takes it over, or it ends.",
    )
    on_lost_session: Literal["replay", "fail"] = Field(
        default="replay",
        description="What becomes of a conversation whose session the agent does not know any more: a fresh one is "
        "told what was said, or the task fails.",
    )

    def make(self, folder: Path) -> CliBackend:
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
        given = {
            name: tuple(cast("list[object]", value)) if isinstance(value, list) else value
            for name, value in dumped.items()
        }
        given["cwd"] = folder / Path(self.cwd or ".").expanduser()
        if isinstance(self.command, str) and "/" in self.command:
            given["command"] = str(folder / Path(self.command).expanduser())
        return given


class ClaudeCodeSpec(AgentSpec):
    """Claude Code, run as `claude -p`."""

    kind: Literal["claude-code"]
    system: str | None = Field(default=None, description="System prompt of every conversation.")
    permission_mode: str | None = Field(
        default=None,
        description="Claude Code's own word, such as acceptEdits. Default: what would need asking is denied.",
    )
    allowed_tools: list[str] = Field(
        default_factory=list, description='Tools that it may use without asking, such as "Read" or "Bash(git *)".'
    )
    disallowed_tools: list[str] = Field(default_factory=list, description="Tools that it may not use.")
    ask_for: list[str] = Field(
        default_factory=list,
        description="Tools for whose every use a person is asked, and AskUserQuestion, so that it may ask itself: the "
        "task waits for the answer.",
    )
    tools: list[str] | None = Field(default=None, description="The built-in tools that it has; [] for none.")
    append_system: str | None = Field(default=None, description="Added to its own system prompt.")
    max_turns: int | None = Field(default=None, ge=1, description="Most model requests of one turn.")
    max_budget_usd: float | None = Field(default=None, gt=0, description="Most that one turn may cost.")
    bare: bool = Field(default=False, description="Without hooks, memory, plugins and CLAUDE.md files.")
    base_url: str | None = Field(default=None, pattern=BASE_URL, description="Another server for its requests.")

    def make(self, folder: Path) -> CliBackend:
        from plait.backends.agents.claude.backend import ClaudeCodeBackend  # noqa: PLC0415

        return ClaudeCodeBackend(**self.options(folder))


class CodexSpec(AgentSpec):
    """Codex, run as `codex exec`."""

    kind: Literal["codex"]
    system: str | None = Field(default=None, description="System prompt of every conversation.")
    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = Field(
        default="read-only", description="What its tools may do."
    )
    append_system: str | None = Field(default=None, description="Added to its own instructions.")
    config: dict[str, str | int | float | bool] = Field(
        default_factory=dict, description="Further settings, as in its config.toml."
    )
    base_url: str | None = Field(default=None, pattern=BASE_URL, description="Another server for its requests.")
    api_key_env: str | None = Field(
        default=None, description="The environment variable that holds the key for base_url; never the key itself."
    )

    def make(self, folder: Path) -> CliBackend:
        from plait.backends.agents.codex.backend import CodexBackend  # noqa: PLC0415

        return CodexBackend(**self.options(folder))


class GeminiSpec(AgentSpec):
    """Gemini CLI, run as `gemini`."""

    kind: Literal["gemini"]
    system: str | None = Field(default=None, description="System prompt of every conversation.")
    approval_mode: Literal["default", "auto_edit", "yolo", "plan"] | None = Field(
        default=None, description="Gemini's own word. Default: tools that would need asking are absent."
    )
    base_url: str | None = Field(default=None, pattern=BASE_URL, description="Another server for its requests.")

    def make(self, folder: Path) -> CliBackend:
        from plait.backends.agents.gemini.backend import GeminiBackend  # noqa: PLC0415

        return GeminiBackend(**self.options(folder))


class AcpSpec(AgentSpec):
    """An agent that speaks the Agent Client Protocol, such as goose, opencode or Qwen Code."""

    kind: Literal["acp"]
    command: list[str] = Field(  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleVariableOverride]
        min_length=1, description="The words that start the agent, such as [goose, acp]."
    )
    mode: str | None = Field(
        default=None, description="One of the modes that the agent offers. Default: its own choice."
    )
    auth_method: str | None = Field(
        default=None, description="The id of a way to log in that the agent offers, where it is not logged in yet."
    )
    permissions: Literal["deny", "allow", "ask"] = Field(
        default="deny", description="What becomes of what the agent asks permission for; with ask a person decides."
    )

    def make(self, folder: Path) -> CliBackend:
        from plait.backends.agents.acp.backend import AcpBackend  # noqa: PLC0415

        return AcpBackend(**self.options(folder))
