"""Claude Code (`claude -p`), run for one turn at a time. Tested with 2.1.330 and 2.1.197.

The command prints events (`stream-json`); the last event is `result`. Neither the exit status nor the word "success"
shows that the turn has an answer, only `is_error` does. The session keeps the prompt of a failed or interrupted turn.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from plait.backends.agents.agent_catalog import version_numbers
from plait.backends.agents.agent_output import (
    THROTTLED,
    WORDS,
    AgentCall,
    ProcessEnd,
    SchemaRefused,
    TurnAnswer,
    classify,
    failure,
    no_outcome,
    reread,
    safe_line,
)
from plait.backends.agents.cli_agent import AgentBackend, AgentConversation, marked
from plait.backends.backend_protocol import ConversationRequest, Files, Output, Reply
from plait.backends.error_kinds import error_text, seconds_left
from plait.backends.json_fields import (
    at,
    at_least,
    count,
    counted,
    describe_tool_call,
    number,
    tables,
    text,
    usage_beside_cache,
)
from plait.backends.prices import Billing
from plait.backends.process.files_and_locks import private_file
from plait.backends.whole_answer import kind_of_reason, without_calls
from plait.dialogue import Message, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue, value
from plait.safe_text import check_base_url, clean_text, shown
from plait.usage import NO_USAGE, Usage

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

    permission_mode: str | None = None
    """One of Claude Code's own modes, such as "acceptEdits". Without a mode and without `allowed_tools`, any tool use
    that needs permission is denied, and the agent continues without.
    """
    allowed_tools: tuple[str, ...] = ()
    """Tools allowed without asking, such as "Read" or "Bash(git *)"."""
    disallowed_tools: tuple[str, ...] = ()
    """Tools that are always denied."""
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
        billed_by = self.base_url or "anthropic"
        return Billing(billed_by, self.model, sums_requests=True, max_turn_usd=self.max_budget_usd)

    def session_of(self, folder: Path) -> str | None:
        """Return the session as for all agents; None while an answer waits for the hook, because the session lacks that
        answer.
        """
        if (folder / ANSWER).exists() and reread(self.reader(AgentCall(folder)), folder).session_id is None:
            return None
        return super().session_of(folder)

    def session_files(self, session_id: str) -> Sequence[Path]:
        """Return the files of the session: one file in the folder of each working folder."""
        home = Path(os.environ.get("CLAUDE_CONFIG_DIR") or "~/.claude").expanduser()
        return sorted(home.glob(f"projects/*/{glob.escape(session_id)}.jsonl"))

    @property
    def writes(self) -> bool:
        """Whether the agent may use tools that need permission."""
        mode = self.permission_mode
        return bool(self.allowed_tools or self.ask_for) if mode in {None, "default"} else mode != "plan"

    def arguments(self, call: AgentCall) -> Sequence[str]:
        """Return the command's arguments. Writes system prompts, if any, into `call.folder`."""
        # Join each value to its option, so that a value with a leading dash is not read as an option.
        return [
            *("-p", "--output-format=stream-json", "--verbose", "--include-partial-messages"),
            *(["--bare"] if self.bare else []),
            *_session(call),
            *(f"--{option}={setting}" for option, setting in self._values(call) if setting is not None),
            *(f"--allowedTools={rule}" for rule in self.allowed_tools),
            *(f"--disallowedTools={rule}" for rule in self.disallowed_tools),
            *self._asking(call),
        ]

    def _values(self, call: AgentCall) -> Iterator[tuple[str, object]]:
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

    def _asking(self, call: AgentCall) -> Iterator[str]:
        if self.ask_for:
            answer = call.folder / ANSWER
            if call.answer is not None:
                private_file(answer, json.dumps(call.answer.value))
            words = [sys.executable, "-I", "-S", str(_HOOK), str(answer)]
            hook = {"type": "command", "command": shlex.join(words)}  # a line for a shell
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

    def input_text(self, call: AgentCall, prompt: str) -> str:
        """Return the prompt, or no text with an answer: the tool use waits in the session and proceeds by itself."""
        return "" if self.ask_for and call.answer is not None else prompt

    def environment(self, call: AgentCall) -> Mapping[str, str]:
        """Return the variables to set. Temporary files go beside the turn's files."""
        variables = {**self.entry.sets, "CLAUDE_CODE_TMPDIR": str(call.folder)}
        return variables if self.base_url is None else {**variables, "ANTHROPIC_BASE_URL": self.base_url}

    def conversation(self, request: ConversationRequest, files: Files, *, guarded: bool) -> ClaudeConversation:
        """Return a conversation that uses `files`. A `guarded` agent ends with this process."""
        return ClaudeConversation(self, request, files, guarded=guarded)

    def reader(self, call: AgentCall) -> ClaudeReader:
        """Return a reader for the output of the call."""
        return ClaudeReader(call, self.clock(call))


def _session(call: AgentCall) -> Iterator[str]:
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


# A spent budget is a question.

STOP = "stop"
_SPENT = re.compile(r"spent-(.+)-of-(.+)")
_RAISED = (
    "You were stopped because the budget for this work was spent. It has been raised. Go on where you were stopped: "
    "look at what you have done already, do what is missing, and give your whole answer."
)
"""The message that continues the session. The session holds the prompt and the work done."""


@value
class TurnBudget:
    """The US dollars for a turn, which may consist of several calls."""

    limit: float
    spent: float = 0.0
    """Dollars spent by the calls before."""

    @property
    def rest(self) -> float:
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

    def after(self, cost: float | None) -> TurnBudget:
        """Return the budget after a call that has spent the rest and cost `cost` dollars; None if unknown."""
        return replace(self, spent=round(self.spent + (self.rest if cost is None else cost), 6))


class ClaudeConversation(AgentConversation):
    """A conversation with Claude Code, in which a spent budget is a question."""

    def __init__(
        self, backend: ClaudeCodeBackend, request: ConversationRequest, files: Files, *, guarded: bool
    ) -> None:
        super().__init__(backend, request, files, guarded=guarded)
        match = _SPENT.fullmatch(self._question)
        reached = TurnBudget(float(match[2]), float(match[1])) if match else None
        self._stopped = reached if self._answer == STOP else None
        """The spent budget, if the answer was to stop."""
        self._raised: TurnBudget | None = None
        """The raised budget, if any."""
        if reached is not None and isinstance(self._answer, int | float):
            self._raised = replace(reached, limit=float(self._answer))
            self._request = replace(request, answer=None)  # no hook waits for the answer
        limit = backend.max_budget_usd
        self._budget = self._raised or (None if limit is None else TurnBudget(limit))

    async def send(self, prompt: str) -> Reply:
        """Implement `Conversation.send`. With an open question about the budget, the session id ends in `?` and the
        budget.
        """
        if self._stopped is not None:
            message = f"{self._stopped.reached}, and the answer was to stop"
            raise BackendError(ErrorKind.LIMIT_REACHED, message)
        sent = _RAISED if self._raised is not None and self._is_new else prompt
        try:
            return await super().send(sent)
        except BudgetReached as error:
            if self._budget is None or self.session_id is None:
                raise
            spent = self._budget.after(error.usage.cost_usd)
            question = spent.question
            notice = Message("assistant", f"({question.text})", error.usage)
            messages = (*(error.messages or (Message("user", sent),)), notice)
            session_id = marked(self.session_id, f"spent-{spent.spent:.6f}-of-{spent.limit:.6f}")
            return Reply(notice.content, None, session_id, error.usage, messages, question)

    def _call(self, folder: Path) -> AgentCall:
        call = super()._call(folder)
        return call if self._raised is None else replace(call, max_budget_usd=self._raised.rest)


def _dollars(amount: float) -> str:
    return f"${amount:.2f}" if amount >= 0.1 else f"${amount:.6f}".rstrip("0")


# The kinds of its failures.

REFUSES_SCHEMA = ("--json-schema is not", "input_schema")
"""Messages about a schema that exceeds Claude Code's own check, or the server's rules for a tool's input."""
_LIMITS: Mapping[str, ErrorKind] = {
    # The user's limit is used up. The kind must not be retried: a retry would spend the limit once more.
    "error_max_turns": ErrorKind.LIMIT_REACHED,
    "error_max_budget_usd": ErrorKind.LIMIT_REACHED,
    "error_max_structured_output_retries": ErrorKind.INVALID_OUTPUT,
}
_TYPED: Mapping[str, ErrorKind] = {
    "usage_limit_reached": ErrorKind.RATE_LIMITED,
    **dict.fromkeys(("model_requires_usage_credits", "long_context_credits_required", "provider_credentials",
                     "gateway_signin_required", "gateway_session_expired", "api_key_auth_disabled",
                     "org_disabled_credential", "invalid_credential_header", "network_edge_blocked"), ErrorKind.AUTH),
    **dict.fromkeys(("message_over_context_limit", "autocompact_thrashing"), ErrorKind.CONTEXT_OVERFLOW),
    **dict.fromkeys(("safety_monitor_blocked", "dlp_request_denied"), ErrorKind.REFUSED),
    **dict.fromkeys(("claude_code_version_too_old", "tool_history_mismatch"), ErrorKind.INVALID_REQUEST),
}  # fmt: skip
"""`api_error` of a failed turn, where the HTTP status would mislead."""


def kind_of_result(result: Mapping[str, JsonValue], message: str, error: str) -> ErrorKind:
    """Return the kind of the failure in `result`; `message` is its text, `error` the error of its last message."""
    kind = ErrorKind.OVERLOADED if THROTTLED in message.lower() else None
    api_error = text(result, "api_error")
    kind = kind or _LIMITS.get(text(result, "subtype")) or _TYPED.get(api_error) or kind_of_reason(api_error)
    if kind is None and text(result, "terminal_reason").startswith("aborted"):
        kind = ErrorKind.CRASHED
    status = count(result, "api_error_status")
    kind = kind or next(filter(None, map(kind_of_reason, _reasons(result))), None)
    if kind is None and not status:
        kind = WORDS.get(error) or kind_of_reason(error)
    if kind is not None:
        return kind
    if text(result, "startup_failure_reason") not in {"", "session_held_by_background"}:
        return ErrorKind.INVALID_REQUEST
    return classify(message, status, [text(result, "api_error_type")])


def _reasons(result: Mapping[str, JsonValue]) -> Sequence[str]:
    """Return the reason for the end, but for Claude Code's own tools, such as the one for structured output."""
    return without_calls([text(result, "stop_reason")])


# Claude Code calls a hook before each tool use that needs a person's answer. Without an answer the hook defers: the
# turn ends, and the tool use stays in the session. When the session is continued, the hook is called first for the same
# tool use, and then finds the answer. Each later tool use is a new question.

_HOOK = Path(__file__).with_name("_claude_hook.py")
ANSWER = "answer.json"
_TOOL = "AskUserQuestion"
_LONGEST = 50_000


def question_of(deferred: JsonValue) -> Question:
    """Return the question to a person about a deferred tool use."""
    if text(deferred, "name") == _TOOL:
        return _own_question(deferred)
    # Show the whole input: a person has to see everything to be allowed.
    tool_input = json.dumps(at(deferred, "input"), ensure_ascii=False)
    what = shown(f"{text(deferred, 'name')} with {tool_input}", _LONGEST)
    schema: dict[str, JsonValue] = {"anyOf": [{"enum": ["allow", "deny"]}, {"type": "string", "pattern": "^deny: ."}]}
    return Question(f'Claude Code asks to use {what}. Answer "allow", "deny" or "deny: REASON"', schema)


def _own_question(deferred: JsonValue) -> Question:
    questions = tables(deferred, "input", "questions")
    texts = [_with_options(one) for one in questions]
    if len(questions) == 1:
        return Question(texts[0], {"type": "string", "minLength": 1})
    each: dict[str, JsonValue] = {text(one, "question"): {"type": "string", "minLength": 1} for one in questions}
    fields: dict[str, JsonValue] = {"type": "object", "properties": each, "additionalProperties": False}
    return Question(" ".join(texts), {**fields, "required": list(each)})


def _with_options(question: Mapping[str, JsonValue]) -> str:
    words = shown(text(question, "question"), 2000)
    options = [shown(text(option, "label"), 200) for option in tables(question, "options")]
    return f"{words} ({', '.join(options)})" if options else words


_FIRST_TO_ADD_UP = (2, 1, 300)
"""From about this version on, `total_cost_usd` counts the whole session; before, the call alone."""
_BUDGET = "error_max_budget_usd"
_LONGEST_LIMIT = 8 * 86_400.0
"""Seconds. The longest window of a limit has seven days."""


class BudgetReached(BackendError):  # noqa: N818 - reads as what it is
    """A call has spent its budget. The session holds the work done."""


class ClaudeReader:
    """Reads the output of `claude -p --output-format=stream-json`. `now` returns the Unix time, to compute the end of a
    limit.
    """

    def __init__(self, call: AgentCall, now: Callable[[], float]) -> None:
        self.session_id: str | None = None
        """The session's id, once the model has produced output: only then is the prompt certain to be in the session
        file. The announcement of the session and of a request come up to half a second earlier.
        """
        self.announced: str | None = None
        """The session's id, announced before the session file exists."""
        self.is_final = False
        """Whether a `result` was printed and no background work is left. Claude Code waits for a command or agent in
        the background, continues the conversation about its outcome, and prints another result. If the work ends
        before the first result, that result looks final until a `system/init` follows it.
        """
        self.last_whole: str | None = None
        """The last message in the turn; None while a tool use has no result, because a session cut there reports the
        interruption by itself, provided that no message is dropped.
        """
        self._has_schema = call.output_schema is not None
        self._begins = not call.resume and call.forks is None
        self._now = now
        self._version: tuple[int, ...] = ()
        self._requests: dict[str, Usage] = {}
        self._counted = NO_USAGE
        """The sum of the usage of `_requests`."""
        self._model: str | None = None
        self._request: dict[str, str] = {}
        self._streamed: set[str] = set()
        self._denied = set[str]()
        """The tool uses whose denial was shown."""
        self._until: float | None = None
        self._delay: float | None = None
        self._error = ""
        self._pieces: list[str] = []
        self._writing = ""
        """Request of the message in `_pieces`."""
        self._ends_in_text = False
        """Whether that message is the last one: no other has begun, and no tool has returned since."""
        self._open_uses: set[str] = set()
        """Tool uses without a result so far."""
        self._in_background = False
        self._result: Mapping[str, JsonValue] | None = None
        self._billed: Usage | None = None

    @property
    def usage(self) -> Usage:
        """Usage from the results or, before the first result, from the requests so far. Tokens read from or written to
        the prompt cache count as input.
        """
        return replace(self._counted if self._billed is None else self._billed, model=self._model)

    @property
    def last_text(self) -> str:
        """The text of the last message with text, messages of subagents and of Claude Code itself excluded."""
        return "".join(self._pieces)

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event."""
        kind, subtype = text(event, "type"), text(event, "subtype")
        self.announced = text(event, "session_id") or self.announced
        if kind in {"stream_event", "assistant", "user"} or subtype == "api_retry":
            self.session_id = text(event, "session_id") or self.session_id
        match kind, subtype:
            case "stream_event", _:
                return self._stream(event)
            case "assistant", _:
                return self._message(event)
            case "user", _ if not text(event, "parent_tool_use_id"):
                ended = {text(block, "tool_use_id") for block in tables(event, "message", "content")}
                self._ends_in_text = self._ends_in_text and ended <= {""}
                self._open_uses -= ended
                self._note_whole(event)
            case "result", _:
                return self._finish(event)
            case "rate_limit_event", _:
                return self._limit(event)
            case "system", "init":
                self._version = version_numbers(text(event, "claude_code_version"))
                self.is_final = False
            case "system", "api_retry":
                return self._retry(event)
            case "system", "permission_denied":
                return self._deny(event)
            case "system", "background_tasks_changed":
                self._in_background = bool(at(event, "tasks"))
            case _:
                pass
        return []

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the answer. Raises BackendError if the result is not an answer."""
        result = self._result
        # The agent ended during background work. Claude Code may also stop waiting by itself, with status 0.
        is_cut = not self.is_final and ending.status != 0
        if result is None or is_cut:
            kind, message = no_outcome("Claude Code", ending)
            self._check_schema(message)
            raise failure(kind, message, usage=self.usage, continues_session=self.session_id is not None)
        if at(result, "is_error") is not False or text(result, "subtype") != "success":
            raise self._failure(result)
        deferred = at(result, "deferred_tool_use")
        if deferred is not None:  # "success", with an empty answer
            return TurnAnswer("", None, self.usage, question=question_of(deferred))
        used = self.usage
        if not (count(result, "num_turns") or used.input_tokens or used.output_tokens):
            # The text is no answer; `/clear` prints no text.
            words = shown(text(result, "result"), 200) or "no words"
            message = f"Claude Code took the prompt for a command of its own and asked no model ({words})"
            advice = "begin the prompt with another character than a slash"
            raise failure(ErrorKind.INVALID_REQUEST, f"{message}; {advice}", usage=used)
        answer_text = text(result, "result")
        if not answer_text.strip() and self._ends_in_text:
            answer_text = self.last_text
        data = at(result, "structured_output")
        return TurnAnswer(answer_text, data, used, reasons=_reasons(result))

    def _stream(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        agent = text(event, "parent_tool_use_id")
        match text(event, "event", "type"):
            case "message_start":
                self._request[agent] = text(event, "event", "message", "id")
                self._count(self._request[agent], usage_beside_cache(at(event, "event", "message", "usage")))
                if not agent:
                    self._begin(self._request[agent], text(event, "event", "message", "model"))
            case "message_delta":
                self._count(self._request.get(agent, ""), usage_beside_cache(at(event, "event", "usage")))
            case "content_block_delta" if not agent and (piece := text(event, "event", "delta", "text")):
                self._streamed.add(self._request.get(agent, ""))
                return [self._text(self._request.get(agent, ""), piece)]
            case _:
                pass
        return []

    def _message(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read a message or a block of a message. Text of subagents is not part of the answer."""
        request, is_main = text(event, "message", "id"), not text(event, "parent_tool_use_id")
        if at(event, "is_api_error_message") is True or text(event, "error"):
            self._error = text(event, "error")
            self._until = self._end_of_limit(at(event, "api_error_params", "rate_limit_info")) or self._until
            return []
        self._count(request, usage_beside_cache(at(event, "message", "usage")))
        if is_main:
            self._begin(request, text(event, "message", "model"))
        outputs: list[Output] = []
        for block in tables(event, "message", "content"):
            if text(block, "type") == "tool_use":
                if is_main:
                    self._open_uses.add(text(block, "id"))
                outputs.append(self._output("tool", describe_tool_call(text(block, "name"), at(block, "input"))))
            elif is_main and request not in self._streamed and text(block, "text"):
                outputs.append(self._text(request, text(block, "text")))
        if is_main:
            self._note_whole(event)
        return outputs

    def _count(self, request: str, used: Usage) -> None:
        """Record that `request`, which is reported repeatedly, has used at least the tokens of `used`."""
        self._requests[request] = at_least(self._requests.get(request, NO_USAGE), used)
        self._counted = sum(self._requests.values(), NO_USAGE)

    def _begin(self, request: str, model: str) -> None:
        """Record that the message of `request` is the last one, and its model. Claude Code writes messages of its own,
        with the model "<synthetic>".
        """
        self._ends_in_text = self._ends_in_text and request == self._writing
        if model and not model.startswith("<"):
            self._model = shown(model)

    def _note_whole(self, event: Mapping[str, JsonValue]) -> None:
        """Record a message held whole by the session: a place to continue from, unless a tool result is missing."""
        self.last_whole = None if self._open_uses else text(event, "uuid") or self.last_whole

    def _limit(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read a line about the limits of the account, of which the last one counts. With an exceeded limit, an account
        may go on at extra cost ("overage").
        """
        info = at(event, "rate_limit_info")
        self._until = self._end_of_limit(info)
        is_exceeded = text(info, "status") == "rejected" and at(info, "isUsingOverage") is not True
        return [self._output("waiting", "usage limit reached")] if is_exceeded else []

    def _end_of_limit(self, info: JsonValue) -> float | None:
        """Return the Unix time at which the last exceeded window of `info` ends, in eight days at most; None if the
        limit is not exceeded, or the end is unknown or has passed.
        """
        if text(info, "status") != "rejected" or at(info, "isUsingOverage") is True:
            return None
        windows = at(info, "unifiedWindows")
        listed = list(windows.values()) if isinstance(windows, dict) else []
        ends = [number(one, "resetsAt") for one in listed if (number(one, "utilization") or 0.0) >= 1]
        latest = max(filter(None, ends), default=None) or number(info, "resetsAt")
        now = self._now()
        return min(latest, now + _LONGEST_LIMIT) if latest is not None and latest > now else None

    def _retry(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        delay = self._delay = (number(event, "retry_delay_ms") or 0.0) / 1000
        why = shown(text(event, "error").replace("_", " "), 40) or "no answer"
        tries = f"try {count(event, 'attempt')} of {count(event, 'max_retries')}"
        return [self._output("waiting", f"{why}, {delay:.1f} s, {tries}")]

    def _deny(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Show a denial, reported when it happens (not in older versions), and again in the result with its input."""
        use = text(event, "tool_use_id")
        if use in self._denied:
            return []
        self._denied.add(use)
        tool = describe_tool_call(text(event, "tool_name"), at(event, "tool_input"))
        return [self._output("notice", f"not allowed: {tool}")]

    def _finish(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        # Claude Code does not wait for background work once its budget is spent.
        self._result, self.is_final = event, not self._in_background or text(event, "subtype") == _BUDGET
        if count(event, "num_turns"):
            self.session_id = text(event, "session_id") or self.session_id
        self._billed = self._cost(event) + (self._billed or NO_USAGE)
        return [output for denial in tables(event, "permission_denials") for output in self._deny(denial)]

    def _cost(self, result: Mapping[str, JsonValue]) -> Usage:
        """Return the cost of the turn from its result. Versions of Claude Code count differently."""
        since = at(result, "model_usage_since_last_result")
        if isinstance(since, dict):
            return sum((_of_model(since[model]) for model in since), Usage(cost_usd=0.0))
        counts_call = self._begins or (0,) < self._version < _FIRST_TO_ADD_UP
        return replace(
            usage_beside_cache(at(result, "usage")), cost_usd=number(result, "total_cost_usd") if counts_call else None
        )

    def _failure(self, result: Mapping[str, JsonValue]) -> BackendError:
        errors = at(result, "errors")
        first = errors[0] if isinstance(errors, list) and errors else None
        message = text(result, "result") or clean_text(error_text(first)) or "no reason given"
        self._check_schema(message)
        kind = kind_of_result(result, message, self._error)
        if text(result, "subtype") == _BUDGET:
            return BudgetReached(kind, f"Claude Code: {safe_line(message)}", usage=self.usage, continues_session=True)
        continues = self.session_id is not None
        return failure(
            kind, f"Claude Code: {message}", wait=self._hint(message), usage=self.usage, continues_session=continues
        )

    def _check_schema(self, message: str) -> None:
        if self._has_schema and any(phrase in message for phrase in REFUSES_SCHEMA):
            raise SchemaRefused(message)

    def _hint(self, message: str) -> float | None:
        """Return the seconds to wait: until the end of the limit, given as a number or in words, or the last retry
        delay.
        """
        if THROTTLED in message.lower():
            return self._delay
        if self._until is not None:
            return max(0.0, self._until - self._now())
        seconds = seconds_left(message, self._now())
        return self._delay if seconds is None else seconds

    def _text(self, request: str, piece: str) -> Output:
        """Add `piece` to the text of the message of `request`."""
        if request != self._writing:
            self._writing = request
            self._pieces.clear()
        self._pieces.append(piece)
        self._ends_in_text = True
        return self._output("text", piece)

    def _output(self, kind: Literal["text", "tool", "waiting", "notice"], words: str) -> Output:
        return Output(kind, words, self.usage)


def _of_model(usage: JsonValue) -> Usage:
    cache_read, cache_write = count(usage, "cacheReadInputTokens"), count(usage, "cacheCreationInputTokens")
    return counted(
        count(usage, "inputTokens") + cache_read + cache_write,
        count(usage, "outputTokens"),
        number(usage, "costUSD"),
        cache_read=cache_read,
        cache_write=cache_write,
        reasoning=count(usage, "thinkingTokens"),
    )
