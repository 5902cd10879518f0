"""The catalogue of coding agents: names, commands, installation and tested versions. Data alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field

from plait.json_form import value

ACP = "acp"
"""Kind of the backend shared by all agents without a backend of their own."""
ACP_READER = "acp_transcript:AcpTranscriptReader"
"""Class that reads ACP output from the files of a call, as "module:Class" in this package."""


@value
class Login:
    """How to detect that an agent is logged in, without reading any secret.

    An agent is logged in if any of `files` or `keys` exists. Otherwise the login is unknown if any of `elsewhere`
    exists or `may_be_elsewhere` holds, and missing if neither does.
    """

    how: str
    """Command to log in."""
    folder: tuple[str, str]
    """An environment variable with the folder of `files`, and the default folder."""
    files: tuple[str, ...]
    """Files below the folder."""
    keys: tuple[str, ...] = ()
    """Environment variables that hold a key."""
    elsewhere: tuple[str, ...] = ()
    """Environment variables that indicate credentials in another place."""
    may_be_elsewhere: bool = False
    """Whether the key may be in another place, such as a keyring."""


@value
class CatalogEntry:
    """One coding agent."""

    name: str
    """Common name of the agent: the backend's `kind`, or the `agent` of `kind: acp`."""
    program: str
    """Usual name of the command."""
    install: str
    """Shell command to install the agent."""
    tested: tuple[str, ...]
    """Versions tested with plait, oldest first."""
    memory: int
    """Memory of one turn in MiB: the proportional share (PSS) of one of five parallel turns."""
    login: Login
    arguments: tuple[str, ...] = ()
    """Arguments that make the program speak ACP, for agents that use ACP."""
    quiet: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables that keep the agent's start off the network."""
    backend: str = ""
    """Backend class, as "module:Class" in this package. Empty for the ACP backend."""


_CLAUDE_LOGIN = Login(
    how="claude auth login",
    folder=("CLAUDE_CONFIG_DIR", "~/.claude"),
    files=(".credentials.json",),
    keys=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
    elsewhere=("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    may_be_elsewhere=sys.platform == "darwin",  # credentials are in the keychain
)
_CODEX_LOGIN = Login(
    how="codex login",
    folder=("CODEX_HOME", "~/.codex"),
    files=("auth.json",),
    keys=("CODEX_API_KEY", "OPENAI_API_KEY"),
)
_CLAUDE_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}

AGENTS: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name="claude-code",
        program="claude",
        # By name: with an old node, npm would silently take an old version instead.
        install="npm install -g @anthropic-ai/claude-code@latest",
        tested=("2.1.197", "2.1.330"),
        memory=117,
        login=_CLAUDE_LOGIN,
        quiet=_CLAUDE_QUIET,
        backend="claude_code:ClaudeCodeBackend",
    ),
    CatalogEntry(
        name="codex",
        program="codex",
        install="npm install -g @openai/codex",
        tested=("0.169.0",),
        memory=43,
        login=_CODEX_LOGIN,
        backend="codex:CodexBackend",
    ),
    CatalogEntry(
        name="gemini",
        program="gemini",
        install="npm install -g @google/gemini-cli",
        tested=("0.61.0",),
        memory=182,
        login=Login(
            how="gemini",
            folder=("GEMINI_CLI_HOME", "~"),
            files=(".gemini/oauth_creds.json", ".gemini/gemini-credentials.json"),
            keys=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
            elsewhere=("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_GENAI_USE_VERTEXAI"),
        ),
        arguments=("--acp",),
        quiet={"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"},
    ),
    CatalogEntry(
        name="goose",
        program="goose",
        install="npm install -g @aaif/goose-binary-linux-x64",
        tested=("1.52.0",),
        memory=72,
        login=Login(
            how="goose configure",
            folder=("XDG_CONFIG_HOME", "~/.config"),
            files=("goose/secrets.yaml",),
            may_be_elsewhere=True,  # in a keyring
        ),
        arguments=("acp",),
    ),
    CatalogEntry(
        name="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        tested=("1.18.33",),
        memory=406,
        login=Login(
            how="opencode auth login",
            folder=("XDG_DATA_HOME", "~/.local/share"),
            files=("opencode/auth.json",),
            may_be_elsewhere=True,  # in its settings, as for qwen
        ),
        arguments=("acp",),
        quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    CatalogEntry(
        name="qwen",
        program="qwen",
        install="npm install -g @qwen-code/qwen-code@latest",
        tested=("0.24.4",),
        memory=188,
        login=Login(
            how="qwen",
            folder=("QWEN_HOME", "~/.qwen"),
            files=("oauth_creds.json",),
            may_be_elsewhere=True,
        ),
        arguments=("--acp",),
    ),
    CatalogEntry(
        name="claude-agent-acp",
        program="claude-agent-acp",
        install="npm install -g @agentclientprotocol/claude-agent-acp",
        tested=("0.100.0",),
        memory=306,  # RSS: the proportional share was not measured
        login=_CLAUDE_LOGIN,
        quiet=_CLAUDE_QUIET,
    ),
    CatalogEntry(
        name="codex-acp",
        program="codex-acp",
        install="npm install -g @agentclientprotocol/codex-acp",
        tested=("2.6.0",),
        memory=249,  # RSS, as above
        login=_CODEX_LOGIN,
    ),
)
"""Agents with a backend of their own come first."""


def agent(name: str) -> CatalogEntry | None:
    """Return the agent called `name`; None if unknown."""
    return next((one for one in AGENTS if one.name == name), None)
