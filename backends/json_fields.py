"""Read JSON of unknown shape: a missing field, or one of another type, reads as an empty value; counts of tokens, which
may contradict each other, read as usage. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
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
    inner: JsonValue = here
    return inner


def text(value: JsonValue | Mapping[str, JsonValue], *path: str) -> str:
    """Return the text under `path`, cleaned for storing; empty if missing."""
    inner = at(value, *path)
    return clean_text(inner) if isinstance(inner, str) else ""


def number(value: JsonValue | Mapping[str, JsonValue], *path: str) -> float | None:
    """Return the number under `path`; None unless finite and not negative."""
    inner = at(value, *path)
    if inner is None or isinstance(inner, bool) or not isinstance(inner, int | float):
        return None
    return float(inner) if 0 <= inner <= _MOST else None


def is_impossible(value: JsonValue | Mapping[str, JsonValue], *path: str) -> bool:
    """Return whether there is a value under `path` that counts nothing: a text, or a number that is negative, too large
    or NaN.
    """
    return at(value, *path) is not None and number(value, *path) is None


def count(value: JsonValue | Mapping[str, JsonValue], *path: str) -> int:
    """Return the whole number under `path`; 0 if missing."""
    inner = at(value, *path)
    return inner if type(inner) is int and 0 <= inner <= _MOST else int(number(inner) or 0)


def tables(value: JsonValue | Mapping[str, JsonValue], *path: str) -> Sequence[Mapping[str, JsonValue]]:
    """Return the objects in the list under `path`."""
    inner = at(value, *path)
    return [item for item in inner if isinstance(item, dict)] if isinstance(inner, list) else []


def describe_tool_call(name: str, arguments: JsonValue) -> str:
    """Return a short description of a tool call: the tool's name and the most informative of its arguments."""
    detail = next((value for key in _INFORMATIVE if (value := text(arguments, key))), "")
    return shown(f"{name}: {detail}" if detail else name)


def counted(
    read: int,
    written: int,
    cost: float | None = None,
    *,
    model: str | None = None,
    cache_read: int = 0,
    cache_write: int = 0,
    cache_write_1h: int = 0,
    reasoning: int = 0,
) -> Usage:
    """Return the usage of counts as reported, of which no part may be larger than its whole.

    Tokens read from the cache count before tokens written to it: both together are a part of the input.
    """
    cached = min(cache_read, read)
    cache_write = min(cache_write, read - cached)
    return Usage(
        read,
        written,
        cost,
        model,
        cache_read_tokens=cached,
        cache_write_tokens=cache_write,
        reasoning_tokens=min(reasoning, written),
        cache_write_1h_tokens=min(cache_write_1h, cache_write),
    )


def usage_beside_cache(counts: JsonValue) -> Usage:
    """Return the counts of a `usage` of Anthropic's API, whose `input_tokens` are the tokens beside the cache."""
    cache_read, cache_write = count(counts, "cache_read_input_tokens"), count(counts, "cache_creation_input_tokens")
    return counted(
        count(counts, "input_tokens") + cache_read + cache_write,
        count(counts, "output_tokens"),
        number(counts, "cost"),
        cache_read=cache_read,
        cache_write=cache_write,
        cache_write_1h=count(counts, "cache_creation", "ephemeral_1h_input_tokens"),
        reasoning=count(counts, "output_tokens_details", "thinking_tokens"),
    )


def at_least(before: Usage, used: Usage) -> Usage:
    """Return the larger of each number of two reports on one request. The model is that of `before`."""
    if before is NO_USAGE and used.model is None:
        return used
    costs = [cost for cost in (before.cost_usd, used.cost_usd) if cost is not None]
    return _each(max, before, used, max(costs, default=None), before.model)


def since(total: Usage, before: Usage) -> Usage:
    """Return the difference between two counts of a growing total."""
    cost = None if total.cost_usd is None else max(0.0, total.cost_usd - (before.cost_usd or 0.0))
    return _each(lambda now, then: max(0, now - then), total, before, cost, total.model)


_counts = attrgetter(
    *("input_tokens", "output_tokens", "cache_read_tokens", "cache_write_tokens", "cache_write_1h_tokens"),
    "reasoning_tokens",
)


def _each(of: Callable[[int, int], int], one: Usage, other: Usage, cost: float | None, model: str | None) -> Usage:
    """Return the usage whose counts are `of` those of `one` and `other`."""
    read, written, cache_read, cache_write, cache_write_1h, reasoning = map(of, _counts(one), _counts(other))
    return counted(
        read,
        written,
        cost,
        model=model,
        cache_read=cache_read,
        cache_write=cache_write,
        cache_write_1h=cache_write_1h,
        reasoning=reasoning,
    )
