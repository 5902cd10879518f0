"""The output of coding agents: the `Reader` of one turn, which each agent has, and the events in a line. Pure.

Everything else, from starting the agent to its end, is common to all agents: `cli_agent.py`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from plait.backends.backend_protocol import Output
from plait.backends.json_fields import text
from plait.dialogue import Answer, Question
from plait.json_form import JsonValue, value
from plait.safe_text import parse_json
from plait.usage import NO_USAGE, Usage


@value
class Call:
    """One call of an agent's command. The prompt is not part of the call, but goes to standard input."""

    folder: Path
    """Private folder of this call. Exists before the call."""
    session_id: str | None = None
    """With `resume`, an existing session; otherwise the id chosen for a new session, None if the program makes its own
    ids.
    """
    resume: bool = False
    """Continue the existing session `session_id`."""
    forks: str | None = None
    """Session from which the new session branches."""
    rewind_to: str | None = None
    """Message at which an interrupted turn is continued (`Reader.last_whole`)."""
    output_schema: Mapping[str, object] | None = None
    """JSON Schema to be enforced by the program itself."""
    answer: Answer | None = None
    """Answer to the question that ended the last reply."""
    max_budget_usd: float | None = None
    """Limit of the call in US dollars, raised by a person; None for the backend's own limit."""
    written_at: float | None = None
    """Unix time of the last output, if the call was over before this process read any of it; None otherwise."""


@value
class ProcessEnd:
    """The end of the child process."""

    status: int | None
    """Exit status, negative for a signal; None if unknown."""
    stderr: str = ""
    """The last 64 KiB of standard error."""
    stdout: Sequence[str] = ()
    """The last lines of standard output that are no events: they may hold the reason."""


@value
class TurnAnswer:
    """The answer of a turn that has ended as it should."""

    text: str
    """The text of the turn's last message."""
    data: JsonValue = None
    """The structured answer, if checked by the program itself."""
    usage: Usage = NO_USAGE
    """Usage of the turn; with `is_total`, of the whole session including the turn."""
    is_total: bool = False
    question: Question | None = None
    """Question to answer before the session can continue."""
    reasons: Sequence[str] = ()
    """The reasons for the end of the answer, if the program reports any."""


class Reader(Protocol):
    """Interprets the standard output of one turn as it arrives. Pure; never raises on any input."""

    @property
    def session_id(self) -> str | None:
        """The session's id, once the output shows that the session holds the prompt; None before."""
        ...

    @property
    def announced(self) -> str | None:
        """The session's id as announced by the program, even if the session does not hold the prompt yet."""
        ...

    @property
    def is_final(self) -> bool:
        """Whether the output is complete: `end` may be called without waiting for the child to exit. A later line may
        begin a new part of the output.
        """
        ...

    @property
    def usage(self) -> Usage:
        """Usage of the turn so far, for a turn that is interrupted."""
        ...

    @property
    def last_text(self) -> str:
        """Text of the last message of the model so far, for an answer that is cut; empty if there is none."""
        ...

    @property
    def last_whole(self) -> str | None:
        """Id of the last message held whole by the session, as needed by `Call.rewind_to`; None if there is none."""
        ...

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event of the output, and return the outputs in it."""
        ...

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the outcome of the turn, once the child has ended or `is_final` holds.

        Raises BackendError if the turn has failed. Whether the answer is whole is decided by `whole_turn`.
        """
        ...


# An agent writes one JSON object a line. Around an object there may be what a terminal would interpret and nobody would
# see: codes for its title, colours and modes, and a spinner. Text before an object is more than that in a log line,
# which quotes an event but is none.

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
