"""Codex (`codex exec --json`), run for one turn at a time. Tested with 0.169.0.

A turn is over with `turn.completed` or `turn.failed`; its exit is not waited for, which may take seconds. What it says
of tokens counts the whole session. The session keeps the prompt of a turn that fails or is cut.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
    ("no rollout found", ErrorKind.SESSION_LOST),
    # Another process has the session, or had it a moment ago.
    ("already has an active writer", ErrorKind.TRANSIENT),
    ("quota exceeded. check your plan", ErrorKind.AUTH),
    ("out of credits", ErrorKind.AUTH),
    ("with your chatgpt plan, upgrade", ErrorKind.AUTH),
    ("missing environment variable", ErrorKind.AUTH),
    ("reason: content_filter", ErrorKind.REFUSED),
    ("was flagged", ErrorKind.REFUSED),
    ("request was blocked", ErrorKind.REFUSED),
    ("reason: max_output_tokens", ErrorKind.CONTEXT_OVERFLOW),
    ("at capacity", ErrorKind.OVERLOADED),
    ("not inside a trusted directory", ErrorKind.INVALID_REQUEST),
    ("error loading config", ErrorKind.INVALID_REQUEST),
    ("error: invalid value", ErrorKind.INVALID_REQUEST),
    ("error: unexpected argument", ErrorKind.INVALID_REQUEST),
    *COMMON,
)
_NOISE = ("Reading prompt from stdin", "Reading additional input from stdin")
_ALWAYS = (
    *("--json", "--skip-git-repo-check"),
    # Else it fetches plugins with git, and tries for ever to connect.
    *("--disable=plugins", "--disable=unbounded_connection_retries"),
)


@dataclass(eq=False, kw_only=True)
class CodexBackend(CliBackend):
    """Codex, run as `codex exec`, one process a turn. For what all agents have in common see `CliBackend`.

    `sandbox` is what its commands may do: "read-only", "workspace-write" (and write in its folder and in temporary
    ones), "danger-full-access". Nobody is asked: what the sandbox forbids fails. `system` replaces its instructions,
    `append_system` is added to them; a session keeps the ones that it began with. `base_url` is another server that
    speaks the Responses API, asked without retries, with the key in environment variable `api_key_env`. `config` holds
    settings beside those of its own file, by dotted key, such as {"model_reasoning_effort": "high"}; they win over
    those that follow from other options. `now` tells the Unix time.
    """

    kind: ClassVar[str] = "codex"
    chooses_session: ClassVar[bool] = False
    can_fork: ClassVar[bool] = True
    checks_schema: ClassVar[bool] = True
    program: ClassVar[str] = "codex"
    install: ClassVar[str] = "npm install -g @openai/codex"

    model: str | None = None
    sandbox: str = "read-only"
    system: str | None = None
    append_system: str | None = None
    base_url: str | None = None
    api_key_env: str | None = None
    config: Mapping[str, JsonValue] = field(default_factory=dict[str, "JsonValue"])
    now: Callable[[], float] = time.time

    @property
    def passes(self) -> Sequence[str]:
        """Its keys and folder, and how the network is reached."""
        own = () if self.api_key_env is None else (self.api_key_env,)
        return ("CODEX_API_KEY", "CODEX_HOME", "OPENAI_API_KEY", *own, *NETWORK)

    def arguments(self, call: Call) -> Sequence[str]:
        """The arguments; writes instructions and schema into `call.folder`, where there are any."""
        earlier = call.session_id if call.resume else call.forks
        begins = [] if earlier is None else ["resume" if call.resume else "fork"]
        schema = call.folder / "schema.json"
        if call.output_schema is not None:
            schema.write_text(json.dumps(call.output_schema), encoding="utf-8")
        return [
            *("exec", *begins, *_ALWAYS),
            *([] if self.model is None else [f"--model={self.model}"]),
            *([] if call.output_schema is None else [f"--output-schema={schema}"]),
            *(f"--config={key}={_toml(given)}" for key, given in self._settings(call)),
            *("--", *([] if earlier is None else [earlier]), "-"),
        ]

    def _settings(self, call: Call) -> Iterator[tuple[str, JsonValue]]:
        # A session does not remember its sandbox, and only a new one could be given it by an option.
        yield "sandbox_mode", self.sandbox
        yield "analytics.enabled", False
        if self.system is not None:
            path = call.folder / "system-prompt.txt"
            path.write_text(self.system, encoding="utf-8")
            yield "model_instructions_file", str(path)
        if self.append_system is not None:
            yield "developer_instructions", self.append_system
        if self.base_url is not None:
            yield "model_provider", "plait"
            yield "model_providers.plait", self._provider(self.base_url)
        yield from self.config.items()

    def _provider(self, base_url: str) -> dict[str, JsonValue]:
        provider: dict[str, JsonValue] = {"name": "plait", "base_url": base_url, "wire_api": "responses"}
        if self.api_key_env is not None:
            provider["env_key"] = self.api_key_env
        return provider | {"request_max_retries": 0, "stream_max_retries": 0}

    def environment(self, call: Call) -> Mapping[str, str]:  # noqa: ARG002 - other agents need it
        """Nothing: all that it is to heed stands in its arguments."""
        return {}

    def reader(self, call: Call) -> CodexReader:
        """A reader for that turn's output."""
        return CodexReader(call, self.now)


class CodexReader:
    """Reads what `codex exec --json` prints. `now` tells the Unix time, for when a limit ends."""

    def __init__(self, call: Call, now: Callable[[], float]) -> None:
        self._resumed = call.session_id if call.resume else None
        self._now = now
        self._thread: str | None = None
        self._has_begun = False
        self._text: str | None = None
        self._seen: set[str] = set()
        self._completed: Mapping[str, JsonValue] | None = None
        self._failed: str | None = None

    @property
    def session_id(self) -> str | None:
        """The thread's id, once its turn has begun."""
        return self._thread if self._has_begun and not self._is_another else None

    @property
    def is_final(self) -> bool:
        """Whether the turn is completed or has failed, or is in a session that nobody asked for."""
        return self._completed is not None or self._failed is not None or self._is_another

    @property
    def _is_another(self) -> bool:
        # What is no UUID is taken for a name, and one that nobody has for a new session's.
        return None not in {self._resumed, self._thread} and self._thread != self._resumed

    @property
    def usage(self) -> Usage:
        """Nothing before the end, and then only what the session has come to."""
        return NO_USAGE

    @property
    def last_whole(self) -> str | None:
        """None: a session is gone on with from its end alone."""
        return None

    def note(self, line: str) -> None:
        """Nothing but events is of use."""

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """One event."""
        match text(event, "type"):
            case "thread.started":
                self._thread = text(event, "thread_id") or None
            case "turn.started":
                self._has_begun = True
            case "turn.completed":
                self._completed = event
            case "turn.failed":
                self._failed = text(event, "error", "message")
            case "error" if (message := text(event, "message")).startswith("Reconnecting"):
                return [Output("waiting", shown(message))]
            case "item.started" | "item.completed" as kind:
                return self._item(at(event, "item"), is_whole=kind == "item.completed")
            case _:
                pass
        return []

    def end(self, ending: Ending) -> Answered:
        """The answer, if the turn is completed and of the session that was asked for."""
        if self._is_another:
            raise failure(ErrorKind.SESSION_LOST, f"Codex does not know session {self._resumed}, and began another one")
        if self._failed is not None:
            raise self._failure(self._failed)
        if self._completed is None:
            kind, message = no_outcome("Codex", ending, _PHRASES, _NOISE)
            raise failure(kind, message, goes_on=self._has_begun)
        used = at(self._completed, "usage")
        total = Usage(count(used, "input_tokens"), count(used, "output_tokens"))
        return Answered(self._text or "", usage=total, is_total=True)

    def _item(self, item: JsonValue, *, is_whole: bool) -> Sequence[Output]:
        kind, words = text(item, "type"), text(item, "text")
        if kind == "agent_message" and is_whole:
            self._text = words
            return [Output("text", words)]
        if kind in {"reasoning", "error"} and is_whole:
            return [Output("notice", shown(words or text(item, "message")))]
        if kind not in _TOOLS or text(item, "id") in self._seen:
            return []
        self._seen.add(text(item, "id"))
        return [Output("tool", _TOOLS[kind](item))]

    def _failure(self, message: str) -> BackendError:
        kind, said = _judged(message)
        return failure(kind, f"Codex: {said}", wait=seconds_left(said, self._now()), goes_on=self._has_begun)


def _judged(message: str) -> tuple[ErrorKind, str]:
    """What a failed turn's message tells, which is the server's whole answer where that was a 400."""
    try:
        body = parse_json(message)
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return classify(message, _PHRASES), message
    said = text(body, "error", "message") or text(body, "message") or "the server takes the request for invalid"
    return classify(said, _PHRASES, 400, [text(body, "error", "code")]), said


def _command(item: JsonValue) -> str:
    line = text(item, "command")
    try:
        words = shlex.split(line[:4000])
    except ValueError:
        words = []
    is_wrapped = len(words) == 3 and words[1] in {"-c", "-lc"}
    return deed("Bash", {"command": words[2] if is_wrapped else line})


def _change(item: JsonValue) -> str:
    return deed("Edit", {"path": ", ".join(text(change, "path") for change in tables(item, "changes"))})


def _mcp(item: JsonValue) -> str:
    return deed(f"{text(item, 'server')}.{text(item, 'tool')}", at(item, "arguments"))


_TOOLS: Mapping[str, Callable[[JsonValue], str]] = {
    "command_execution": _command,
    "file_change": _change,
    "mcp_tool_call": _mcp,
    "web_search": lambda item: deed("WebSearch", item),
    "collab_tool_call": lambda item: deed(text(item, "tool") or "Agent", item),
}


def _toml(value: JsonValue) -> str:
    """`value` in TOML; text and lists are written as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(value[key])}" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
