"""Claude Code's output, as two versions of it really printed it, and the arguments that it is called with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.backends.agents.agent_output import AgentCall, ProcessEnd
from plait.backends.agents.claude_code import ClaudeCodeBackend, question_of
from plait.dialogue import Question
from plait.errors import ErrorKind
from plait.json_form import JsonValue
from plait.usage import Usage
from tests.support.agents.recorded import NOW, Seen, names, read, recorded, replay

PROGRAM = ClaudeCodeBackend(now=lambda: NOW)
FREE, ONE = Usage(0, 0, 0.0), Usage(16, 7, 0.0001395, cache_read_tokens=5)
TWO = Usage(32, 14, 0.000279, cache_read_tokens=10)
UNPRICED = Usage(16, 7, cache_read_tokens=5)
MODEL = "claude-sonnet-4-5"
NOTHING = Usage()

# The recorded turns that have an answer: what it ends with, and what it cost.
ANSWERS: dict[str, tuple[str, Usage]] = {
    "claude/first_json": ("first TURN-A", ONE),
    # Without a version and a count of its own, a total may be the session's: better no price than a wrong one.
    "claude/fork_json": ("forked", UNPRICED),
    "claude/resume_json": ("second TURN-B", UNPRICED),
    "claude/resume_after_sigkill": ("fifth after kill", UNPRICED),
    "claude/stdin_json": ("prompt from stdin", UNPRICED),
    "claude197/resume_json": ("second TURN-B", UNPRICED),
    # The session's third turn: its total is three times that.
    "claude/resume_stream": ("third TURN-C", ONE),
    # Two results: what was at work in the background is told to the model, which goes on.
    "claude/background_stream": ("STUB 5 messages; last: ", Usage(48, 21, 0.0004185, cache_read_tokens=15)),
    "claude/permission_denied_json": ("Permission to use Bash has been denied because ", TWO),
    "claude/structured_json": ('{"name":"Ada"}', ONE),
    "claude/tool_stream": ("</system-reminder>>", TWO),
    "claude197/first_json": ("first TURN-A", ONE),
    "claude197/stream": ("last user line: s", ONE),
}
# Those that failed: why, a piece of the message, whether the session goes on, what it cost.
FAILURES: dict[str, tuple[ErrorKind, str, bool, Usage]] = {
    "claude/error_400_json": (ErrorKind.INVALID_REQUEST, "400 stub says 400", True, FREE),
    "claude/error_401_json": (ErrorKind.AUTH, "401 stub says 401", True, FREE),
    "claude/error_429_json": (ErrorKind.RATE_LIMITED, "(429) · stub says 429", True, FREE),
    "claude/error_429_retry_after_2_stream": (ErrorKind.RATE_LIMITED, "(429) · stub says 429", True, FREE),
    "claude/error_500_json": (ErrorKind.TRANSIENT, "500 stub says 500", True, FREE),
    "claude/error_529_json": (ErrorKind.OVERLOADED, "529 stub says 529", True, FREE),
    "claude/error_529_stream": (ErrorKind.OVERLOADED, "529 stub says 529", True, FREE),
    "claude/error_refused_json": (ErrorKind.TRANSIENT, "Connection refused", True, FREE),
    "claude/usage_limit_stream": (ErrorKind.RATE_LIMITED, "You've hit your 5-hour limit · resets", True, FREE),
    # Its exit status is 0.
    "claude/killed_sigint": (ErrorKind.CRASHED, "ended with status 0 before its turn was over", False, NOTHING),
    "claude/killed_sigkill": (ErrorKind.CRASHED, "ended by SIGKILL before its turn was over", False, NOTHING),
    "claude/killed_sigterm": (ErrorKind.CRASHED, "ended with status 143 before its turn was over", False, NOTHING),
    "claude/max_budget_json": (
        ErrorKind.LIMIT_REACHED,
        "maximum budget ($0.0002)",
        True,
        Usage(16, 7, 0.000279, cache_read_tokens=5),
    ),
    "claude/max_turns_json": (ErrorKind.LIMIT_REACHED, "maximum number of turns (2)", True, TWO),
    "claude/resume_unknown_json": (ErrorKind.SESSION_LOST, "No conversation found with session ID", False, NOTHING),
    "claude/resume_unknown_stream": (ErrorKind.SESSION_LOST, "No conversation found", False, NOTHING),
    "claude/session_in_use": (ErrorKind.TRANSIENT, "is already in use", False, NOTHING),
    "claude197/error_429_json": (ErrorKind.RATE_LIMITED, "(429) · stub says 429", True, FREE),
    "claude197/resume_other_cwd": (ErrorKind.SESSION_LOST, "No conversation found", False, NOTHING),
}


def _replayed(path: str) -> Seen:
    return replay(PROGRAM.reader, *path.split("/"))


def test_every_recorded_turn_is_in_a_table() -> None:
    assert {f"{cli}/{name}" for cli in ("claude", "claude197") for name in names(cli)} == {*ANSWERS, *FAILURES}


@pytest.mark.parametrize("path", ANSWERS)
def test_an_answer(path: str) -> None:
    seen, (text, usage) = _replayed(path), ANSWERS[path]
    assert seen.answered is not None, seen.error
    assert seen.answered.text.endswith(text)
    used = seen.answered.usage
    assert (used.input_tokens, used.output_tokens) == (usage.input_tokens, usage.output_tokens)
    assert used.cost_usd == (None if usage.cost_usd is None else pytest.approx(usage.cost_usd))
    assert seen.reader.usage == used
    assert not seen.answered.is_total
    assert seen.reader.is_final
    assert seen.reader.session_id == json.loads(recorded(*path.split("/"))["stdout"].splitlines()[-1])["session_id"]


@pytest.mark.parametrize("path", FAILURES)
def test_a_failure(path: str) -> None:
    seen, (kind, message, goes_on, usage) = _replayed(path), FAILURES[path]
    assert seen.error is not None, seen.answered
    assert (seen.error.kind, seen.error.continues_session) == (kind, goes_on)
    assert message in seen.error.message
    assert seen.error.usage == usage
    assert (seen.reader.session_id is not None) == goes_on


def test_text_is_shown_as_it_comes_and_once() -> None:
    seen = _replayed("claude/resume_stream")
    assert [output.text for output in seen.outputs] == [
        "STUB: 5 messages, 3 from user",
        "; last user line: third TURN-C",
    ]
    assert seen.answered is not None and seen.streamed == seen.answered.text
    assert seen.outputs[0].usage == Usage(16, 1, model=MODEL, cache_read_tokens=5)


def test_the_model_is_that_of_the_main_agents_own_messages() -> None:
    answered = _replayed("claude/tool_stream").answered
    assert answered is not None and answered.usage.model == MODEL
    reader = PROGRAM.reader(AgentCall(folder=Path("/nowhere")))
    for agent, model in ((None, "large"), ("t", "small"), (None, "<synthetic>"), (None, ["x"])):
        reader.read({"type": "assistant", "parent_tool_use_id": agent, "message": {"id": "m", "model": model}})
    assert reader.usage.model == "large"


def test_without_pieces_whole_messages_are_shown() -> None:
    assert _replayed("claude197/stream").streamed == "STUB: 1 messages, 1 from user; last user line: s"


def test_tools_waits_and_denials_are_shown() -> None:
    assert _replayed("claude/tool_stream").others == [("tool", "Bash: echo RAN42")]
    limited = _replayed("claude/error_429_retry_after_2_stream")
    assert limited.others == [
        ("waiting", "rate limit, 2.0 s, try 1 of 2"),
        ("waiting", "rate limit, 2.1 s, try 2 of 2"),
    ]
    assert limited.error is not None and limited.error.retry_after == 2.077
    denied = _replayed("claude/permission_denied_json")
    assert denied.others == [("notice", "not allowed: Bash: touch denied.txt")]
    assert denied.answered is not None


def test_data_is_there_where_the_program_has_checked_it() -> None:
    seen = _replayed("claude/structured_json")
    assert seen.answered is not None and seen.answered.data == {"name": "Ada"}


def test_a_total_is_the_calls_own_in_old_versions_and_nobodys_turn_in_new_ones() -> None:
    assert recorded("claude", "resume_json")["stdout"].count('"total_cost_usd": 0.000279')
    assert recorded("claude197", "resume_json")["stdout"].count('"total_cost_usd": 0.0001395')
    for version, cost in (("2.1.197", 0.0001395), ("2.1.330", None), ("", None), ("x.y", None)):
        resumed = PROGRAM.reader(AgentCall(folder=Path("/nowhere"), resume=True))
        resumed.read({"type": "system", "subtype": "init", "claude_code_version": version})
        seen = read(resumed, recorded("claude197", "resume_json")["stdout"], ProcessEnd(0))
        assert seen.answered is not None and seen.answered.usage == Usage(16, 7, cost, cache_read_tokens=5), version


def test_the_first_result_is_not_the_last_word_while_something_works_in_the_background() -> None:
    reader = PROGRAM.reader(AgentCall(folder=Path("/nowhere")))
    finals: list[tuple[int, str]] = []
    lines = recorded("claude", "background_stream")["stdout"].splitlines()
    for number, line in enumerate(lines):
        event = json.loads(line)
        reader.read(event)
        if event["type"] == "result":
            finals.append((number, event["result"]))
            assert reader.is_final == (number == len(lines) - 1)
        else:
            assert not reader.is_final
    assert len(finals) == 2
    for status, is_answer in ((0, True), (-9, False), (143, False), (None, False)):
        reader = PROGRAM.reader(AgentCall(folder=Path("/nowhere")))
        seen = read(reader, "\n".join(lines[: finals[0][0] + 1]), ProcessEnd(status))
        assert (seen.answered is not None) == is_answer
        assert is_answer or (seen.error is not None and seen.error.continues_session)


def test_results_of_work_in_the_background_add_up() -> None:
    result = json.loads(recorded("claude", "tool_stream")["stdout"].splitlines()[-1])
    stdout = "\n".join(json.dumps({**result, "result": text}) for text in ("first", "last"))
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), stdout, ProcessEnd(0))
    assert seen.answered is not None
    assert (seen.answered.text, seen.answered.usage) == ("last", TWO + TWO)


@pytest.mark.parametrize("lines", [1, 2, 3, 6, 9])
def test_a_cut_turn_says_what_is_known_of_it(lines: int) -> None:
    stdout = "\n".join(recorded("claude", "resume_stream")["stdout"].splitlines()[:lines])
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"), resume=True)), stdout, ProcessEnd(-9))
    assert seen.error is not None and seen.error.kind is ErrorKind.CRASHED
    # Neither the announcement nor that a request is made shows that the session holds the prompt.
    assert seen.error.continues_session == (seen.reader.session_id is not None) == (lines > 2)
    begun, whole = Usage(16, 1, model=MODEL, cache_read_tokens=5), Usage(16, 7, model=MODEL, cache_read_tokens=5)
    assert seen.error.usage == {1: NOTHING, 2: NOTHING, 3: begun, 6: begun, 9: whole}[lines]
    assert seen.reader.last_whole == (None if lines < 7 else "444cc378-160a-4507-bfef-2c412d54c5c4")


API_ERROR: dict[str, Any] = {
    "type": "result",
    "subtype": "success",
    "is_error": True,
    "num_turns": 1,
    "session_id": "s",
}


@pytest.mark.parametrize(
    ("fields", "kind", "wait"),
    [
        ({"api_error_status": 503, "result": "API Error: 503"}, ErrorKind.OVERLOADED, None),
        ({"api_error_status": 404, "result": "no such model"}, ErrorKind.INVALID_REQUEST, None),
        ({"api_error_status": 403, "result": "no"}, ErrorKind.AUTH, None),
        ({"result": "Prompt is too long"}, ErrorKind.CONTEXT_OVERFLOW, None),
        ({"result": "...", "api_error": "max_output_tokens"}, ErrorKind.TRUNCATED, None),
        ({"result": "Claude AI usage limit reached|1795000060"}, ErrorKind.RATE_LIMITED, 60.0),
        ({"result": "You've hit your limit · resets 12pm (UTC)"}, ErrorKind.RATE_LIMITED, 3_260.0),
        ({"result": "This appears to violate our Usage Policy"}, ErrorKind.REFUSED, None),
        ({"result": "", "stop_reason": "refusal"}, ErrorKind.REFUSED, None),
        ({"result": "", "terminal_reason": "aborted_streaming"}, ErrorKind.CRASHED, None),
        ({"subtype": "error_max_structured_output_retries", "errors": ["no"]}, ErrorKind.INVALID_OUTPUT, None),
        ({"startup_failure_reason": "bypass_root", "errors": ["as root"]}, ErrorKind.INVALID_REQUEST, None),
        ({"startup_failure_reason": "session_held_by_background"}, ErrorKind.TRANSIENT, None),
        ({"is_error": "?"}, ErrorKind.TRANSIENT, None),
    ],
)
def test_kinds_that_no_recording_has(fields: dict[str, Any], kind: ErrorKind, wait: float | None) -> None:
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), json.dumps(API_ERROR | fields), ProcessEnd(1))
    assert seen.error is not None
    assert (seen.error.kind, seen.error.retry_after) == (kind, wait)


def test_a_cut_turn_counts_what_the_cache_keeps_for_an_hour() -> None:
    created = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 412}
    usage = {"input_tokens": 8, "cache_creation_input_tokens": 512, "cache_creation": created, "output_tokens": 7}
    begun = {"type": "message_start", "message": {"id": "m1", "model": "claude-sonnet-4-5", "usage": usage}}
    stdout = json.dumps({"type": "stream_event", "event": begun, "session_id": "s", "parent_tool_use_id": None})
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), stdout, ProcessEnd(-9))
    assert seen.error is not None
    used = seen.error.usage
    assert (used.input_tokens, used.cache_write_tokens, used.cache_write_1h_tokens) == (520, 512, 412)


@pytest.mark.parametrize("thought", [400, 501])
def test_reasoning_is_counted_within_the_output(thought: int) -> None:
    reader = PROGRAM.reader(AgentCall(folder=Path("/nowhere")))
    usage = {"input_tokens": 8, "output_tokens": 500, "output_tokens_details": {"thinking_tokens": thought}}
    begun = {"type": "message_start", "message": {"id": "m1", "model": "claude-sonnet-4-5", "usage": usage}}
    reader.read({"type": "stream_event", "event": begun, "session_id": "s", "parent_tool_use_id": None})
    assert reader.usage.reasoning_tokens == min(thought, 500)
    models = {"claude-sonnet-4-5": {"inputTokens": 9, "outputTokens": 600, "thinkingTokens": thought + 100}}
    reader.read({"type": "result", "subtype": "success", "num_turns": 1, "model_usage_since_last_result": models})
    assert (reader.usage.output_tokens, reader.usage.reasoning_tokens) == (600, min(thought + 100, 600))


@pytest.mark.parametrize(("said", "shown"), [("", "no words"), ("/exit isn't available", "/exit isn't available")])
def test_what_it_says_without_asking_its_model_is_no_answer(said: str, shown: str) -> None:
    result = API_ERROR | {"is_error": False, "num_turns": 0, "result": said, "usage": {}, "modelUsage": {}}
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), json.dumps(result), ProcessEnd(0))
    assert seen.error is not None
    assert (seen.error.kind, seen.error.continues_session) == (ErrorKind.INVALID_REQUEST, False)
    assert f"took the prompt for a command of its own and asked no model ({shown})" in seen.error.message


def test_a_usage_limit_ends_when_it_says() -> None:
    seen = _replayed("claude/usage_limit_stream")
    told = next(
        json.loads(line)["rate_limit_info"]["resetsAt"]
        for line in recorded("claude", "usage_limit_stream")["stdout"].splitlines()
        if "rate_limit_event" in line
    )
    assert seen.error is not None and seen.error.retry_after == told - NOW
    assert seen.others == [("waiting", "usage limit reached")]


def test_the_end_of_a_usage_limit_is_taken_from_where_it_stands_as_a_number() -> None:
    limit = {"type": "rate_limit_event", "rate_limit_info": {"status": "rejected", "resetsAt": int(NOW) + 90}}
    harmless = {"type": "rate_limit_event", "rate_limit_info": {"status": "allowed_warning", "resetsAt": 5}}
    result = API_ERROR | {"api_error": "usage_limit_reached", "api_error_status": 429, "result": "resets 3pm"}
    stdout = "\n".join(json.dumps(event) for event in (harmless, limit, result))
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), stdout, ProcessEnd(1))
    assert seen.error is not None
    assert (seen.error.kind, seen.error.retry_after) == (ErrorKind.RATE_LIMITED, 90.0)
    assert seen.others == [("waiting", "usage limit reached")]


def _limited(*infos: dict[str, Any], result: str = "You've hit your weekly limit") -> float | None:
    """The time to wait after these `rate_limit_info` of lines in this order."""
    told = [{"type": "rate_limit_event", "rate_limit_info": info} for info in infos]
    last = API_ERROR | {"api_error": "usage_limit_reached", "api_error_status": 429, "result": result}
    stdout = "\n".join(json.dumps(event) for event in (*told, last))
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), stdout, ProcessEnd(1))
    assert seen.error is not None
    return seen.error.retry_after


def _window(utilization: float, seconds: float) -> dict[str, float]:
    return {"utilization": utilization, "resetsAt": int(NOW) + seconds}


def _rejected(seconds: float = 60, **more: Any) -> dict[str, Any]:
    return {"status": "rejected", "resetsAt": int(NOW) + seconds, **more}


def test_the_exceeded_window_that_ends_last_is_waited_for() -> None:
    windows = {"five_hour": _window(1, 60), "seven_day": _window(1.2, 500_000), "seven_day_opus": _window(0.9, 600_000)}
    assert _limited(_rejected(unifiedWindows=windows)) == 500_000
    assert _limited(_rejected(unifiedWindows={"five_hour": _window(0.99, 90)})) == 60
    assert _limited(_rejected(unifiedWindows={"five_hour": {"utilization": 1}, "seven_day": None})) == 60
    assert _limited(_rejected(unifiedWindows={"seven_day": _window(1, 9 * 86_400)})) == 8 * 86_400


def test_the_last_line_about_limits_counts() -> None:
    assert _limited(_rejected(), _rejected(90)) == 90
    assert _limited(_rejected(90), _rejected()) == 60
    assert _limited(_rejected(90), {"status": "allowed"}) is None


def test_an_end_that_is_not_known_or_has_passed_is_read_from_the_words() -> None:
    words = "You've hit your weekly limit · resets 12pm (UTC)"
    assert _limited({"status": "rejected"}, result=words) == 3_260
    assert _limited(_rejected(-5), result=words) == 3_260
    assert _limited(_rejected(-5)) is None


def test_an_account_that_goes_on_beyond_its_limit_does_not_wait() -> None:
    over = _rejected(isUsingOverage=True)
    assert _limited(over) is None
    event = {"type": "rate_limit_event", "rate_limit_info": over}
    answer = API_ERROR | {"is_error": False, "result": "done", "num_turns": 1}
    seen = read(
        PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), "\n".join(map(json.dumps, (event, answer))), ProcessEnd(0)
    )
    assert (seen.error, seen.others) == (None, [])


def test_a_throttle_waits_for_the_server_not_for_the_limit() -> None:
    assert _limited(_rejected(), result="Server is temporarily limiting requests (not your usage limit)") is None


def test_what_a_subagent_says_is_no_answer_but_its_tools_are_seen() -> None:
    blocks = [
        {"type": "text", "text": "mumble"},
        {"type": "tool_use", "name": "Read", "input": {"file_path": "a\n\x1bb"}},
    ]
    usage = {"input_tokens": 3, "output_tokens": 2}
    message = {"type": "assistant", "parent_tool_use_id": "t", "uuid": "u", "message": {"id": "m", "content": blocks}}
    message["message"] |= {"usage": usage}  # type: ignore[operator]
    reader = PROGRAM.reader(AgentCall(folder=Path("/nowhere")))
    seen = read(reader, json.dumps(message), ProcessEnd(-9))
    assert [(output.kind, output.text) for output in seen.outputs] == [("tool", "Read: a \\x1bb")]
    assert (reader.usage, reader.last_whole) == (Usage(3, 2), None)


def test_a_key_in_a_message_is_not_repeated() -> None:
    result = API_ERROR | {"api_error_status": 401, "result": "API Error: 401 bad key sk-ant-api03-abcdefgh"}
    seen = read(PROGRAM.reader(AgentCall(folder=Path("/nowhere"))), json.dumps(result), ProcessEnd(1))
    assert seen.error is not None and seen.error.message == "Claude Code: API Error: 401 bad key ***"


def test_the_questions_of_claude_code_itself_are_asked_in_their_own_words() -> None:
    def asked(*questions: JsonValue) -> Question:
        return question_of({"name": "AskUserQuestion", "input": {"questions": list(questions)}})

    fruit: JsonValue = {"question": "Which fruit?", "options": [{"label": "Pear"}, {"label": "Plum"}]}
    line = {"type": "string", "minLength": 1}
    assert asked(fruit) == Question("Which fruit? (Pear, Plum)", line)
    assert asked(fruit, {"question": "How many?"}) == Question(
        "Which fruit? (Pear, Plum) How many?",
        {
            "type": "object",
            "properties": {"Which fruit?": line, "How many?": line},
            "additionalProperties": False,
            "required": ["Which fruit?", "How many?"],
        },
    )


def test_a_tool_is_allowed_in_sight_of_its_whole_input() -> None:
    question = question_of({"name": "Bash", "input": {"command": "rm -r x"}})
    assert question.text.startswith(
        'Claude Code asks to use Bash with {"command": "rm -r x"}. Answer "allow", "deny" or'
    )
