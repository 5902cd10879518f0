"""The error in a server's answer, as an `ErrorKind` by HTTP status, error codes and message text. Pure.

The text for a person is never the whole body: servers that validate fields return the request, including the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.backends.json_fields import at
from plait.backends.limit_resets import reports_limit
from plait.errors import ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import parse_json

_BY_STATUS: Mapping[int, ErrorKind] = {
    401: ErrorKind.AUTH,
    402: ErrorKind.AUTH,
    403: ErrorKind.AUTH,
    408: ErrorKind.TRANSIENT,
    409: ErrorKind.TRANSIENT,
    413: ErrorKind.CONTEXT_OVERFLOW,
    425: ErrorKind.TRANSIENT,
    429: ErrorKind.RATE_LIMITED,
    498: ErrorKind.OVERLOADED,
    503: ErrorKind.OVERLOADED,
    529: ErrorKind.OVERLOADED,
}
_BY_CODE: Mapping[str, ErrorKind] = {
    "context_length_exceeded": ErrorKind.CONTEXT_OVERFLOW,
    "exceed_context_size_error": ErrorKind.CONTEXT_OVERFLOW,
    "request_too_large": ErrorKind.CONTEXT_OVERFLOW,
    "json_validate_failed": ErrorKind.INVALID_OUTPUT,
    "output_parse_failed": ErrorKind.INVALID_OUTPUT,
    "tool_use_failed": ErrorKind.INVALID_OUTPUT,
    "insufficient_quota": ErrorKind.AUTH,
    "billing_error": ErrorKind.AUTH,
    "content_filter": ErrorKind.REFUSED,
    "content_policy_violation": ErrorKind.REFUSED,
    "invalid_prompt": ErrorKind.REFUSED,
    "overloaded_error": ErrorKind.OVERLOADED,
    "rate_limit_error": ErrorKind.RATE_LIMITED,
    "rate_limit_exceeded": ErrorKind.RATE_LIMITED,
}
"""Codes that are more specific than the HTTP status."""
_WITHOUT_STATUS: Mapping[str, ErrorKind] = {
    "authentication_error": ErrorKind.AUTH,
    "permission_error": ErrorKind.AUTH,
    "invalid_request_error": ErrorKind.INVALID_REQUEST,
    "not_found_error": ErrorKind.INVALID_REQUEST,
}
"""Codes of errors inside a stream, where no HTTP status is available."""
_OVERFLOW_PHRASES = (
    "prompt is too long",
    "context length",
    "context limit",
    "context size",
    "context window",
    "maximum model length",
    "maximum prompt length",
    "exceeds the maximum number of tokens",
    "exceeded model token limit",
    "input is too long",
)
_OF_OVERFLOWS = {0, 200, 400, 422, 500}
"""Statuses with which servers report a full context: that of llama.cpp and of Ollama is 500."""
_TOO_LARGE = "request too large"
"""In the message that a single request exceeds the tokens of a whole minute. Waiting does not help, whatever the status
and the code say.
"""
_QUOTA_PHRASES = ("credit balance is too low",)
_REFUSED_PHRASE = "your input was flagged"
_OF_SOME_LIMITS = {0, 200, 400, 403, 500}
"""Statuses with which some servers report a used-up limit, and others an error that lasts. The message decides."""

_TEXTS = ("message", "detail", "error", "msg", "errors", "status_msg", "error_msg", "reason")
"""Fields of an error with its text, or with further errors."""
_DEEPEST, _MOST = 4, 3
"""Levels of an error that are read, and the members of a list."""
_MINIMAX: Mapping[str, str] = {
    "1002": "rate_limit_error",
    "1039": "rate_limit_error",
    "1041": "rate_limit_error",
    "2045": "rate_limit_error",
    "1004": "authentication_error",
    "2049": "authentication_error",
    "1008": "insufficient_quota",
    "1026": "content_filter",
    "1027": "content_filter",
    "2013": "invalid_request_error",
}
"""The codes of `base_resp`, which MiniMax sends with status 200, in the words of others."""


def kind_of(status: int, words: Sequence[str], detail: str) -> ErrorKind:
    """Return the kind of an error with HTTP `status` (0 if unknown), machine-readable `words`, and message `detail`."""
    lowered = detail[:2000].lower()
    if status == 413 or _TOO_LARGE in lowered:
        return ErrorKind.CONTEXT_OVERFLOW
    for word in words:
        if word in _BY_CODE:
            return _BY_CODE[word]
    if status in _OF_OVERFLOWS and any(phrase in lowered for phrase in _OVERFLOW_PHRASES):
        return ErrorKind.CONTEXT_OVERFLOW
    if any(phrase in lowered for phrase in _QUOTA_PHRASES):
        return ErrorKind.AUTH
    if _REFUSED_PHRASE in lowered:
        return ErrorKind.REFUSED
    if status in _OF_SOME_LIMITS and reports_limit(detail):
        status = 429
    if status >= 300:
        return _BY_STATUS.get(status, ErrorKind.TRANSIENT if status >= 500 else ErrorKind.INVALID_REQUEST)
    return next((_WITHOUT_STATUS[word] for word in words if word in _WITHOUT_STATUS), ErrorKind.TRANSIENT)


def is_error(body: JsonValue) -> bool:
    """Return whether a JSON value that came with status 200, or in a stream, is an error. An `object` named so comes
    from vLLM and Mistral, and `base_resp` from MiniMax.
    """
    if at(body, "error") or at(body, "object") in ("error", "Error") or at(body, "type") == "error":
        return True
    return bool(at(body, "base_resp", "status_code"))


def error_in(body: JsonValue) -> Mapping[str, JsonValue]:
    """Return the part of an answer that describes its error; empty if there is none."""
    # Gemini returns a list.
    whole = next((one for one in body if isinstance(one, dict)), None) if isinstance(body, list) else body
    for part in (at(whole, "error"), at(whole, "base_resp") if is_error(whole) else None, whole):
        if part and isinstance(part, dict):
            return part
    return {}


def read_error(body: JsonValue) -> tuple[list[str], str]:
    """Return the machine-readable words of an error body, and its text for a person. `body` is the value of a JSON
    body, and the text of any other.
    """
    error = error_in(body)
    if not error:
        return [], body if isinstance(body, str) and body else "no reason given"
    words, said = _words_and_text(error)
    # OpenRouter: the message of the provider behind it.
    more, reason = _words_and_text(error_in(_parsed(at(error, "metadata", "raw"))))
    return words + more, ": ".join(text for text in (said, reason) if text) or "no reason given"


def _words_and_text(error: Mapping[str, JsonValue]) -> tuple[list[str], str]:
    words = [str(error[key]) for key in ("code", "type", "status_code") if error.get(key)]
    if "status_msg" in error:
        words = [_MINIMAX.get(word, word) for word in words]
    return words, error_text(error)


def error_text(value: JsonValue | Mapping[str, JsonValue], depth: int = 0) -> str:
    """Return the text for a person in an error, which may be a list, or an object for each field that is wrong; empty
    if there is none.
    """
    if isinstance(value, str):
        parsed = _parsed(value) if value.startswith(("{", "[")) else value  # Mistral: JSON in a text
        return value if isinstance(parsed, str) else error_text(parsed, depth + 1) or value
    if depth > _DEEPEST:
        return ""
    if isinstance(value, list):
        return "; ".join(filter(None, (error_text(one, depth + 1) for one in value[:_MOST])))
    text = next(filter(None, (error_text(at(value, key), depth + 1) for key in _TEXTS)), "")
    steps = at(value, "loc")
    place = ".".join(str(step) for step in steps if isinstance(step, str | int)) if isinstance(steps, list) else ""
    return f"{place}: {text}" if place and text else text


def _parsed(raw: JsonValue) -> JsonValue:
    try:
        return parse_json(raw) if isinstance(raw, str) else raw
    except ValueError:
        return {"message": raw}
