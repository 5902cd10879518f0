"""Claude Code (`claude -p`), run for one turn at a time. Tested with 2.1.330 and 2.1.197.

The command prints events (`stream-json`); the last event is `result`. Neither the exit status nor the word "success"
shows that the turn has an answer, only `is_error` does. The session keeps the prompt of a failed or interrupted turn.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from plait.backends.agents.agent_errors import NETWORK
from plait.backends.agents.agent_protocol import Call
from plait.backends.agents.agent_transcript import reread
from plait.backends.agents.claude_budget import ClaudeConversation
from plait.backends.agents.claude_output import ClaudeReader
from plait.backends.agents.claude_questions import ANSWER, hook_command, write_answer
from plait.backends.agents.cli_agent import CliBackend
from plait.backends.backend_protocol import ConversationRequest, Files
from plait.backends.prices import Billing
from plait.backends.process.private_files import private_file
from plait.safe_text import check_base_url

_ENVIRONMENT: Mapping[str, str] = {
    "CLAUDE_CODE_MAX_RETRIES": "0",
    # Otherwise many failures at startup are reported on stderr only.
    "CLAUDE_CODE_STARTUP_FAILURE_RESULTS": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
}
_CHOICES = frozenset({"anyOf", "oneOf", "allOf"})
_LONGEST_ARGUMENT = 100_000
"""Bytes. Linux accepts arguments of 128 KiB."""
_PASSES = (
    "ANTHROPIC_API_KEY",
    "ANTHROPIC_AUTH_TOKEN",
    "ANTHROPIC_BASE_URL",
    "ANTHROPIC_CUSTOM_HEADERS",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "ANTHROPIC_FOUNDRY_API_KEY",
    "ANTHROPIC_FOUNDRY_BASE_URL",
    "ANTHROPIC_FOUNDRY_RESOURCE",
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",
    "ANTHROPIC_VERTEX_PROJECT_ID",
    "AWS_ACCESS_KEY_ID",
    "AWS_BEARER_TOKEN_BEDROCK",
    "AWS_CONFIG_FILE",
    "AWS_DEFAULT_REGION",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_SHARED_CREDENTIALS_FILE",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
    "CLAUDE_CONFIG_DIR",
    "CLOUD_ML_REGION",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "IS_SANDBOX",
    "MAX_THINKING_TOKENS",
    *NETWORK,
)


@dataclass(eq=False, kw_only=True)
class ClaudeCodeBackend(CliBackend):
    """Claude Code, run as `claude -p`, one process per turn."""

    kind: ClassVar[str] = "claude-code"
    program: ClassVar[str] = "claude"
    install: ClassVar[str] = "npm install -g @anthropic-ai/claude-code@latest"
    chooses_session: ClassVar[bool] = True
    can_fork: ClassVar[bool] = True
    ends_at_interrupt: ClassVar[bool] = True

    model: str | None = None
    """Model; None for the agent's default."""
    permission_mode: str | None = None
    """One of Claude Code's own modes, such as "acceptEdits". Without a mode and without `allowed_tools`, any tool use
    that needs permission is denied, and the agent continues without.
    """
    allowed_tools: tuple[str, ...] = ()
    """Tools allowed without asking, such as "Read" or "Bash(git *)"."""
    disallowed_tools: tuple[str, ...] = ()
    """Tools denied in any case."""
    ask_for: tuple[str, ...] = ()
    """Tools (as matched by Claude Code's hooks, such as "Bash" or "mcp__.*") whose every use needs a person's answer.

    The turn ends and the task waits. The answer, "allow", "deny" or "deny: REASON", applies to the same tool use, in
    any process, at any time. "AskUserQuestion" lets the agent ask questions of its own.
    """
    tools: tuple[str, ...] | None = None
    """All built-in tools of the agent; no tools for `()`, the default tools for None."""
    system: str | None = None
    """Replaces the system prompt. A session keeps its first system prompt."""
    append_system: str | None = None
    """Added to the system prompt."""
    max_turns: int | None = None
    """Limit of one turn, in model requests. At the limit the turn fails as `limit_reached`, which the runner does
    not retry; the session can be continued.
    """
    max_budget_usd: float | None = None
    """Limit of one turn, in US dollars. At the limit the turn ends with a question, and the task waits. The answer is a
    higher limit, with which the turn goes on in the same session, or "stop", which fails the task.
    """
    bare: bool = False
    """Leave out hooks, memory, plugins and CLAUDE.md files, and accept a key only from ANTHROPIC_API_KEY."""
    base_url: str | None = None
    """Another server for the agent's requests."""

    def __post_init__(self) -> None:
        check_base_url(self.base_url, "the environment variable ANTHROPIC_API_KEY")
        if self.ask_for and self.bare:
            raise ValueError("ask_for needs hooks, which bare leaves out; give one of the two")
        wrong = [name for name in self.ask_for if not re.fullmatch(r"[\w.*|-]+", name)]
        if wrong:
            raise ValueError(f"ask_for must hold names of tools, such as 'Bash', not {wrong[0]!r}")

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of turns without a reported cost."""
        return Billing(self.base_url or "anthropic", self.model, sums_requests=True)

    @property
    def passes(self) -> Sequence[str]:
        """Names of the variables with keys, settings and network access."""
        return _PASSES

    def session_of(self, folder: Path) -> str | None:
        """Return the session as for all agents; None while an answer waits for the hook, because the session lacks that
        answer.
        """
        reader = self.reader(Call(folder))
        reread(reader, folder)
        if reader.session_id is None and (folder / ANSWER).exists():
            return None
        return super().session_of(folder)

    def session_files(self, session_id: str) -> Sequence[Path]:
        """Return the files of the session: one file in the folder of each working folder."""
        home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or "~/.claude").expanduser()
        return sorted(home.glob(f"projects/*/{glob.escape(session_id)}.jsonl"))

    def arguments(self, call: Call) -> Sequence[str]:
        """Return the command's arguments. Writes system prompts, if any, into `call.folder`."""
        # Join each value to its option, so that a value with a leading dash is not read as an option.
        return [
            *("-p", "--output-format=stream-json", "--verbose", "--include-partial-messages"),
            *(["--bare"] if self.bare else []),
            *_session(call),
            *_options(self._values(call)),
            *(f"--allowedTools={rule}" for rule in self.allowed_tools),
            *(f"--disallowedTools={rule}" for rule in self.disallowed_tools),
            *self._asking(call),
        ]

    def _values(self, call: Call) -> Iterator[tuple[str, object]]:
        yield "model", self.model
        yield "permission-mode", self.permission_mode
        yield "tools", None if self.tools is None else ",".join(self.tools)
        yield "max-turns", self.max_turns
        yield "max-budget-usd", self.max_budget_usd if call.max_budget_usd is None else call.max_budget_usd
        if call.output_schema is not None:
            # Claude Code rejects any "$schema" except its own.
            schema = {key: call.output_schema[key] for key in call.output_schema if key != "$schema"}
            yield "json-schema", json.dumps(schema, ensure_ascii=False)
        for option, words in (("system-prompt", self.system), ("append-system-prompt", self.append_system)):
            if words is not None:
                path = call.folder / f"{option}.txt"
                private_file(path, words)
                yield f"{option}-file", path

    def _asking(self, call: Call) -> Iterator[str]:
        if self.ask_for:
            if call.answer is not None:
                write_answer(call.folder, call.answer.value)
            hook = {"type": "command", "command": hook_command(call.folder)}
            hooks = {"PreToolUse": [{"matcher": "|".join(self.ask_for), "hooks": [hook]}]}
            yield f"--settings={json.dumps({'hooks': hooks})}"
        if "AskUserQuestion" in self.ask_for:
            # Claude Code offers the tool only if a permission prompt is available. The hook is called first.
            yield "--permission-prompt-tool=stdio"

    def takes_schema(self, schema: Mapping[str, object]) -> bool:
        """Return whether the schema is valid for a tool's input at the server, and short enough for an argument.

        Claude Code's own check supports fewer keywords than plait's: a rejected schema is described in the prompt
        instead.
        """
        is_plain = schema.get("type") == "object" and _CHOICES.isdisjoint(schema)
        return is_plain and len(json.dumps(dict(schema))) < _LONGEST_ARGUMENT

    def input_text(self, call: Call, prompt: str) -> str:
        """Return the prompt, or no text with an answer: the tool use waits in the session and proceeds by itself."""
        return "" if self.ask_for and call.answer is not None else prompt

    def environment(self, call: Call) -> Mapping[str, str]:
        """Return variables that disable retries, telemetry and updates, and place temporary files beside the turn's
        files.
        """
        own = {**_ENVIRONMENT, "CLAUDE_CODE_TMPDIR": str(call.folder)}
        return own if self.base_url is None else {**own, "ANTHROPIC_BASE_URL": self.base_url}

    def conversation(self, request: ConversationRequest, files: Files) -> ClaudeConversation:
        """Return a conversation that uses `files`."""
        return ClaudeConversation(self, self.max_budget_usd, request, files)

    def reader(self, call: Call) -> ClaudeReader:
        """Return a reader for the output of the call."""
        return ClaudeReader(call, self.clock(call))


def _session(call: Call) -> Iterator[str]:
    begins_from = call.session_id if call.resume else call.forks
    if begins_from is not None:
        yield f"--resume={begins_from}"
    if begins_from is not None and call.rewind_to is not None:
        yield f"--resume-session-at={call.rewind_to}"
    if not call.resume:
        if call.forks is not None:
            yield "--fork-session"
        if call.session_id is not None:
            yield f"--session-id={call.session_id}"


def _options(values: Iterator[tuple[str, object]]) -> Iterator[str]:
    return (f"--{option}={given}" for option, given in values if given is not None)
