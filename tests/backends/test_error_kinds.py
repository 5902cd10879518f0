"""The kind of a server's error, by its HTTP status, its codes and its message."""

from __future__ import annotations

import sys

import pytest

from plait.backends.error_kinds import NO_REASON, kind_of, read_error

STATUSES = {
    300: "invalid_request",
    400: "invalid_request",
    401: "auth",
    402: "no_credit",
    403: "auth",
    404: "invalid_request",
    408: "transient",
    409: "transient",
    413: "context_overflow",
    424: "transient",  # Bedrock and TGI: the model failed
    425: "transient",
    426: "invalid_request",
    429: "rate_limited",
    498: "overloaded",
    499: "transient",  # Gemini: the server itself cancelled the call
    500: "transient",
    501: "transient",
    503: "overloaded",
    529: "overloaded",
    0: "transient",
    200: "transient",
    299: "transient",
}
CODES = {
    "context_length_exceeded": "context_overflow",
    "exceed_context_size_error": "context_overflow",
    "model_max_prompt_tokens_exceeded": "context_overflow",  # Copilot
    "insufficient_quota": "no_credit",
    "billing_error": "no_credit",
    "budget_exceeded": "no_credit",  # LiteLLM, with 400
    "billing_hard_limit_reached": "no_credit",
    "exceeded_current_quota_error": "no_credit",  # Moonshot
    "insufficient_user_quota": "no_credit",  # New API, with 403
    "Arrearage": "no_credit",  # Alibaba, with 400
    "AllocationQuota.FreeTierOnly": "no_credit",
    "content_filter": "refused",
    "content_policy_violation": "refused",
    "data_inspection_failed": "refused",  # Alibaba
    "invalid_prompt": "refused",
    "overloaded_error": "overloaded",
    "rate_limit_error": "rate_limited",
    "rate_limit_exceeded": "rate_limited",
    "RateLimitReached": "rate_limited",
    "ThrottlingException": "rate_limited",
    "throttling_error": "rate_limited",
    "too_many_requests": "rate_limited",
    "TooManyRequestsException": "rate_limited",
    "engine_overloaded_error": "overloaded",
    "server_is_overloaded": "overloaded",
    "slow_down": "overloaded",
    "json_validate_failed": "invalid_output",
    "tool_use_failed": "invalid_output",
}
STREAMED = {
    "authentication_error": "auth",
    "permission_error": "auth",
    "invalid_request_error": "invalid_request",
    "not_found_error": "invalid_request",
}
MINIMAX = {
    1002: "rate_limited",
    1039: "rate_limited",
    1041: "rate_limited",
    2045: "rate_limited",
    1004: "auth",
    2049: "auth",
    1008: "no_credit",
    1026: "refused",
    1027: "refused",
    2013: "invalid_request",
    9999: "transient",
}
OVERFLOWS = [
    "Prompt is too long: 9 tokens",
    "this model's maximum context length is 8",
    "over the context limit",
    "exceeds the available context size",
    "outside of the context window",
    "longer than the maximum model length",
    "the maximum prompt length is 8",
    "input exceeds the maximum number of tokens",
    "the input length exceeds the context length",
    "Your request exceeded model token limit: 8192",
    "Input is too long for requested model.",
    "Prompt exceeds max length",
    "<400> InternalError.Algo.InvalidParameter: Range of input length should be [1, 129024]",
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4097. Given: 5000 `inputs` tokens",
]


@pytest.mark.parametrize("status", STATUSES)
def test_a_status_alone(status: int) -> None:
    assert kind_of(status, [], "no").value == STATUSES[status]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("status", [0, 400, 500])
def test_a_code_says_more_than_the_status(status: int, code: str) -> None:
    assert kind_of(status, ["unknown", code], "no").value == CODES[code]


@pytest.mark.parametrize("code", STREAMED)
def test_a_code_in_a_stream_counts_where_there_is_no_status(code: str) -> None:
    assert kind_of(200, ["unknown", code], "no").value == STREAMED[code]
    assert kind_of(503, [code], "no").value == "overloaded"


@pytest.mark.parametrize("code", MINIMAX)
def test_minimax_sends_its_codes_with_status_200(code: int) -> None:
    body = {"choices": None, "base_resp": {"status_code": code, "status_msg": "no"}}
    words, message = read_error(body)  # type: ignore[arg-type]
    assert (kind_of(200, words, message).value, message) == (MINIMAX[code], "no")


@pytest.mark.parametrize("message", OVERFLOWS)
@pytest.mark.parametrize("status", [0, 200, 400, 422, 500])
def test_a_full_context_is_known_by_the_message(status: int, message: str) -> None:
    assert kind_of(status, [], message).value == "context_overflow"
    assert kind_of(503, [], message).value == "overloaded"
    assert kind_of(429, [], message).value == "rate_limited"


@pytest.mark.parametrize("status", [0, 200, 400, 413, 429])
def test_a_request_larger_than_the_limit_of_a_minute_is_not_waited_for(status: int) -> None:
    assert kind_of(status, ["rate_limit_exceeded"], "Request too large for gpt").value == "context_overflow"
    wrapped = "Provider returned error: Request too large for gpt"
    assert kind_of(status, ["rate_limit_exceeded"], wrapped).value == "context_overflow"


def test_a_body_too_large_is_not_waited_for_whatever_the_code() -> None:
    assert kind_of(413, ["rate_limit_exceeded"], "Too many tokens").value == "context_overflow"


@pytest.mark.parametrize(
    ("status", "word", "message"),
    [
        (403, "403", "openai/gpt requires moderation. Your input was flagged for violence"),  # OpenRouter
        (400, "invalid_request_error", "Content Exists Risk"),  # DeepSeek
        (400, "invalid_request_error", "Output blocked by content filtering policy"),  # Anthropic
        (0, "invalid_request_error", "Output blocked by content filtering policy"),
    ],
)
def test_a_filter_refuses_whatever_the_status_and_the_code(status: int, word: str, message: str) -> None:
    assert kind_of(status, [word], message).value == "refused"


@pytest.mark.parametrize(
    "message",
    ["API key not valid. Please pass a valid API key.", "API key expired.", "Incorrect API key provided: xa***f."],
)
def test_a_wrong_key_told_with_400(message: str) -> None:
    assert kind_of(400, ["INVALID_ARGUMENT"], message).value == "auth"
    assert kind_of(500, [], message).value == "transient"


@pytest.mark.parametrize(
    "message",
    [
        "Your Credit Balance is too low",
        "Credit balance too low · Add funds: https://platform.claude.com/settings/billing",
        "Your team 1 has either used all available credits or reached its monthly spending limit.",  # xAI, 403
        "You have run out of credits or need a Grok subscription.",
        "Sorry, your account balance is insufficient",  # SiliconFlow, 403
        "Budget has been exceeded! Current cost: 14, Max budget: 10",  # a LiteLLM behind a LiteLLM
        "Key limit exceeded (total limit). Manage it using https://openrouter.ai/settings/keys",  # OpenRouter, 403
        "You're out of extra usage. Add more at claude.ai/settings/usage and keep going.",
        "Third-party apps now draw from your extra usage, not your plan limits.",
        "Extra usage is required for long context requests.",
    ],
)
def test_no_credit_is_no_mistake_in_the_request_and_no_wrong_key(message: str) -> None:
    for status in (0, 400, 403, 429):
        assert kind_of(status, ["permission_error", "rate_limit_error"], message).value == "no_credit"


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Too many requests, please wait before trying again.", "rate_limited"),  # Bedrock, 400
        ("litellm.RateLimitError: slow down", "rate_limited"),
        ("Rate limit exceeded", "rate_limited"),
        ("Quota exceeded for this key", "rate_limited"),
        ("An error occurred (ThrottlingException) when calling the InvokeModel operation", "rate_limited"),
        ("You have exceeded a secondary rate limit.", "rate_limited"),
        ("Key limit exceeded (daily limit). Manage it using https://openrouter.ai/settings/keys", "rate_limited"),
        ("You've reached your weekly (7-day) usage limit. Your quota will reset later.", "rate_limited"),  # Kimi, 403
        ("Our servers are currently overloaded. Please try again later.", "overloaded"),  # OpenAI, 400
    ],
)
def test_a_limit_and_an_overload_are_known_by_the_message(message: str, kind: str) -> None:
    assert {kind_of(status, ["unknown"], message).value for status in (0, 200, 400, 403, 500)} == {kind}
    assert kind_of(401, [], message).value == "auth"
    assert kind_of(404, [], message).value == "invalid_request"


def test_a_message_that_speaks_of_limits_only_is_an_error_that_lasts() -> None:
    assert kind_of(403, [], "Your plan has no access to higher rate limits.").value == "auth"
    assert kind_of(400, [], "Unknown parameter: 'rate_limit'").value == "invalid_request"
    assert kind_of(500, [], "OSError: [Errno 122] Disk quota exceeded").value == "transient"
    assert kind_of(0, [], "warning: thermal throttling").value == "transient"


@pytest.mark.parametrize("message", ["Weekly limit reached", "quota reached, try again in 3 days"])
def test_a_used_up_limit_is_known_by_the_message(message: str) -> None:
    kinds = {status: kind_of(status, [], message).value for status in STATUSES}
    assert kinds == STATUSES | dict.fromkeys((0, 200, 400, 403, 500), "rate_limited")
    assert kind_of(403, ["permission_error"], message).value == "rate_limited"
    assert kind_of(403, ["billing_error"], message).value == "no_credit"
    assert kind_of(400, [], f"Prompt is too long. {message}").value == "context_overflow"
    assert kind_of(400, [], f"Your credit balance is too low. {message}").value == "no_credit"


def test_only_the_beginning_of_a_long_message_is_read() -> None:
    assert kind_of(400, [], " " * 1982 + "prompt is too long").value == "context_overflow"
    assert kind_of(400, [], " " * 1983 + "prompt is too long").value == "invalid_request"


def test_an_error_without_a_text_is_read_at_once() -> None:
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        words, message = read_error({"error": {"code": "overloaded", "message": None}})
    finally:
        sys.setprofile(None)
    assert (words, message) == (["overloaded"], NO_REASON)
    assert calls < 1000  # each error took 0.1 s
