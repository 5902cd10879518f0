"""Text that comes from outside, made safe to store, and errors made safe to show."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

from plait.backends.protocol import JsonValue


def clean_text(text: str) -> str:
    """`text` without lone surrogates, which neither UTF-8 nor SQLite can hold: each becomes U+FFFD, a pair of them
    becomes the character that it stands for. Any other text comes back as it is.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def one_line(text: str, limit: int = 300) -> str:
    """`text` with its white space folded into single spaces and cut at `limit` characters, for an error message."""
    # Cut before splitting: the text may be megabytes long.
    folded = " ".join(clean_text(text[: 4 * limit]).split())
    return folded if len(folded) <= limit else folded[: limit - 1] + "…"


def shown(words: str, limit: int = 120) -> str:
    """`words` in one line of at most `limit` characters, with an escape for each that a terminal would not show."""
    line = one_line(words, limit)
    if line.isprintable():
        return line
    return one_line("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line), limit)


def masked(text: str, secrets: Iterable[str]) -> str:
    """`text` with `***` for each of the `secrets` that has at least 8 characters: what is shorter may be any word. A
    part of one that is left where `text` was cut, before an ellipsis at its end, is masked too.
    """
    # The longest first: where one holds another, nothing of it is left.
    for secret in sorted((one for one in secrets if len(one) >= 8), key=len, reverse=True):
        text = text.replace(secret, "***")
        if text.endswith("…"):
            left = next((size for size in range(len(secret) - 1, 3, -1) if text.endswith(f"{secret[:size]}…")), 0)
            text = f"{text[: -left - 1]}***…" if left else text
    return text


def header_values(lines: str) -> list[str]:
    """What has to be masked of headers given as `Name: value`, one a line: the values, and the last word of each, since
    a server may name a token without the "Bearer" before it.
    """
    values = [value.strip() for _, _, value in (line.partition(":") for line in lines.split("\n"))]
    return [*values, *(value.rpartition(" ")[2] for value in values)]


def parse_json(text: str) -> JsonValue:
    """The value of JSON `text`. ValueError for what is not JSON, NaN, Infinity and numbers beyond a float included."""
    try:
        value: JsonValue = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def json_at(text: str, start: int) -> tuple[JsonValue, int]:
    """The JSON value that begins at `start` of `text`, and where it ends. ValueError as for `parse_json`."""
    try:
        return json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite).raw_decode(text, start)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {one_line(digits, 40)} is too large")
    return number
