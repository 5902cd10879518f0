"""Reader of the output of `gemini -o stream-json`, one event per line. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from plait.backends.agents.error_kinds import COMMON, Phrases, classify, failure, no_outcome
from plait.backends.agents.protocol import Call, ProcessEnd, TurnAnswer
from plait.backends.errors import BackendError, ErrorKind
from plait.backends.json_fields import at, count, describe_tool_call, tables, text
from plait.backends.limit_resets import seconds_left
from plait.backends.protocol import NO_USAGE, JsonValue, Output, Usage
from plait.backends.text import parse_json, shown

_PHRASES: Phrases = (
    ("invalid session identifier", ErrorKind.SESSION_LOST),
    ("no previous sessions found", ErrorKind.SESSION_LOST),
    # A session with the same id already exists.
    ("already exists. use --resume", ErrorKind.TRANSIENT),
    ("invalid auth method", ErrorKind.AUTH),
    ("set an auth method", ErrorKind.AUTH),
    ("api key not valid", ErrorKind.AUTH),
    ("not running in a trusted directory", ErrorKind.INVALID_REQUEST),
    ("unknown argument", ErrorKind.INVALID_REQUEST),
    ("invalid values:", ErrorKind.INVALID_REQUEST),
    ("exhausted your", ErrorKind.RATE_LIMITED),
    ("quota will reset", ErrorKind.RATE_LIMITED),
    ("response was blocked", ErrorKind.REFUSED),
    ("exceeded the token limit", ErrorKind.TRUNCATED),
    ("input token count", ErrorKind.CONTEXT_OVERFLOW),
    ("max session turns", ErrorKind.LIMIT_REACHED),
    ("no final response text", ErrorKind.TRANSIENT),
    ("agent execution blocked", ErrorKind.REFUSED),
    ("manual authorization is required", ErrorKind.AUTH),
    *COMMON,
)
_EXITS = {status % 256: status for status in (400, 401, 403, 404, 408, 413, 429, 500, 502, 503, 504, 529)}
"""HTTP status by exit status, for server errors reported only by the exit status (the HTTP status modulo 256)."""
_SILENT = "the turn ended without an answer, as happens if prompt and history exceed the model's context"
_NOISE = ("Warning: ", "Ripgrep is not available", "YOLO mode is enabled", "Loaded cached credentials")


class GeminiReader:
    """Reads the output of `gemini -o stream-json`. `now` returns the Unix time, to compute the end of a limit."""

    def __init__(self, call: Call, now: Callable[[], float]) -> None:  # noqa: ARG002 - same signature as other readers
        self._now = now
        self._announced: str | None = None
        self._model: str | None = None
        self._has_said = False
        self._pieces: list[str] = []
        self._error = ""
        """The last error event, if no output followed."""
        self._result: Mapping[str, JsonValue] | None = None

    @property
    def session_id(self) -> str | None:
        """The session's id, once the model has produced output: only then is the prompt certain to be in the session
        file.
        """
        return self._announced if self._has_said else None

    @property
    def announced(self) -> str | None:
        """The session's id, announced before the session holds the prompt."""
        return self._announced

    @property
    def is_final(self) -> bool:
        """Whether a `result` was printed."""
        return self._result is not None

    @property
    def usage(self) -> Usage:
        """Usage from the result; no usage is known before."""
        return NO_USAGE if self._result is None else replace(_of_turn(at(self._result, "stats")), model=self._model)

    @property
    def last_text(self) -> str:
        """The text after the last tool."""
        return "".join(self._pieces)

    @property
    def last_whole(self) -> str | None:
        """None: a session can be continued from its end only."""
        return None

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event."""
        match text(event, "type"):
            case "init":
                self._announced = text(event, "session_id") or None
                self._model = shown(text(event, "model")) or None
            case "message":
                return self._message(event)
            case "tool_use":
                self._has_said, self._error = True, ""
                self._pieces.clear()  # the answer is the text after the last tool
                return [Output("tool", describe_tool_call(text(event, "tool_name"), at(event, "parameters")))]
            case "tool_result":
                self._pieces.clear()
            case "error" if message := text(event, "message"):
                self._error = message
                return [Output("notice", shown(message))]
            case "result":
                self._result = event
                self._has_said = self._has_said or text(event, "status") == "success"
            case _:
                pass
        return []

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the answer. Raises BackendError if the result is not an answer."""
        if self._result is None:
            kind, message = no_outcome("Gemini", ending, _PHRASES, _NOISE)
            raise failure(kind, message, continues_session=self._has_said)
        if text(self._result, "status") != "success":
            raise self._failure(self._result, _EXITS.get(ending.status or 0, 0))
        if self._error:  # a turn stopped by a loop or a hook is reported as a success
            raise failure(classify(self._error, _PHRASES), f"Gemini: {self._error}", usage=self.usage)
        stats = at(self._result, "stats")
        if not self.last_text.strip() and isinstance(stats, dict) and not count(stats, "total_tokens"):
            raise failure(ErrorKind.CONTEXT_OVERFLOW, f"Gemini: {_SILENT}", usage=self.usage)
        return TurnAnswer(self.last_text, usage=self.usage)

    def _message(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        piece = text(event, "content")
        if text(event, "role") != "assistant" or not piece:
            return []
        self._has_said, self._error = True, ""
        self._pieces.append(piece)
        return [Output("text", piece)]

    def _failure(self, result: Mapping[str, JsonValue], status: int) -> BackendError:
        message = text(result, "error", "message") or self._error or "no reason given"
        error = _unwrapped(message)
        said = text(error, "message") or message
        kind = classify(said, _PHRASES, count(error, "code") or status)
        wait = seconds_left(said, self._now())
        return failure(kind, f"Gemini: {said}", wait=_delay(error) if wait is None else wait, usage=self.usage)


def _unwrapped(message: str) -> JsonValue:
    """Return the server's own error object, which may be nested in the text of another error."""
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
    """Return the seconds to wait, if given in the error's details ("38s"); None otherwise."""
    told = next((found for detail in tables(error, "details") if (found := text(detail, "retryDelay"))), "")
    return seconds_left(f"retry in {told}", 0.0)


def _of_turn(stats: JsonValue) -> Usage:
    """Return the usage in `stats`. Thinking counts as output, and is contained only in the total."""
    read, written = count(stats, "input_tokens"), count(stats, "output_tokens")
    thought = max(0, count(stats, "total_tokens") - read - written)
    cached = min(read, count(stats, "cached"))
    return Usage(read, written + thought, cache_read_tokens=cached, reasoning_tokens=thought)
