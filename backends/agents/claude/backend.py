"""Claude Code (`claude -p`), run for one turn at a time. Tested with 2.1.330 and 2.1.197.

It prints events (`stream-json`), of which `result` is the last word: neither its exit status nor the word "success"
says that there is an answer, only `is_error` does. The session keeps the prompt of a turn that fails or is cut.
"""

from __future__ import annotations

import glob
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from plait.backends.agents.backend import CliBackend
from plait.backends.agents.claude.questions import ANSWER, hook_command, write_answer
from plait.backends.agents.claude.reader import ClaudeReader
from plait.backends.agents.error_kinds import NETWORK
from plait.backends.agents.protocol import Call
from plait.backends.agents.transcript import reread
from plait.backends.process.private import private_file

_ENVIRONMENT: Mapping[str, str] = {
    "CLAUDE_CODE_MAX_RETRIES": "0",
    # Else much of what it finds wrong before it starts is told on stderr alone.
    "CLAUDE_CODE_STARTUP_FAILURE_RESULTS": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "DISABLE_AUTOUPDATER": "1",
}
_CHOICES = frozenset({"anyOf", "oneOf", "allOf"})
_LONGEST_ARGUMENT = 100_000
"""Bytes; Linux takes arguments of 128 KiB."""
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
    """Claude Code, run as `claude -p`, one process a turn. For what all agents have in common see `CliBackend`.

    `permission_mode` is one of its own words, such as "acceptEdits"; without it and without `allowed_tools`
    (such as "Read" or "Bash(git *)") it is denied whatever it would have to ask for, and goes on without.
    `disallowed_tools` are denied in any case. `tools` are all built-in tools that it has; none at all for `()`, its
    usual ones for None. `system` replaces its system prompt, `append_system` is added to it; a session keeps the one
    that it began with. `max_turns` (model requests) and `max_budget_usd` limit one turn: where a limit is
    reached, the turn fails as `context_overflow`, which is not tried again by itself; the session can be gone on with.
    `bare` leaves out hooks, memory, plugins and CLAUDE.md files, and knows a key in ANTHROPIC_API_KEY alone.
    `base_url` is another server for its requests. `now` tells the Unix time.

    `ask_for` names tools (as its hooks match them, such as "Bash" or "mcp__.*") for whose every use a person is asked:
    the turn ends, the task waits, and the answer, "allow", "deny" or "deny: REASON", goes to that very use, in any
    process, at any time. "AskUserQuestion" among them lets it ask questions of its own.
    """

    kind: ClassVar[str] = "claude-code"
    program: ClassVar[str] = "claude"
    install: ClassVar[str] = "npm install -g @anthropic-ai/claude-code@latest"
    chooses_session: ClassVar[bool] = True
    can_fork: ClassVar[bool] = True

    model: str | None = None
    permission_mode: str | None = None
    allowed_tools: tuple[str, ...] = ()
    disallowed_tools: tuple[str, ...] = ()
    ask_for: tuple[str, ...] = ()
    tools: tuple[str, ...] | None = None
    system: str | None = None
    append_system: str | None = None
    max_turns: int | None = None
    max_budget_usd: float | None = None
    bare: bool = False
    base_url: str | None = None
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        if self.ask_for and self.bare:
            raise ValueError("ask_for needs hooks, which bare leaves out; give one of the two")
        wrong = [name for name in self.ask_for if not re.fullmatch(r"[\w.*|-]+", name)]
        if wrong:
            raise ValueError(f"ask_for names tools, such as 'Bash'; {wrong[0]!r} is no such name")

    @property
    def passes(self) -> Sequence[str]:
        """Its keys, its settings, and how the network is reached."""
        return _PASSES

    def session_of(self, folder: Path) -> str | None:
        """As for all agents; but an answer that the hook has not taken is not in the session, whatever else is."""
        reader = self.reader(Call(folder))
        reread(reader, folder)
        if reader.session_id is None and (folder / ANSWER).exists():
            return None
        return super().session_of(folder)

    def session_files(self, session_id: str) -> Sequence[Path]:
        """One, in a folder for each folder that it has worked in."""
        home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or "~/.claude").expanduser()
        return sorted(home.glob(f"projects/*/{glob.escape(session_id)}.jsonl"))

    def arguments(self, call: Call) -> Sequence[str]:
        """The arguments; writes the system prompt into `call.folder`, where there is one."""
        # Each value in one argument with its option: nothing that it begins with makes it an option of its own.
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
        yield "max-budget-usd", self.max_budget_usd
        if call.output_schema is not None:
            # It knows no other version than the one that it takes it for.
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
            # It has that tool only where somebody seems to be there to be asked. The hook is asked first.
            yield "--permission-prompt-tool=stdio"

    def takes_schema(self, schema: Mapping[str, object]) -> bool:
        """Whether it is one of the schemas that its server takes for a tool's input, and an argument can hold. Its own
        check knows fewer words than we do: what it refuses it is told in words, too.
        """
        is_plain = schema.get("type") == "object" and _CHOICES.isdisjoint(schema)
        return is_plain and len(json.dumps(dict(schema))) < _LONGEST_ARGUMENT

    def says(self, call: Call, prompt: str) -> str:
        """Nothing beside an answer: what it asked about is still waiting in the session, and goes on by itself."""
        return "" if self.ask_for and call.answer is not None else prompt

    def environment(self, call: Call) -> Mapping[str, str]:
        """Retries inside, telemetry and updates are off, and what its tools leave lies beside the turn's files."""
        own = {**_ENVIRONMENT, "CLAUDE_CODE_TMPDIR": str(call.folder)}
        return own if self.base_url is None else {**own, "ANTHROPIC_BASE_URL": self.base_url}

    def reader(self, call: Call) -> ClaudeReader:
        """A reader for that turn's output."""
        return ClaudeReader(call, self.now)


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
