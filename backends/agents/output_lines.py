"""Read the events in a line of an agent's standard output. Pure.

An agent writes one JSON object a line. Around an object there may be what a terminal would interpret and nobody would
see: codes for its title, colours and modes, and a spinner. Text before an object is more than that in a log line, which
quotes an event but is none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from plait.backends.json_fields import text
from plait.json_form import JsonValue, value
from plait.safe_text import parse_json

_COLOUR = re.compile(r"\x1b\[[\d;:]*m")
_CODE = re.compile(
    # A text for the terminal itself, such as its title: up to BEL or ST, or at least up to an event.
    r"\x1b[\]PX^_](?:[^\x07\x1b]*(?:\x07|\x1b\\)|[^\x07\x1b{]*(?=\{\s*\"))"
    r"|\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_CODE_IN_ONE_BYTE = re.compile(r"[\x90\x9d][^\x07\x90\x9c\x9d]*[\x07\x9c]|\x9b[0-?]*[ -/]*[@-~]")
"""Codes that begin with a character which JSON may hold as it is."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f]+")
"""Control characters, which JSON never holds but as white space."""
_OBJECT = re.compile(r'\{[\x00-\x20]*["}]')
_SPINNER = re.compile(
    r"\s*(?:"
    # A sign, but no arrow, and perhaps words: "⠋ Thinking".
    r"(?:[|/\\*+.\-]|[^\x00-\x7f\w\u2190-\u21ff\u27f0-\u27ff\u2900-\u297f\xab\xbb])+(?:\s.*)?"
    r"|\w.*(?:\.\.\.|\u2026)\s*"  # "Working..."
    r")?",
    re.DOTALL,
)
_LIKE_AN_EVENT = re.compile(r'\{\s*"|"(?:type|jsonrpc)"\s*:')


@value
class OutputLine:
    """A line of output."""

    events: Sequence[Mapping[str, JsonValue]]
    """The JSON objects in the line; mostly one."""
    words: str
    """The line as text without terminal codes, if it holds no event; the message of an event that is an error and
    nothing else; empty otherwise.
    """

    @property
    def is_unread_event(self) -> bool:
        """Whether the line holds no event, but looks as if it should."""
        return not self.events and _LIKE_AN_EVENT.search(self.words) is not None


def read_line(line: bytes) -> OutputLine:
    """Return the events in a line of output, or its text."""
    content = line.decode("utf-8", "replace").strip()
    events: list[Mapping[str, JsonValue]] = []
    if content.startswith("{"):
        with suppress(ValueError):
            events = _objects(parse_json(content))
    if not events:
        events = _among_noise(content)
    if events:
        return OutputLine(events, "\n".join(filter(None, map(_reason, events))))
    return OutputLine((), plain(content).strip("\ufeff \n\t"))


def plain(output: str) -> str:
    """Return text without terminal codes and control characters, but for the ends of lines."""
    lines = output.replace("\r\n", "\n").replace("\r", "\n")
    return _CONTROL.sub(" ", _CODE.sub("", lines))


def _among_noise(line: str) -> list[Mapping[str, JsonValue]]:
    """Return the objects in a line that is not one object and nothing else."""
    # Codes but colours move what follows to another place, as a carriage return does.
    visible, at, is_clean = _CODE.sub("\r", _COLOUR.sub("", line)), 0, False
    events: list[Mapping[str, JsonValue]] = []
    while begin := _OBJECT.search(visible, at):
        before = _CONTROL.split(_CODE_IN_ONE_BYTE.sub("\r", visible[at : begin.start()]))[-1]
        if not _SPINNER.fullmatch(before):
            break
        try:
            event, at = _TOLERANT.raw_decode(visible, begin.start())
        except (ValueError, RecursionError):
            if is_clean:
                break
            visible, at, is_clean = _CONTROL.sub("", visible[begin.start() :]), 0, True  # a code inside of the object
            continue
        events += _objects(event)
    return events


def _objects(one: JsonValue) -> list[Mapping[str, JsonValue]]:
    return [one] if isinstance(one, dict) else []


def _reason(event: Mapping[str, JsonValue]) -> str:
    """Return the message of an event that is an error and nothing else."""
    if text(event, "type") not in {"", "error"} or "jsonrpc" in event or "id" in event:
        return ""
    return text(event, "error", "message") or text(event, "message") or text(event, "error")


def _finite(digits: str) -> float | None:
    number = float(digits)
    return number if math.isfinite(number) else None


def _whole(digits: str) -> int | None:
    return int(digits) if len(digits) < 400 else None


_TOLERANT = json.JSONDecoder(parse_constant=lambda _: None, parse_float=_finite, parse_int=_whole)
"""Reads a number that is none, or that is too large to count with, as null: an event is worth more than one count."""
