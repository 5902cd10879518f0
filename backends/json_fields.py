"""Read JSON of unknown shape: a missing field or a field of another type reads as an empty value. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from plait.json_form import JsonValue
from plait.safe_text import clean_text, shown
from plait.usage import NO_USAGE, Usage

_INFORMATIVE = ("command", "file_path", "path", "pattern", "query", "url", "description", "prompt")
_MOST = 2**53
"""Larger counts are treated as invalid; a store's integers end at 2**63."""


_decode_first = json.JSONDecoder().raw_decode


def parse(text: str) -> JsonValue:
    """Return the value of a JSON text. Raises ValueError. An object without white space around it, as a server streams
    thousands of them, is parsed in two thirds of the time of `json.loads`, which looks for that white space.
    """
    value: JsonValue
    if text.startswith("{"):
        value, end = _decode_first(text)
        if end == len(text):
            return value
    value = json.loads(text)
    return value


def at(value: JsonValue | Mapping[str, JsonValue], *path: str) -> JsonValue:
    """Return the value under `path`, one key per level; None if missing."""
    here: Any = value
    for key in path:
        kind = type(here)  # pyright: ignore[reportUnknownVariableType]
        if kind is not dict and not issubclass(kind, Mapping):  # the first check alone is ten times as fast
            return None
        here = here.get(key)
    found: JsonValue = here
    return found


def text(value: JsonValue | Mapping[str, JsonValue], *path: str) -> str:
    """Return the text under `path`, cleaned for storing; empty if missing."""
    found = at(value, *path)
    return clean_text(found) if isinstance(found, str) else ""


def number(value: JsonValue | Mapping[str, JsonValue], *path: str) -> float | None:
    """Return the number under `path`; None unless finite and not negative."""
    found = at(value, *path)
    if found is None or isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if 0 <= found <= _MOST else None


def is_impossible(value: JsonValue | Mapping[str, JsonValue], *path: str) -> bool:
    """Return whether there is a value under `path` that counts nothing: a text, or a number that is negative, too large
    or NaN.
    """
    return at(value, *path) is not None and number(value, *path) is None


def count(value: JsonValue | Mapping[str, JsonValue], *path: str) -> int:
    """Return the whole number under `path`; 0 if missing."""
    found = at(value, *path)
    return found if type(found) is int and 0 <= found <= _MOST else int(number(found) or 0)


def tables(value: JsonValue | Mapping[str, JsonValue], *path: str) -> Sequence[Mapping[str, JsonValue]]:
    """Return the objects in the list under `path`."""
    found = at(value, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def describe_tool_call(name: str, given: JsonValue) -> str:
    """Return a short description of a tool call: the tool's name and the most informative of its arguments."""
    told = next((found for key in _INFORMATIVE if (found := text(given, key))), "")
    return shown(f"{name}: {told}" if told else name)


class UsageTally:
    """Usage of a turn, summed over its requests. An agent reports each request repeatedly, with growing counts."""

    def __init__(self) -> None:
        self.total = NO_USAGE
        self._requests: dict[str, Usage] = {}

    def note(self, request: str, used: Usage) -> None:
        """Record that `request` has used at least the tokens of `used`."""
        old = self._requests.get(request, NO_USAGE)
        self._requests[request] = new = at_least(old, used)
        self.total += Usage(
            new.input_tokens - old.input_tokens,
            new.output_tokens - old.output_tokens,
            cache_read_tokens=new.cache_read_tokens - old.cache_read_tokens,
            cache_write_tokens=new.cache_write_tokens - old.cache_write_tokens,
            reasoning_tokens=new.reasoning_tokens - old.reasoning_tokens,
            cache_write_1h_tokens=new.cache_write_1h_tokens - old.cache_write_1h_tokens,
        )


def at_least(known: Usage, used: Usage) -> Usage:
    """Return the larger of each number of two reports on one request. The model is the model of `known`.

    Tokens read from the cache count before tokens written to it: both together are a part of the input.
    """
    if known is NO_USAGE and used.model is None:
        return used
    read = max(known.input_tokens, used.input_tokens)
    cached = min(max(known.cache_read_tokens, used.cache_read_tokens), read)
    kept = min(max(known.cache_write_tokens, used.cache_write_tokens), read - cached)
    costs = [cost for cost in (known.cost_usd, used.cost_usd) if cost is not None]
    return Usage(
        read,
        max(known.output_tokens, used.output_tokens),
        max(costs, default=None),
        known.model,
        cached,
        kept,
        max(known.reasoning_tokens, used.reasoning_tokens),
        cache_write_1h_tokens=min(max(known.cache_write_1h_tokens, used.cache_write_1h_tokens), kept),
    )
