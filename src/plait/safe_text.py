"""Text from outside: cleaned for storing, shown on one line, without secrets and passwords."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Iterable
from typing import Final
from urllib.parse import unquote

from plait.json_form import JsonValue


def clean_text(text: str) -> str:
    """Return `text` without lone surrogates, which neither UTF-8 nor SQLite can hold.

    Each lone surrogate becomes U+FFFD, a pair becomes its character. Other text is returned unchanged.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def one_line(text: str, limit: int = 300) -> str:
    """Return `text` for an error message: white space folded into single spaces, cut at `limit` characters."""
    # Cut before splitting: the text may be megabytes long.
    return shorten(" ".join(clean_text(text[: 4 * limit]).split()), limit)


def shorten(text: str, limit: int) -> str:
    """Return `text` in at most `limit` characters, with an ellipsis if its end is cut off."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def shown(words: str, limit: int = 120) -> str:
    """Return `words` in one line of at most `limit` characters, with unprintable characters escaped."""
    line = one_line(words, limit)
    if line.isprintable():
        return line
    return one_line("".join(char if char.isprintable() else ascii(char)[1:-1] for char in line), limit)


def masked(text: str, secrets: Iterable[str]) -> str:
    """Return `text` with each of `secrets` replaced by `***`.

    Secrets of less than 8 characters are not masked, because any word could match. If `text` was cut and ends in an
    ellipsis, the first part of a secret before the ellipsis is masked too.
    """
    # The longest first: a secret may contain another secret.
    for secret in sorted((one for one in secrets if len(one) >= 8), key=len, reverse=True):
        text = text.replace(secret, "***")
        if text.endswith("…"):
            left = next((size for size in range(len(secret) - 1, 3, -1) if text.endswith(f"{secret[:size]}…")), 0)
            text = f"{text[: -left - 1]}***…" if left else text
    return text


def check_base_url(url: str | None, key: str) -> None:
    """Raise ValueError, without repeating `url`, if `url` holds a user or password. `key` tells where a key belongs."""
    if url is not None and "@" in url:
        raise ValueError(f"base_url must not hold a user or password; leave them out, and put the key in {key}")


def header_values(lines: str) -> list[str]:
    """Return the strings to mask in headers given as `Name: value`, one per line.

    These are the values, and the last word of each value, because a server may quote a token without its "Bearer".
    """
    values = [value.strip() for _, _, value in (line.partition(":") for line in lines.split("\n"))]
    return [*values, *(value.rpartition(" ")[2] for value in values)]


_SECRET_NAMES: Final = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
"""Names of environment variables whose values appear in no message."""


def without_secrets(text: str) -> str:
    """Return `text` with the values of environment variables that are named like secrets masked (see `masked`).

    A value of several lines is masked line by line, because errors indent and fold lines.
    """
    values = [value for name, value in os.environ.items() if _SECRET_NAMES.search(name)]
    return masked(text, [line.strip() for value in values for line in value.splitlines()])


SCHEMES: Final = ("postgresql://", "postgres://")
"""How the address of a server that keeps runs begins."""
MASK: Final = "***"
_PASSWORD: Final = re.compile(r"(?<=://)([^@:]*:)(.*)(?=@)", re.DOTALL)
"""Up to the last `@`, because a password may have any character that its user forgot to escape."""
_IN_QUERY: Final = re.compile(r"([?&]([^=&]*)=)([^&]*)")


def masked_address(address: str) -> str:
    """Return the address with each password replaced by `***`."""
    without = _PASSWORD.sub(rf"\1{MASK}", address)
    return _IN_QUERY.sub(lambda match: f"{match[1]}{MASK}" if _is_password(match) else match[0], without)


def passwords(address: str) -> set[str]:
    """Return the passwords of the address, as written and decoded."""
    words = {match[2] for match in _PASSWORD.finditer(address)}
    words |= {match[3] for match in _IN_QUERY.finditer(address) if _is_password(match)}
    return {form for word in words if word for form in (word, unquote(word))}


def has_unescaped_password(address: str) -> bool:
    """Return whether a character of a password ends the part of the address in which the password stands."""
    match = _PASSWORD.search(address)
    return match is not None and any(char in match[2] for char in "/?#")


def _is_password(match: re.Match[str]) -> bool:
    return unquote(match[2]).lower() in {"password", "sslpassword"}


class UnreadableNumber(ValueError):  # noqa: N818 - becomes the message of another error
    """A number in JSON is too large to be read."""


def parse_json(text: str) -> JsonValue:
    """Return the value of JSON `text`. Raises ValueError for invalid JSON, NaN and Infinity, and UnreadableNumber for a
    number beyond a float or with more digits than Python reads.
    """
    try:
        value: JsonValue = _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise _described(error) from None
    return value


def is_json(text: str) -> bool:
    """Return whether `parse_json` can read `text`."""
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def json_at(text: str, start: int) -> tuple[JsonValue, int]:
    """Return the JSON value that starts at `start` of `text`, and its end. Raises ValueError as `parse_json` does."""
    try:
        return _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise _described(error) from None


def _described(error: ValueError | RecursionError) -> ValueError:
    if isinstance(error, RecursionError):
        return ValueError("nested too deeply")
    if isinstance(error, json.JSONDecodeError) or "integer string" not in str(error):
        return error
    return UnreadableNumber(f"a number has more than {sys.get_int_max_str_digits():,} digits")


def _refuse_constant(name: str) -> JsonValue:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise UnreadableNumber(f"the number {one_line(digits, 40)} is too large")
    return number


def _same(value: dict[str, JsonValue]) -> dict[str, JsonValue]:
    """Return `value`. The parser holds the interpreter, but for calls of functions written in Python."""
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite, object_hook=_same)


def is_utf8(value: str) -> bool:
    """Return whether an argument can be stored. Bytes that are not UTF-8 arrive as lone surrogates."""
    return value.isascii() or not any("\ud800" <= char <= "\udfff" for char in value)
