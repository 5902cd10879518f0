"""The JSON values in the text of an answer, in the forms in which models give them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from plait.json_form import JsonValue
from plait.safe_text import UnreadableNumber, clean_text, json_at, one_line, parse_json

_FENCE = re.compile(r"(?:```|~~~)[^\s`~]*[ \t]*\r?\n\s*")
_FENCES_END = re.compile(r"\s*(?:```|~~~|\Z)")
_BRACKET = re.compile(r"[\[{]")
_LINES_END = re.compile(r"[ \t.`~]*(?:</[\w|]+>[ \t]*)*(?:[\r\n]|\Z)")
_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*+"|[\[\]{}]')
_JSON = re.compile(r'\{\s*["}/]|\[\s*["{\[\]\-0-9tfn/]|[\[{][ \t]*[\r\n]')
"""A bracket with which JSON may begin, and seldom a remark in prose."""
_HALF = re.compile(r"\\u[dD][89a-fA-F]")
"""Perhaps half a character, which the validator refuses and the store cannot hold."""
_MOST_PLACES = 200
"""Most places in an answer at which a value may begin."""


class Candidate(NamedTuple):
    """A value found in an answer."""

    value: JsonValue
    ends_line: bool
    """Whether nothing follows in the line. Within a sentence only an object with fields is an answer: a list, such as
    [1], is a remark there. Either may be the rival of an answer.
    """


def whole(answer: str) -> JsonValue:
    """Return the JSON value that is the whole answer. Raises ValueError if the answer is more or less than that."""
    return _cleaned(parse_json(answer), answer)


def parts(answer: str, *, brackets: bool) -> Iterator[Candidate]:
    """Yield the value of each fenced block that is JSON, and with `brackets` of each bracket at the top level, in their
    order: no part of another value, or of JSON that cannot be read. Within other code, a value begins its line.
    """
    here, in_code = 0, False
    fence, bracket = _FENCE.search(answer), _BRACKET.search(answer) if brackets else None
    for _ in range(_MOST_PLACES):
        if fence is not None and fence.start() < here:
            fence = _FENCE.search(answer, here)
        if bracket is not None and bracket.start() < here:
            bracket = _BRACKET.search(answer, here)
        if fence is not None and (bracket is None or fence.start() < bracket.start()):
            here = fence.end()
            found = None if in_code else _value_at(answer, here)
            end = None if found is None else _FENCES_END.match(answer, found[1])
            if found is not None and end is not None:
                here = end.end()
                yield Candidate(_cleaned(found[0], answer), ends_line=True)
            else:
                in_code = not in_code
        elif bracket is not None:
            found = _value_at(answer, bracket.start()) if _JSON.match(answer, bracket.start()) else None
            here = _after(answer, bracket.start()) if found is None else found[1]
            if found is not None and (not in_code or _begins_line(answer, bracket.start())):
                yield Candidate(_cleaned(found[0], answer), ends_line=_LINES_END.match(answer, here) is not None)
        else:
            return


def _value_at(answer: str, start: int) -> tuple[JsonValue, int] | None:
    try:
        return json_at(answer, start)
    except ValueError:
        return None


def _after(answer: str, bracket: int) -> int:
    """Return the place from which the search goes on after a `bracket` that begins no value: behind its partner, the
    end without one. Brackets as they stand in prose have no partner to find.
    """
    if not _JSON.match(answer, bracket):
        return bracket + 1
    depth = 0
    for token in _TOKEN.finditer(answer, bracket):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token[0], 0)
        if depth == 0:
            return token.end()
    return len(answer)


def _begins_line(answer: str, place: int) -> bool:
    return not answer[max(0, place - 200) : place].rpartition("\n")[2].strip()


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
