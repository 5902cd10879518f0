"""A turn that an agent calls successful, without a whole answer in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plait.backends import ClaudeCodeBackend, CodexBackend, ConversationRequest
from plait.backends.agents.cli_agent import AgentBackend
from plait.backends.backend_protocol import Files, Reply
from plait.errors import BackendError, ErrorKind
from tests.support.agents.homes import send

SESSION = "00000000-0000-4000-8000-000000000002"
SAYS = {"type": "text", "text": "The answer is 4."}
USES = {"type": "tool_use", "id": "t", "name": "Read", "input": {}}
RETURNS = {"type": "user", "session_id": SESSION, "message": {"content": [{"type": "tool_result", "tool_use_id": "t"}]}}


def _said(*blocks: dict[str, Any], request: str = "m") -> dict[str, Any]:
    return {"type": "assistant", "session_id": SESSION, "message": {"id": request, "content": list(blocks)}}


def _result(text: str = "", **fields: Any) -> dict[str, Any]:
    return {"type": "result", "subtype": "success", "is_error": False, "num_turns": 1, "result": text,
            "session_id": SESSION, "usage": {"input_tokens": 9, "output_tokens": 5}, **fields}  # fmt: skip


def _item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "item.completed", "item": {"type": kind, **fields}}


THREAD = {"type": "thread.started", "thread_id": SESSION}
COMMAND = _item("command_execution", id="i", command="ls")
USED = {"type": "turn.completed", "usage": {"input_tokens": 9, "output_tokens": 5}}
STREAMED = [
    {"type": "stream_event", "session_id": SESSION, "event": event}
    for event in (
        {"type": "message_start", "message": {"id": "m"}},
        {"type": "content_block_delta", "delta": {"text": "Four."}},
    )
]
AGENTS = {"claude": ClaudeCodeBackend, "codex": CodexBackend}
K = ErrorKind
TURNS: dict[str, tuple[list[dict[str, Any]], str | ErrorKind]] = {
    "claude: the text is in the message alone": ([_said(SAYS), _result()], "The answer is 4."),
    "claude: a tool is called behind the text": ([_said(SAYS, USES), _result()], "The answer is 4."),
    "claude: a blank result": ([_said(SAYS), _result(" \n")], "The answer is 4."),
    "claude: the text is in the stream alone": ([*STREAMED, _result()], "Four."),
    "claude: no result at all": ([_said(SAYS), {**_result(), "result": None}], "The answer is 4."),
    "claude: no text": ([_said(USES), _result()], K.INVALID_OUTPUT),
    "claude: nothing but a result": ([_result()], K.INVALID_OUTPUT),
    "claude: text before a tool": ([_said(SAYS, USES), RETURNS, _result()], K.INVALID_OUTPUT),
    "claude: text before an empty message": (
        [_said(SAYS, USES), RETURNS, _said(request="n"), _result()],
        K.INVALID_OUTPUT,
    ),
    "claude: nothing but thoughts": ([_result("<think>4 is it.</think>")], K.INVALID_OUTPUT),
    "claude: thoughts before the text": ([_result("<think>Is it 4?</think>\n\nIt is 4.")], "It is 4."),
    "claude: a full answer": ([_said(SAYS), _result("The answer", stop_reason="max_tokens")], K.TRUNCATED),
    "claude: a full context": ([_result("The", stop_reason="model_context_window_exceeded")], K.TRUNCATED),
    "claude: a refusal": ([_result("I ", stop_reason="refusal")], K.REFUSED),
    "claude: its own tool for data": ([_result("{}", stop_reason="tool_use", structured_output={})], "{}"),
    "codex: no message": ([THREAD, COMMAND, USED], K.INVALID_OUTPUT),
    "codex: a blank message": ([THREAD, _item("agent_message", text=" "), USED], K.INVALID_OUTPUT),
    "codex: a blank last message": (
        [THREAD, _item("agent_message", text="I look."), _item("agent_message", text=""), USED],
        K.INVALID_OUTPUT,
    ),
    "codex: text before a tool": ([THREAD, _item("agent_message", text="I look."), COMMAND, USED], K.INVALID_OUTPUT),
    "codex: a tool that ends behind the text": (
        [THREAD, {"type": "item.started", "item": COMMAND["item"]}, _item("agent_message", text="4"), COMMAND, USED],
        "4",
    ),
    "codex: a list of things to do behind the text": (
        [THREAD, _item("agent_message", text="4"), _item("todo_list", id="l"), USED],
        "4",
    ),
    "codex: thoughts before the text": ([THREAD, _item("agent_message", text="<think>?</think>4"), USED], "4"),
}  # fmt: skip


def _agent(folder: Path, name: str, events: list[dict[str, Any]]) -> AgentBackend:
    command = folder / name
    told = "\n".join(map(json.dumps, events))
    command.write_text(f"#!/bin/sh\ncat >/dev/null\ncat <<'END'\n{told}\nEND\n")
    command.chmod(0o755)
    return AGENTS[name](command=str(command), cwd=folder)


@pytest.mark.parametrize("turn", TURNS)
async def test_a_turn_is_completed_by_the_text_of_its_last_message_alone(turn: str, tmp_path: Path) -> None:
    events, right = TURNS[turn]
    backend = _agent(tmp_path, turn.partition(":")[0], events)
    try:
        reply: Reply | BackendError = await send(backend, "What is it?", session_id=backend.new_session_id())
    except BackendError as error:
        reply = error
    if isinstance(right, ErrorKind):
        assert isinstance(reply, BackendError), reply
        assert reply.kind is right
        assert "\n" not in reply.message
    else:
        assert isinstance(reply, Reply), reply
        assert reply.text == reply.messages[-1].content == right


async def test_thoughts_are_kept_apart_from_the_answer(tmp_path: Path) -> None:
    reply = await send(_agent(tmp_path, "claude", [_result("<think>Is it 4?</think>It is 4.")]), "What is it?")
    assert (reply.text, reply.messages[-1].content, reply.messages[-1].thoughts) == ("It is 4.", "It is 4.", "Is it 4?")


@pytest.mark.parametrize("name", AGENTS)
async def test_an_empty_turn_is_paid_for_once_and_gone_on_with(name: str, tmp_path: Path) -> None:
    events, _ = TURNS[f"{name}: text before a tool"]
    files = Files(tmp_path / "turn" / "1", tmp_path / "sessions")
    with pytest.raises(BackendError) as caught:
        await send(_agent(tmp_path, name, events), "What is it?", files=files)
    assert (caught.value.usage.input_tokens, caught.value.usage.output_tokens) == (9, 5)
    assert caught.value.continues_session
    again = ConversationRequest(
        session_id=SESSION, resume=True, resumes_interrupted=True, files=Files(tmp_path / "turn" / "2", files.sessions)
    )
    whole = {"claude": [_result("4")], "codex": [THREAD, _item("agent_message", text="4"), USED]}
    async with _agent(tmp_path, name, whole[name]).open(again) as conversation:
        reply = await conversation.send("Go on.")
    assert reply.text == "4"
    # Codex counts the session as a whole, of which this turn has added nothing; the cut turn is counted already.
    assert reply.usage.input_tokens == (0 if name == "codex" else 9)
