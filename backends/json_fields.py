"""Reading JSON of unknown shape: what is missing or of another type reads as nothing at all. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from plait.backends.protocol import NO_USAGE, JsonValue, Usage
from plait.backends.text import clean_text, shown

_TELLING = ("command", "file_path", "path", "pattern", "query", "url", "description", "prompt")
_MOST = 2**53
"""Counts beyond this are no counts; a store's integers end at 2**63."""


def at(value: JsonValue | Mapping[str, JsonValue], *path: str) -> JsonValue:
    """What stands under `path`, one key a level; None where there is nothing."""
    here: object = value
    for key in path:
        if not isinstance(here, Mapping):
            return None
        here = cast("Mapping[str, JsonValue]", here).get(key)
    return cast("JsonValue", here)


def text(value: JsonValue | Mapping[str, JsonValue], *path: str) -> str:
    """The text under `path`, fit to be stored."""
    found = at(value, *path)
    return clean_text(found) if isinstance(found, str) else ""


def number(value: JsonValue | Mapping[str, JsonValue], *path: str) -> float | None:
    """The number under `path`, if it is finite and not negative."""
    found = at(value, *path)
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    return float(found) if 0 <= found <= _MOST else None


def count(value: JsonValue | Mapping[str, JsonValue], *path: str) -> int:
    """The whole number under `path`; 0 where there is none."""
    return int(number(value, *path) or 0)


def tables(value: JsonValue | Mapping[str, JsonValue], *path: str) -> Sequence[Mapping[str, JsonValue]]:
    """The objects in the list under `path`."""
    found = at(value, *path)
    return [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []


def deed(name: str, given: JsonValue) -> str:
    """A tool's use in a few words: its name and the most telling of what it was given."""
    told = next((found for key in _TELLING if (found := text(given, key))), "")
    return shown(f"{name}: {told}" if told else name)


class Tally:
    """What a turn's requests have cost, by request; each is told again and again while it grows."""

    def __init__(self) -> None:
        self.total = NO_USAGE
        self._requests: dict[str, Usage] = {}

    def note(self, request: str, read: int, written: int) -> None:
        """The request `request` has come to `read` tokens of input and `written` of output, or more."""
        old = self._requests.get(request, NO_USAGE)
        new = Usage(max(old.input_tokens, read), max(old.output_tokens, written))
        self._requests[request] = new
        more = Usage(new.input_tokens - old.input_tokens, new.output_tokens - old.output_tokens)
        self.total = self.total + more
