"""Map a server's error to an `ErrorKind` by HTTP status, error codes and message text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.backends.errors import ErrorKind
from plait.backends.limit_resets import reports_limit

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
