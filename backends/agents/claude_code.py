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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, cast

from plait.backends.agents.agent_protocol import Call
from plait.backends.agents.agent_transcript import noted_before, reread
from plait.backends.agents.claude_output import ANSWER, BudgetReached, ClaudeReader, hook_command, write_answer
from plait.backends.agents.cli_agent import AgentBackend, AgentConversation
from plait.backends.backend_protocol import ConversationRequest, Files, Reply
from plait.backends.prices import Billing
from plait.backends.process.private_files import private_file
from plait.dialogue import Message, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import check_base_url

_CHOICES = frozenset({"anyOf", "oneOf", "allOf"})
_LONGEST_ARGUMENT = 100_000
"""Bytes. Linux accepts arguments of 128 KiB."""


@dataclass(eq=False, kw_only=True)
class ClaudeCodeBackend(AgentBackend):
    """Claude Code, run as `claude -p`, one process per turn."""

    kind: ClassVar[str] = "claude-code"
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
        """Return the variables to set. Temporary files go beside the turn's files."""
        variables = {**self.entry.sets, "CLAUDE_CODE_TMPDIR": str(call.folder)}
        return variables if self.base_url is None else {**variables, "ANTHROPIC_BASE_URL": self.base_url}

    def conversation(self, request: ConversationRequest, files: Files) -> ClaudeConversation:
        """Return a conversation that uses `files`."""
        return ClaudeConversation(self, request, files)

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


STOP = "stop"
_NOTE = "budget"
_MARKED = re.compile(r"(.*)\?spent-(\d+\.\d+)-of-(\d+\.\d+)", re.DOTALL)
_RAISED = (
    "You were stopped because the budget for this work was spent. It has been raised. Go on where you were stopped: "
    "look at what you have done already, do what is missing, and give your whole answer."
)
"""The message that continues the session. The session holds the prompt and the work done."""


@value
class Budget:
    """The US dollars for a turn, which may consist of several calls."""

    limit: float
    spent: float = 0.0
    """Dollars spent by the calls before."""

    @property
    def left(self) -> float:
        """Dollars left for the next call."""
        return self.limit - self.spent

    @property
    def reached(self) -> str:
        """The words for a person once the budget is spent."""
        return f"Claude Code reached its budget of {_dollars(self.limit)} (spent {_dollars(self.spent)})"

    @property
    def question(self) -> Question:
        """The question to a person once the budget is spent."""
        schema: dict[str, JsonValue] = {"anyOf": [{"type": "number", "exclusiveMinimum": self.spent}, {"enum": [STOP]}]}
        return Question(f'{self.reached}. Raise it to? Answer with the new budget in dollars, or "{STOP}"', schema)

    def after(self, cost: float | None) -> Budget:
        """Return the budget after a call that has spent the rest and cost `cost` dollars; None if unknown."""
        return replace(self, spent=round(self.spent + (self.left if cost is None else cost), 6))

    def marks(self, session_id: str) -> str:
        """Return the session id, extended by the budget, so that the answer can be matched to the question."""
        return f"{session_id}?spent-{self.spent:.6f}-of-{self.limit:.6f}"


def unmarked(session_id: str | None) -> tuple[str | None, Budget | None]:
    """Return the plain session id, and the spent budget if `session_id` is marked."""
    match = _MARKED.fullmatch(session_id or "")
    return (match[1], Budget(float(match[3]), float(match[2]))) if match else (session_id, None)


class ClaudeConversation(AgentConversation):
    """A conversation with Claude Code, in which a spent budget is a question."""

    def __init__(self, backend: ClaudeCodeBackend, request: ConversationRequest, files: Files) -> None:
        limit = backend.max_budget_usd
        session_id, reached = unmarked(request.session_id)
        answer = None if reached is None or request.answer is None else request.answer.value
        self._stopped = reached if answer == STOP else None
        """The spent budget, if the answer was to stop."""
        self._raised = _budget_noted(noted_before(request, files.turn, _NOTE))
        """The raised budget, if any."""
        self._begins = _RAISED if answer is not None and self._raised is None else None
        """The message to send instead of the answer."""
        if reached is not None and isinstance(answer, int | float) and self._raised is None:
            self._raised = replace(reached, limit=float(answer))
        self._budget = self._raised or (None if limit is None else Budget(limit))
        if self._raised is not None:  # no hook waits for the answer
            request = replace(request, answer=None)
        super().__init__(backend, replace(request, session_id=session_id), files)

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`. With an open question about the budget, the session id ends in `?` and the
        budget.
        """
        if self._stopped is not None:
            message = f"{self._stopped.reached}, and the answer was to stop"
            raise BackendError(ErrorKind.LIMIT_REACHED, message)
        sent = self._begins or prompt
        try:
            return await super().send(sent)
        except BudgetReached as error:
            if self._budget is None or self._session_id is None:
                raise
            spent = self._budget.after(error.usage.cost_usd)
            question = spent.question
            notice = Message("assistant", f"({question.text})", error.usage)
            messages = (*(error.messages or (Message("user", sent),)), notice)
            session_id = spent.marks(self._session_id)
            return Reply(notice.content, None, session_id, error.usage, messages, question)

    def _call(self, folder: Path) -> Call:
        call = super()._call(folder)
        return call if self._raised is None else replace(call, max_budget_usd=self._raised.left)

    def _notes(self) -> Mapping[str, str]:
        if self._raised is None:
            return {}
        return {_NOTE: json.dumps([self._raised.limit, self._raised.spent])}


def _budget_noted(note: JsonValue) -> Budget | None:
    """Return the raised budget in the note of a turn."""
    with suppress(ValueError, TypeError):
        limit, spent = cast("Any", note)
        return Budget(float(limit), float(spent))
    return None


def _dollars(amount: float) -> str:
    return f"${amount:.2f}" if amount >= 0.1 else f"${amount:.6f}".rstrip("0")
