"""The output of `claude -p --output-format=stream-json`, one event a line: its reader, its failures, its questions.

Claude Code calls a hook before each tool use that needs a person's answer. Without an answer the hook defers: the turn
ends, and the tool use stays in the session. When the session is continued, the hook is called first for the same tool
use, and then finds the answer. Each later tool use is a new question.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from plait.backends.agents.agent_errors import (
    COMMON,
    THROTTLED,
    Phrases,
    SchemaRefused,
    classify,
    failure,
    no_outcome,
    safe_line,
)
from plait.backends.agents.agent_protocol import Call, ProcessEnd, TurnAnswer
from plait.backends.backend_protocol import Output
from plait.backends.error_kinds import error_text, seconds_left
from plait.backends.json_fields import UsageTally, at, count, describe_tool_call, number, tables, text
from plait.backends.process.private_files import private_file
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, shown
from plait.usage import NO_USAGE, Usage

PHRASES: Phrases = (
    ("no conversation found", ErrorKind.SESSION_LOST),
    # The message to continue from is not in the session file.
    ("no message found with message.uuid", ErrorKind.SESSION_LOST),
    # Another process holds the session, or held it a moment ago.
    ("already in use", ErrorKind.TRANSIENT),
    ("error: unknown option", ErrorKind.INVALID_REQUEST),
    ("error: --json-schema is not", ErrorKind.INVALID_REQUEST),
    ("is invalid. allowed choices", ErrorKind.INVALID_REQUEST),
    ("root/sudo privileges", ErrorKind.INVALID_REQUEST),
    *COMMON,
)
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
    "model_requires_usage_credits": ErrorKind.AUTH,
    "long_context_credits_required": ErrorKind.AUTH,
    "provider_credentials": ErrorKind.AUTH,
    "gateway_signin_required": ErrorKind.AUTH,
    "gateway_session_expired": ErrorKind.AUTH,
    "api_key_auth_disabled": ErrorKind.AUTH,
    "org_disabled_credential": ErrorKind.AUTH,
    "invalid_credential_header": ErrorKind.AUTH,
    "network_edge_blocked": ErrorKind.AUTH,
    "max_output_tokens": ErrorKind.TRUNCATED,
    "message_over_context_limit": ErrorKind.CONTEXT_OVERFLOW,
    "autocompact_thrashing": ErrorKind.CONTEXT_OVERFLOW,
    "safety_monitor_blocked": ErrorKind.REFUSED,
    "dlp_request_denied": ErrorKind.REFUSED,
    "claude_code_version_too_old": ErrorKind.INVALID_REQUEST,
    "tool_history_mismatch": ErrorKind.INVALID_REQUEST,
}
"""`api_error` of a failed turn, where the HTTP status would mislead."""
_UNTYPED: Mapping[str, ErrorKind] = {
    "authentication_failed": ErrorKind.AUTH,
    "billing_error": ErrorKind.AUTH,
    "account_on_hold": ErrorKind.AUTH,
    "verification_required": ErrorKind.AUTH,
    "cloud_credential_error": ErrorKind.AUTH,
    "oauth_org_not_allowed": ErrorKind.AUTH,
    "rate_limit": ErrorKind.RATE_LIMITED,
    "overloaded": ErrorKind.OVERLOADED,
    "invalid_request": ErrorKind.INVALID_REQUEST,
    "model_not_found": ErrorKind.INVALID_REQUEST,
    "max_output_tokens": ErrorKind.TRUNCATED,
}
"""`error` of a failed turn, for errors without an HTTP status."""


def kind_of_result(result: Mapping[str, JsonValue], message: str, error: str) -> ErrorKind:
    """Return the kind of the failure in `result`; `message` is its text, `error` the error of its last message."""
    kind = ErrorKind.OVERLOADED if THROTTLED in message.lower() else None
    kind = kind or _LIMITS.get(text(result, "subtype")) or _TYPED.get(text(result, "api_error"))
    if kind is not None:
        return kind
    if text(result, "terminal_reason").startswith("aborted"):
        return ErrorKind.CRASHED
    if text(result, "stop_reason") == "refusal":
        return ErrorKind.REFUSED
    status = count(result, "api_error_status")
    if not status and error in _UNTYPED:
        return _UNTYPED[error]
    if text(result, "startup_failure_reason") not in {"", "session_held_by_background"}:
        return ErrorKind.INVALID_REQUEST
    return classify(message, PHRASES, status, [text(result, "api_error_type")])


_HOOK = Path(__file__).with_name("_claude_hook.py")
ANSWER = "answer.json"
_TOOL = "AskUserQuestion"
_LONGEST = 50_000


def hook_command(folder: Path) -> str:
    """Return the hook as a shell command line, as required by Claude Code. The hook finds the answer in `folder`."""
    return shlex.join([sys.executable, "-I", "-S", str(_HOOK), str(folder / ANSWER)])


def write_answer(folder: Path, answer: JsonValue) -> None:
    """Write the answer for the hook."""
    private_file(folder / ANSWER, json.dumps(answer))


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


def _with_options(asked: Mapping[str, JsonValue]) -> str:
    question = shown(text(asked, "question"), 2000)
    options = [shown(text(option, "label"), 200) for option in tables(asked, "options")]
    return f"{question} ({', '.join(options)})" if options else question


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

    def __init__(self, call: Call, now: Callable[[], float]) -> None:
        self._handlers = {
            "stream_event": self._stream,
            "assistant": self._message,
            "user": self._results,
            "result": self._finish,
            "rate_limit_event": self._limit,
            "system/init": self._init,
            "system/api_retry": self._retry,
            "system/permission_denied": self._deny,
            "system/background_tasks_changed": self._background,
        }
        self._has_schema = call.output_schema is not None
        self._begins = not call.resume and call.forks is None
        self._now = now
        self._session: str | None = None
        self._announced: str | None = None
        self._version: tuple[int, ...] = ()
        self._tally = UsageTally()
        self._model: str | None = None
        self._request: dict[str, str] = {}
        self._streamed: set[str] = set()
        self._denied: dict[str, str] = {}
        self._until: float | None = None
        self._delay: float | None = None
        self._error = ""
        self._last_whole: str | None = None
        self._pieces: list[str] = []
        self._writing = ""
        """Request of the message in `_pieces`."""
        self._ends_in_text = False
        """Whether that message is the last one: no other has begun, and no tool has returned since."""
        self._open_uses: set[str] = set()
        """Tool uses without a result so far."""
        self._in_background = False
        self._is_final = False
        self._result: Mapping[str, JsonValue] | None = None
        self._billed: Usage | None = None

    @property
    def session_id(self) -> str | None:
        """The session's id, once the model has produced output: only then is the prompt certain to be in the session
        file. The announcement of the session and of a request come up to half a second earlier.
        """
        return self._session

    @property
    def announced(self) -> str | None:
        """The session's id, announced before the session file exists."""
        return self._announced

    @property
    def is_final(self) -> bool:
        """Whether a `result` was printed and no background work is left. Claude Code waits for a command or agent in
        the background, continues the conversation about its outcome, and prints another result. If the work ends
        before the first result, that result looks final until a `system/init` follows it.
        """
        return self._is_final

    @property
    def usage(self) -> Usage:
        """Usage from the results or, before the first result, from the requests so far. Tokens read from or written to
        the prompt cache count as input.
        """
        return replace(self._tally.total if self._billed is None else self._billed, model=self._model)

    @property
    def last_text(self) -> str:
        """The text of the last message with text, messages of subagents and of Claude Code itself excluded."""
        return "".join(self._pieces)

    @property
    def last_whole(self) -> str | None:
        """The last message in the turn; None while a tool use has no result, because a session cut there reports the
        interruption by itself, provided that no message is dropped.
        """
        return self._last_whole

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event."""
        kind, subtype = text(event, "type"), text(event, "subtype")
        self._announced = text(event, "session_id") or self._announced
        if kind in {"stream_event", "assistant", "user"} or subtype == "api_retry":
            self._session = text(event, "session_id") or self._session
        handler = self._handlers.get(kind) or self._handlers.get(f"{kind}/{subtype}")
        return handler(event) if handler else []

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the answer. Raises BackendError if the result is not an answer."""
        result = self._result
        # The agent ended during background work. Claude Code may also stop waiting by itself, with status 0.
        is_cut = not self._is_final and ending.status != 0
        if result is None or is_cut:
            kind, message = no_outcome("Claude Code", ending, PHRASES)
            self._check_schema(message)
            raise failure(kind, message, usage=self.usage, continues_session=self._session is not None)
        if at(result, "is_error") is not False or text(result, "subtype") != "success":
            raise self._failure(result)
        denied = tuple(self._denied.values())
        deferred = at(result, "deferred_tool_use")
        if deferred is not None:  # "success", with an empty answer
            return TurnAnswer("", None, self.usage, denied=denied, question=question_of(deferred))
        used = self.usage
        if not (count(result, "num_turns") or used.input_tokens or used.output_tokens):
            raise self._no_question(text(result, "result"))
        answer_text = text(result, "result")
        if not answer_text.strip() and self._ends_in_text:
            answer_text = self.last_text
        # Claude Code's own tools, such as the one for structured output, may end a turn.
        reasons = [reason for reason in [text(result, "stop_reason")] if not reason.startswith("tool_")]
        return TurnAnswer(answer_text, at(result, "structured_output"), used, denied=denied, reasons=reasons)

    def _stream(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        agent = text(event, "parent_tool_use_id")
        match text(event, "event", "type"):
            case "message_start":
                self._request[agent] = text(event, "event", "message", "id")
                self._bill(self._request[agent], at(event, "event", "message", "usage"))
                if not agent:
                    self._begin(self._request[agent])
                    self._answers(shown(text(event, "event", "message", "model")))
            case "message_delta":
                self._bill(self._request.get(agent, ""), at(event, "event", "usage"))
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
        self._bill(request, at(event, "message", "usage"))
        if is_main:
            self._begin(request)
        seen: list[Output] = []
        for block in tables(event, "message", "content"):
            if text(block, "type") == "tool_use":
                if is_main:
                    self._open_uses.add(text(block, "id"))
                seen.append(self._output("tool", describe_tool_call(text(block, "name"), at(block, "input"))))
            elif is_main and request not in self._streamed and text(block, "text"):
                seen.append(self._text(request, text(block, "text")))
        if is_main:
            self._answers(shown(text(event, "message", "model")))
            self._whole(event)
        return seen

    def _begin(self, request: str) -> None:
        """Record that the message of `request` is the last one."""
        self._ends_in_text = self._ends_in_text and request == self._writing

    def _answers(self, model: str) -> None:
        """Record the answering model. Claude Code's own messages have the model "<synthetic>"."""
        if model and not model.startswith("<"):
            self._model = model

    def _results(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        if not text(event, "parent_tool_use_id"):
            ended = {text(block, "tool_use_id") for block in tables(event, "message", "content")}
            self._ends_in_text = self._ends_in_text and ended <= {""}
            self._open_uses -= ended
            self._whole(event)
        return []

    def _whole(self, event: Mapping[str, JsonValue]) -> None:
        """Record a message held whole by the session: a place to continue from, unless a tool result is missing."""
        self._last_whole = None if self._open_uses else text(event, "uuid") or self._last_whole

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

    def _init(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        self._version = _numbers(text(event, "claude_code_version"))
        self._is_final = False
        return []

    def _retry(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        delay = self._delay = (number(event, "retry_delay_ms") or 0.0) / 1000
        why = shown(text(event, "error").replace("_", " "), 40) or "no answer"
        tries = f"try {count(event, 'attempt')} of {count(event, 'max_retries')}"
        return [self._output("waiting", f"{why}, {delay:.1f} s, {tries}")]

    def _background(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        self._in_background = bool(at(event, "tasks"))
        return []

    def _deny(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Record a denial, reported when it happens (not in older versions), and again in the result with its input."""
        use = text(event, "tool_use_id")
        is_new = use not in self._denied
        self._denied[use] = describe_tool_call(text(event, "tool_name"), at(event, "tool_input"))
        return [self._output("notice", f"not allowed: {self._denied[use]}")] if is_new else []

    def _finish(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        # Claude Code does not wait for background work once its budget is spent.
        self._result, self._is_final = event, not self._in_background or text(event, "subtype") == _BUDGET
        if count(event, "num_turns"):
            self._session = text(event, "session_id") or self._session
        self._billed = self._cost(event) + (self._billed or NO_USAGE)
        return [output for denial in tables(event, "permission_denials") for output in self._deny(denial)]

    def _cost(self, result: Mapping[str, JsonValue]) -> Usage:
        """Return the cost of the turn from its result. Versions of Claude Code count differently."""
        since = at(result, "model_usage_since_last_result")
        if isinstance(since, dict):
            return sum((_of_model(since[model]) for model in since), Usage(cost_usd=0.0))
        is_known = self._begins or (0,) < self._version < _FIRST_TO_ADD_UP
        return replace(
            _of_request(at(result, "usage")), cost_usd=number(result, "total_cost_usd") if is_known else None
        )

    def _failure(self, result: Mapping[str, JsonValue]) -> BackendError:
        errors = at(result, "errors")
        first = errors[0] if isinstance(errors, list) and errors else None
        message = text(result, "result") or clean_text(error_text(first)) or "no reason given"
        self._check_schema(message)
        kind = kind_of_result(result, message, self._error)
        if text(result, "subtype") == _BUDGET:
            return BudgetReached(kind, f"Claude Code: {safe_line(message)}", usage=self.usage, continues_session=True)
        continues = self._session is not None
        return failure(
            kind, f"Claude Code: {message}", wait=self._hint(message), usage=self.usage, continues_session=continues
        )

    def _no_question(self, words: str) -> BackendError:
        """Return the error for a "success" without a model request: the text is no answer, `/clear` prints no text."""
        message = (
            "Claude Code took the prompt for a command of its own and asked no model "
            f"({shown(words, 200) or 'no words'}); begin the prompt with another character than a slash"
        )
        return failure(ErrorKind.INVALID_REQUEST, message, usage=self.usage)

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

    def _bill(self, request: str, usage: JsonValue) -> None:
        self._tally.note(request, _of_request(usage))

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


def _of_request(usage: JsonValue) -> Usage:
    cache_read, cache_write = count(usage, "cache_read_input_tokens"), count(usage, "cache_creation_input_tokens")
    read, written = count(usage, "input_tokens") + cache_read + cache_write, count(usage, "output_tokens")
    return Usage(
        read,
        written,
        cache_read_tokens=cache_read,
        cache_write_tokens=cache_write,
        reasoning_tokens=min(written, count(usage, "output_tokens_details", "thinking_tokens")),
        cache_write_1h_tokens=min(cache_write, count(usage, "cache_creation", "ephemeral_1h_input_tokens")),
    )


def _of_model(usage: JsonValue) -> Usage:
    cache_read, cache_write = count(usage, "cacheReadInputTokens"), count(usage, "cacheCreationInputTokens")
    read, written = count(usage, "inputTokens") + cache_read + cache_write, count(usage, "outputTokens")
    return Usage(
        read,
        written,
        number(usage, "costUSD"),
        cache_read_tokens=cache_read,
        cache_write_tokens=cache_write,
        reasoning_tokens=min(written, count(usage, "thinkingTokens")),
    )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part[:9]) for part in version.split(".")[:3] if part.isascii() and part.isdigit())
