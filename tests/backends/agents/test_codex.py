"""Codex's output, as it really printed it, and the arguments that it is called with."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from plait.backends.agents.agent_output import AgentCall, ProcessEnd
from plait.backends.agents.codex import CodexBackend
from plait.errors import BackendError, ErrorKind
from plait.usage import Usage
from tests.support.agents.recorded import NOW, Seen, names, read, recorded, replay

PROGRAM = CodexBackend(now=lambda: NOW)
THREAD = "01a2000a-1ecc-7a20-bc14-49e1445f179f"

# The recorded turns that have an answer: what it ends with, and what the whole session has cost by then.
ANSWERS: dict[str, tuple[str, Usage]] = {
    "first": ("first TURN-A", Usage(11, 7, cache_read_tokens=5, reasoning_tokens=2)),
    "resume": ("second TURN-B", Usage(22, 14, cache_read_tokens=10, reasoning_tokens=4)),
    "resume_stdin": ("prompt from stdin", Usage(33, 21, cache_read_tokens=15, reasoning_tokens=6)),
    "resume_after_sigkill": ("after kill", Usage(44, 28, cache_read_tokens=20, reasoning_tokens=8)),
    "fork": ("forked", Usage(44, 28, cache_read_tokens=20, reasoning_tokens=8)),
    "tool": ("run a tool", Usage(22, 14, cache_read_tokens=10, reasoning_tokens=4)),
}
# Those that failed: why, a piece of the message, whether the session goes on.
FAILURES: dict[str, tuple[ErrorKind, str, bool]] = {
    # Of a 400 it says nothing but the server's answer.
    "error_400": (ErrorKind.INVALID_REQUEST, "Codex: stub says 400", True),
    "error_401": (ErrorKind.AUTH, "401 Unauthorized", True),
    "error_429": (ErrorKind.RATE_LIMITED, "429 Too Many Requests", True),
    "usage_limit": (ErrorKind.RATE_LIMITED, "hit your usage limit", True),
    "usage_limit_days": (ErrorKind.RATE_LIMITED, "hit your usage limit", True),
    "error_500": (ErrorKind.TRANSIENT, "high demand", True),
    "error_529": (ErrorKind.OVERLOADED, "529", True),
    "error_refused_bounded": (ErrorKind.TRANSIENT, "Connection failed", True),
    "error_refused_default_never_ends": (ErrorKind.CRASHED, "ended by SIGKILL before its turn was over", True),
    # Cut before the model said anything: the prompt may not be in the session.
    "killed_sigint": (ErrorKind.CRASHED, "ended with status 1 before its turn was over", False),
    "killed_sigkill": (ErrorKind.CRASHED, "ended by SIGKILL before its turn was over", False),
    "no_git_repo": (ErrorKind.INVALID_REQUEST, "Not inside a trusted directory", False),
    # Its exit status is 0, and there is an answer, of somebody who never heard of the conversation.
    "resume_unknown_name_starts_new": (ErrorKind.SESSION_LOST, "has no session not-a-uuid", False),
    "resume_unknown_uuid": (ErrorKind.SESSION_LOST, "no rollout found", False),
    "resume_while_running": (ErrorKind.TRANSIENT, "already has an active writer", False),
}


def _replayed(name: str) -> Seen:
    return replay(PROGRAM.reader, "codex", name)


def _read(*events: dict[str, Any], status: int = 1, stderr: str = "", session: str | None = None) -> Seen:
    call = AgentCall(folder=Path("/nowhere"), session_id=session, resume=session is not None)
    return read(PROGRAM.reader(call), "\n".join(map(json.dumps, events)), ProcessEnd(status, stderr))


def test_every_recorded_turn_is_in_a_table() -> None:
    assert set(names("codex")) == {*ANSWERS, *FAILURES}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(name: str) -> None:
    seen, (text, usage) = _replayed(name), ANSWERS[name]
    assert seen.answered is not None, seen.error
    assert seen.answered.text.endswith(text)
    assert seen.answered.text == seen.streamed
    assert (seen.answered.usage, seen.answered.is_total) == (usage, True)
    assert seen.reader.is_final
    assert seen.reader.session_id == json.loads(recorded("codex", name)["stdout"].splitlines()[0])["thread_id"]


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure(name: str) -> None:
    seen, (kind, message, goes_on) = _replayed(name), FAILURES[name]
    assert seen.error is not None, seen.answered
    assert (seen.error.kind, seen.error.continues_session) == (kind, goes_on)
    assert message in seen.error.message
    assert (seen.reader.session_id is not None) == goes_on


def test_tools_and_waits_are_shown() -> None:
    metadata, *rest = _replayed("tool").others
    assert metadata[0] == "notice" and metadata[1].startswith("Model metadata for `stub-model` not found.")
    assert rest == [("tool", "Bash: echo RAN42")]
    waits = [text for kind, text in _replayed("error_429").others if kind == "waiting"]
    assert waits[0] == "Reconnecting... 1/5 (exceeded retry limit, last status: 429 Too Many Requests)"
    assert len(waits) == 5


@pytest.mark.usefixtures("utc")
def test_a_usage_limit_ends_when_it_says() -> None:
    """The server said 2 hours, and 3 days; Codex tells the time of day, or the day, without seconds."""
    for name, seconds in (("usage_limit", 7200), ("usage_limit_days", 3 * 86_400)):
        events = recorded("codex", name)["stdout"].splitlines()
        recorded_at = int(json.loads(events[0])["thread_id"].replace("-", "")[:12], 16) / 1000  # a UUID of version 7
        reader = CodexBackend(now=lambda at=recorded_at: at).reader(AgentCall(folder=Path("/nowhere")))
        seen = read(reader, "\n".join(events), ProcessEnd(1))
        assert seen.error is not None and seen.error.retry_after == pytest.approx(seconds, abs=90)


def test_tokens_written_to_the_cache_are_a_part_of_the_input() -> None:
    """The newer models of OpenAI bill them above other input."""
    message = {"type": "item.completed", "item": {"type": "agent_message", "text": "done"}}
    usage = {"input_tokens": 2600, "cached_input_tokens": 2000, "cache_write_input_tokens": 400, "output_tokens": 7}
    seen = _read({"type": "thread.started", "thread_id": "x"}, message, {"type": "turn.completed", "usage": usage})
    assert seen.answered is not None
    assert seen.answered.usage == Usage(2600, 7, cache_read_tokens=2000, cache_write_tokens=400)


def test_a_turn_in_another_session_is_over_before_the_model_is_asked() -> None:
    seen = _read({"type": "thread.started", "thread_id": "new"}, session="old", status=-9)
    assert seen.reader.is_final
    assert seen.error is not None and seen.error.kind is ErrorKind.SESSION_LOST


@pytest.mark.parametrize(
    ("told", "kind"),
    [
        ("thread/fork failed: invalid paginated history lineage for x: missing source rollout", ErrorKind.SESSION_LOST),
        ("turn/start failed: Input exceeds the maximum length of 1048576 characters.", ErrorKind.CONTEXT_OVERFLOW),
    ],
)
def test_what_it_says_before_a_turn(told: str, kind: ErrorKind) -> None:
    seen = _read(status=1, stderr=f"Reading prompt from stdin...\nError: {told} (code -32600)\n")
    assert seen.error is not None and (seen.error.kind, seen.error.continues_session) == (kind, False)


ITEMS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    (
        {"type": "file_change", "changes": [{"path": "a.py", "kind": "add"}, {"path": "b.py"}]},
        ("tool", "Edit: a.py, b.py"),
    ),
    (
        {"type": "mcp_tool_call", "server": "docs", "tool": "find", "arguments": {"query": "x"}},
        ("tool", "docs.find: x"),
    ),
    ({"type": "web_search", "query": "weather"}, ("tool", "WebSearch: weather")),
    ({"type": "collab_tool_call", "tool": "spawn_agent", "prompt": "Look."}, ("tool", "spawn_agent: Look.")),
    ({"type": "command_execution", "command": "ls 'a b"}, ("tool", "Bash: ls 'a b")),
    ({"type": "reasoning", "text": "I should\n\x1b[2Jlook"}, ("notice", "I should \\x1b[2Jlook")),
]


@pytest.mark.parametrize(("item", "output"), ITEMS)
def test_what_it_does_is_shown_once(item: dict[str, Any], output: tuple[str, str]) -> None:
    kinds = ("item.started", "item.updated", "item.completed")
    seen = _read(*({"type": kind, "item": {"id": "item_1", **item}} for kind in kinds))
    assert seen.others == [output]


@pytest.fixture
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """It names times as the clock on the wall has them, which shows UTC here."""
    with monkeypatch.context() as patch:
        patch.setenv("TZ", "UTC")
        time.tzset()
        yield
    time.tzset()


@pytest.mark.parametrize(
    ("message", "kind", "wait"),
    [
        ("You've hit your usage limit. Upgrade to Pro, or try again at 12:06 PM.", ErrorKind.RATE_LIMITED, 3620.0),
        ("You've hit your usage limit. Try again at Nov 20th, 2026 11:06 AM.", ErrorKind.RATE_LIMITED, 172_820.0),
        ("You've hit your usage limit. Try again later.", ErrorKind.RATE_LIMITED, None),
        ("stream disconnected: Rate limit reached. Please try again in 11.054s.", ErrorKind.RATE_LIMITED, 11.054),
        ("Quota exceeded. Check your plan and billing details.", ErrorKind.NO_CREDIT, None),
        ("To use Codex with your ChatGPT plan, upgrade to Plus", ErrorKind.AUTH, None),
        ("Missing environment variable: `KEY`.", ErrorKind.AUTH, None),
        ("Codex ran out of room in the model's context window.", ErrorKind.CONTEXT_OVERFLOW, None),
        ("Incomplete response returned, reason: max_output_tokens", ErrorKind.TRUNCATED, None),
        ("Incomplete response returned, reason: content_filter", ErrorKind.REFUSED, None),
        ("Selected model is at capacity. Please try a different model.", ErrorKind.OVERLOADED, None),
        ("unexpected status 503 Service Unavailable: no", ErrorKind.OVERLOADED, None),
        ("unexpected status 404 Not Found: no such model", ErrorKind.INVALID_REQUEST, None),
        ('{"error": {"message": "too much", "code": "context_length_exceeded"}}', ErrorKind.CONTEXT_OVERFLOW, None),
        ("stream disconnected before completion: Transport error", ErrorKind.TRANSIENT, None),
    ],
)
@pytest.mark.usefixtures("utc")
def test_kinds_by_what_it_says(message: str, kind: ErrorKind, wait: float | None) -> None:
    seen = _read({"type": "thread.started", "thread_id": "t"}, {"type": "turn.failed", "error": {"message": message}})
    assert seen.error is not None
    assert (seen.error.kind, seen.error.retry_after) == (kind, wait)


def test_a_reason_in_another_form_than_text_is_read() -> None:
    error = {"message": {"detail": [{"loc": ["body", "model"], "msg": "no such model"}]}}
    seen = _read({"type": "thread.started", "thread_id": "t"}, {"type": "turn.failed", "error": error})
    assert seen.error is not None
    assert seen.error.message == "Codex: body.model: no such model"


ALWAYS = ["--json", "--skip-git-repo-check", "--disable=plugins", "--disable=unbounded_connection_retries"]
SAFE = ['--config=sandbox_mode="read-only"', "--config=analytics.enabled=false"]


@pytest.mark.parametrize(
    ("call", "verbs", "ends"),
    [
        ({}, ["exec"], ["--", "-"]),
        ({"session_id": "S", "resume": True}, ["exec", "resume"], ["--", "S", "-"]),
        ({"session_id": "S", "resume": True, "forks": "old"}, ["exec", "resume"], ["--", "S", "-"]),
        ({"forks": "--last"}, ["exec", "fork"], ["--", "--last", "-"]),
    ],
)
def test_arguments_for_each_form_of_a_call(
    call: dict[str, Any], verbs: list[str], ends: list[str], tmp_path: Path
) -> None:
    assert CodexBackend().arguments(AgentCall(folder=tmp_path, **call)) == [*verbs, *ALWAYS, *SAFE, *ends]
    assert list(tmp_path.iterdir()) == []


def _settings(program: CodexBackend, folder: Path) -> dict[str, Any]:
    """What `--config` says, read as TOML, each key as it stands."""
    given = [
        one.removeprefix("--config=") for one in program.arguments(AgentCall(folder)) if one.startswith("--config=")
    ]
    pairs = [one.split("=", 1) for one in given]
    return {key: tomllib.loads(f"value = {value}")["value"] for key, value in pairs}


def test_every_option_becomes_a_setting(tmp_path: Path) -> None:
    program = CodexBackend(
        model="m",
        sandbox="workspace-write",
        system="Be brief: ä.",
        append_system='And "kind".\n\x7f',
        base_url="http://127.0.0.1:1/v1",
        api_key_env="MY_KEY",
        config={"model_reasoning_effort": "high", "t": {"web search": [True, 1.5, "x"]}, "sandbox_mode": "read-only"},
    )
    assert "--model=m" in program.arguments(AgentCall(tmp_path))
    assert "MY_KEY" in program.passes
    assert _settings(program, tmp_path) == {
        "sandbox_mode": "read-only",  # given in `config`, which has the last word
        "analytics.enabled": False,
        "model_instructions_file": str(tmp_path / "system-prompt.txt"),
        "developer_instructions": 'And "kind".\n\x7f',
        "model_provider": "plait",
        "model_providers.plait": {
            "name": "plait",
            "base_url": "http://127.0.0.1:1/v1",
            "wire_api": "responses",
            "env_key": "MY_KEY",
            "request_max_retries": 0,
            "stream_max_retries": 0,
        },
        "model_reasoning_effort": "high",
        "t": {"web search": [True, 1.5, "x"]},
    }
    assert (tmp_path / "system-prompt.txt").read_text(encoding="utf-8") == "Be brief: ä."


CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "takes"),
    [
        (CLOSED, True),
        (CLOSED | {"properties": {"a": {"type": "array", "items": CLOSED}}}, True),
        (CLOSED | {"properties": {"a": {"anyOf": [CLOSED, {"type": "null"}]}}}, True),
        (CLOSED | {"additionalProperties": True}, False),
        (CLOSED | {"required": []}, False),
        ({"type": "object"}, False),
        (CLOSED | {"properties": {"a": {}}}, False),
        (CLOSED | {"properties": {"a": {"type": "array", "items": {"type": "object"}}}}, False),
        (CLOSED | {"properties": {"a": {"type": "string", "pattern": "x"}}}, False),
        ({"type": "array", "items": CLOSED}, False),
        (CLOSED | {"required": 5, "properties": [], "anyOf": 5}, False),
    ],
)
def test_it_is_given_the_schemas_that_its_server_takes(schema: dict[str, Any], takes: bool) -> None:
    assert CodexBackend().takes_schema(schema) is takes


def test_a_schema_goes_into_a_file(tmp_path: Path) -> None:
    arguments = CodexBackend().arguments(AgentCall(tmp_path, output_schema=CLOSED))
    assert f"--output-schema={tmp_path}/schema.json" in arguments
    assert json.loads((tmp_path / "schema.json").read_text()) == CLOSED


def test_a_cut_turn_with_a_tool_at_work_goes_on() -> None:
    events = recorded("codex", "tool")["stdout"].splitlines()
    reader = PROGRAM.reader(AgentCall(folder=Path("/nowhere")))
    seen = read(reader, "\n".join(events[:4]), ProcessEnd(-15))
    assert isinstance(seen.error, BackendError)
    assert (seen.error.kind, seen.error.continues_session) == (ErrorKind.CRASHED, True)
    assert not reader.is_final
