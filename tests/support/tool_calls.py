"""Answers of a model that calls tools, in the wire format of chat completions."""

from __future__ import annotations

import json
from typing import Any

from tests.support.wire import Answer, ChatCompletions, Exchange, events

CHAT = ChatCompletions()


def calling(*calls: tuple[str, dict[str, Any]], text: str = "") -> Answer:
    """A model that says `text` and calls these tools."""
    deltas = [
        {"index": number, "id": f"call-{name}-{number}", "type": "function",
         "function": {"name": name, "arguments": json.dumps(given)}}
        for number, (name, given) in enumerate(calls)
    ]  # fmt: skip
    usage = {"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}
    said = [CHAT.chunk({"delta": {"content": text}})] if text else []
    return events([
        CHAT.chunk({"delta": {"role": "assistant", "content": ""}}),
        *said,
        CHAT.chunk({"delta": {"tool_calls": deltas}}),
        CHAT.chunk({"delta": {}, "finish_reason": "tool_calls"}),
        CHAT.chunk(None, usage=usage),
        "data: [DONE]\n\n",
    ])  # fmt: skip


def saying(*texts: str) -> Answer:
    """A model that answers with text."""
    return events(CHAT.parts(*texts))


async def polite(exchange: Exchange) -> None:
    """A model that fills in the output tool, if there is one, and answers with text otherwise."""
    tools = [tool["function"]["name"] for tool in exchange.request.body.get("tools", ())]
    answer = calling((tools[0], {"mood": "good"})) if tools else saying("Hello", " there.")
    await answer(exchange)
