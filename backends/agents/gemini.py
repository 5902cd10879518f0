"""Gemini CLI (`gemini -o stream-json`), run for one turn at a time. Tested with 0.61.0.

Its last word is `result`; its exit status is 0 after a signal and an HTTP status, cut to 8 bits, after an error. The
session drops the prompt of a turn that failed, and keeps that of one that was cut.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from backends.agents.cli import CliBackend
from backends.agents.faults import COMMON, NETWORK, Phrases, classify, failure, no_outcome
from backends.agents.fields import at, count, deed, shown, tables, text
from backends.agents.program import Answered, Call, Ending
from backends.agents.resets import seconds_left
from backends.errors import BackendError, ErrorKind
from backends.protocol import NO_USAGE, JsonValue, Output, Usage
from backends.text import parse_json

_PHRASES: Phrases = (
    ("invalid session identifier", ErrorKind.SESSION_LOST),
    ("no previous sessions found", ErrorKind.SESSION_LOST),
    # The id of a session that is there already.
    ("already exists. use --resume", ErrorKind.TRANSIENT),
    ("invalid auth method", ErrorKind.AUTH),
    ("set an auth method", ErrorKind.AUTH),
    ("api key not valid", ErrorKind.AUTH),
    ("not running in a trusted directory", ErrorKind.INVALID_REQUEST),
    ("unknown argument", ErrorKind.INVALID_REQUEST),
    ("invalid values:", ErrorKind.INVALID_REQUEST),
    ("response was blocked", ErrorKind.REFUSED),
    ("exceeded the token limit", ErrorKind.CONTEXT_OVERFLOW),
    ("input token count", ErrorKind.CONTEXT_OVERFLOW),
    ("max session turns", ErrorKind.CONTEXT_OVERFLOW),
    ("no final response text", ErrorKind.TRANSIENT),
    *COMMON,
)
_NOISE = ("Warning: ", "Ripgrep is not available", "YOLO mode is enabled", "Loaded cached credentials")
_PASSES = (
    "GEMINI_API_KEY",
    "GEMINI_CLI_HOME",
    "GEMINI_MODEL",
    "GOOGLE_API_KEY",
    "GOOGLE_APPLICATION_CREDENTIALS",
    "GOOGLE_CLOUD_LOCATION",
    "GOOGLE_CLOUD_PROJECT",
    "GOOGLE_GEMINI_BASE_URL",
    "GOOGLE_GENAI_USE_GCA",
    "GOOGLE_GENAI_USE_VERTEXAI",
    "GOOGLE_VERTEX_BASE_URL",
    *NETWORK,
)


@dataclass(eq=False, kw_only=True)
class GeminiBackend(CliBackend):
    """Gemini CLI, run as `gemini`, one process a turn. For what all agents have in common see `CliBackend`.

    `approval_mode` is one of its own words: "auto_edit", "yolo", "plan"; without it, it has no tools that would have to
    ask, such as a shell. `system` replaces its system prompt. `base_url` is another server for its requests: its own
    settings file then has to choose "gemini-api-key" as `security.auth.selectedType`. The folder that it works in is
    taken for trusted, without which it does not run. `now` tells the Unix time.

    It tries ten times by itself, for minutes, unless its settings file says less as `general.maxAttempts`: there is no
    other way to tell it, and none to see it wait.
    """

    kind: ClassVar[str] = "gemini"
    chooses_session: ClassVar[bool] = True
    can_fork: ClassVar[bool] = False
    checks_schema: ClassVar[bool] = False
    program: ClassVar[str] = "gemini"
    install: ClassVar[str] = "npm install -g @google/gemini-cli"

    model: str | None = None
    approval_mode: str | None = None
    system: str | None = None
    base_url: str | None = None
    now: Callable[[], float] = time.time

    @property
    def passes(self) -> Sequence[str]:
        """Its keys, its settings, and how the network is reached."""
        return _PASSES

    def arguments(self, call: Call) -> Sequence[str]:
        """The arguments; writes the system prompt into `call.folder`, where there is one."""
        if self.system is not None:
            (call.folder / "system-prompt.md").write_text(self.system, encoding="utf-8")
        return ["--output-format=stream-json", "--skip-trust", *self._options(call)]

    def _options(self, call: Call) -> Iterator[str]:
        if self.model is not None:
            yield f"--model={self.model}"
        if self.approval_mode is not None:
            yield f"--approval-mode={self.approval_mode}"
        if call.session_id is not None:
            yield f"--{'resume' if call.resume else 'session-id'}={call.session_id}"

    def environment(self, call: Call) -> Mapping[str, str]:
        """One process instead of two, which also heeds signals; no telemetry."""
        variables = {"GEMINI_CLI_NO_RELAUNCH": "true", "GEMINI_TELEMETRY_ENABLED": "false"}
        if self.system is not None:
            variables["GEMINI_SYSTEM_MD"] = str(call.folder / "system-prompt.md")
        if self.base_url is not None:
            variables["GOOGLE_GEMINI_BASE_URL"] = self.base_url
        return variables

    def reader(self, call: Call) -> GeminiReader:
        """A reader for that turn's output."""
        return GeminiReader(call, self.now)


class GeminiReader:
    """Reads what `gemini -o stream-json` prints. `now` tells the Unix time, for when a limit ends."""

    def __init__(self, call: Call, now: Callable[[], float]) -> None:  # noqa: ARG002 - as the other readers have it
        self._now = now
        self._announced: str | None = None
        self._has_begun = False
        self._pieces: list[str] = []
        self._error = ""
        self._result: Mapping[str, JsonValue] | None = None

    @property
    def session_id(self) -> str | None:
        """The session's id, once it has been told the prompt."""
        return self._announced if self._has_begun else None

    @property
    def is_final(self) -> bool:
        """Whether there was a `result`."""
        return self._result is not None

    @property
    def usage(self) -> Usage:
        """What the result says; nothing is known before."""
        return NO_USAGE if self._result is None else _of_turn(at(self._result, "stats"))

    @property
    def last_whole(self) -> str | None:
        """None: a session is gone on with from its end alone."""
        return None

    def note(self, line: str) -> None:
        """Nothing but events is of use."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """One event."""
        match text(event, "type"):
            case "init":
                self._announced = text(event, "session_id") or None
            case "message":
                return self._message(event)
            case "tool_use":
                return [Output("tool", deed(text(event, "tool_name"), at(event, "parameters")))]
            case "tool_result":
                # The answer is what is said after the last of them.
                self._pieces.clear()
            case "error" if message := text(event, "message"):
                self._error = message
                return [Output("notice", shown(message))]
            case "result":
                self._result = event
            case _:
                pass
        return []

    def end(self, ending: Ending) -> Answered:
        """The answer, if the result is one."""
        if self._result is None:
            kind, message = no_outcome("Gemini", ending, _PHRASES, _NOISE)
            raise failure(kind, message, goes_on=self._has_begun)
        if text(self._result, "status") != "success":
            raise self._failure(text(self._result, "error", "message") or self._error or "it says no reason")
        return Answered("".join(self._pieces), usage=self.usage)

    def _message(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        if text(event, "role") == "user":
            self._has_begun = True
        piece = text(event, "content")
        if text(event, "role") != "assistant" or not piece:
            return []
        self._pieces.append(piece)
        return [Output("text", piece)]

    def _failure(self, message: str) -> BackendError:
        error = _unwrapped(message)
        said = text(error, "message") or message
        kind = classify(said, _PHRASES, count(error, "code"))
        wait = seconds_left(said, self._now())
        return failure(kind, f"Gemini: {said}", wait=_delay(error) if wait is None else wait, usage=self.usage)


def _unwrapped(message: str) -> JsonValue:
    """The server's own error object, which may stand in the text of another one."""
    for _ in range(3):
        begin, end = message.find("{"), message.rfind("}")
        try:
            error = at(parse_json(message[begin : end + 1]), "error")
        except ValueError:
            return None
        inner = text(error, "message")
        if not inner.lstrip().startswith("{"):
            return error
        message = inner
    return None


def _delay(error: JsonValue) -> float | None:
    """Seconds to wait, where the error's details say so: "38s"."""
    told = next((found for detail in tables(error, "details") if (found := text(detail, "retryDelay"))), "")
    return seconds_left(f"retry in {told}", 0.0)


def _of_turn(stats: JsonValue) -> Usage:
    """What the model thought counts as output; it stands in the total alone."""
    read, written = count(stats, "input_tokens"), count(stats, "output_tokens")
    return Usage(read, max(written, count(stats, "total_tokens") - read))
