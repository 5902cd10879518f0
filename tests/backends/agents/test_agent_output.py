"""Lines of an agent's output, as real terminals and runtimes decorate them."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task, TaskStatus, events
from plait.backends import AcpBackend, ClaudeCodeBackend, CodexBackend, ConversationRequest, Output
from plait.backends.agents import acp_agent, cli_agent
from plait.backends.agents.agent_output import TurnWatch, outputs_of, place_output, read_line
from plait.backends.agents.cli_agent import AgentBackend
from plait.backends.backend_protocol import Files, Reply
from plait.errors import BackendError, ErrorKind
from tests.support.agents.recorded import ROOT, recorded
from tests.support.linear import check_linear

K = ErrorKind
EVENT = {"type": "result", "result": 'a "quoted" {word}, \x1b[0m, ünïcode \u009b', "is_error": False}
BEFORE = {
    "a title": "\x1b]0;agent: ready\x07",
    "a title with another end": "\x1b]2;agent\x1b\\",
    "a title that holds JSON": '\x1b]0;{"type": "x"}\x07',
    "progress": "\x1b]9;4;3;\x1b\\",
    "a text for the terminal": "\x1bPq#0\x1b\\",
    "bracketed paste": "\x1b[?2004h",
    "a hidden cursor and a colour": "\x1b[?25l\x1b[1;31m",
    "a reset": "\x1bc\x1b(B",
    "a bell": "\x07",
    "a byte order mark": "\ufeff",
    "carriage returns": "\r\r",
    "backspaces": "\b\b\b",
    "a null": "\0",
    "an erased line": "Loading the settings\x1b[2K\x1b[1G",
    "an overwritten line": "Loading the settings\r",
    "a spinner": "⠋ Thinking",
    "a spinner and time": "✻ Working… (3s · esc to interrupt) ",
    "a plain spinner": "| ",
    "words of progress": "Starting MCP servers...",
    "a coloured spinner": "\x1b[33m⠙\x1b[0m loading ",
}
AFTER = ["", "\r", "\x07", "\x1b[0m", "\x1b]0;done\x07", "\ufeff", " ⠙ Waiting", "\x1b[?2004l\r", "Done in 3 s"]


@pytest.mark.parametrize("before", BEFORE.values(), ids=BEFORE)
def test_an_event_is_read_with_what_a_terminal_would_not_show_around_it(before: str) -> None:
    for after in AFTER:
        for said in (json.dumps(EVENT), json.dumps(EVENT, ensure_ascii=False)):
            line = read_line(f"{before}{said}{after}".encode())
            assert line.events == [EVENT], (before, after)
            assert line.words == ""


@pytest.mark.parametrize("before", [b"\x1b]0;agent ", b"\xff\xfe", b"\xe2\xa0 "])
def test_an_event_is_read_behind_a_piece_of_a_code_or_of_a_character(before: bytes) -> None:
    assert read_line(before + json.dumps(EVENT).encode()).events == [EVENT]


@pytest.mark.parametrize("code", ["\x1b]0;x\x07", "\x1b[0m", "\r", "\x07", "\x1b[2K"])
def test_a_code_inside_of_an_event_is_no_part_of_it(code: str) -> None:
    said = json.dumps({"type": "x", "text": "Hello world"})
    for at in range(len(said)):
        assert read_line(f"{said[:at]}{code}{said[at:]}".encode()).events == [{"type": "x", "text": "Hello world"}], at


def test_two_events_in_a_line_are_both_read() -> None:
    one, two = {"type": "a"}, {"type": "b", "x": {"y": [{}]}}
    for between in ("", " ", "\r", "\x1b]0;x\x07", "⠋ Thinking\r"):
        assert read_line(f"{json.dumps(one)}{between}{json.dumps(two)}".encode()).events == [one, two]


@pytest.mark.parametrize("cli", sorted(path.name for path in ROOT.iterdir() if path.is_dir()))
def test_recorded_events_are_read_as_they_are(cli: str) -> None:
    for path in (ROOT / cli).glob("*.json"):
        turn = recorded(cli, path.stem)
        for said in str(turn.get("stdout", "")).splitlines():
            try:
                event: Any = json.loads(said)
            except ValueError:
                continue
            if isinstance(event, dict):
                for before, after in (("", ""), ("\x1b]0;x\x07", "\x1b[0m"), ("⠋ Thinking\r", "\r")):
                    assert read_line(f"{before}{said}{after}".encode()).events == [event]


@pytest.mark.parametrize(
    "said",
    [
        'DEBUG received: {"jsonrpc": "2.0", "id": 3, "method": "session/prompt"}',
        '[debug] {"type": "result", "result": "no"}',
        '\x1b[32m[DEBUG]\x1b[0m {"type": "result", "result": "no"}',
        '-> {"jsonrpc": "2.0", "id": 3}',
        '→ {"jsonrpc": "2.0", "id": 3}',
        '> {"type": "result"}',
        '2026-11-27T10:00:00Z INFO acp: {"type": "result"}',
        '{"type": "result", "result": "cut he',
        '"type": "result"}',
    ],
)
def test_a_line_that_quotes_an_event_is_none_but_it_is_told(said: str) -> None:
    line = read_line(said.encode())
    assert line.events == ()
    (output,) = outputs_of(line, lambda _: pytest.fail("read"))
    assert output.kind == "notice"
    assert output.text.startswith("not read, though it looks like an event: ")
    assert output.text.isprintable()
    assert len(output.text) <= 140


@pytest.mark.parametrize("said", ["", "\r", "\x1b[0m", "Hello.", "{Hello}", "[1, 2]", "\x1b]0;title\x07"])
def test_a_line_of_words_is_neither(said: str) -> None:
    line = read_line(said.encode())
    assert line.events == ()
    assert outputs_of(line, lambda _: pytest.fail("read")) == []
    assert "\x1b" not in line.words


def test_a_number_that_nobody_can_count_with_costs_no_event() -> None:
    said = f'{{"type": "result", "a": NaN, "b": -Infinity, "c": 1e999, "d": {"9" * 5000}, "e": [NaN, 1]}}'
    assert read_line(said.encode()).events == [
        {"type": "result", "a": None, "b": None, "c": None, "d": None, "e": [None, 1]}
    ]


@pytest.mark.parametrize(
    "piece", ['{"a":', '{"a":1}', "\x1b]0;", "\x9d", "\x1b", "\x1b[", "w...", "⠋", "\r", '\x1b]{"', "\\", "\ufeff"]
)
def test_a_long_line_is_read_in_time(piece: str) -> None:
    """No pattern may be quadratic: a line has up to eight megabytes."""
    for start in ("", "{", "⠋ "):
        check_linear(lambda text: read_line((start + text).encode()), piece, 8000)  # noqa: B023 - called at once


def _command(folder: Path, said: str, status: int = 0) -> str:
    """A command that prints `said`, whatever it is asked."""
    (folder / "said").write_text(said)
    command = folder / "agent"
    command.write_text(f"#!/bin/sh\ncat > /dev/null &\ncat '{folder / 'said'}'\nwait\nexit {status}\n")
    command.chmod(0o755)
    return str(command)


async def _send(backend: AgentBackend, outputs: list[Output] | None = None, files: Files | None = None) -> Reply:
    seen: list[Output] = [] if outputs is None else outputs
    request = ConversationRequest(session_id=backend.new_session_id(), on_output=seen.append, files=files)
    with anyio.fail_after(60):
        async with backend.open(request) as conversation:
            return await conversation.send("Say hello.")


def _claude(text: str, **fields: Any) -> list[dict[str, Any]]:
    said = {"id": "m", "model": "x", "content": [{"type": "text", "text": text}]}
    return [
        {"type": "system", "subtype": "init", "session_id": "s"},
        {"type": "assistant", "session_id": "s", "uuid": "u", "message": said},
        {"type": "result", "subtype": "success", "is_error": False, "num_turns": 1, "result": text, **fields},
    ]


def _codex(text: str) -> list[dict[str, Any]]:
    return [
        {"type": "thread.started", "thread_id": "00000000-0000-4000-8000-000000000002"},
        {"type": "item.completed", "item": {"id": "i", "type": "agent_message", "text": text}},
        {"type": "turn.completed", "usage": {"input_tokens": 9, "output_tokens": 9}},
    ]


AGENTS = {
    "claude": (lambda command: ClaudeCodeBackend(command=command), _claude),
    "codex": (lambda command: CodexBackend(command=command), _codex),
}


@pytest.mark.parametrize("agent", AGENTS)
async def test_a_turn_is_read_through_the_codes_of_a_terminal(agent: str, tmp_path: Path) -> None:
    make, events = AGENTS[agent]
    lines = [f"\x1b]0;{agent}\x07⠋ Thinking\r{json.dumps(event)}\x1b[0m\r" for event in events("Hello world")]
    files = Files(tmp_path / "turn", tmp_path / "sessions")
    seen: list[Output] = []
    reply = await _send(make(_command(tmp_path, "\n".join([*lines, "", '{"type": "cut']))), seen, files)
    assert reply.text == "Hello world"
    watch = TurnWatch(files.turn)
    watch.peek()
    watch.finish()
    shown = [watch.take().output for _ in iter(watch.peek, None)]
    watch.close()
    assert [(one.kind, one.text) for one in shown] == [(one.kind, one.text) for one in seen]
    assert [one.text for one in seen if one.kind == "text"] == ["Hello world"]
    assert [one.kind for one in seen if "looks like an event" in one.text] == ["notice"]


def test_the_output_of_a_turn_on_another_host_is_shown_as_it_was_sent(tmp_path: Path) -> None:
    for text in ["Hello ", "world"]:
        place_output(tmp_path / "turn", Output("text", text), begins=text == "Hello ")
    watch = TurnWatch(tmp_path / "turn")
    shown = [watch.take().output for _ in iter(watch.peek, None)]
    watch.close()
    assert shown == [Output("text", "Hello "), Output("text", "world")]


ACP_AGENT = """#!{python}
import json, sys
NOISE = {noise!r}
def tell(**message):
    print(NOISE + json.dumps(dict(message, jsonrpc="2.0")) + NOISE, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["method"] == "initialize":
        tell(id=asked["id"], result=dict(protocolVersion=1, agentCapabilities=dict()))
    elif asked["method"] == "session/new":
        tell(id=asked["id"], result=dict(sessionId="s"))
    else:
        for text in ("Hello ", "world"):
            update = dict(sessionUpdate="agent_message_chunk", content=dict(type="text", text=text))
            tell(method="session/update", params=dict(sessionId="s", update=update))
        tell(id=asked["id"], result=dict(stopReason="end_turn"))
"""


def _acp(folder: Path, source: str) -> AcpBackend:
    command = folder / "acp-agent"
    command.write_text(source)
    command.chmod(0o755)
    return AcpBackend(command=[str(command)], idle_timeout=10)


@pytest.mark.parametrize("noise", ["\x1b]0;agent: ready\x07", "\x1b[?2004h", "\ufeff", "\r", "⠋ Thinking\r"])
async def test_an_agent_that_speaks_acp_is_understood_through_the_codes_of_a_terminal(
    noise: str, tmp_path: Path
) -> None:
    reply = await _send(_acp(tmp_path, ACP_AGENT.format(python=sys.executable, noise=noise)))
    assert reply.text == "Hello world"


CANCELLED_ACP_AGENT = """#!{python}
import json, sys
NOISE = {noise!r}
def tell(**message):
    print(NOISE + json.dumps(dict(message, jsonrpc="2.0")) + NOISE, flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        tell(id=asked["id"], result=dict(protocolVersion=1, agentCapabilities=dict()))
    elif asked.get("method") == "session/new":
        tell(id=asked["id"], result=dict(sessionId="s"))
    elif asked.get("method") == "session/prompt":
        prompt = asked["id"]
        tell(method="session/update", params=dict(sessionId="s", update=dict(sessionUpdate="agent_message_chunk",
             content=dict(type="text", text="begun"))))
    elif asked.get("method") == "session/cancel":
        option = dict(optionId="yes", name="Yes", kind="allow_once")
        tell(id="p", method="session/request_permission", params=dict(sessionId="s", options=[option], toolCall=dict(
             toolCallId="t", title="rm x", kind="execute", rawInput=dict())))
    elif asked["result"]["outcome"]["outcome"] == "cancelled":
        tell(id=prompt, result=dict(stopReason="cancelled"))
"""


@pytest.mark.parametrize("noise", ["", "\x1b]0;agent: ready\x07", "⠋ Thinking\r"])
async def test_the_answer_that_ends_a_cancelled_turn_is_understood_through_the_codes_of_a_terminal(
    noise: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the agent asks for meanwhile is refused."""
    monkeypatch.setattr(acp_agent, "_CANCEL", 600.0)
    monkeypatch.setattr(acp_agent, "LAST_WORD", 0.1)
    backend = replace(
        _acp(tmp_path, CANCELLED_ACP_AGENT.format(python=sys.executable, noise=noise)), permissions="allow"
    )
    async with ParallelRunner(backend, cancel_grace=600).start(DAG([Task("a", prompt="Work.")])) as run:
        async for event in run.events():
            if isinstance(event, events.TaskOutput) and event.text == "begun":
                run.cancel()
                break
        with anyio.fail_after(60):
            result = await run.result()
    assert (result.status, result["a"].status) == (RunStatus.CANCELLED, TaskStatus.CANCELLED)


async def test_an_agent_that_waits_for_a_login_is_not_tried_again(tmp_path: Path) -> None:
    errors: dict[str, BackendError] = {}

    async def fail(words: str) -> None:
        with pytest.raises(BackendError) as caught:  # it has to say its words within the limit
            await _send(ClaudeCodeBackend(command=_saying(tmp_path / words[:4], words), idle_timeout=3))
        errors[words] = caught.value

    kinds = {"Please log in: https://a.example/login": K.AUTH, "Loading the model": K.TIMEOUT}
    async with anyio.create_task_group() as group:
        for words in kinds:
            group.start_soon(fail, words)
    assert {words: error.kind for words, error in errors.items()} == kinds
    for words, error in errors.items():
        assert error.message == f"no output for 3 s (idle_timeout); the last line of its output: {words}"


def _saying(command: Path, words: str) -> str:
    command.write_text(f"#!/bin/sh\necho '{words}'\nexec sleep 60\n")
    command.chmod(0o755)
    return str(command)


REASONS = {
    "Invalid API key · Please run /login": ErrorKind.AUTH,
    "\x1b[31mCredit balance is too low\x1b[0m": ErrorKind.NO_CREDIT,
    "OAuth token has expired. Please obtain a new token.": ErrorKind.AUTH,
    "Claude AI usage limit reached|1795000000": ErrorKind.RATE_LIMITED,
    'API Error: 529 {"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}': ErrorKind.OVERLOADED,
    "API Error: 401 Invalid authentication credentials": ErrorKind.AUTH,
    "Prompt is too long": ErrorKind.CONTEXT_OVERFLOW,
    '{"error": {"message": "Incorrect API key provided"}}': ErrorKind.AUTH,
    '{"type": "error", "message": "Not logged in"}': ErrorKind.AUTH,
    "The configuration is of another planet": ErrorKind.CRASHED,
}


@pytest.mark.parametrize("agent", [*AGENTS, "acp"])
@pytest.mark.parametrize("reason", REASONS)
async def test_a_reason_on_standard_output_is_read(agent: str, reason: str, tmp_path: Path) -> None:
    command = _command(tmp_path, f"Welcome.\n{reason}\nHave a nice day.\n" if "planet" not in reason else reason, 1)
    if agent == "acp":
        (tmp_path / "agent").write_text(f"#!/bin/sh\nread x\ncat '{tmp_path / 'said'}'\nexit 1\n")
        backend: AgentBackend = AcpBackend(command=[command])
    else:
        backend = AGENTS[agent][0](command)
    with pytest.raises(BackendError) as caught:
        await _send(backend)
    assert caught.value.kind is REASONS[reason]
    words = read_line(reason.encode()).words
    assert words[:30] in caught.value.message
    assert math.isfinite(caught.value.retry_after or 0)


async def test_an_agent_that_goes_on_printing_after_its_last_event_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_agent, "LAST_WORD", 0.5)
    (tmp_path / "said").write_text("".join(f"{json.dumps(event)}\n" for event in _claude("Hello world")))
    command = tmp_path / "agent"
    chatter = "while true; do echo 'still cleaning up'; sleep 0.05; done"
    command.write_text(f"#!/bin/sh\ncat > /dev/null &\ncat '{tmp_path / 'said'}'\n{chatter}\n")
    command.chmod(0o755)
    with anyio.fail_after(60):
        assert (await _send(ClaudeCodeBackend(command=str(command)))).text == "Hello world"


ASKING_ACP_AGENT = """#!{python}
import json, sys, threading, time
def tell(**message):
    print(json.dumps(dict(message, jsonrpc="2.0")), flush=True)
def ask_on_and_on():
    tool = dict(toolCallId="t", title="rm x", kind="execute", rawInput=dict())
    options = [dict(optionId="yes", name="Yes", kind="allow_once"), dict(optionId="no", name="No", kind="reject_once")]
    for number in range(1000):
        params = dict(sessionId="s", toolCall=tool, options=options)
        tell(id=f"p-{{number}}", method="session/request_permission", params=params)
        time.sleep(0.05)
for line in sys.stdin:
    asked = json.loads(line)
    if asked.get("method") == "initialize":
        tell(id=asked["id"], result=dict(protocolVersion=1, agentCapabilities=dict(loadSession=True)))
    elif asked.get("method") == "session/new":
        tell(id=asked["id"], result=dict(sessionId="s"))
    elif asked.get("method") == "session/prompt":
        threading.Thread(target=ask_on_and_on, daemon=True).start()
"""


async def test_an_agent_that_asks_for_permission_again_and_again_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not heed the cancellation that follows the first request."""
    monkeypatch.setattr(acp_agent, "_STOP", 0.5)
    backend = replace(_acp(tmp_path, ASKING_ACP_AGENT.format(python=sys.executable)), permissions="ask")
    with anyio.fail_after(60):
        reply = await _send(backend)
    assert reply.question is not None
