"""The kind of an error of an agent that speaks ACP."""

from __future__ import annotations

import pytest

from plait.backends.agents.acp_machine import error_of, list_login_methods, stopped_by_denial
from plait.json_form import JsonValue

WORDS = {
    "rate_limit": "rate_limited",
    "overloaded": "overloaded",
    "authentication_failed": "auth",
    "billing_error": "no_credit",
    "invalid_request": "invalid_request",
    "max_output_tokens": "truncated",
}
CODES = {
    -32000: "auth",
    -32002: "session_lost",
    -32600: "invalid_request",
    -32601: "invalid_request",
    -32602: "invalid_request",
    -32603: "transient",
    400: "invalid_request",
    401: "auth",
    429: "rate_limited",
    503: "overloaded",
    599: "transient",
    600: "transient",
}
MESSAGES = {
    "thread has an active writer": "transient",
    "the session is already in use": "transient",
    "Thread not found": "session_lost",
    "missing source rollout for x": "session_lost",
    "no rollout found for x": "session_lost",
    "configuration value not found": "invalid_request",
    "the usage limit is reached": "rate_limited",
}
LOST = [
    "session not found",
    "Invalid session identifier",
    "no previous sessions",
    "service failure",
]


def test_a_throttle_is_no_limit_of_the_account() -> None:
    message = "Server is temporarily limiting requests"
    for words in (message, f"{message} (not your usage limit)"):
        error: JsonValue = {"code": -32603, "message": words, "data": {"errorKind": "rate_limit"}}
        assert error_of(error)[0].value == "overloaded"


@pytest.mark.parametrize("word", WORDS)
def test_a_word_in_the_data_says_more_than_the_code(word: str) -> None:
    error: JsonValue = {"code": -32002, "message": "no", "data": {"errorKind": word}}
    assert error_of(error)[0].value == WORDS[word]


@pytest.mark.parametrize("code", CODES)
def test_a_code_alone(code: int) -> None:
    assert error_of({"code": code, "message": "no"}) == (error_of({"code": code})[0], "no")
    assert error_of({"code": code, "message": "no"})[0].value == CODES[code]
    if code > 0:
        assert error_of({"code": float(code), "message": "no"})[0].value == CODES[code]


def test_a_code_that_is_an_http_status_counts_before_a_status_in_the_message() -> None:
    kinds = [error_of({"code": code, "message": "API Error 401"})[0].value for code in (399, 400, 599, 600)]
    assert kinds == ["auth", "invalid_request", "transient", "auth"]


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_without_a_telling_code(message: str) -> None:
    assert error_of({"code": -32603, "message": message})[0].value == MESSAGES[message]
    assert error_of({"message": message})[0].value == MESSAGES[message]
    assert error_of({"message": message}, opens_session=True)[0].value == MESSAGES[message]


@pytest.mark.parametrize("message", LOST)
def test_while_a_session_is_opened_more_errors_mean_that_the_session_is_gone(message: str) -> None:
    error: JsonValue = {"code": -32603, "message": message}
    assert error_of(error, opens_session=True)[0].value == "session_lost"
    assert error_of(error)[0].value == "transient"
    assert error_of({"code": -32000, "message": message}, opens_session=True)[0].value == "auth"
    assert error_of({"code": -32002, "message": "no"}, opens_session=True)[0].value == "session_lost"
    assert error_of({"code": -32603, "message": "no"}, opens_session=True)[0].value == "transient"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ({"message": "no", "data": "why"}, "no: why"),
        ({"message": "no", "data": {"details": "why"}}, "no: why"),
        ({"message": "no", "data": {"message": "why"}}, "no: why"),
        ({"message": "no", "data": {"details": "this", "message": "that"}}, "no: this"),
        ({"message": "no, that is why", "data": "why"}, "no, that is why"),
        ({"message": "no", "data": {"request": "long"}}, "no"),
        ({"data": {"request": "long"}}, "no reason given"),
        (None, "no reason given"),
    ],
)
def test_the_message_has_the_details_that_do_not_repeat_the_request(error: JsonValue, message: str) -> None:
    assert error_of(error)[1] == message


def test_a_denied_action_ends_a_turn_that_was_cancelled_or_silent() -> None:
    for reason, is_silent in (("cancelled", False), ("cancelled", True), ("end_turn", True)):
        found = stopped_by_denial(reason, ["read a", "write b"], is_silent=is_silent)
        assert found is not None
        assert (found[0].value, "write b" in found[1]) == ("invalid_request", True)
    assert stopped_by_denial("end_turn", ["write b"], is_silent=False) is None
    assert stopped_by_denial("end_turn", [], is_silent=True) is None


def test_the_login_methods_are_named() -> None:
    assert list_login_methods([{"id": "key", "name": "API key"}, {"id": "web", "name": "Browser"}]) == (
        "key (API key), web (Browser)"
    )
    assert list_login_methods([]) == list_login_methods(None) == "none"
    assert len(list_login_methods([{"id": f"key{n}", "name": "API key"} for n in range(30)])) == 200


@pytest.mark.parametrize("message", [["no such model"], {"detail": [{"msg": "no such model"}]}])
def test_a_message_in_another_form_than_text_is_read(message: JsonValue) -> None:
    assert error_of({"code": -32602, "message": message})[1] == "no such model"
    assert error_of({"code": -32602, "message": "no", "data": {"details": message}})[1] == "no: no such model"
