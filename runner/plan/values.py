"""What a value may not hold, whether it stands in a plan or in a file of rows. Pure."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator

from plait.backends.protocol import JsonValue
from plait.runner.plan.errors import Path

MAX_DEPTH = 50
"""How many lists and mappings may lie in one another."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def unstorable(value: JsonValue, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Where `value`, which stands at `path`, holds what no store can keep, and what to do: escapes can spell what a
    file cannot hold.
    """
    if isinstance(value, str) and _UNSTORABLE.search(value):
        yield path, "a text may not hold U+0000 or half a character; remove it"
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} is not a number that JSON knows; write another one"
    for key, part in _parts(value):
        if isinstance(key, str) and _UNSTORABLE.search(key):
            yield path, "a key may not hold U+0000 or half a character; remove it"
        yield from unstorable(part, (*path, key))


def not_json(error: json.JSONDecodeError) -> str:
    """What is said of a text that json refuses."""
    # Some of its messages go on with a place, which is told beside them.
    return f"this is not JSON: {error.msg.removesuffix(' at').removesuffix(' starting')}"


def too_many_digits() -> str:
    """What is said of the whole numbers that Python does not read."""
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text, in quotes"


def nests_too_deep(value: JsonValue, levels: int = MAX_DEPTH) -> bool:
    """Whether more than `levels` lists and mappings lie in one another."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(nests_too_deep(part, levels - 1) for _, part in _parts(value))


def _parts(value: JsonValue) -> Iterable[tuple[str | int, JsonValue]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()
