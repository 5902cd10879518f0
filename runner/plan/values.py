"""Restrictions on values in plans and in files of rows. Pure."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from plait.json_form import JsonValue

Path: TypeAlias = tuple[str | int, ...]
"""The position of a value in a plan: keys and indexes from the top, such as `("tasks", 3, "depends_on", 0)`."""
MAX_DEPTH = 50
"""The maximum nesting of lists and mappings."""
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def unstorable(value: JsonValue, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """Yield the path and a message for each part of `value` that no store can keep. Escapes can express characters that
    a file cannot contain.
    """
    if isinstance(value, str) and _UNSTORABLE.search(value):
        yield path, "a text may not hold U+0000 or a lone surrogate; remove the character"
    elif isinstance(value, float) and not math.isfinite(value):
        yield path, f"{value} is not a number in JSON; write a finite number"
    for key, part in _parts(value):
        if isinstance(key, str) and _UNSTORABLE.search(key):
            yield path, "a key may not hold U+0000 or a lone surrogate; remove the character"
        yield from unstorable(part, (*path, key))


def not_json(error: json.JSONDecodeError) -> str:
    """Return the message about a text refused by json."""
    # Some messages of json end before a position, which is reported separately.
    return f"this is not JSON: {error.msg.removesuffix(' at').removesuffix(' starting')}"


def too_many_digits() -> str:
    """Return the message about whole numbers too long for Python."""
    return f"a number has more than {sys.get_int_max_str_digits():,} digits; write it as text, in quotes"


def nests_too_deep(value: JsonValue, levels: int = MAX_DEPTH) -> bool:
    """Return whether more than `levels` lists and mappings are nested."""
    if not isinstance(value, dict | list):
        return False
    return levels == 0 or any(nests_too_deep(part, levels - 1) for _, part in _parts(value))


def _parts(value: JsonValue) -> Iterable[tuple[str | int, JsonValue]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()


def spell(path: Path) -> str:
    """Return `path` in the form `tasks[3].depends_on[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
