"""The catalogue of coding agents: names, commands, variables, peculiarities; and which of them are here and logged in.

A new agent that speaks ACP needs an entry here and nothing else. The search starts the agents only to print their
version, and looks for a login from outside: no secret is read.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import field
from importlib import import_module
from pathlib import Path
from typing import Any

import anyio

from plait.backends.process.child_process import Launch, child_environment, running
from plait.errors import BackendError, BackendUnavailable
from plait.json_form import value

ACP = "acp"
"""Kind of the backend shared by all agents without a backend of their own."""


@value
class Login:
    """How to detect that an agent is logged in, without reading any secret.

    An agent is logged in if any of `files` or `keys` exists. Otherwise the login is unknown if any of `elsewhere`
    exists or `may_be_elsewhere` holds, and missing if neither does.
    """

    command: str = ""
    """Command to log in."""
    folder: tuple[str, str] = ("HOME", "~")
    """An environment variable with the folder of `files`, and the default folder."""
    files: tuple[str, ...] = ()
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
    tested: tuple[str, ...] = ()
    """Versions tested with plait, oldest first."""
    memory: int = 0
    """Memory of one turn in MiB: the proportional share (PSS) of one of five parallel turns."""
    login: Login = Login()
    passes: tuple[str, ...] = ()
    """Environment variables with its keys and settings, passed on to the agent."""
    sets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables set for the agent: no updates, no telemetry, no retries of its own."""
    backend: str = ""
    """Backend class, as "module:Class" in this package. Empty for the ACP backend."""
    arguments: tuple[str, ...] = ()
    """Arguments that make the program speak ACP. The fields below are of agents that do, too."""
    calls_itself: str = ""
    """Part of the name in the agent's answer to `initialize`, in lower case."""
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


_CLAUDE_LOGIN = Login(
    command="claude auth login",
    folder=("CLAUDE_CONFIG_DIR", "~/.claude"),
    files=(".credentials.json",),
    keys=("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN"),
    elsewhere=("CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_VERTEX"),
    may_be_elsewhere=sys.platform == "darwin",  # credentials are in the keychain
)
_CODEX_LOGIN = Login(
    command="codex login",
    folder=("CODEX_HOME", "~/.codex"),
    files=("auth.json",),
    keys=("CODEX_API_KEY", "OPENAI_API_KEY"),
)
_CLAUDE_SETS = {
    "CLAUDE_CODE_MAX_RETRIES": "0",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_TELEMETRY": "1",
}
_CLAUDE = (
    *("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_BASE_URL", "ANTHROPIC_CUSTOM_HEADERS"),
    *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
    *("ANTHROPIC_FOUNDRY_API_KEY", "ANTHROPIC_FOUNDRY_BASE_URL", "ANTHROPIC_FOUNDRY_RESOURCE", "ANTHROPIC_MODEL"),
    *("ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_VERTEX_PROJECT_ID", "AWS_ACCESS_KEY_ID", "AWS_BEARER_TOKEN_BEDROCK"),
    *("AWS_CONFIG_FILE", "AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_REGION", "AWS_SECRET_ACCESS_KEY"),
    *("AWS_SESSION_TOKEN", "AWS_SHARED_CREDENTIALS_FILE", "CLAUDE_CODE_MAX_OUTPUT_TOKENS", "CLAUDE_CODE_OAUTH_TOKEN"),
    *("CLAUDE_CODE_TMPDIR", "CLAUDE_CODE_USE_BEDROCK", "CLAUDE_CODE_USE_FOUNDRY", "CLAUDE_CODE_USE_VERTEX"),
    *("CLAUDE_CONFIG_DIR", "CLOUD_ML_REGION", "GOOGLE_APPLICATION_CREDENTIALS", "MAX_THINKING_TOKENS"),
)
_CODEX = ("CODEX_API_KEY", "CODEX_HOME", "OPENAI_API_KEY")
_ANY_PROVIDER = ("ANTHROPIC_API_KEY", "GOOGLE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENROUTER_API_KEY")
"""For agents that take the models of any provider; none of what only another agent reads."""

AGENTS: tuple[CatalogEntry, ...] = (
    CatalogEntry(
        name="claude-code",
        program="claude",
        # By name: with an old node, npm would silently take an old version instead.
        install="npm install -g @anthropic-ai/claude-code@latest",
        tested=("2.1.197", "2.1.330"),
        memory=117,
        login=_CLAUDE_LOGIN,
        # Not for the adapter, which then skips permissions, and is refused that as root.
        passes=(*_CLAUDE, "IS_SANDBOX"),
        # Otherwise many failures at startup are reported on stderr only.
        sets={**_CLAUDE_SETS, "CLAUDE_CODE_STARTUP_FAILURE_RESULTS": "1"},
        backend="claude_code:ClaudeCodeBackend",
    ),
    CatalogEntry(
        name="codex",
        program="codex",
        install="npm install -g @openai/codex",
        tested=("0.169.0",),
        memory=43,
        login=_CODEX_LOGIN,
        passes=_CODEX,
        backend="codex:CodexBackend",
    ),
    CatalogEntry(
        name="gemini",
        program="gemini",
        install="npm install -g @google/gemini-cli",
        tested=("0.61.0",),
        memory=182,
        login=Login(
            command="gemini",
            folder=("GEMINI_CLI_HOME", "~"),
            files=(".gemini/oauth_creds.json", ".gemini/gemini-credentials.json"),
            keys=("GEMINI_API_KEY", "GOOGLE_API_KEY"),
            elsewhere=("GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_GENAI_USE_VERTEXAI"),
        ),
        passes=(
            *("GEMINI_API_KEY", "GEMINI_CLI_HOME", "GEMINI_CLI_TRUST_WORKSPACE", "GEMINI_MODEL", "GEMINI_SYSTEM_MD"),
            *("GOOGLE_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_LOCATION", "GOOGLE_CLOUD_PROJECT"),
            *("GOOGLE_GEMINI_BASE_URL", "GOOGLE_GENAI_USE_GCA", "GOOGLE_GENAI_USE_VERTEXAI", "GOOGLE_VERTEX_BASE_URL"),
        ),
        sets={"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"},
        arguments=("--acp",),
        calls_itself="gemini-cli",
        spoils_loaded=True,
        provider="google",
    ),
    CatalogEntry(
        name="goose",
        program="goose",
        install="npm install -g @aaif/goose-binary-linux-x64",
        tested=("1.52.0",),
        memory=72,
        login=Login(
            command="goose configure",
            folder=("XDG_CONFIG_HOME", "~/.config"),
            files=("goose/secrets.yaml",),
            may_be_elsewhere=True,  # in a keyring
        ),
        passes=(
            *("GOOSE_PROVIDER", "GOOSE_MODEL", "GOOSE_MODE", "GOOSE_DISABLE_KEYRING"),
            *(*_ANY_PROVIDER, "ANTHROPIC_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "OPENAI_HOST"),
        ),
        arguments=("acp",),
        calls_itself="goose",
        counts_sessions=True,
        error_begins="Ran into this error:",
    ),
    CatalogEntry(
        name="opencode",
        program="opencode",
        install="npm install -g opencode-ai",
        tested=("1.18.33",),
        memory=406,
        login=Login(
            command="opencode auth login",
            folder=("XDG_DATA_HOME", "~/.local/share"),
            files=("opencode/auth.json",),
            may_be_elsewhere=True,  # in its settings, as for qwen
        ),
        passes=(
            *("OPENCODE_CONFIG", "OPENCODE_CONFIG_CONTENT", *_ANY_PROVIDER, "ANTHROPIC_AUTH_TOKEN"),
            *("ANTHROPIC_BASE_URL", "GEMINI_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_LOCATION"),
            "GOOGLE_CLOUD_PROJECT",
        ),
        sets={"OPENCODE_DISABLE_AUTOUPDATE": "1"},
        arguments=("acp",),
        calls_itself="opencode",
        forks=True,
    ),
    CatalogEntry(
        name="qwen",
        program="qwen",
        install="npm install -g @qwen-code/qwen-code@latest",
        tested=("0.24.4",),
        memory=188,
        login=Login(
            command="qwen",
            folder=("QWEN_HOME", "~/.qwen"),
            files=("oauth_creds.json",),
            may_be_elsewhere=True,
        ),
        passes=("DASHSCOPE_API_KEY", "QWEN_HOME", "OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENAI_MODEL"),
        arguments=("--acp",),
        calls_itself="qwen-code",
    ),
    CatalogEntry(
        name="claude-agent-acp",
        program="claude-agent-acp",
        install="npm install -g @agentclientprotocol/claude-agent-acp",
        tested=("0.100.0",),
        memory=306,  # RSS: the proportional share was not measured
        login=_CLAUDE_LOGIN,
        passes=_CLAUDE,
        sets={**_CLAUDE_SETS, "CLAUDE_CODE_ENABLE_PROMPT_SUGGESTION": "false"},
        calls_itself="claude-agent-acp",
        forks=True,
    ),
    CatalogEntry(
        name="codex-acp",
        program="codex-acp",
        install="npm install -g @agentclientprotocol/codex-acp",
        tested=("2.6.0",),
        memory=249,  # RSS, as above
        login=_CODEX_LOGIN,
        passes=(*_CODEX, "OPENAI_BASE_URL"),
        calls_itself="codex-acp",
        forks=True,
        counts_answers=True,
    ),
)
"""Agents with a backend of their own come first."""


UNKNOWN = CatalogEntry("", "", "install it")
"""An agent that is not in the catalogue: expected to follow the protocol."""
_SPEAK_ACP = [entry for entry in AGENTS if not entry.backend]
ACP_AGENTS = tuple(entry.name for entry in _SPEAK_ACP)
"""The names of the agents that speak ACP."""


def agent(name: str) -> CatalogEntry | None:
    """Return the agent called `name`; None if unknown."""
    return next((entry for entry in AGENTS if entry.name == name), None)


def backend_class(kind: str) -> Any:
    """Return the class of the backends of `kind`, imported now; None if no agent has a backend of this kind."""
    entry = agent(kind)
    place = "acp_agent:AcpBackend" if kind == ACP else "" if entry is None else entry.backend
    module, _, name = place.partition(":")
    return getattr(import_module(f"{__package__}.{module}"), name) if place else None


def acp_agent_of(command: Sequence[str]) -> CatalogEntry:
    """Return the agent started by a command, found by file name, because a runner such as npx may come first."""
    names = [word.rpartition("/")[2].partition("@")[0] for word in command]
    return next((entry for name in names for entry in _SPEAK_ACP if name == entry.program), UNKNOWN)


def acp_agent_named(title: str) -> CatalogEntry:
    """Return the agent with the name `title` in its answer to `initialize`."""
    return next((entry for entry in _SPEAK_ACP if entry.calls_itself in title.lower()), UNKNOWN)


_VERSION = re.compile(r"(?<![\w.])\d+\.\d+\.\d+[\w.+-]*")


@value
class Installed:
    """The state of an agent on this machine."""

    agent: CatalogEntry
    path: str | None = None
    """Path of the command; None if not installed."""
    version: str | None = None
    """Version printed by the command; None if unknown."""
    is_logged_in: bool | None = None
    """Whether the agent is logged in; None if unknown."""
    by: str = ""
    """Evidence of the login: a file, or the name of an environment variable."""

    @property
    def is_tested(self) -> bool:
        """Whether plait was tested with this version."""
        return self.version in self.agent.tested

    @property
    def is_newer(self) -> bool:
        """Whether the version is later than all versions tested with plait."""
        return self.version is not None and version_numbers(self.version) > version_numbers(self.agent.tested[-1])

    def turns_that_fit(self, memory: int | None) -> int | None:
        """Return how many turns of the agent fit into `memory` bytes at once; None if `memory` is unknown."""
        return None if memory is None else memory // (self.agent.memory << 20)


async def look_for_agents(patience: float = 15.0) -> tuple[Installed, ...]:
    """Return the state of every agent in the catalogue, in catalogue order.

    The agents are started in parallel to print their version, and ended after `patience` seconds.
    """
    states: dict[str, Installed] = {}

    async def look(agent: CatalogEntry) -> None:
        path = shutil.which(agent.program)
        if path is None:
            states[agent.name] = Installed(agent)
            return
        is_logged_in, by = logged_in(agent.login, os.environ)
        states[agent.name] = Installed(agent, path, await _version(agent, path, patience), is_logged_in, by)

    async with anyio.create_task_group() as group:
        for agent in AGENTS:
            group.start_soon(look, agent)
    return tuple(states[agent.name] for agent in AGENTS)


def logged_in(login: Login, environment: Mapping[str, str]) -> tuple[bool | None, str]:
    """Return whether the agent is logged in, None if unknown, and the evidence."""
    for name in login.keys:
        if environment.get(name):
            return True, name
    variable, usual = login.folder
    folder = Path(environment.get(variable) or usual).expanduser()
    for file in login.files:
        try:
            if (folder / file).stat().st_size:
                return True, str(folder / file)
        except OSError:
            continue
    elsewhere = next((name for name in login.elsewhere if environment.get(name)), "")
    return (None, elsewhere) if elsewhere or login.may_be_elsewhere else (False, "")


async def _version(agent: CatalogEntry, path: str, patience: float) -> str | None:
    with tempfile.TemporaryDirectory(prefix="plait-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        quiet = {**child_environment(), **agent.sets, "TMPDIR": name}
        start = Launch((path, "--version"), quiet, folder, b"")
        try:
            async with running(start, folder / "child") as child:
                await child.follow(lambda _: False, idle=patience, until=anyio.current_time() + patience)
        except (BackendError, BackendUnavailable):
            return None
        version = _VERSION.search(child.tail("stdout")) if child.status == 0 else None
    return version[0] if version else None


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version, for comparison; the version may be any text."""
    return tuple(int(digits[:9]) for digits in re.findall(r"[0-9]+", version)[:3])
