"""Convert a graph's state to a reply or a question, without importing the library."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from plait.backends.answers.reader import check_answer, read_answer
from plait.backends.answers.schema import Mismatch, Schema, invalid_output
from plait.backends.protocol import NO_USAGE, JsonValue, Question, Reply, Usage
from plait.backends.text import clean_text, shown

_ROLES = {"human": "user", "ai": "assistant", "AIMessageChunk": "assistant", "HumanMessageChunk": "user"}
_DEEPEST = 100
_LEFT_OUT = object()


def json_part(values: Mapping[Any, Any]) -> dict[str, JsonValue]:
    """Return the fields of `values` that JSON can hold, whole or in part. Never raises.

    Messages become `role` and `content`; pydantic models and dataclasses become their fields; other values that JSON
    cannot hold are omitted.
    """
    return cast("dict[str, JsonValue]", _fields(values, 0))


async def reply_of(values: Any, names: Any, schema: Schema | None) -> Reply:
    """Return the reply of a graph that ended with `values`; `names` are the declared output fields, or None.

    Raises BackendError (invalid_output) if the reply does not fit `schema`.
    """
    shown = _shown(values, names)
    messages = messages_of(shown)
    fields = json_part({name: one for name, one in shown.items() if name != "messages" or not messages})
    said = last_answer(messages)
    data: JsonValue = json_part(shown) if fields or said is None else None
    text = json.dumps(data, ensure_ascii=False) if said is None else said
    try:
        if schema is not None:
            if fields or said is None:
                data = await check_answer(schema, fields)
            else:
                data = await read_answer(schema, text)
    except Mismatch as mismatch:
        raise invalid_output(mismatch) from None
    return Reply(text, data)


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
    found: Any = cast("Mapping[str, Any]", values).get("messages") if isinstance(values, Mapping) else None
    return [one for one in cast("Sequence[Any]", found) if _is_message(one)] if isinstance(found, list) else []


def last_answer(messages: Sequence[Any]) -> str | None:
    """Return the text of the last assistant message after the last user message; None if there is none."""
    for message in reversed(messages):
        role = _role(message)
        if role == "user":
            return None
        if role == "assistant" and (text := _text(message)):
            return text
    return None


def tokens_of(messages: Sequence[Any]) -> Usage:
    """Return the sum of the usage reported by the messages."""
    return sum((_tokens(message) for message in messages), NO_USAGE)


def _shown(values: Any, names: Any) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        return {"output": values}
    fields = cast("Mapping[str, Any]", values)
    return {name: fields[name] for name in fields if not isinstance(names, list) or name in names}


def _tokens(message: Any) -> Usage:
    said: Any = getattr(message, "usage_metadata", None)
    if not isinstance(said, Mapping):
        return NO_USAGE
    counts = cast("Mapping[str, Any]", said)
    given, made = _whole(counts.get("input_tokens")), _whole(counts.get("output_tokens"))
    of_input, of_output = counts.get("input_token_details"), counts.get("output_token_details")
    cache_read = min(given, _detail(of_input, "cache_read"))
    told: Any = getattr(message, "response_metadata", None)
    model: object = cast("Mapping[str, Any]", told).get("model_name") if isinstance(told, Mapping) else None
    return Usage(
        given,
        made,
        model=shown(model) if isinstance(model, str) and model else None,
        cache_read_tokens=cache_read,
        cache_write_tokens=min(given - cache_read, _detail(of_input, "cache_creation")),
        reasoning_tokens=min(made, _detail(of_output, "reasoning")),
    )


def _detail(details: object, name: str) -> int:
    return _whole(cast("Mapping[str, object]", details).get(name)) if isinstance(details, Mapping) else 0


def _whole(count: object) -> int:
    return count if type(count) is int and count > 0 else 0


def _is_message(value: Any) -> bool:
    return isinstance(getattr(value, "type", None), str) and hasattr(value, "content")


def _role(message: Any) -> str:
    return _ROLES.get(message.type) or str(message.type)


def _text(message: Any) -> str:
    content: Any = message.content
    if isinstance(content, str):
        return clean_text(content)
    blocks = cast("Sequence[Any]", content) if isinstance(content, list) else ()
    return clean_text("".join(block if isinstance(block, str) else _block_text(block) for block in blocks))


def _block_text(block: Any) -> str:
    text: Any = cast("Mapping[str, Any]", block).get("text") if isinstance(block, Mapping) else None
    return text if isinstance(text, str) else ""


def _part(value: Any, depth: int) -> Any:
    """Return `value` as JSON, or _LEFT_OUT."""
    if value is None or isinstance(value, bool | str | int | float):
        return _plain(value)
    if depth >= _DEEPEST:
        return _LEFT_OUT
    if isinstance(value, list | tuple):
        parts = (_part(one, depth + 1) for one in cast("Sequence[Any]", value))
        return [part for part in parts if part is not _LEFT_OUT]
    if _is_message(value):
        return {"role": _role(value), "content": _text(value)}
    members = _members(value)
    return _LEFT_OUT if members is None else _fields(members, depth)


def _plain(value: str | float | None) -> Any:
    # Convert subclasses, such as enumerations, to the base type.
    if isinstance(value, str):
        return clean_text(str(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _LEFT_OUT
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
