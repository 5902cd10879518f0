"""Reader of the output of `codex exec --json`, one event per line. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence

from plait.backends.agents.agent_errors import COMMON, Phrases, failure, kind_of_failure, no_outcome
from plait.backends.agents.agent_protocol import Call, ProcessEnd, TurnAnswer
from plait.backends.backend_protocol import Output
from plait.backends.error_kinds import error_text, seconds_left
from plait.backends.json_fields import at, count, describe_tool_call, tables, text
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import clean_text, shown
from plait.usage import NO_USAGE, Usage

_PHRASES: Phrases = (
    ("no rollout found", ErrorKind.SESSION_LOST),
    ("missing source rollout", ErrorKind.SESSION_LOST),
    # Another process holds the session, or held it a moment ago.
    ("already has an active writer", ErrorKind.TRANSIENT),
    ("quota exceeded. check your plan", ErrorKind.AUTH),
    ("out of credits", ErrorKind.AUTH),
    ("with your chatgpt plan, upgrade", ErrorKind.AUTH),
    ("missing environment variable", ErrorKind.AUTH),
    ("reason: content_filter", ErrorKind.REFUSED),
    ("was flagged", ErrorKind.REFUSED),
    ("request was blocked", ErrorKind.REFUSED),
    ("reason: max_output_tokens", ErrorKind.TRUNCATED),
    ("at capacity", ErrorKind.OVERLOADED),
    ("not inside a trusted directory", ErrorKind.INVALID_REQUEST),
    ("error loading config", ErrorKind.INVALID_REQUEST),
    ("error: invalid value", ErrorKind.INVALID_REQUEST),
    ("error: unexpected argument", ErrorKind.INVALID_REQUEST),
    *COMMON,
)
_NOISE = ("Reading prompt from stdin", "Reading additional input from stdin")


class CodexReader:
    """Reads the output of `codex exec --json`.

    `now` returns the Unix time, to compute the end of a limit. `model` is the requested model: Codex does not report
    the answering model.
    """

    def __init__(self, call: Call, now: Callable[[], float], model: str | None = None) -> None:
        self._model = model
        self._resumed = call.session_id if call.resume else None
        self._now = now
        self._thread: str | None = None
        self._has_said = False
        self._text = ""
        self._ends_in_text = False
        """Whether no tool was called after the last message."""
        self._seen: set[str] = set()
        self._completed: Mapping[str, JsonValue] | None = None
        self._failed: str | None = None

    @property
    def session_id(self) -> str | None:
        """The thread's id, once the model or its server has produced output: only then is the prompt certain to be in
        the thread's file. The start of the turn is reported earlier.
        """
        return self._thread if self._has_said and not self._is_another else None

    @property
    def announced(self) -> str | None:
        """The thread's id, announced before the thread's file holds the prompt."""
        return None if self._is_another else self._thread

    @property
    def is_final(self) -> bool:
        """Whether the turn has completed or failed, or runs in a session other than requested."""
        return self._completed is not None or self._failed is not None or self._is_another

    @property
    def _is_another(self) -> bool:
        # Codex treats an id that is not a UUID as a name, and starts a new session for an unknown name.
        return None not in {self._resumed, self._thread} and self._thread != self._resumed

    @property
    def usage(self) -> Usage:
        """No usage: the only counts, at the end, cover the whole session."""
        return NO_USAGE

    @property
    def last_text(self) -> str:
        """The last message of the agent."""
        return self._text

    @property
    def last_whole(self) -> str | None:
        """None: a session can be continued from its end only."""
        return None

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event."""
        match text(event, "type"):
            case "thread.started":
                self._thread = text(event, "thread_id") or None
            case "turn.completed":
                self._completed, self._has_said = event, True
            case "turn.failed":
                self._failed, self._has_said = _reason(event), True
            case "error" if (message := text(event, "message")).startswith("Reconnecting"):
                self._has_said = True
                return [Output("waiting", shown(message))]
            case "item.started" | "item.completed" as kind:
                return self._item(at(event, "item"), is_whole=kind == "item.completed")
            case _:
                pass
        return []

    def end(self, ending: ProcessEnd) -> TurnAnswer:
        """Return the answer. Raises BackendError unless the turn completed in the requested session."""
        if self._is_another:
            raise failure(ErrorKind.SESSION_LOST, f"Codex has no session {self._resumed}, and started another session")
        if self._failed is not None:
            raise self._failure(self._failed)
        if self._completed is None:
            kind, message = no_outcome("Codex", ending, _PHRASES, _NOISE)
            raise failure(kind, message, continues_session=self._has_said)
        used = at(self._completed, "usage")
        read, written = count(used, "input_tokens"), count(used, "output_tokens")
        total = Usage(
            read,
            written,
            model=self._model,
            cache_read_tokens=min(read, count(used, "cached_input_tokens")),
            reasoning_tokens=min(written, count(used, "reasoning_output_tokens")),
        )
        return TurnAnswer(self._text if self._ends_in_text else "", usage=total, is_total=True)

    def _item(self, item: JsonValue, *, is_whole: bool) -> Sequence[Output]:
        kind, words = text(item, "type"), text(item, "text")
        # An error item is a warning, and may precede all other items.
        self._has_said = self._has_said or kind not in {"", "error"}
        if kind == "agent_message" and is_whole:
            self._text, self._ends_in_text = words, True
            return [Output("text", words)]
        if kind in {"reasoning", "error"} and is_whole:
            return [Output("notice", shown(words or text(item, "message")))]
        if kind not in _TOOLS or text(item, "id") in self._seen:
            return []
        self._seen.add(text(item, "id"))
        self._ends_in_text = False
        return [Output("tool", _TOOLS[kind](item))]

    def _failure(self, message: str) -> BackendError:
        kind, said = kind_of_failure(message, _PHRASES)
        return failure(kind, f"Codex: {said}", wait=seconds_left(said, self._now()), continues_session=self._has_said)


def _reason(event: Mapping[str, JsonValue]) -> str:
    return text(event, "error", "message") or clean_text(error_text(at(event, "error"))) or "no reason given"


def _command(item: JsonValue) -> str:
    line = text(item, "command")
    try:
        words = shlex.split(line[:4000])
    except ValueError:
        words = []
    is_wrapped = len(words) == 3 and words[1] in {"-c", "-lc"}
    return describe_tool_call("Bash", {"command": words[2] if is_wrapped else line})


def _change(item: JsonValue) -> str:
    return describe_tool_call("Edit", {"path": ", ".join(text(change, "path") for change in tables(item, "changes"))})


def _mcp(item: JsonValue) -> str:
    return describe_tool_call(f"{text(item, 'server')}.{text(item, 'tool')}", at(item, "arguments"))


_TOOLS: Mapping[str, Callable[[JsonValue], str]] = {
    "command_execution": _command,
    "file_change": _change,
    "mcp_tool_call": _mcp,
    "web_search": lambda item: describe_tool_call("WebSearch", item),
    "collab_tool_call": lambda item: describe_tool_call(text(item, "tool") or "Agent", item),
}
