"""Codex (`codex exec --json`), run for one turn at a time. Tested with 0.169.0.

A turn ends with `turn.completed` or `turn.failed`; the process may take seconds longer to exit and is not waited for.
Token counts cover the whole session. The session keeps the prompt of a failed or interrupted turn.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from plait.backends.agents.agent_errors import NETWORK
from plait.backends.agents.agent_protocol import Call
from plait.backends.agents.cli_agent import CliBackend
from plait.backends.agents.codex_output import CodexReader
from plait.backends.json_fields import at
from plait.backends.prices import Billing
from plait.backends.process.private_files import private_file
from plait.json_form import JsonValue
from plait.safe_text import check_base_url

_STRICT = frozenset({"type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf",
                     "title", "description"})  # fmt: skip
_KINDS = frozenset({"type", "enum", "const", "anyOf"})
_ALWAYS = (
    *("--json", "--skip-git-repo-check"),
    # Otherwise Codex fetches plugins with git, and retries connections for ever.
    *("--disable=plugins", "--disable=unbounded_connection_retries"),
)


@dataclass(eq=False, kw_only=True)
class CodexBackend(CliBackend):
    """Codex, run as `codex exec`, one process per turn.

    Codex's plugins are turned off, because Codex would fetch the plugins first.
    """

    kind: ClassVar[str] = "codex"
    program: ClassVar[str] = "codex"
    install: ClassVar[str] = "npm install -g @openai/codex"
    chooses_session: ClassVar[bool] = False
    can_fork: ClassVar[bool] = True
    ends_at_interrupt: ClassVar[bool] = True

    model: str | None = None
    """Model; None for the agent's default."""
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
        """Names of the variables with keys, Codex's folder and network access."""
        own = () if self.api_key_env is None else (self.api_key_env,)
        return ("CODEX_API_KEY", "CODEX_HOME", "OPENAI_API_KEY", *own, *NETWORK)

    def takes_schema(self, schema: Mapping[str, object]) -> bool:
        """Return whether the server accepts the schema."""
        return schema.get("type") == "object" and _is_strict(cast("JsonValue", dict(schema)))

    def session_files(self, session_id: str) -> Sequence[Path]:
        """Return the files of the session: one file, in a folder for each day."""
        home = Path(os.environ.get("CODEX_HOME") or "~/.codex").expanduser()
        return sorted(home.glob(f"sessions/*/*/*/rollout-*-{glob.escape(session_id)}.jsonl"))

    def arguments(self, call: Call) -> Sequence[str]:
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
            *(f"--config={key}={_toml(given)}" for key, given in self._settings(call)),
            *("--", *([] if earlier is None else [earlier]), "-"),
        ]

    def _settings(self, call: Call) -> Iterator[tuple[str, JsonValue]]:
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

    def environment(self, call: Call) -> Mapping[str, str]:  # noqa: ARG002 - other agents need it
        """Return no variables: all settings are in the arguments."""
        return {}

    def reader(self, call: Call) -> CodexReader:
        """Return a reader for the output of the call."""
        return CodexReader(call, self.clock(call), self.model)


def _is_strict(schema: JsonValue) -> bool:
    """Return whether every object in `schema` lists and requires all its fields, in keywords known to the server."""
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
    """Return `value` in TOML. Text and lists are written as in JSON."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)} = {_toml(value[key])}" for key in value) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
