"""Errors in the shapes of one server or another: the reason is told and classified, the body around it is not shown."""

from __future__ import annotations

import json
from typing import Any

import pytest

from plait.backends import AnthropicBackend, ConversationRequest, OpenAIBackend
from plait.errors import BackendError, ErrorKind
from tests.support.wire import Answer, ChatCompletions, Messages, events, plain, serve

K = ErrorKind
CHAT = ChatCompletions()
SECRET = "sk-canary-9d3f1c77"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)


async def fail(answer: Answer, kind: type[OpenAIBackend | AnthropicBackend] = OpenAIBackend, path: str = "/v1"):
    async with serve(answer) as server:
        with pytest.raises(BackendError) as caught:
            async with kind("m", base_url=server.url + path).open(ConversationRequest()) as conversation:
                await conversation.send("the-prompt-itself")
        assert len(server.requests) == 1
    error = caught.value
    assert error.__context__ is None
    assert "the-prompt-itself" not in error.message
    assert SECRET[:6] not in error.message
    assert "\n" not in error.message and len(error.message) <= 300
    return error


def openrouter(status: int, raw: Any) -> Answer:
    error = {"message": "Provider returned error", "code": status, "metadata": {"raw": raw, "provider_name": "X"}}
    return plain(status, {"error": error})


OVERLONG = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}}


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (openrouter(429, "m:free is limited\nupstream"), K.RATE_LIMITED, "returned error: m:free is limited upstream"),
        (openrouter(400, json.dumps(OVERLONG)), K.CONTEXT_OVERFLOW, "returned error: prompt is too long: 9 > 8"),
        (openrouter(400, OVERLONG), K.CONTEXT_OVERFLOW, "returned error: prompt is too long: 9 > 8"),
        (openrouter(400, '{"input": "the-prompt-itself"}'), K.INVALID_REQUEST, "400: Provider returned error"),
        (openrouter(400, '["the-prompt-itself"]'), K.INVALID_REQUEST, "400: Provider returned error"),
        (openrouter(500, "x" * 235 + SECRET), K.TRANSIENT, "x" * 200),
    ],
)
async def test_what_a_provider_behind_the_server_said(answer: Answer, kind: ErrorKind, words: str) -> None:
    error = await fail(answer)
    assert error.kind is kind
    assert words in error.message


def gemini(status: int, message: str, *details: dict[str, Any]) -> Answer:
    body: Any = [{"error": {"code": status, "message": message, "status": "SO", "details": list(details)}}]
    return plain(status, body)


async def test_errors_in_a_list() -> None:
    error = await fail(gemini(429, "Quota.", {"@type": "Help"}, {"@type": "RetryInfo", "retryDelay": "34.5s"}))
    assert (error.kind, error.retry_after) == (K.RATE_LIMITED, 34.5)
    assert error.message.endswith("answered 429: Quota.")
    odd: Any = ["the-prompt-itself"]
    assert (await fail(plain(400, odd))).message.endswith("400: no reason given")
    assert (await fail(gemini(429, "Quota.", {"retryDelay": "soon"}))).retry_after is None


@pytest.mark.parametrize(
    ("status", "code", "message", "kind"),
    [
        (400, None, "The decoder prompt is longer than the maximum model length of 4096.", K.CONTEXT_OVERFLOW),
        (400, None, "This model's maximum prompt length is 8 but the request contains 9 tokens", K.CONTEXT_OVERFLOW),
        (400, None, "The input exceeds the maximum number of tokens allowed (8).", K.CONTEXT_OVERFLOW),
        (400, "invalid_prompt", "Invalid prompt: it was flagged.", K.REFUSED),
        (425, None, "Too early.", K.TRANSIENT),
    ],
)
async def test_kinds_by_status_code_and_words(status: int, code: str | None, message: str, kind: ErrorKind) -> None:
    assert (await fail(plain(status, {"error": {"message": message, "code": code}}))).kind is kind


@pytest.mark.parametrize("backend", [OpenAIBackend, AnthropicBackend])
async def test_json_without_an_answer(backend: type[OpenAIBackend | AnthropicBackend]) -> None:
    error = await fail(plain(200, {"error": {"message": f"No slot, {SECRET}", "code": 429}}), backend)
    assert error.kind is K.RATE_LIMITED
    assert "answered with JSON that holds no answer: No slot, ***" in error.message


async def test_events_that_are_called_json_are_read() -> None:
    data = "".join(CHAT.parts("fine")).encode()
    async with serve(plain(200, data, content_type="application/json")) as server:
        backend = OpenAIBackend("m", base_url=f"{server.url}/v1")
        async with backend.open(ConversationRequest()) as conversation:
            assert (await conversation.send("?")).text == "fine"


async def test_an_error_that_passes_for_a_chunk() -> None:
    died = {"object": "error", "message": f"the engine died, {SECRET}", "type": "InternalServerError", "code": 500}
    error = await fail(events([*CHAT.parts("half", reason=None), f"data: {json.dumps(died)}\n\n", "data: [DONE]\n\n"]))
    assert error.kind is K.TRANSIENT
    assert "broke off the answer: the engine died, ***" in error.message


async def test_why_a_model_declined() -> None:
    wire = Messages()
    details = {"type": "refusal", "category": "bio", "explanation": "It is about\nthe lab."}
    delta = {"stop_reason": "refusal", "stop_sequence": None, "stop_details": details}
    end = [wire.event("message_delta", delta=delta, usage={"output_tokens": 1}), wire.event("message_stop")]
    error = await fail(events([*wire.parts("I ", reason=None), *end]), AnthropicBackend)
    assert (error.kind, error.message) == (K.REFUSED, "the model declined to answer: It is about the lab.")


@pytest.mark.parametrize(
    ("backend", "path", "body", "hint"),
    [
        (OpenAIBackend, "", b"404 page not found", "; is /v1 missing at the end of base_url?"),
        (OpenAIBackend, "", b"no " * 1000 + SECRET.encode(), "; is /v1 missing at the end of base_url?"),
        (OpenAIBackend, "", {"error": {"message": "model 'm' not found"}}, "model 'm' not found"),
        (OpenAIBackend, "/v1", b"404 page not found", "404 page not found"),
        (AnthropicBackend, "/v1", {"error": {"message": "Not Found"}}, "; leave /v1 out of base_url"),
        (AnthropicBackend, "", {"error": {"message": "Not Found"}}, "404: Not Found"),
    ],
)
async def test_a_base_url_that_leads_nowhere(backend: Any, path: str, body: Any, hint: str) -> None:
    error = await fail(plain(404, body), backend, path)
    assert error.kind is K.INVALID_REQUEST
    assert error.message.endswith(hint)
