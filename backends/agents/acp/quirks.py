"""What is known of single agents that speak ACP; others are taken at the protocol's word. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

from plait.backends.values import value


@value
class Agent:
    """What an agent does differently. `command` is its command's usual name, `name` a part of what it calls itself, in
    lower case. `passes` and `sets` as in `Program`.

    `forks`: it can branch off from a session. `spoils_loaded`: a session that it has loaded is gone the next time.
    `counts_sessions`: its ids are those of a day, so where its home is another one, or was emptied, they name others.
    `error_begins`: how an answer begins that is an error. `counts_answers`: one without a count of tokens is an error.
    """

    command: str
    name: str
    passes: Sequence[str] = ()
    sets: Mapping[str, str] = field(default_factory=dict[str, str])
    forks: bool = False
    spoils_loaded: bool = False
    counts_sessions: bool = False
    error_begins: str | None = None
    counts_answers: bool = False


_OPENAI = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_HOST", "OPENAI_MODEL", "OPENROUTER_API_KEY")
_CLAUDE = ("ANTHROPIC_CUSTOM_HEADERS", "ANTHROPIC_VERTEX_PROJECT_ID", "AWS_ACCESS_KEY_ID", "AWS_BEARER_TOKEN_BEDROCK",
           "AWS_CONFIG_FILE", "AWS_PROFILE", "AWS_REGION", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
           "AWS_SHARED_CREDENTIALS_FILE", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX", "CLOUD_ML_REGION",
           "GOOGLE_APPLICATION_CREDENTIALS")  # fmt: skip
_ANTHROPIC = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_MODEL", "ANTHROPIC_HOST",
              "CLAUDE_CODE_OAUTH_TOKEN", "CLAUDE_CONFIG_DIR", "CLAUDE_CODE_TMPDIR")  # fmt: skip
_GOOGLE = ("GEMINI_API_KEY", "GOOGLE_API_KEY", "GEMINI_MODEL", "GOOGLE_GEMINI_BASE_URL", "GOOGLE_CLOUD_PROJECT",
           "GOOGLE_CLOUD_LOCATION", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_APPLICATION_CREDENTIALS",
           "GEMINI_CLI_TRUST_WORKSPACE", "GEMINI_SYSTEM_MD")  # fmt: skip

UNKNOWN = Agent("", "")
KNOWN = (
    Agent(
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
    Agent("codex-acp", "codex-acp", ("CODEX_HOME", "CODEX_API_KEY", *_OPENAI), forks=True, counts_answers=True),
    Agent(
        "gemini",
        "gemini-cli",
        ("GEMINI_CLI_HOME", "GOOGLE_GENAI_USE_GCA", *_GOOGLE),
        {"GEMINI_CLI_NO_RELAUNCH": "true"},
        spoils_loaded=True,
    ),
    Agent(
        "goose",
        "goose",
        ("GOOSE_PROVIDER", "GOOSE_MODEL", "GOOSE_MODE", "GOOSE_DISABLE_KEYRING", *_OPENAI, *_ANTHROPIC, *_GOOGLE),
        counts_sessions=True,
        error_begins="Ran into this error:",
    ),
    Agent(
        "opencode",
        "opencode",
        ("OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT", *_OPENAI, *_ANTHROPIC, *_GOOGLE),
        forks=True,
    ),
    Agent("qwen", "qwen-code", ("DASHSCOPE_API_KEY", "QWEN_HOME", *_OPENAI)),
)


def of_command(words: Sequence[str]) -> Agent:
    """The agent that a command starts; by the file names in it, so that a runner such as npx may stand in front."""
    names = [word.rpartition("/")[2].partition("@")[0] for word in words]
    return next((agent for name in names for agent in KNOWN if name == agent.command), UNKNOWN)


def of_name(name: str) -> Agent:
    """The agent that calls itself so."""
    lowered = name.lower()
    return next((agent for agent in KNOWN if agent.name in lowered), UNKNOWN)
