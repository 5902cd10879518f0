"""The JSON values in the text of an answer, in the forms in which models give them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice

from plait.backends.protocol import JsonValue
from plait.backends.text import UnreadableNumber, clean_text, json_at, one_line, parse_json

# A line with only the tag is never JSON: strings in JSON have no line breaks.
_THOUGHTS = re.compile(r"\s*<think>.*?</think>|.*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE)
_FENCE = re.compile(r"(?:```|~~~)[^\s`~]*[ \t]*\r?\n\s*")
_FENCES_END = re.compile(r"\s*(?:```|~~~|\Z)")
_BRACKET = re.compile(r"[\[{]")
_LINES_END = re.compile(r"[ \t.`~]*(?:[\r\n]|\Z)")
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Perhaps half a character, which the validator refuses and the store cannot hold."""
_MOST_FENCES = 20


def without_thoughts(text: str) -> str:
    """Return the answer in `text` without the thoughts before it."""
    text = text.removeprefix("\ufeff")
    thoughts = _THOUGHTS.match(text) if "</think>" in text else None
    return text[thoughts.end() :] if thoughts else text


def whole(answer: str) -> JsonValue:
    """Return the JSON value that is the whole answer. Raises ValueError if the answer is more or less than that."""
    return _cleaned(parse_json(answer), answer)


def fenced(answer: str) -> Iterator[JsonValue]:
    """Yield the value of each fenced block that is JSON."""
    for fence in islice(_FENCE.finditer(answer), _MOST_FENCES):
        try:
            value, end = json_at(answer, fence.end())
        except ValueError:
            continue
        if _FENCES_END.match(answer, end):
            yield _cleaned(value, answer)


def at_bracket(answer: str) -> Iterator[JsonValue]:
    """Yield the value, if any, that starts at the first bracket and runs to the end of a line."""
    bracket = _BRACKET.search(answer)
    if bracket is None:
        return
    try:
        value, end = json_at(answer, bracket.start())
    except ValueError:
        return
    if _LINES_END.match(answer, end):
        yield _cleaned(value, answer)


def why_none(answer: str) -> str:
    """Return the reason why no JSON was found in `answer`."""
    fence = _FENCE.search(answer)
    what = "it is not JSON" if fence is None else "its fenced block is not JSON"
    try:
        parse_json(answer if fence is None else answer[fence.end() :].partition(fence[0][:3])[0])
    except UnreadableNumber as exc:
        return f"{'it' if fence is None else 'its fenced block'} cannot be read: {exc}"
    except ValueError as exc:
        what += f": {one_line(str(exc), 120)}"
    return what


def _cleaned(value: JsonValue, text: str) -> JsonValue:
    """Return a value that was read from `text`, without lone surrogates."""
    return parse_json(clean_text(json.dumps(value, ensure_ascii=False))) if _HALF.search(text) else value
