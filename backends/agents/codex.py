"""Codex (`codex exec --json`), run for one turn at a time. Tested with 0.169.0.

A turn ends with `turn.completed` or `turn.failed`; the process may take seconds longer to exit and is not waited for.
Token counts cover the whole session. The session keeps the prompt of a failed or interrupted turn.
"""

from __future__ import annotations

import glob
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from plait.backends.agents.agent_output import AgentCall, ProcessEnd, TurnAnswer, failure, kind_of_failure, no_outcome
from plait.backends.agents.cli_agent import AgentBackend
from plait.backends.backend_protocol import Output
from plait.backends.error_kinds import error_text, seconds_left
from plait.backends.json_fields import at, count, counted, describe_tool_call, tables, text
from plait.backends.prices import Billing
from plait.backends.process.files_and_locks import private_file
from plait.errors import ErrorKind
from plait.json_form import JsonValue
from plait.safe_text import check_base_url, clean_text, shown
from plait.usage import NO_USAGE

_STRICT = frozenset({"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf",
                     "title", "description"})  # fmt: skip
_KINDS = frozenset({"type", "enum", "const", "anyOf"})
_ALWAYS = (
    *("--json", "--skip-git-repo-check"),
    # Otherwise Codex fetches plugins with git, and retries connections for ever.
    *("--disable=plugins", "--disable=unbounded_connection_retries"),
)


@dataclass(eq=False, kw_only=True)
class CodexBackend(AgentBackend):
    """Codex, run as `codex exec`, one process per turn.

    Codex's plugins are turned off, because Codex would fetch the plugins first.
    """

    kind: ClassVar[str] = "codex"
    chooses_session: ClassVar[bool] = False
    can_fork: ClassVar[bool] = True
    ends_at_interrupt: ClassVar[bool] = True

    sandbox: str = "read-only"
    """Rights of the agent's commands: "read-only", "workspace-write" (may also write in the working folder and in
    temporary folders), or "danger-full-access". There are no permission requests: an action forbidden by the sandbox
    fails.
    """
    system: str | None = None
    """Replaces the instructions. A session keeps its first instructions."""
    append_system: str | None = None
    """Added to the instructions."""
    base_url: str | None = None
    """Another server that speaks the Responses API, used without retries."""
    api_key_env: str | None = None
    """Environment variable with the key for `base_url`."""
    config: Mapping[str, JsonValue] = field(default_factory=dict[str, "JsonValue"])
    """Settings in addition to Codex's own file, by dotted key, such as {"model_reasoning_effort": "high"}. These
    settings override settings derived from other fields.
    """

    def __post_init__(self) -> None:
        check_base_url(self.base_url, "the environment variable that api_key_env names")

    @property
    def billing(self) -> Billing:
        """The facts that decide the price of turns without a reported cost."""
        return Billing(self.base_url or "openai", self.model, sums_requests=True)

    @property
    def passes(self) -> Sequence[str]:
        """Names of the variables with keys and Codex's folder."""
        return (*super().passes, *([] if self.api_key_env is None else [self.api_key_env]))

    def takes_schema(self, schema: Mapping[str, object]) -> bool:
        """Return whether the server accepts the schema."""
        return schema.get("type") == "object" and _is_strict(cast("JsonValue", dict(schema)))

    def session_files(self, session_id: str) -> Sequence[Path]:
        """Return the files of the session: one file, in a folder for each day."""
        home = Path(os.environ.get("CODEX_HOME") or "~/.codex").expanduser()
        return sorted(home.glob(f"sessions/*/*/*/rollout-*-{glob.escape(session_id)}.jsonl"))

    @property
    def writes(self) -> bool:
        """Whether the sandbox lets the agent write."""
        return self.sandbox != "read-only"

    def arguments(self, call: AgentCall) -> Sequence[str]:
        """Return the command's arguments. Writes instructions and schema, if any, into `call.folder`."""
        earlier = call.session_id if call.resume else call.forks
        begins = [] if earlier is None else ["resume" if call.resume else "fork"]
        schema = call.folder / "schema.json"
        if call.output_schema is not None:
            private_file(schema, json.dumps(call.output_schema))
        return [
            *("exec", *begins, *_ALWAYS),
            *([] if self.model is None else [f"--model={self.model}"]),
            *([] if call.output_schema is None else [f"--output-schema={schema}"]),
            *(f"--config={key}={_toml(setting)}" for key, setting in self._settings(call)),
            *("--", *([] if earlier is None else [earlier]), "-"),
        ]

    def _settings(self, call: AgentCall) -> Iterator[tuple[str, JsonValue]]:
        # A session does not store its sandbox, and the option for the sandbox works for a new session only.
        yield "sandbox_mode", self.sandbox
        yield "analytics.enabled", False
        if self.system is not None:
            path = call.folder / "system-prompt.txt"
            private_file(path, self.system)
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

    def reader(self, call: AgentCall) -> CodexReader:
        """Return a reader for the output of the call."""
        return CodexReader(call, self.clock(call), self.model)


def _is_strict(schema: JsonValue) -> bool:
    """Return whether every object in `schema` lists and requires all its fields, in keywords known to the server."""
    if not isinstance(schema, dict) or not _STRICT.issuperset(schema) or _KINDS.isdisjoint(schema):
        return False
    fields, required, choices = at(schema, "properties"), at(schema, "required"), at(schema, "anyOf")
    inner: list[JsonValue] = list(choices) if isinstance(choices, list) else []
    if schema.get("type") == "object" or fields is not None:
        is_closed = schema.get("additionalProperties") is False
        if (
            not isinstance(fields, dict)
            or not isinstance(required, list)
            or not is_closed
            or set(fields) != {*map(str, required)}
        ):
            return False
        inner += fields.values()
    return all(map(_is_strict, [*inner, schema["items"]] if "items" in schema else inner))


def _toml(value: JsonValue) -> str:
    """Return `value` in TOML. Text and lists are written as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(value[key])}" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


_NOISE = ("Reading prompt from stdin", "Reading additional input from stdin")


class CodexReader:
    """Reads the output of `codex exec --json`.

    `now` returns the Unix time, to compute the end of a limit. `model` is the requested model: Codex does not report
    the answering model.
    """

    usage = NO_USAGE
    """No usage: the only counts, at the end, cover the whole session."""
    last_whole: str | None = None
    """None: a session can be continued from its end only."""

    def __init__(self, call: AgentCall, now: Callable[[], float], model: str | None = None) -> None:
        self.last_text = ""
        """The last message of the agent."""
        self._model = model
        self._resumed = call.session_id if call.resume else None
        self._now = now
        self._thread: str | None = None
        self._has_output = False
        self._ends_in_text = False
        """Whether no tool was called after the last message."""
        self._tools: set[str] = set()
        """The ids of the tools shown."""
        self._completed: Mapping[str, JsonValue] | None = None
        self._failure: str | None = None

    @property
    def session_id(self) -> str | None:
        """The thread's id, once the model or its server has produced output: only then is the prompt certain to be in
        the thread's file. The start of the turn is reported earlier.
        """
        return self._thread if self._has_output and not self._is_another else None

    @property
    def announced(self) -> str | None:
        """The thread's id, announced before the thread's file holds the prompt."""
        return None if self._is_another else self._thread

    @property
    def is_final(self) -> bool:
        """Whether the turn has completed or failed, or runs in a session other than requested."""
        return self._completed is not None or self._failure is not None or self._is_another

    @property
    def _is_another(self) -> bool:
        # Codex treats an id that is not a UUID as a name, and starts a new session for an unknown name.
        return None not in {self._resumed, self._thread} and self._thread != self._resumed

    def read(self, event: Mapping[str, JsonValue]) -> Sequence[Output]:
        """Read one event."""
        match text(event, "type"):
            case "thread.started":
                self._thread = text(event, "thread_id") or None
            case "turn.completed":
                self._completed, self._has_output = event, True
            case "turn.failed":
                error = at(event, "error")
                self._failure = text(error, "message") or clean_text(error_text(error)) or "no reason given"
                self._has_output = True
            case "error" if (message := text(event, "message")).startswith("Reconnecting"):
                self._has_output = True
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
        if self._failure is not None:
            kind, reason = kind_of_failure(self._failure)
            wait = seconds_left(reason, self._now())
            raise failure(kind, f"Codex: {reason}", wait=wait, continues_session=self._has_output)
        if self._completed is None:
            kind, message = no_outcome("Codex", ending, _NOISE)
            raise failure(kind, message, continues_session=self._has_output)
        used = at(self._completed, "usage")
        total = counted(
            count(used, "input_tokens"),
            count(used, "output_tokens"),
            model=self._model,
            cache_read=count(used, "cached_input_tokens"),
            cache_write=count(used, "cache_write_input_tokens"),
            reasoning=count(used, "reasoning_output_tokens"),
        )
        return TurnAnswer(self.last_text if self._ends_in_text else "", usage=total, is_total=True)

    def _item(self, item: JsonValue, *, is_whole: bool) -> Sequence[Output]:
        kind, words = text(item, "type"), text(item, "text")
        # An error item is a warning, and may precede all other items.
        self._has_output = self._has_output or kind not in {"", "error"}
        if kind == "agent_message" and is_whole:
            self.last_text, self._ends_in_text = words, True
            return [Output("text", words)]
        if kind in {"reasoning", "error"} and is_whole:
            return [Output("notice", shown(words or text(item, "message")))]
        tool = _tool(item)
        if tool is None or text(item, "id") in self._tools:
            return []
        self._tools.add(text(item, "id"))
        self._ends_in_text = False
        return [Output("tool", tool)]


def _tool(item: JsonValue) -> str | None:
    """Return the description of a tool call; None for another item."""
    match text(item, "type"):
        case "command_execution":
            line = text(item, "command")
            try:
                words = shlex.split(line[:4000])
            except ValueError:
                words = []
            is_wrapped = len(words) == 3 and words[1] in {"-c", "-lc"}
            return describe_tool_call("Bash", {"command": words[2] if is_wrapped else line})
        case "file_change":
            paths = ", ".join(text(change, "path") for change in tables(item, "changes"))
            return describe_tool_call("Edit", {"path": paths})
        case "mcp_tool_call":
            return describe_tool_call(f"{text(item, 'server')}.{text(item, 'tool')}", at(item, "arguments"))
        case "web_search":
            return describe_tool_call("WebSearch", item)
        case "collab_tool_call":
            return describe_tool_call(text(item, "tool") or "Agent", item)
        case _:
            return None
