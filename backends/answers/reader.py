"""Reading of answers without holding up the event loop: small ones at once, large ones in a thread, costly ones in a
process.

JSON is parsed, and checked by jsonschema-rs, with the interpreter held: a thread alone would stop the event loop as
well. So the cost of a check is found from the schema and the length of the text before anything is parsed, and a check
of a high cost is done, with its parsing, by `CheckingProcess`. This process parses the fitting value alone.
"""

from __future__ import annotations

import json

from plait.backends.answers.process import CheckingProcess
from plait.backends.answers.schema import Schema, TooCostly
from plait.backends.answers.threads import LARGE, in_thread, in_waiting_thread, is_large
from plait.backends.protocol import JsonValue
from plait.backends.text import parse_json


async def read_answer(schema: Schema, text: str) -> JsonValue:
    """Return the JSON value in an answer's `text`, as `Schema.read`.

    Raises Mismatch, and BackendError (invalid_output) if the check takes too long. Cancellation ends the check.
    """
    try:
        return schema.read(text) if len(text) <= LARGE else await in_thread(schema.read, text)
    except TooCostly:
        pass
    process = CheckingProcess()
    try:
        fitting = await in_waiting_thread(process.read, schema.text, text)
    except BaseException:
        process.stop()
        raise
    return parse_json(fitting) if len(fitting) <= LARGE else await in_thread(parse_json, fitting)


async def check_answer(schema: Schema, value: JsonValue) -> JsonValue:
    """Return `value` if it fits the schema. Raises as `read_answer`."""
    return await read_answer(schema, await in_thread(json.dumps, value) if is_large(value) else json.dumps(value))
