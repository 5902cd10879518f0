"""The kind and the message of an agent's failure, by what its command wrote."""

from __future__ import annotations

import json

import pytest

from plait.backends.agents.agent_output import (
    ProcessEnd,
    classify,
    failure,
    hide,
    kind_of_failure,
    no_outcome,
    safe_line,
    status_in,
)
from plait.backends.agents.claude_code import ClaudeCodeBackend
from plait.errors import BackendError, ErrorKind
from plait.usage import Usage

PHRASES = {
    "You have reached your usage limit": "rate_limited",
    "you've hit your limit": "rate_limited",
    "You've hit your weekly limit · resets Tuesday 9am (UTC)": "rate_limited",
    "You've hit your session limit": "rate_limited",
    "You've hit your Opus limit": "rate_limited",
    "You've hit your monthly spend limit": "rate_limited",
    "You've reached your Fable 5 limit. Run /usage-credits to go on or switch models with /model": "rate_limited",
    "You've hit your org's monthly spend limit": "rate_limited",
    "5-hour limit reached ∙ resets 3pm (Europe/Berlin)": "rate_limited",
    "Opus weekly limit reached ∙ resets Oct 6, 1pm": "rate_limited",
    "You have reached your specified API usage limits": "rate_limited",
    "Rate limit exceeded": "rate_limited",
    "Weekly limit reached": "rate_limited",
    "Opus limit reached, try again in 3 days": "rate_limited",
    "You're out of extra usage · resets 3pm (UTC)": "rate_limited",
    "Server is temporarily limiting requests (not your usage limit)": "overloaded",
    "API Error: Server is temporarily limiting requests": "overloaded",
    "Server is temporarily limiting requests, usage is high, try again in 5 minutes": "overloaded",
    "Prompt is too long": "context_overflow",
    "larger than the context window": "context_overflow",
    "input exceeds the maximum length": "context_overflow",
    "against our Usage Policy": "refused",
    "Not logged in": "auth",
    "Please run /login": "auth",
    "Invalid API key": "auth",
}


@pytest.mark.parametrize("message", PHRASES)
def test_a_phrase_counts_before_the_status(message: str) -> None:
    assert classify(message, 500).value == PHRASES[message]
    assert classify(" " * 2000 + message, 500) is ErrorKind.TRANSIENT


@pytest.mark.parametrize(
    ("message", "status", "kind"),
    [
        ("Too many requests, see our usage policy", 429, "rate_limited"),
        ("API Error: 429 Too many requests, see our usage policy", 0, "rate_limited"),
        ("Your request was blocked: too many requests", 429, "rate_limited"),
        ("You've hit your weekly limit, see our usage policy", 0, "rate_limited"),
        ("API Error: 529 busy, see our usage policy", 0, "overloaded"),
        ("Rate limit exceeded: see our usage policy", 0, "rate_limited"),
        ("The context window is at capacity", 0, "context_overflow"),
        ("The model is at capacity", 0, "overloaded"),
        ("The tool said: error: unknown option --x", 0, "transient"),
        ("Usage:\nerror: unknown option --x", 0, "invalid_request"),
        ("error: unknown option --x", 0, "invalid_request"),
        ("reason: length of the queue", 0, "transient"),
        ("Incomplete, reason: length.", 0, "truncated"),
    ],
)
def test_a_phrase_counts_where_it_says_what_happened(message: str, status: int, kind: str) -> None:
    assert classify(message, status).value == kind


def test_a_limit_on_a_line_is_a_wait_even_beside_a_usage_policy() -> None:
    line = "API Error: 429 Too many requests, see our usage policy"
    assert no_outcome("it", ProcessEnd(1, line))[0] is ErrorKind.RATE_LIMITED


@pytest.mark.parametrize(
    ("message", "status"),
    [
        ("API Error: 529 overloaded", 529),
        ("API Error 401", 401),
        ("api error 401", 401),
        ("HTTP Status: 503", 503),
        ("unexpected status 503 Service", 503),
        ("status code 429", 429),
        ('{"code": 404}', 404),
        ('{"error":{"code":400}}', 400),
        ("exit status 1", 0),
        ("status 4000", 0),
        ("600 lines", 0),
        (" " * 1990 + "status 503", 503),
        (" " * 1991 + "status 503", 0),
    ],
)
def test_the_status_in_a_message(message: str, status: int) -> None:
    assert status_in(message) == status


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"error": {"message": "bad field", "code": "x"}}, "invalid_request", "bad field"),
        ({"error": {"message": "no", "code": "content_filter"}}, "refused", "no"),
        ({"message": "bad field"}, "invalid_request", "bad field"),
        ({"error": {"message": "first"}, "message": "second"}, "invalid_request", "first"),
        ({"else": 1}, "invalid_request", "no reason given"),
    ],
)
def test_a_server_s_whole_answer_is_read(body: object, kind: str, message: str) -> None:
    found = kind_of_failure(json.dumps(body))
    assert (found[0].value, found[1]) == (kind, message)


def test_an_unpaid_account_is_no_limit_to_wait_for() -> None:
    body = {"error": {"message": "quota exceeded, try again in 3 days", "code": "insufficient_quota"}}
    assert kind_of_failure(json.dumps(body))[0] is ErrorKind.NO_CREDIT


@pytest.mark.parametrize("message", ["API Error: 503 busy", "[503]"])
def test_any_other_text_is_the_message(message: str) -> None:
    kind = "overloaded" if "Error" in message else "transient"
    assert (kind_of_failure(message)[0].value, kind_of_failure(message)[1]) == (kind, message)


def test_only_a_limit_has_a_time_to_wait_and_a_lost_session_is_not_continued() -> None:
    usage = Usage(1, 2)
    for kind in ErrorKind:
        error = failure(kind, "why", wait=9.0, usage=usage, continues_session=True)
        assert (error.kind, error.message, error.usage) == (kind, "why", usage)
        assert error.retry_after == (9.0 if kind in {ErrorKind.RATE_LIMITED, ErrorKind.OVERLOADED} else None)
        assert error.continues_session is (kind is not ErrorKind.SESSION_LOST)
        assert failure(kind, "why").continues_session is False


@pytest.mark.parametrize(
    "key", ["sk-abcdefgh", "AIzaabcdefgh", "ghp_abcdefgh", "github_pat_abcdefgh", "eyJabcdefgh", "Bearer  abc"]
)
def test_a_key_in_a_message_is_masked(key: str) -> None:
    assert safe_line(f"before\n{key} after") == "before *** after"
    assert (len(safe_line("x" * 300)), len(safe_line("x" * 9000))) == (300, 300)


def test_both_spellings_of_a_proxy_reach_an_agent_and_are_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    proxies = {f"{name}_PROXY" for name in ("HTTP", "HTTPS", "ALL", "NO")}
    network = {*proxies, *map(str.lower, proxies), "NODE_EXTRA_CA_CERTS", "SSL_CERT_DIR", "SSL_CERT_FILE"}
    for name in network:
        monkeypatch.setenv(name, "proxy.example")
    environment = ClaudeCodeBackend().inherited()
    assert network <= environment.keys()
    error = BackendError(ErrorKind.TRANSIENT, "cannot reach proxy.example")
    hide(error, environment)
    assert error.message == "cannot reach proxy.example"


def test_secret_variables_are_masked_in_an_error() -> None:
    given = {
        "MY_API_KEY": " first-secret ",
        "a_token": "second-secret",
        "THE_SECRET": "third-secret",
        "PASSWORD": "fourth-secret",
        "EXTRA_HEADERS": "x-key: fifth-secret",
        "HOME": "not-secret",
    }
    error = BackendError(
        ErrorKind.AUTH, "first-secret second-secret third-secret fourth-secret fifth-secret not-secret"
    )
    hide(error, given)
    assert error.message == "*** *** *** *** *** not-secret"
    assert error.args == (error.message,)


@pytest.mark.parametrize(
    ("status", "how"),
    [(None, "ended"), (0, "ended with status 0"), (3, "ended with status 3"), (-9, "was ended by SIGKILL")],
)
def test_how_a_command_ended(status: int | None, how: str) -> None:
    assert no_outcome("it", ProcessEnd(status, "")) == (ErrorKind.CRASHED, f"it {how} before its turn was over")


def test_a_signal_without_a_name_is_named_by_its_number() -> None:
    assert no_outcome("it", ProcessEnd(-200, ""))[1] == "it was ended by signal 200 before its turn was over"


def test_the_last_telling_line_is_the_message() -> None:
    stderr = (
        "noise: x\n\x1b[31mError: broken\x1b[0m\n    at file.js\n\tat b\nNode.js v22\nBun v1\nnote: run with x\n---\n"
    )
    told = no_outcome("it", ProcessEnd(1, stderr), ("noise",))
    assert told == (ErrorKind.CRASHED, "it ended with status 1 before its turn was over: Error: broken")
    assert no_outcome("it", ProcessEnd(1, "noise: x"), ("noise",))[1].endswith("was over")
    assert no_outcome("it", ProcessEnd(1, " at a\n at b"))[1].endswith("was over:  at b")
    assert no_outcome("it", ProcessEnd(1, "Error: broken", ("x", "see the log")))[1].endswith(
        "was over: Error: broken: see the log"
    )


def test_a_phrase_on_any_line_decides_unless_a_signal_ended_the_command() -> None:
    assert no_outcome("it", ProcessEnd(1, "x\nWeekly limit reached\nx"))[0] is ErrorKind.RATE_LIMITED
    stderr = "first\nNot logged in\nlast"
    assert no_outcome("it", ProcessEnd(1, stderr)) == (ErrorKind.AUTH, "it: Not logged in")
    assert no_outcome("it", ProcessEnd(None, stderr)) == (ErrorKind.AUTH, "it: Not logged in")
    assert no_outcome("it", ProcessEnd(-9, stderr))[0] is ErrorKind.CRASHED
    assert no_outcome("it", ProcessEnd(1, "Rate limit\nNot logged in"))[0] is ErrorKind.AUTH
