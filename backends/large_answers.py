"""Work that the event loop must not wait for: large answers are read and checked in a thread."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from plait.backends.output_schema import Schema
from plait.json_form import JsonValue

if TYPE_CHECKING:
    from anyio import CapacityLimiter
    from anyio.lowlevel import RunVar

LARGE = 64 * 1024
"""Characters of a text that is parsed in a thread. Parsing takes 15 ms for a million characters."""
_Result = TypeVar("_Result")


async def in_thread(function: Callable[..., _Result], *args: Any) -> _Result:
    """Return the result of a function that holds the interpreter for long, such as parsing.

    One such function runs at a time: they would compete for the interpreter, and the event loop would wait for each of
    them in turn. Cancellation abandons the call.
    """
    from anyio import CapacityLimiter  # noqa: PLC0415 - small answers do without anyio
    from anyio.to_thread import run_sync  # noqa: PLC0415

    limiter = _limiter_of_loop().get(None)
    if limiter is None:
        limiter = CapacityLimiter(1)
        _limiter_of_loop().set(limiter)
    return await run_sync(partial(function, *args), abandon_on_cancel=True, limiter=limiter)


async def read_answer(schema: Schema, text: str, data: JsonValue = None) -> JsonValue:
    """Return the JSON value in an answer's `text`, as `Schema.read`, or in the `data` of an answer that has some.
    Raises Mismatch.
    """
    if data is not None:
        text = await in_thread(json.dumps, data) if is_large(data) else json.dumps(data)
    return schema.read(text) if len(text) <= LARGE else await in_thread(schema.read, text)


def is_large(value: object) -> bool:
    """Return whether `value`, as JSON, may have more than `LARGE` characters. Looks at a few thousand parts at most."""
    budget = LARGE // 8
    parts: list[object] = [value]
    while parts:
        part = parts.pop()
        budget -= 1
        if isinstance(part, str):
            budget -= len(part) // 8
        elif isinstance(part, dict):
            parts += cast("dict[str, object]", part).values()
        elif isinstance(part, list | tuple):
            parts += cast("list[object]", part)
        if budget < len(parts):
            return True
    return False


@cache
def _limiter_of_loop() -> RunVar[CapacityLimiter | None]:
    from anyio.lowlevel import RunVar  # noqa: PLC0415

    return RunVar("plait_parsing")
