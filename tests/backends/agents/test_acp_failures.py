"""What agents that speak ACP say of turns that failed and of sessions that they do not know."""

from __future__ import annotations

from typing import Any

import pytest

from plait.backends.agents.acp_machine import AcpMachine
from plait.backends.agents.agent_output import AgentCall
from plait.errors import ErrorKind
from tests.support.agents.acp_talks import (
    AIMS,
    NOWHERE,
    OPEN,
    chunk,
    done,
    failed,
    hold,
    new_talk,
    start,
    tool,
)
from tests.support.agents.recorded import NOW

# What agents answered to a prompt that failed, and what it is.
FAILURES: list[tuple[ErrorKind, str, list[dict[str, Any]], str]] = [
    (ErrorKind.TRUNCATED, "was cut", [chunk("half an ans"), done("max_tokens")], ""),
    (ErrorKind.LIMIT_REACHED, "max_turn_requests", [done("max_turn_requests")], ""),
    (ErrorKind.REFUSED, "refusal", [chunk("No."), done("refusal")], ""),
    (ErrorKind.TRANSIENT, "'cancelled'", [chunk("half"), done("cancelled")], ""),
    (ErrorKind.TRANSIENT, "'something new'", [chunk("half"), done("something new")], ""),
    (ErrorKind.TRANSIENT, "'none given'", [chunk("half"), done("")], ""),
    (ErrorKind.INVALID_OUTPUT, "answer is empty", [done()], ""),
    (ErrorKind.INVALID_OUTPUT, "answer is empty", [chunk("I look."), tool("t-1"), done()], ""),
    (ErrorKind.INVALID_OUTPUT, "nothing but thoughts", [chunk("<think>I look.</think>"), done()], ""),
    (
        ErrorKind.RATE_LIMITED,
        "Request rejected (429)",
        [failed({"code": -32603, "message": "API Error: Request rejected (429)", "data": {"errorKind": "rate_limit"}})],
        "claude-agent-acp",
    ),
    (ErrorKind.AUTH, "log in", [failed({"code": -32000, "message": "Authentication required"})], ""),
    (ErrorKind.RATE_LIMITED, "quota", [failed({"code": 429, "message": "quota"})], "gemini-cli"),
    (ErrorKind.TRANSIENT, "down", [failed({"code": 500, "message": "down"})], "gemini-cli"),
    (ErrorKind.AUTH, "key", [failed({"code": 401, "message": "API key"})], "gemini-cli"),
    (
        ErrorKind.TRANSIENT,
        "500",
        [failed({"code": -32603, "message": "Internal error", "data": {"details": "[API Error: 500 x]"}})],
        "qwen-code",
    ),
    (ErrorKind.INVALID_REQUEST, "params", [failed({"code": -32602, "message": "Invalid params"})], ""),
    (
        ErrorKind.RATE_LIMITED,
        "last status: 429",
        [
            chunk("Warning: Model metadata for `m` not found.\n\n"),
            chunk("exceeded retry limit, last status: 429 Too Many Requests\n\n"),
            done(usage=None),
        ],
        "@agentclientprotocol/codex-acp",
    ),
    (
        ErrorKind.INVALID_REQUEST,
        "Codex: no such tool",
        [
            chunk('{"error": {"message": "no such tool", "code": "invalid_request_error"}}\n\n'),
            done(usage=None),
        ],
        "@agentclientprotocol/codex-acp",
    ),
    (
        ErrorKind.RATE_LIMITED,
        "Rate limit exceeded",
        [chunk("Ran into this error: Rate limit exceeded: x.\n\nPlease retry if you think"), done()],
        "goose",
    ),
    (
        ErrorKind.INVALID_REQUEST,
        "Bad request (400)",
        [chunk("Ran into this error: Request failed: Bad request (400): x.\n\nPlease retry"), done()],
        "goose",
    ),
    (
        ErrorKind.OVERLOADED,
        "529",
        [chunk("Ran into this error: Server error: Server error (529 ) at http://x\n\nPlease retry"), done()],
        "goose",
    ),
]


@pytest.mark.parametrize(("kind", "message", "said", "name"), FAILURES)
def test_a_turn_without_an_answer_fails(kind: ErrorKind, message: str, said: list[Any], name: str) -> None:
    began = start(name=name)
    if "codex" in name:
        began["result"]["agentInfo"]["title"] = "Codex"
    held = hold(new_talk(), [began, OPEN, *said])
    assert held.error is not None, held.answered
    assert (held.error.kind, held.error.continues_session) == (kind, True)
    assert message in held.error.message
    assert "\n" not in held.error.message


def test_nothing_said_to_a_prompt_with_a_slash_is_told_as_what_it_may_be() -> None:
    held = hold(new_talk(prompt=" /home/ada/notes.txt: read it"), [start(), OPEN, done()])
    assert held.error is not None
    assert held.error.kind is ErrorKind.INVALID_REQUEST, "another attempt would come to the same"
    assert "begin the prompt with another character than a slash" in held.error.message


def test_the_same_words_are_an_answer_of_agents_that_do_not_tell_errors_so() -> None:
    for said in ([chunk("Ran into this error: x"), done()], [chunk("429"), done(usage=None)]):
        held = hold(new_talk(), [start(), OPEN, *said])
        assert held.error is None


def test_when_a_limit_ends_is_read_from_the_words() -> None:
    error = {
        "code": -32603,
        "message": "Usage limit reached, try again in 2 hours",
        "data": {"errorKind": "rate_limit"},
    }
    held = hold(new_talk(), [start(), OPEN, failed(error)])
    assert held.error is not None
    assert held.error.retry_after == 7200


LOST = [
    {"code": -32002, "message": "Resource not found", "data": "Session not found: x"},
    {"code": -32603, "message": "Internal error", "data": {"details": "no rollout found for thread id x"}},
    {"code": -32603, "message": "Internal error: OpenCode service failure", "data": {"service": "session"}},
    {"code": -32602, "message": "Session not found: x"},
    {"code": -32603, "message": "Internal error", "data": "invalid history lineage for x: missing source rollout"},
]


@pytest.mark.parametrize("error", LOST)
def test_a_session_that_the_agent_does_not_know_is_lost(error: Any) -> None:
    talk = AcpMachine(AgentCall(NOWHERE, "x", resume=True), AIMS, lambda: NOW)
    held = hold(talk, [start(loadSession=True), failed(error, 2)])
    assert held.error is not None
    assert (held.error.kind, held.error.continues_session) == (ErrorKind.SESSION_LOST, False)


def test_a_session_that_is_opened_but_gone_is_lost() -> None:
    error = {"code": -32603, "message": "Internal error", "data": {"message": "thread not found: x"}}
    held = hold(new_talk(), [start(), OPEN, failed(error)])
    assert held.error is not None
    assert (held.error.kind, held.error.continues_session) == (ErrorKind.SESSION_LOST, False)


def test_an_agent_without_settings_is_not_asked_again_and_again() -> None:
    error = {"code": -32603, "message": "Internal error", "data": "Configuration value not found: GOOSE_PROVIDER"}
    held = hold(new_talk(), [start(), failed(error, 2)])
    assert held.error is not None
    assert held.error.kind is ErrorKind.INVALID_REQUEST and "GOOSE_PROVIDER" in held.error.message


def test_a_session_that_is_busy_is_not_lost() -> None:
    talk = AcpMachine(AgentCall(NOWHERE, "x", resume=True), AIMS, lambda: NOW)
    busy = {"code": -32603, "message": "Internal error", "data": {"details": "thread x already has an active writer"}}
    held = hold(talk, [start(loadSession=True), failed(busy, 2)])
    assert held.error is not None
    assert held.error.kind is ErrorKind.TRANSIENT
