"""Translate between the values of pydantic-ai and ours: messages, outputs, usage, events and settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from plait.backends.backend_protocol import Output
from plait.backends.json_fields import describe_tool_call
from plait.backends.whole_answer import split_thoughts, whole_answer
from plait.dialogue import Message
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, one_line, parse_json, shown
from plait.usage import NO_USAGE, Usage

if TYPE_CHECKING:
    from pydantic_ai.messages import ModelMessage


def from_stored(history: Sequence[Message]) -> list[ModelMessage]:
    """Return the stored text of a conversation as messages for a model."""
    from pydantic_ai.messages import (  # noqa: PLC0415
        ModelRequest,
        ModelResponse,
        SystemPromptPart,
        TextPart,
        UserPromptPart,
    )

    messages: list[ModelMessage] = []
    for one in history:
        text = clean_text(one.content)
        if one.role == "assistant":
            messages.append(ModelResponse(parts=[TextPart(text)]))
        else:
            messages.append(
                ModelRequest(parts=[SystemPromptPart(text) if one.role == "system" else UserPromptPart(text)])
            )
    return messages


def stated(output: Any) -> tuple[str, JsonValue]:
    """Return an agent's output as text, and as JSON if the output is not text."""
    if isinstance(output, str):
        return clean_text(str(output)), None
    from pydantic_core import to_json  # noqa: PLC0415

    try:
        data = parse_json(clean_text(to_json(output).decode()))
    except (ValueError, TypeError) as error:
        name = type(output).__name__
        text = f"the agent's output is {name}, which JSON cannot hold: {one_line(str(error), 120)}"
        raise BackendError(ErrorKind.UNEXPECTED, text) from error
    return json.dumps(data, ensure_ascii=False), data


def clean_parts(response: Any) -> str:
    """Cut the thoughts out of a response's text, which is the answer and is sent again as history, and return them.

    Join the halves of characters that a stream delivered in two parts: a history with halves cannot be written.
    """
    found: list[str] = []
    for part in response.parts:
        if part.part_kind in {"text", "thinking"}:
            part.content = clean_text(part.content)
        if part.part_kind == "text":  # a part of its own would be sent again in `<think>` by some of the models
            part.content, thoughts = split_thoughts(part.content)
            found += [thoughts] if thoughts else []
    return "\n\n".join(found)


def check_whole(response: Any) -> None:
    """Raise BackendError if a response of the model is not whole: an answer, or a call of tools."""
    reasons = [reason for reason in [response.finish_reason or _told_reason(response)] if reason]
    if any(part.part_kind == "tool-call" for part in response.parts):
        reasons = [reason for reason in reasons if reason != "tool_call"]
    whole_answer(
        "".join(part.content for part in response.parts if part.part_kind == "text"),
        reasons if _says_why(response) else (),
        missing="" if _says_why(response) else "the model's answer broke off: it ended without a reason",
        usage=_usage(response),
        raise_limit="set a higher `max_tokens` of the backend (in Python in the agent's model_settings)",
        needs_text=False,  # pydantic-ai asks again for an answer without text
    )


def _told_reason(response: Any) -> str:
    """Return the server's own word for the reason, which pydantic-ai keeps in the details."""
    details: dict[str, Any] = response.provider_details or {}
    told = details.get("finish_reason")
    return told if isinstance(told, str) else ""


def _says_why(response: Any) -> bool:
    """Return whether the server said why the answer ended.

    Without a word, pydantic-ai takes a stream of chat completions as complete; a server that also reports no usage was
    cut off. The library's models for tests report nothing.
    """
    counted = response.finish_reason and not getattr(response.usage, "unmeasured_requests", 0)
    return response.provider_name in {None, "test"} or bool(_told_reason(response) or counted)


def spent(messages: Sequence[ModelMessage]) -> Usage:
    """Return the sum of the usage that the messages report."""
    return sum((_usage(message) for message in messages if message.kind == "response"), NO_USAGE)


def _usage(response: Any) -> Usage:
    told = response.usage
    cost = getattr(told, "cost", None)
    name = response.model_name
    reasoning = getattr(told, "output_reasoning_tokens", 0)
    # Some servers (xAI, Gemini) count reasoning beside the answer; it shows where the reasoning is the larger count.
    beside = reasoning if reasoning > told.output_tokens else 0
    cached = min(told.cache_read_tokens, told.input_tokens)
    kept = min(told.cache_write_tokens, told.input_tokens - cached)
    return Usage(
        told.input_tokens,
        told.output_tokens + beside,
        None if cost is None else float(cost),
        shown(name) if name else None,
        cached,
        kept,
        reasoning,
        cache_write_1h_tokens=min(getattr(told, "cache_write_1h_tokens", 0), kept),
    )


def reported(event: Any) -> Output | None:
    """Return the output that an event of a running turn shows; None for other events."""
    kind = event.event_kind
    if kind == "part_start" and event.part.part_kind == "text" and event.part.content:
        return Output("text", clean_text(event.part.content))
    if kind == "part_delta" and event.delta.part_delta_kind == "text" and event.delta.content_delta:
        return Output("text", clean_text(event.delta.content_delta))
    if kind == "function_tool_call":
        given: dict[str, Any] = event.part.args_as_dict() if event.args_valid is not False else {}
        return Output("tool", describe_tool_call(event.part.tool_name, given))
    return None


def settings_for(model: Any) -> dict[str, Any]:
    """Return the settings that switch the retries of the model's SDK off, if pydantic-ai can do so for the model."""
    from pydantic_ai.models import infer_model  # noqa: PLC0415

    if model is None:
        return {}
    ignored = getattr(infer_model(model), "unsupported_settings", ("max_retries",))
    return {} if "max_retries" in ignored else {"max_retries": 0}
