"""What Claude Code says when a turn fails, by kind. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from plait.backends.agents.error_kinds import COMMON, Phrases, classify
from plait.backends.errors import ErrorKind
from plait.backends.json_fields import count, text
from plait.backends.protocol import JsonValue

PHRASES: Phrases = (
    ("no conversation found", ErrorKind.SESSION_LOST),
    # The place to go on from is not in its file.
    ("no message found with message.uuid", ErrorKind.SESSION_LOST),
    # Another process has the session, or had it a moment ago.
    ("already in use", ErrorKind.TRANSIENT),
    ("error: unknown option", ErrorKind.INVALID_REQUEST),
    ("error: --json-schema is not", ErrorKind.INVALID_REQUEST),
    ("is invalid. allowed choices", ErrorKind.INVALID_REQUEST),
    ("root/sudo privileges", ErrorKind.INVALID_REQUEST),
    *COMMON,
)
REFUSES_SCHEMA = ("--json-schema is not", "input_schema")
"""What it says of a schema that is more than its own check knows, or than its server takes for a tool's input."""
_LIMITS: Mapping[str, ErrorKind] = {
    # What the user allowed is used up. Not a kind that is tried again by itself: that would spend it once more.
    "error_max_turns": ErrorKind.CONTEXT_OVERFLOW,
    "error_max_budget_usd": ErrorKind.CONTEXT_OVERFLOW,
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
    "max_output_tokens": ErrorKind.CONTEXT_OVERFLOW,
    "message_over_context_limit": ErrorKind.CONTEXT_OVERFLOW,
    "autocompact_thrashing": ErrorKind.CONTEXT_OVERFLOW,
    "safety_monitor_blocked": ErrorKind.REFUSED,
    "dlp_request_denied": ErrorKind.REFUSED,
    "claude_code_version_too_old": ErrorKind.INVALID_REQUEST,
    "tool_history_mismatch": ErrorKind.INVALID_REQUEST,
}
"""`api_error` of a failed turn, where the status that comes with it would mislead."""
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
    "max_output_tokens": ErrorKind.CONTEXT_OVERFLOW,
}
"""`error` of a failed turn, for errors that came with no status."""


def kind_of_result(result: Mapping[str, JsonValue], message: str, error: str) -> ErrorKind:
    """The kind of the failure that `result` tells of: `message` is its text, `error` that of its last message."""
    kind = _LIMITS.get(text(result, "subtype")) or _TYPED.get(text(result, "api_error"))
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
