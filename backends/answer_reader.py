"""Reading of answers without holding up the event loop for long: small ones at once, large ones in a thread."""

from __future__ import annotations

import json

from plait.backends.output_schema import Schema
from plait.backends.threads import LARGE, in_thread, is_large
from plait.json_form import JsonValue


async def read_answer(schema: Schema, text: str) -> JsonValue:
    """Return the JSON value in an answer's `text`, as `Schema.read`. Raises Mismatch."""
    return schema.read(text) if len(text) <= LARGE else await in_thread(schema.read, text)


async def check_answer(schema: Schema, value: JsonValue) -> JsonValue:
    """Return `value` if it fits the schema. Raises Mismatch."""
    return await read_answer(schema, await in_thread(json.dumps, value) if is_large(value) else json.dumps(value))
