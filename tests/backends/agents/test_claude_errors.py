"""The kind of a failed turn of Claude Code, by the fields of its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.backends import ClaudeCodeBackend
from plait.backends.agents.agent_output import AgentCall, ProcessEnd
from plait.backends.agents.claude_code import kind_of_result
from plait.errors import BackendError

FIELDS = [
    ("subtype", "error_max_turns", "limit_reached"),
    ("subtype", "error_max_budget_usd", "limit_reached"),
    ("subtype", "error_max_structured_output_retries", "invalid_output"),
    ("api_error", "usage_limit_reached", "rate_limited"),
    ("api_error", "model_requires_usage_credits", "auth"),
    ("api_error", "long_context_credits_required", "auth"),
    ("api_error", "provider_credentials", "auth"),
    ("api_error", "gateway_signin_required", "auth"),
    ("api_error", "gateway_session_expired", "auth"),
    ("api_error", "api_key_auth_disabled", "auth"),
    ("api_error", "org_disabled_credential", "auth"),
    ("api_error", "invalid_credential_header", "auth"),
    ("api_error", "network_edge_blocked", "auth"),
    ("api_error", "max_output_tokens", "truncated"),
    ("api_error", "message_over_context_limit", "context_overflow"),
    ("api_error", "autocompact_thrashing", "context_overflow"),
    ("api_error", "safety_monitor_blocked", "refused"),
    ("api_error", "dlp_request_denied", "refused"),
    ("api_error", "claude_code_version_too_old", "invalid_request"),
    ("api_error", "tool_history_mismatch", "invalid_request"),
    ("terminal_reason", "aborted_streaming", "crashed"),
    ("stop_reason", "refusal", "refused"),
    ("startup_failure_reason", "bad_option", "invalid_request"),
    ("startup_failure_reason", "session_held_by_background", "transient"),
    ("api_error_type", "overloaded_error", "overloaded"),
    ("api_error_type", "content_filter", "refused"),
]
ERRORS = {
    "authentication_failed": "auth",
    "billing_error": "no_credit",
    "account_on_hold": "auth",
    "verification_required": "auth",
    "cloud_credential_error": "auth",
    "oauth_org_not_allowed": "auth",
    "rate_limit": "rate_limited",
    "overloaded": "overloaded",
    "invalid_request": "invalid_request",
    "model_not_found": "invalid_request",
    "max_output_tokens": "truncated",
    "unknown": "transient",
}
MESSAGES = {
    "No conversation found with session ID: x": "session_lost",
    "No message found with message.uuid of: x": "session_lost",
    "Session x is already in use": "transient",
    "error: unknown option '--x'": "invalid_request",
    "error: --json-schema is not a valid schema": "invalid_request",
    "argument 'x' is invalid. Allowed choices are a, b": "invalid_request",
    "cannot be used with root/sudo privileges": "invalid_request",
    "You've hit your limit": "rate_limited",
    "You've hit your weekly limit": "rate_limited",
    "You've reached your context limit": "context_overflow",
}


@pytest.mark.parametrize(("field", "value", "kind"), FIELDS)
def test_a_field_of_the_result_decides(field: str, value: str, kind: str) -> None:
    status = 500 if kind not in {"transient", "overloaded"} else 0
    assert kind_of_result({field: value, "api_error_status": status}, "no", "").value == kind


@pytest.mark.parametrize("error", ERRORS)
def test_the_error_of_the_last_message_counts_without_a_status(error: str) -> None:
    assert kind_of_result({}, "no", error).value == ERRORS[error]
    assert kind_of_result({"api_error_status": 529}, "no", error).value == "overloaded"


def test_the_last_message_of_a_turn_says_which_error_ended_it() -> None:
    reader = ClaudeCodeBackend().reader(AgentCall(Path("/nowhere")))
    reader.read({"type": "assistant", "error": "billing_error"})
    reader.read({"type": "result", "subtype": "success", "is_error": True, "result": "no"})
    with pytest.raises(BackendError) as ended:
        reader.end(ProcessEnd(1))
    assert ended.value.kind.value == "no_credit"


@pytest.mark.parametrize("fields", [{}, {"api_error": "usage_limit_reached"}, {"api_error_status": 429}])
def test_a_throttle_is_no_limit_of_the_account(fields: dict[str, object]) -> None:
    message = "API Error: Server is temporarily limiting requests"
    for words in (message, f"{message} (not your usage limit)"):
        assert kind_of_result(fields, words, "rate_limit").value == "overloaded"


@pytest.mark.parametrize("message", MESSAGES)
def test_else_the_message_decides(message: str) -> None:
    assert kind_of_result({}, message, "").value == MESSAGES[message]
