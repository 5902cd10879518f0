"""The coding agents that plait knows: how each is called, comes onto a machine, and was tried. Data alone."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field

from plait.backends.values import value

ACP = "acp"
"""The kind of the backend for all agents that have none of their own."""
ACP_READER = "acp.transcript:Overheard"
"""The class that reads their output from the files of a call, as "module:Class" in this package."""


@value
class Login:
    """How to see that an agent is logged in, without reading anything of that.

    `files` lie below the folder that the variable `folder[0]` names, or else `folder[1]`; any of them means yes. So
    does any of the variables `keys`. Otherwise it is not, unless there is one of the variables `elsewhere`, or its key
    `may_be_elsewhere`, as in a keyring: then nobody can tell. `how` is the command that logs in.
    """

    how: str
    folder: tuple[str, str]
    files: tuple[str, ...]
    keys: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()
    may_be_elsewhere: bool = False


@value
class Agent:
    """One agent. `name` is how people call it, and the backend's kind, but for those that are driven by ACP; then
    `arguments` make its program speak that.

    `program` is the command's usual name and `install` the command that installs it. `tested` are the versions that
    plait was tried with, oldest first. `memory` is what one turn takes, in MiB: the proportional share (PSS) of one of
    five at once. `quiet` are variables that keep its start from the network.
    `backend` is the class that runs it, as "module:Class" in this package, where that is not the one for ACP.
    """

    name: str
    program: str
    install: str
    tested: tuple[str, ...]
    memory: int
    login: Login
    arguments: tuple[str, ...] = ()
    quiet: Mapping[str, str] = field(default_factory=dict[str, str])
    backend: str = ""


_CLAUDE_LOGIN = Login(
    how="claude auth login",
    folder=("CLAUDE_CONFIG_DIR", "~/.claude"),
    files=(".credentials.json",),
    keys=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
    elsewhere=("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    may_be_elsewhere=sys.platform == "darwin",  # where they are in the keychain
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

AGENTS: tuple[Agent, ...] = (
    Agent(
        name="claude-code",
        program="claude",
        # By name: with an old node, npm would silently take an old version instead.
        install="npm install -g @anthropic-ai/claude-code@latest",
        tested=("2.1.197", "2.1.330"),
        memory=117,
        login=_CLAUDE_LOGIN,
        quiet=_CLAUDE_QUIET,
        backend="claude.backend:ClaudeCodeBackend",
    ),
    Agent(
        name="codex",
        program="codex",
        install="npm install -g @openai/codex",
        tested=("0.169.0",),
        memory=43,
        login=_CODEX_LOGIN,
        backend="codex.backend:CodexBackend",
    ),
    Agent(
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
        quiet={"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"},
        backend="gemini.backend:GeminiBackend",
    ),
    Agent(
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
    Agent(
        name="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        tested=("1.18.33",),
        memory=406,
        login=Login(
            how="opencode auth login",
            folder=("XDG_DATA_HOME", "~/.local/share"),
            files=("opencode/auth.json",),
            may_be_elsewhere=True,  # in its settings, as for the next one
        ),
        arguments=("acp",),
        quiet={"OPENCODE_DISABLE_AUTOUPDATE": "1"},
    ),
    Agent(
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
    Agent(
        name="claude-agent-acp",
        program="claude-agent-acp",
        install="npm install -g @agentclientprotocol/claude-agent-acp",
        tested=("0.100.0",),
        memory=306,  # RSS: the share of one among several was not measured
        login=_CLAUDE_LOGIN,
        quiet=_CLAUDE_QUIET,
    ),
    Agent(
        name="codex-acp",
        program="codex-acp",
        install="npm install -g @agentclientprotocol/codex-acp",
        tested=("2.6.0",),
        memory=249,  # RSS, as above
        login=_CODEX_LOGIN,
    ),
)
"""Those that have a backend of their own come first."""


def agent(name: str) -> Agent | None:
    """The one of that name; None for one that is not known."""
    return next((one for one in AGENTS if one.name == name), None)
