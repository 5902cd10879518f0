"""Gemini CLI's output, as it really printed it, and the arguments that it is called with."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from plait.backends import ErrorKind
from plait.backends.agents.gemini.backend import GeminiBackend
from plait.backends.agents.protocol import Call, ProcessEnd
from plait.backends.protocol import Usage
from tests.support.agents.recorded import NOW, Seen, names, read, recorded, replay

PROGRAM = GeminiBackend(now=lambda: NOW)

# The recorded turns that have an answer: what it ends with, and what it cost.
ANSWERS: dict[str, tuple[str, Usage]] = {
    "resume_stream": ("last user line: third TURN-C", Usage(11, 7, model="gemini-2.5-flash", cache_read_tokens=5)),
    "tool_stream": (
        '{"name": "run_shell_command", "response": ',
        Usage(22, 14, model="gemini-2.5-flash", cache_read_tokens=10),
    ),
}
NO_EVENTS = "ended with status 0 before its turn was over"
# Those that failed: why, and a piece of the message. The session goes on in none of them: it drops a failed prompt.
FAILURES: dict[str, tuple[ErrorKind, str]] = {
    "error_400_stream": (ErrorKind.INVALID_REQUEST, "Gemini: stub says 400"),
    "error_401_stream": (ErrorKind.AUTH, "Gemini: stub says 401"),
    "killed_sigterm": (ErrorKind.CRASHED, NO_EVENTS),
    "resume_unknown": (ErrorKind.SESSION_LOST, "Invalid session identifier"),
    "session_in_use": (ErrorKind.TRANSIENT, "already exists"),
    "untrusted_dir": (ErrorKind.INVALID_REQUEST, "not running in a trusted directory"),
    # In its other format, which we never ask for, there are no events: whatever the exit status, no event, no answer.
    "first_json": (ErrorKind.CRASHED, NO_EVENTS),
    "resume_json": (ErrorKind.CRASHED, NO_EVENTS),
    "resume_after_sigterm": (ErrorKind.CRASHED, NO_EVENTS),
    "error_400_json": (ErrorKind.CRASHED, "ended with status 144"),
    "error_401_json": (ErrorKind.CRASHED, "ended with status 145"),
}


def _replayed(name: str) -> Seen:
    return replay(PROGRAM.reader, "gemini", name)


def _read(*events: dict[str, Any], status: int = 0) -> Seen:
    reader = PROGRAM.reader(Call(folder=Path("/nowhere")))
    init = {"type": "init", "session_id": "s"}
    return read(reader, "\n".join(json.dumps(event) for event in (init, *events)), ProcessEnd(status))


def test_every_recorded_turn_is_in_a_table() -> None:
    assert set(names("gemini")) == {*ANSWERS, *FAILURES}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer(name: str) -> None:
    seen, (text, usage) = _replayed(name), ANSWERS[name]
    assert seen.answered is not None, seen.error
    assert seen.answered.text.endswith(text)
    assert seen.answered.text == seen.streamed
    assert (seen.answered.usage, seen.answered.is_total) == (usage, False)
    assert seen.reader.usage == usage
    assert seen.reader.is_final
    assert seen.reader.session_id == json.loads(recorded("gemini", name)["stdout"].splitlines()[0])["session_id"]


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure(name: str) -> None:
    seen, (kind, message) = _replayed(name), FAILURES[name]
    assert seen.error is not None, seen.answered
    assert (seen.error.kind, seen.error.continues_session) == (kind, False)
    assert message in seen.error.message
    assert seen.reader.session_id is None


def test_tools_are_shown() -> None:
    assert _replayed("tool_stream").others == [("tool", "run_shell_command: echo RAN42")]


SAID = {"type": "message", "role": "assistant", "content": "Let me see.", "delta": True}
TOOL = {"type": "tool_use", "tool_name": "glob", "parameters": {"pattern": "*.py"}}


def test_the_answer_is_what_is_said_after_the_last_tool() -> None:
    answer = SAID | {"content": "Two files."}
    seen = _read(SAID, TOOL, {"type": "tool_result"}, answer, {"type": "result", "status": "success"})
    assert seen.answered is not None and seen.answered.text == "Two files."
    assert seen.streamed == "Let me see.Two files."


def test_the_session_of_a_cut_turn_goes_on_once_the_model_has_spoken() -> None:
    asked = {"type": "message", "role": "user", "content": "prompt"}
    for events, goes_on in (([asked], False), ([asked, SAID], True), ([asked, TOOL], True)):
        seen = _read(*events, status=-9)
        assert seen.error is not None and seen.error.kind is ErrorKind.CRASHED
        assert seen.error.continues_session == (seen.reader.session_id is not None) == goes_on
        assert "prompt" not in seen.error.message


def test_thoughts_count_as_output() -> None:
    stats = {"input_tokens": 10, "output_tokens": 5, "total_tokens": 40}
    seen = _read(SAID, {"type": "result", "status": "success", "stats": stats})
    assert seen.answered is not None and seen.answered.usage == Usage(10, 30, reasoning_tokens=25)


def _api_error(code: int, message: str, **more: Any) -> str:
    return f"[API Error: {json.dumps({'error': {'code': code, 'message': message, **more}})}]\nPlease wait."


RETRY_INFO = [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "38s"}]


@pytest.mark.parametrize(
    ("message", "kind", "wait"),
    [
        (_api_error(429, "Quota. Please retry in 12.5s."), ErrorKind.RATE_LIMITED, 12.5),
        (_api_error(429, "Quota.", details=RETRY_INFO), ErrorKind.RATE_LIMITED, 38.0),
        (_api_error(429, json.dumps({"error": {"code": 429, "message": "in"}})), ErrorKind.RATE_LIMITED, None),
        (_api_error(403, "no"), ErrorKind.AUTH, None),
        (_api_error(400, "API key not valid. Please pass a valid API key."), ErrorKind.AUTH, None),
        (_api_error(400, "The input token count (2) exceeds the maximum"), ErrorKind.CONTEXT_OVERFLOW, None),
        (_api_error(500, "Internal"), ErrorKind.TRANSIENT, None),
        (_api_error(503, "busy"), ErrorKind.OVERLOADED, None),
        ("You have exhausted your capacity. Your quota will reset after 1h2m3s.", ErrorKind.RATE_LIMITED, 3723.0),
        ("[API Error: exception TypeError: fetch failed]", ErrorKind.TRANSIENT, None),
        ("[API Error: {oops}]", ErrorKind.TRANSIENT, None),
        ("Reached max session turns for this session.", ErrorKind.LIMIT_REACHED, None),
    ],
)
def test_kinds_by_what_it_says(message: str, kind: ErrorKind, wait: float | None) -> None:
    seen = _read({"type": "result", "status": "error", "error": {"message": message}}, status=1)
    assert seen.error is not None
    assert (seen.error.kind, seen.error.retry_after) == (kind, wait)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (173, ErrorKind.RATE_LIMITED),
        (247, ErrorKind.OVERLOADED),
        (17, ErrorKind.OVERLOADED),
        (145, ErrorKind.AUTH),
        (148, ErrorKind.INVALID_REQUEST),
        (1, ErrorKind.TRANSIENT),
    ],
)
def test_a_bare_word_of_the_server_is_explained_by_the_exit_status(status: int, kind: ErrorKind) -> None:
    told = {"message": "[API Error: no]\nPlease wait and try again later."}
    seen = _read({"type": "result", "status": "error", "error": told}, status=status)
    assert seen.error is not None and seen.error.kind is kind


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("The model response was blocked due to safety settings.", ErrorKind.REFUSED),
        ("Model response was truncated because it exceeded the token limit.", ErrorKind.TRUNCATED),
        ("Thoughts but no final response text. If your context window is near", ErrorKind.TRANSIENT),
    ],
)
def test_a_result_without_a_reason_is_explained_by_the_error_before(message: str, kind: ErrorKind) -> None:
    seen = _read({"type": "error", "severity": "error", "message": message}, {"type": "result", "status": "error"})
    assert seen.error is not None
    assert (seen.error.kind, seen.error.message) == (kind, f"Gemini: {message}")
    assert seen.others == [("notice", message)]


SUCCESS = {"type": "result", "status": "success"}


BLANK = {"type": "message", "role": "assistant", "content": " \n"}


@pytest.mark.parametrize("before", [[], [BLANK], [SAID, TOOL], [SAID, TOOL, {"type": "tool_result"}]])
def test_a_success_without_a_word_is_none(before: list[dict[str, Any]]) -> None:
    seen = _read(*before, SUCCESS)
    assert seen.error is not None and seen.error.kind is ErrorKind.INVALID_OUTPUT
    assert "answer is empty" in seen.error.message


def test_a_success_without_a_request_to_the_model_is_a_prompt_that_is_too_long() -> None:
    seen = _read(SUCCESS | {"stats": {"total_tokens": 0}})
    assert seen.error is not None and seen.error.kind is ErrorKind.CONTEXT_OVERFLOW
    assert "exceed the model's context" in seen.error.message


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("Loop detected, stopping execution", ErrorKind.TRANSIENT),
        ("Agent execution blocked: no shell today", ErrorKind.REFUSED),
    ],
)
def test_a_success_whose_last_word_is_an_error_is_none(message: str, kind: ErrorKind) -> None:
    stopped = {"type": "error", "severity": "warning", "message": message}
    seen = _read(SAID, stopped, SUCCESS)
    assert seen.error is not None
    assert (seen.error.kind, seen.error.message, seen.error.continues_session) == (kind, f"Gemini: {message}", False)
    went_on = _read(stopped, SAID, SUCCESS)
    assert went_on.answered is not None and went_on.answered.text == "Let me see."


def test_a_login_that_has_run_out_is_no_crash() -> None:
    told = "Manual authorization is required but the current session is non-interactive. Please run the Gemini CLI"
    seen = read(PROGRAM.reader(Call(Path("/nowhere"))), "", ProcessEnd(41, f"Error\n\x1b[31m{told}\x1b[0m\n"))
    assert seen.error is not None
    assert (seen.error.kind, seen.error.message) == (ErrorKind.AUTH, f"Gemini: {told}")


COMMON = ["--output-format=stream-json", "--skip-trust"]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ({"session_id": "N"}, ["--session-id=N"]),
        ({"session_id": "S", "resume": True}, ["--resume=S"]),
        ({"session_id": "N", "output_schema": {"type": "object"}}, ["--session-id=N"]),
    ],
)
def test_arguments_for_each_form_of_a_call(call: dict[str, Any], arguments: list[str], tmp_path: Path) -> None:
    assert GeminiBackend().arguments(Call(folder=tmp_path, **call)) == COMMON + arguments
    assert list(tmp_path.iterdir()) == []


def test_every_option_is_heeded(tmp_path: Path) -> None:
    program = GeminiBackend(model="m", approval_mode="plan", system="Be brief: ä.", base_url="http://127.0.0.1:1")
    assert program.arguments(Call(tmp_path)) == [*COMMON, "--model=m", "--approval-mode=plan"]
    assert program.environment(Call(tmp_path)) == {
        "GEMINI_CLI_NO_RELAUNCH": "true",
        "GEMINI_TELEMETRY_ENABLED": "false",
        "GEMINI_SYSTEM_MD": str(tmp_path / "system-prompt.md"),
        "GOOGLE_GEMINI_BASE_URL": "http://127.0.0.1:1",
    }
    assert (tmp_path / "system-prompt.md").read_text(encoding="utf-8") == "Be brief: ä."


def test_its_sessions_are_named_so_that_its_cleaning_up_does_not_find_them() -> None:
    # What it does with the name of a session's file, where only the first eight characters of the id stand.
    mine = GeminiBackend().new_session_id()
    assert mine is not None
    assert re.search(r"-([a-zA-Z0-9]{8})\.jsonl?$", f"session-2026-11-22T09-51-{mine[:8]}.jsonl") is None
    assert mine != GeminiBackend().new_session_id()
