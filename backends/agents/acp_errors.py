"""Translate error messages of agents that speak ACP into `ErrorKind`s. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from plait.backends.agents.acp_messages import AUTH_REQUIRED, NOT_FOUND
from plait.backends.agents.acp_quirks import AcpQuirks
from plait.backends.agents.acp_updates import Updates
from plait.backends.agents.agent_errors import COMMON, THROTTLED, Phrases, classify, kind_of_failure
from plait.backends.error_kinds import error_text
from plait.backends.json_fields import at, number, tables, text
from plait.errors import ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, shown

PHRASES: Phrases = (
    # Another process holds the session, or held it a moment ago.
    ("active writer", ErrorKind.TRANSIENT),
    ("already in use", ErrorKind.TRANSIENT),
    # The session was opened from an index, and its file is gone.
    ("thread not found", ErrorKind.SESSION_LOST),
    ("missing source rollout", ErrorKind.SESSION_LOST),
    ("configuration value not found", ErrorKind.INVALID_REQUEST),
    *COMMON,
)
_LOST: Phrases = (
    ("not found", ErrorKind.SESSION_LOST),
    ("no rollout found", ErrorKind.SESSION_LOST),
    ("invalid session identifier", ErrorKind.SESSION_LOST),
    ("no previous sessions", ErrorKind.SESSION_LOST),
    ("service failure", ErrorKind.SESSION_LOST),
)
_BY_WORD: Mapping[str, ErrorKind] = {
    "rate_limit": ErrorKind.RATE_LIMITED,
    "overloaded": ErrorKind.OVERLOADED,
    "authentication_failed": ErrorKind.AUTH,
    "billing_error": ErrorKind.AUTH,
    "invalid_request": ErrorKind.INVALID_REQUEST,
    "max_output_tokens": ErrorKind.TRUNCATED,
}
_IN_BRACKETS = re.compile(r"\(([45]\d\d)\b")
_BY_CODE: Mapping[int, ErrorKind] = {
    AUTH_REQUIRED: ErrorKind.AUTH,
    NOT_FOUND: ErrorKind.SESSION_LOST,
    -32600: ErrorKind.INVALID_REQUEST,
    -32601: ErrorKind.INVALID_REQUEST,
    -32602: ErrorKind.INVALID_REQUEST,
}


def error_of(error: JsonValue, *, opens_session: bool = False) -> tuple[ErrorKind, str]:
    """Return kind and message of a JSON-RPC `error`; `opens_session` if the error may mean that the session cannot be
    continued.
    """
    code = _code(error)
    message = _message(error)
    if opens_session and code != AUTH_REQUIRED:
        kind = classify(message, (*PHRASES, *_LOST))
        if code == NOT_FOUND or kind is ErrorKind.SESSION_LOST:
            return ErrorKind.SESSION_LOST, message
    if THROTTLED in message.lower():
        return ErrorKind.OVERLOADED, message
    word = _BY_WORD.get(text(error, "data", "errorKind"))
    if word is not None:
        return word, message
    if 400 <= code < 600:
        return classify(message, PHRASES, code), message
    return _BY_CODE.get(code) or classify(message, PHRASES), message


def stopped_by_denial(reason: str, denied: Sequence[str], *, is_silent: bool) -> tuple[ErrorKind, str] | None:
    """Return kind and message of the error of a turn that a denied action ended, for `reason`; None for another turn.

    `is_silent` says that the agent wrote no text after the last of the `denied` actions.
    """
    if denied and (reason == "cancelled" or (reason == "end_turn" and is_silent)):
        return ErrorKind.INVALID_REQUEST, f"the turn stopped after a denied action: {denied[-1]}; change `permissions`"
    return None


def error_in_text(agent: AcpQuirks, result: JsonValue, updates: Updates, prompt: str) -> tuple[ErrorKind, str] | None:
    """Return kind and message of an error hidden in a successful end of turn; None for a proper answer.

    Some agents report errors as answer text.
    """
    words = updates.text.strip()
    if agent.error_begins is not None and words.startswith(agent.error_begins):
        status = _IN_BRACKETS.search(words)
        return classify(words, PHRASES, int(status[1]) if status else 0), words
    if agent.counts_answers and at(result, "usage") is None:
        # Warnings precede the error in the same text, one per paragraph.
        return kind_of_failure(words.rpartition("\n\n")[2] or "no reason given", PHRASES)
    if not words and not updates.used_tools and prompt.lstrip().startswith("/"):
        # opencode treats a path at the beginning of a prompt as an unknown command.
        hint = "the agent may have taken the prompt for a command; begin the prompt with another character than a slash"
        return ErrorKind.INVALID_REQUEST, f"the answer is empty: {hint}"
    return None


def list_login_methods(methods: JsonValue) -> str:
    """Return the login methods offered in the agent's answer to `initialize`."""
    ways = [f"{text(way, 'id')} ({text(way, 'name')})" for way in tables({"all": methods}, "all")]
    return shown(", ".join(ways) or "none", 200)


def _code(error: JsonValue) -> int:
    code = at(error, "code")
    return code if isinstance(code, int) else int(number(error, "code") or 0)


def _words(value: JsonValue, name: str) -> str:
    return text(value, name) or clean_text(error_text(at(value, name)))


def _message(error: JsonValue) -> str:
    """Return the error's message, without details that repeat the request."""
    said, data = _words(error, "message"), at(error, "data")
    details = data if isinstance(data, str) else _words(data, "details") or _words(data, "message")
    return f"{said}: {details}" if details and details not in said else said or "no reason given"
