"""Translate Claude Code's failures into `ErrorKind`s. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.agents.agent_errors import COMMON, THROTTLED, Phrases, classify
from plait.backends.json_fields import count, text
from plait.errors import ErrorKind
from plait.json_form import JsonValue

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
