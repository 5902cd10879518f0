"""Codex (`codex exec --json`), run for one turn at a time. Tested with 0.169.0.

A turn is over with `turn.completed` or `turn.failed`; its exit is not waited for, which may take seconds. What it says
of tokens counts the whole session. The session keeps the prompt of a turn that fails or is cut.
"""

from __future__ import annotations

import glob
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from plait.backends.agents.backend import CliBackend
from plait.backends.agents.codex.reader import CodexReader
from plait.backends.agents.error_kinds import NETWORK
from plait.backends.agents.protocol import Call
from plait.backends.json_fields import at
from plait.backends.process.private import private_file
from plait.backends.protocol import JsonValue

_STRICT = frozenset({"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf",
                     "title", "description"})  # fmt: skip
_KINDS = frozenset({"type", "enum", "const", "anyOf"})
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
    those that follow from other options. Its plugins are off, which it would fetch first. `now` tells the Unix time.
    """

    kind: ClassVar[str] = "codex"
    program: ClassVar[str] = "codex"
    install: ClassVar[str] = "npm install -g @openai/codex"
    chooses_session: ClassVar[bool] = False
    can_fork: ClassVar[bool] = True

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

    def takes_schema(self, schema: Mapping[str, object]) -> bool:
        """Whether it is one of the schemas that its server accepts."""
        return schema.get("type") == "object" and _is_strict(cast("JsonValue", dict(schema)))

    def session_files(self, session_id: str) -> Sequence[Path]:
        """One, in a folder for each day."""
        home = Path(os.environ.get("CODEX_HOME") or "~/.codex").expanduser()
        return sorted(home.glob(f"sessions/*/*/*/rollout-*-{glob.escape(session_id)}.jsonl"))

    def arguments(self, call: Call) -> Sequence[str]:
        """The arguments; writes instructions and schema into `call.folder`, where there are any."""
        earlier = call.session_id if call.resume else call.forks
        begins = [] if earlier is None else ["resume" if call.resume else "fork"]
        schema = call.folder / "schema.json"
        if call.output_schema is not None:
            private_file(schema, json.dumps(call.output_schema))
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

    def environment(self, call: Call) -> Mapping[str, str]:  # noqa: ARG002 - other agents need it
        """Nothing: all that it is to heed stands in its arguments."""
        return {}

    def reader(self, call: Call) -> CodexReader:
        """A reader for that turn's output."""
        return CodexReader(call, self.now, self.model)


def _is_strict(schema: JsonValue) -> bool:
    """Whether every object in `schema` names all its fields and wants them all, in words that the server knows."""
    if not isinstance(schema, dict) or not _STRICT.issuperset(schema) or _KINDS.isdisjoint(schema):
        return False
    fields, wanted, choices = at(schema, "properties"), at(schema, "required"), at(schema, "anyOf")
    inner: list[JsonValue] = list(choices) if isinstance(choices, list) else []
    if schema.get("type") == "object" or fields is not None:
        is_closed = schema.get("additionalProperties") is False
        if (
            not isinstance(fields, dict)
            or not isinstance(wanted, list)
            or not is_closed
            or set(fields) != {*map(str, wanted)}
        ):
            return False
        inner += fields.values()
    return all(map(_is_strict, [*inner, schema["items"]] if "items" in schema else inner))


def _toml(value: JsonValue) -> str:
    """`value` in TOML; text and lists are written as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(value[key])}" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
