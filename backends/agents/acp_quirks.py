"""Peculiarities of single agents that speak ACP. Other agents are expected to follow the protocol. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from plait.json_form import value


@value
class AcpQuirks:
    """The peculiarities of one agent."""

    command: str
    """Usual name of the command."""
    name: str
    """Part of the name in the agent's answer to `initialize`, in lower case."""
    passes: Sequence[str] = ()
    """Variables passed to the agent, as in `Program.passes`."""
    sets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables set for the agent, as in `Program.environment`."""
    forks: bool = False
    """The agent can fork sessions."""
    spoils_loaded: bool = False
    """A loaded session cannot be loaded again."""
    counts_sessions: bool = False
    """Session ids are counted per day and home directory; in another or a cleared home the same id names a different
    session.
    """
    error_begins: str | None = None
    """Start of an answer that is an error; None if errors are not reported as answers."""
    counts_answers: bool = False
    """An answer without a token count is an error."""
    provider: str | None = None
    """Provider that bills an agent which reports tokens without a cost, as named in genai-prices."""


_OPENAI = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_HOST", "OPENAI_MODEL", "OPENROUTER_API_KEY")
_CLAUDE = ("ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_VERTEX_PROJECT_ID", "AWS_ACCESS_KEY_ID", "AWS_BEARER_TOKEN_BEDROCK",
           "AWS_CONFIG_FILE", "AWS_PROFILE", "AWS_REGION", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
           "AWS_SHARED_CREDENTIALS_FILE", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLOUD_ML_REGION",
           "GOOGLE_APPLICATION_CREDENTIALS")  # fmt: skip
_ANTHROPIC = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "ANTHROPIC_HOST",
              "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CONFIG_DIR", "CLAUDE_CODE_TMPDIR")  # fmt: skip
_GOOGLE = ("GEMINI_API_KEY", "GOOGLE_API_KEY", "GEMINI_MODEL", "GOOGLE_GEMINI_BASE_URL", "GOOGLE_CLOUD_PROJECT",
           "GOOGLE_CLOUD_LOCATION", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_APPLICATION_CREDENTIALS",
           "GOOGLE_VERTEX_BASE_URL", "GEMINI_CLI_TRUST_WORKSPACE", "GEMINI_SYSTEM_MD")  # fmt: skip

UNKNOWN = AcpQuirks("", "")
KNOWN = (
    AcpQuirks(
        "claude-agent-acp",
        "claude-agent-acp",
        (*_ANTHROPIC, *_CLAUDE),
        {
            "CLAUDE_CODE_MAX_RETRIES": "0",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION": "false",
            "DISABLE_AUTOUPDATER": "1",
        },
        forks=True,
    ),
    AcpQuirks("codex-acp", "codex-acp", ("CODEX_HOME", "CODEX_API_KEY", *_OPENAI), forks=True, counts_answers=True),
    AcpQuirks(
        "gemini",
        "gemini-cli",
        ("GEMINI_CLI_HOME", "GOOGLE_GENAI_USE_GCA", *_GOOGLE),
        {"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"},
        spoils_loaded=True,
        provider="google",
    ),
    AcpQuirks(
        "goose",
        "goose",
        ("GOOSE_PROVIDER", "GOOSE_MODEL", "GOOSE_MODE", "GOOSE_DISABLE_KEYRING", *_OPENAI, *_ANTHROPIC, *_GOOGLE),
        counts_sessions=True,
        error_begins="Ran into this error:",
    ),
    AcpQuirks(
        "opencode",
        "opencode",
        ("OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT", *_OPENAI, *_ANTHROPIC, *_GOOGLE),
        forks=True,
    ),
    AcpQuirks("qwen", "qwen-code", ("DASHSCOPE_API_KEY", "QWEN_HOME", *_OPENAI)),
)


def of_command(words: Sequence[str]) -> AcpQuirks:
    """Return the agent started by a command, found by file name, because a runner such as npx may come first."""
    names = [word.rpartition("/")[2].partition("@")[0] for word in words]
    return next((agent for name in names for agent in KNOWN if name == agent.command), UNKNOWN)


def of_name(name: str) -> AcpQuirks:
    """Return the agent called `name` in its answer to `initialize`."""
    lowered = name.lower()
    return next((agent for agent in KNOWN if agent.name in lowered), UNKNOWN)
