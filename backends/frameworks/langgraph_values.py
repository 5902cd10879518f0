"""Convert a graph's state to a reply or a question, without importing the library."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from itertools import takewhile
from typing import Any, cast

from plait.backends.backend_protocol import Reply
from plait.backends.json_fields import at, count, counted, text
from plait.backends.output_schema import Mismatch, Schema, invalid_output
from plait.backends.threads import read_answer
from plait.backends.whole_answer import whole_answer, without_calls
from plait.dialogue import Message, Question
from plait.json_form import JsonValue
from plait.safe_text import clean_text, shown
from plait.usage import NO_USAGE, Usage

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "HumanMessageChunk": "user"}
_REASONS = ("finish_reason", "stop_reason", "done_reason", "stopReason", "finishReason")
"""Where the providers' packages put the reason for the end of a message."""
_DEEPEST = 100
_LEFT_OUT = object()


def json_part(values: Mapping[Any, Any]) -> dict[str, JsonValue]:
    """Return the fields of `values` that JSON can hold, whole or in part. Never raises.

    Messages become `role` and `content`; pydantic models and dataclasses become their fields; tuples and sets become
    lists. A number that JSON cannot hold is null, and so is any other such value in a list, whose places count; other
    fields that JSON cannot hold are omitted.
    """
    return cast("dict[str, JsonValue]", _fields(values, 0))


async def reply_of(
    values: Any,
    names: Any,
    schema: Schema | None,
    *,
    earlier: Set[Any],
    start_values: Mapping[str, Any] | None,
    usage: Usage,
) -> Reply:
    """Return the reply of a graph that ended with `values`; `names` are the declared output fields, or None. Its
    messages, without the prompt, are there only for the sake of thoughts in the answer.

    `earlier` are the ids of the messages before the turn, and `start_values` those with which it began: neither is
    an answer of this turn. `start_values` is None if the turn went on from its middle. Raises BackendError if the
    answer is not whole, or does not fit `schema`.
    """
    fields_shown = _shown(values, names)
    messages = messages_of(fields_shown)
    fields = json_part({name: one for name, one in fields_shown.items() if name != "messages" or not messages})
    begun = json_part({name: one for name, one in (start_values or {}).items() if name in fields})
    made = {name: fields_shown[name] for name in fields if name not in begun or begun[name] != fields[name]}
    new = [one for one in messages if start_values is None or one.id is None or one.id not in earlier]
    turn = _last_words(new, _prompts((start_values or {}).get("messages")))
    turn += [one for one in made.values() if _is_message(one)]
    is_data = any(not _is_message(one) for one in made.values())
    last = turn[-1] if turn else None
    text = "" if last is None else _text(last)
    answered = [reason for one in (turn if is_data else turn[:-1]) for reason in without_calls(_reasons(one))]
    message = whole_answer(
        text,
        answered if is_data or last is None else [*answered, *_reasons(last)],
        refusal="" if last is None else _refusal(last),
        usage=usage,
        raise_limit="set a higher limit for the graph's own model",
        calls_tool=bool(getattr(last, "tool_calls", None)) and not is_data,
        # A graph that keeps no messages answers with its fields, as a function does with its value.
        needs_text=not is_data and bool(turn or messages),
    )
    content = message.content if message.content.strip() else None
    data: JsonValue = json_part(fields_shown) if fields or content is None else None
    text = json.dumps(data, ensure_ascii=False) if content is None else content
    try:
        if schema is not None:
            data = await read_answer(schema, text, fields if fields or content is None else None)
    except Mismatch as mismatch:
        raise invalid_output(mismatch) from None
    apart = (Message("assistant", text, usage, message.thoughts),) if message.thoughts else ()
    return Reply(text, data, usage=usage, messages=apart)


def question_of(interrupt: Any) -> Question:
    """Return the question of an interrupt.

    A text value is the question. In a mapping with `question`, that field is the question, followed by the other fields
    as JSON, such as the available choices. Any other value is shown as JSON. Without a `response_schema` the node takes
    any value, such as the decisions of LangChain's HumanInTheLoopMiddleware: the schema is empty.
    """
    value: Any = interrupt.value
    fields = dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else dict[str, Any]()
    text: Any = fields.pop("question", None) if fields else interrupt.value
    if not isinstance(text, str):
        part = _part(value, 0)
        text = json.dumps(None if part is _LEFT_OUT else part, ensure_ascii=False)
    elif rest := json_part(fields):
        text = f"{text}\n{json.dumps(rest, ensure_ascii=False)}"
    schema: Any = getattr(interrupt, "response_schema", None)
    return Question(clean_text(text), cast("Mapping[str, JsonValue]", schema) if isinstance(schema, Mapping) else {})


def messages_of(values: Any) -> list[Any]:
    """Return the messages in a state's values, oldest first."""
    messages: Any = at(values, "messages")
    return [message for message in cast("list[Any]", messages or ()) if _is_message(message)]


def _last_words(messages: Sequence[Any], prompts: Set[str]) -> list[Any]:
    """Return the last message of a turn, and the assistant's messages just before it: pieces of one answer.

    The words before a call of a tool are no answer, and neither is one of `prompts`.
    """
    candidates = [one for one in messages if _role(one) not in {"system", "remove"}]
    pieces = list(takewhile(lambda one: _role(one) == "assistant", reversed(candidates)))
    if not pieces and candidates:
        # What a tool returned, if the graph ends with the tool, or what an agent said in the role of a user.
        is_prompt = _role(candidates[-1]) == "user" and not (prompts and _text(candidates[-1]) not in prompts)
        pieces = [] if is_prompt else candidates[-1:]
    return pieces[::-1]


def _prompts(messages: Any) -> Set[str]:
    """Return the texts of the messages that a turn was given, in any of the forms that LangChain takes."""
    texts: set[str] = set()
    each: list[Any] = []
    each += messages if isinstance(messages, list) else [messages]
    for one in each:
        content: Any = at(cast("Any", one), "content") if isinstance(one, Mapping) else one
        content = cast("Sequence[Any]", one)[-1] if isinstance(one, tuple) and one else content
        texts |= {_text(one)} if _is_message(one) else {clean_text(content)} if isinstance(content, str) else set()
    return texts


def _reasons(message: Any) -> list[str]:
    """Return the reasons for the end of a message that its provider reported."""
    metadata: Any = getattr(message, "response_metadata", None)
    values: list[Any] = [at(metadata, name) for name in _REASONS]
    if at(metadata, "status") in {"incomplete", "failed", "cancelled"}:  # of OpenAI's Responses API
        values += [at(metadata, "incomplete_details", "reason"), at(metadata, "status")]
    each: list[Any] = []
    for reason in values:
        each += reason if isinstance(reason, list) else [getattr(reason, "name", reason)]
    return [reason for reason in each if isinstance(reason, str)]


def _refusal(message: Any) -> str:
    """Return the words with which the model declined, which OpenAI keeps apart from the text."""
    content: Any = message.content
    blocks: Any = () if isinstance(content, str) else content or ()
    words = (at(getattr(message, "additional_kwargs", None), "refusal"), *(at(block, "refusal") for block in blocks))
    return "".join(word for word in words if isinstance(word, str))


def tokens_of(messages: Sequence[Any]) -> Usage:
    """Return the sum of the usage reported by the messages."""
    return sum((_tokens(message) for message in messages), NO_USAGE)


def _shown(values: Any, names: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        return {"output": values}
    fields = cast("Mapping[str, Any]", values)
    return {name: fields[name] for name in fields if not isinstance(names, list) or name in names}


def _tokens(message: Any) -> Usage:
    usage: Any = getattr(message, "usage_metadata", None)
    if not usage:
        return NO_USAGE
    return counted(
        count(usage, "input_tokens"),
        count(usage, "output_tokens"),
        model=shown(text(getattr(message, "response_metadata", None), "model_name")) or None,
        cache_read=count(usage, "input_token_details", "cache_read"),
        cache_write=count(usage, "input_token_details", "cache_creation"),
        reasoning=count(usage, "output_token_details", "reasoning"),
    )


def _is_message(value: Any) -> bool:
    return isinstance(getattr(value, "type", None), str) and hasattr(value, "content")


def _role(message: Any) -> str:
    return _ROLES.get(message.type) or str(message.type)


def _text(message: Any) -> str:
    content: Any = message.content
    blocks: Any = [content] if isinstance(content, str) else content or ()
    pieces = (block if isinstance(block, str) else at(block, "text") for block in blocks)
    return clean_text("".join(piece for piece in pieces if isinstance(piece, str)))


def _part(value: Any, depth: int) -> Any:
    """Return `value` as JSON, or _LEFT_OUT."""
    if value is None or isinstance(value, bool | str | int | float):
        return _plain(value)
    if depth >= _DEEPEST:
        return _LEFT_OUT
    if isinstance(value, list | tuple | Set | deque):
        parts = [_part(one, depth + 1) for one in cast("Sequence[Any]", value)]
        parts = [None if part is _LEFT_OUT else part for part in parts]
        return sorted(parts, key=json.dumps) if isinstance(value, Set) else parts
    if _is_message(value):
        return {"role": _role(value), "content": _text(value)}
    members = _members(value)
    return _LEFT_OUT if members is None else _fields(members, depth)


def _plain(value: str | float | None) -> Any:
    # Convert subclasses, such as enumerations, to the base type.
    if isinstance(value, str):
        return clean_text(str(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _fields(values: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    parts = {clean_text(name): _part(one, depth + 1) for name, one in values.items() if isinstance(name, str)}
    return {name: part for name, part in parts.items() if part is not _LEFT_OUT}


def _members(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a mapping, a dataclass or a pydantic model; None for other values."""
    if isinstance(value, Mapping):
        return cast("Mapping[str, Any]", value)
    kind = cast("Any", type(value))
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else None
    names = getattr(kind, "model_fields", None) if names is None else names
    return None if names is None else {name: getattr(value, name, _LEFT_OUT) for name in names}
