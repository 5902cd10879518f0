"""What the readers of all agents have in common: they read anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.backends import ClaudeCodeBackend, CodexBackend
from plait.backends.agents.agent_output import AgentCall, ProcessEnd, Reader, TurnAnswer, no_outcome, safe_line
from plait.backends.json_fields import number
from plait.errors import BackendError
from plait.safe_text import shown
from tests.support.agents.recorded import NOW, ROOT, names, read, recorded
from tests.support.sizes import size

PROGRAMS = {
    "claude": ClaudeCodeBackend(now=lambda: NOW),
    "claude197": ClaudeCodeBackend(now=lambda: NOW),
    "codex": CodexBackend(now=lambda: NOW),
}
CALLS = (
    AgentCall(Path("/nowhere")),
    AgentCall(Path("/nowhere"), session_id="s", resume=True),
    AgentCall(Path("/nowhere"), forks="p"),
)
EVENTS = [
    (cli, event)
    for cli in PROGRAMS
    for name in names(cli)
    for line in recorded(cli, name)["stdout"].splitlines()
    if isinstance(event := json.loads(line), dict)
]
WORDS = [
    *("text", "type", "usage", "message", "item", "error", "content", "event", "subtype", "status", "result", "id"),
    *("assistant", "stream_event", "system", "api_retry", "rate_limit_event", "permission_denied", "init", "tool_use"),
    *("thread.started", "turn.completed", "turn.failed", "item.completed", "command_execution", "file_change"),
    *(
        "success",
        "429",
        "retry in 5m",
        "resets 3pm (Europe/Nowhere)",
        "again at Feb 31st, 2026 3:05 PM",
        '{"error": 1}',
    ),
]
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=20),
    st.sampled_from(["\ud800", "\x1b[2J", "9" * 400, "a" * 5000]),
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=5),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.sampled_from(WORDS), JSON, max_size=8)
ENDINGS = st.builds(ProcessEnd, st.one_of(st.none(), st.integers(-70, 255)), st.text(max_size=50))


@st.composite
def bent_events(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A recorded event with one value somewhere in it replaced."""
    cli, event = draw(st.sampled_from(EVENTS))
    bent: Any = json.loads(json.dumps(event))
    here: Any = bent
    for _ in range(draw(st.integers(1, 4))):
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        if not keys:
            break
        key = draw(st.sampled_from(keys))
        if not isinstance(here[key], dict | list) or draw(st.booleans()):
            here[key] = draw(JSON)
            break
        here = here[key]
    return cli, bent


def _check(
    make: Callable[[AgentCall], Reader], call: AgentCall, events: list[dict[str, Any]], ending: ProcessEnd
) -> None:
    reader = make(call)
    for event in events:
        for output in reader.read(event):
            assert output.kind in {"text", "tool", "waiting", "notice"}
            output.text.encode()
            assert output.kind == "text" or output.text.isprintable()
            assert output.kind == "text" or len(output.text) <= 140
        for word in (reader.session_id, reader.last_whole):
            assert word is None or word.encode()
        assert reader.usage.input_tokens >= 0 and reader.usage.output_tokens >= 0
        assert isinstance(reader.is_final, bool)
    try:
        answered = reader.end(ending)
    except BackendError as error:
        failure = error
    else:
        assert isinstance(answered, TurnAnswer) and reader.is_final
        answered.text.encode()
        return
    assert failure.message.isprintable() and 0 < len(failure.message) <= 300
    assert failure.retry_after is None or failure.retry_after >= 0


@settings(max_examples=size(15, 60))
@given(st.sampled_from(sorted(PROGRAMS)), st.sampled_from(CALLS), st.lists(OBJECTS, max_size=4), ENDINGS)
def test_any_objects_are_read(cli: str, call: AgentCall, events: list[dict[str, Any]], ending: ProcessEnd) -> None:
    _check(PROGRAMS[cli].reader, call, events, ending)


@settings(max_examples=100)
@given(bent_events(), st.sampled_from(CALLS), ENDINGS)
def test_events_with_a_wrong_value_somewhere_are_read(
    bent: tuple[str, dict[str, Any]], call: AgentCall, ending: ProcessEnd
) -> None:
    cli, event = bent
    _check(PROGRAMS[cli].reader, call, [event, event], ending)


@pytest.mark.parametrize("cli", PROGRAMS)
def test_output_cut_anywhere_is_no_answer(cli: str) -> None:
    """Up to the last word, every turn that was recorded is a cut one."""
    for name in names(cli):
        lines = recorded(cli, name)["stdout"].splitlines()
        for count in range(len(lines)):
            for rest in ("", lines[count][: len(lines[count]) // 2]):
                reader = PROGRAMS[cli].reader(CALLS[0])
                seen = read(reader, "\n".join([*lines[:count], rest]), ProcessEnd(-15, ""))
                if not reader.is_final:
                    assert seen.error is not None, (name, count)


def test_the_recordings_are_all_read() -> None:
    assert len(EVENTS) > 150
    assert {path.name for path in ROOT.iterdir()} >= set(PROGRAMS)


def test_numbers_that_are_none_and_words_that_are_too_long() -> None:
    for value in (True, -1, float("nan"), float("inf"), 10**400, "1", None):
        assert number({"n": value}, "n") is None
    assert number({"n": 1.5}, "n") == 1.5
    assert len(shown("\x1b" * 500)) == 120
    assert shown("a\r\n\tb\u202e") == "a b\\u202e"


@pytest.mark.parametrize("key", ["sk-ant-api03-abcdefghijk", "AIzaSyA-1234567890", "ghp_abcdefghij", "Bearer abc.def"])
def test_what_looks_like_a_key_is_not_repeated(key: str) -> None:
    assert safe_line(f"Incorrect API key provided: {key} (of sk-1)") == "Incorrect API key provided: *** (of sk-1)"


NODE = """file:///x/gemini.js:3
  throw new Error("boom")
        ^

Error: the settings cannot be read
    at file:///x/gemini.js:3:9 {
  code: 'EACCES',
}

Node.js v22.23.3
"""
RUST = """thread 'main' panicked at src/main.rs:1:2:
no entropy
note: run with `RUST_BACKTRACE=1` environment variable to display a backtrace
"""


@pytest.mark.parametrize(
    ("stderr", "told"),
    [
        (NODE, ": Error: the settings cannot be read"),
        (RUST, ": no entropy"),
        ("\x1b[31mNo.\x1b[0m\n", ": No."),
        ("    at main\n", ": at main"),
        ("", ""),
    ],
)
def test_a_crash_is_told_by_the_line_that_says_why(stderr: str, told: str) -> None:
    _, message = no_outcome("It", ProcessEnd(1, stderr))
    assert safe_line(message) == f"It ended with status 1 before its turn was over{told}"
