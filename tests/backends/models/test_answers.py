"""When an answer of a chat completions server is whole, and what is its text."""

from __future__ import annotations

import pytest

from plait.backends import ConversationRequest, OpenAIBackend, Reply
from plait.errors import BackendError, ErrorKind
from tests.support.wire import ChatCompletions, Script, events, serve

WIRE = ChatCompletions()


async def say(server: Script) -> Reply:
    async with OpenAIBackend("m", base_url=f"{server.url}/v1").open(ConversationRequest()) as conversation:
        return await conversation.send("Hello.")


@pytest.mark.parametrize("reason", ["stop", "STOP", "eos", "eos_token", "stop_sequence", "end_turn"])
async def test_good_finish_reasons_of_all_servers(reason: str) -> None:
    async with serve(events(WIRE.parts("all of it", reason=reason))) as server:
        assert (await say(server)).text == "all of it"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        *((name, ErrorKind.TRUNCATED) for name in ("MAX_TOKENS", "model_length")),
        ("model_context_window_exceeded", ErrorKind.TRUNCATED),
        *((name, ErrorKind.REFUSED) for name in ("content_filter: PROHIBITED_CONTENT", "SAFETY", "RECITATION")),
        *((name, ErrorKind.REFUSED) for name in ("sensitive", "blocklist", "SPII", "prohibited_content")),
        ("function_call", ErrorKind.INVALID_OUTPUT),
        *((name, ErrorKind.TRANSIENT) for name in ("abort", "insufficient_system_resource", "network_error")),
        *((name, ErrorKind.TRANSIENT) for name in ("cancelled", "timeout", "error", "a reason of next year")),
    ],
)
async def test_no_other_finish_reason_makes_an_answer_whole(reason: str, kind: ErrorKind) -> None:
    async with serve(events(WIRE.parts("half an ans", reason=reason))) as server:
        with pytest.raises(BackendError) as caught:
            await say(server)
    assert caught.value.kind is kind
    if kind in {ErrorKind.TRANSIENT, ErrorKind.REFUSED}:
        assert f"finish reason {reason!r}" in caught.value.message


THOUGHT = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}


async def test_content_in_parts_is_joined_without_thoughts() -> None:
    parts = [
        WIRE.chunk({"delta": {"content": [THOUGHT]}}),
        WIRE.chunk({"delta": {"content": [{"type": "text", "text": "an "}, "ans", {"type": "text", "text": "wer"}]}}),
        WIRE.chunk(
            {"delta": {"content": [3, {"type": "reference", "reference_ids": [1]}, {"type": "text", "text": 4}]}}
        ),
    ]
    async with serve(events([*parts, *WIRE.parts(".")])) as server:
        assert (await say(server)).text == "an answer."
