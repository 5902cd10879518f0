"""The model server that stands in for all models: each protocol whole and streamed, its words, its log."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.real_agents.stub import Stub
from tests.real_agents.world import until

Json = dict[str, Any]
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}


def anthropic(prompt: str, streams: bool = False) -> tuple[str, Json]:
    tools = [{"name": "Bash", "input_schema": SHELL}]
    said = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    return "/v1/messages?beta=true", {"model": "m", "messages": said, "stream": streams, "tools": tools}


def responses(prompt: str, streams: bool = False) -> tuple[str, Json]:
    said = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": prompt}]}]
    tools = [{"type": "function", "name": "shell", "parameters": SHELL}]
    return "/v1/responses", {"model": "m", "input": said, "stream": streams, "tools": tools}


def chat(prompt: str, streams: bool = False) -> tuple[str, Json]:
    tools = [{"type": "function", "function": {"name": "bash", "parameters": SHELL}}]
    said = [{"role": "user", "content": prompt}]
    return "/v1/chat/completions", {"model": "m", "messages": said, "stream": streams, "tools": tools}


def gemini(prompt: str, streams: bool = False) -> tuple[str, Json]:
    method = "streamGenerateContent?alt=sse" if streams else "generateContent"
    tools = [{"functionDeclarations": [{"name": "run_shell_command", "parametersJsonSchema": SHELL}]}]
    said = [{"role": "user", "parts": [{"text": prompt}]}]
    return f"/v1beta/models/m:{method}", {"contents": said, "tools": tools}


PROTOCOLS = [anthropic, responses, chat, gemini]
Protocol = Callable[..., tuple[str, Json]]


def post(stub: Stub, path: str, body: Json) -> httpx.Response:
    return httpx.post(stub.url + path, json=body, timeout=20)


def events(answer: httpx.Response) -> list[Json]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def values(data: Any, *names: str) -> Iterator[Any]:
    """What stands under any of those names, anywhere."""
    if isinstance(data, dict):
        for name, value in data.items():
            if name in names and isinstance(value, str | int):
                yield value
            yield from values(value, *names)
    elif isinstance(data, list):
        for value in data:
            yield from values(value, *names)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_answer_whole_and_streamed(stub: Stub, protocol: Protocol):
    whole = post(stub, *protocol("hi [[say one two three]]")).json()
    assert "one two three" in values(whole, "text", "content")
    streamed = events(post(stub, *protocol("hi [[say one two three]]", streams=True)))
    pieces = [one for one in streamed if "delta" in str(one.get("type", "delta"))]
    assert "".join(str(text) for text in values(pieces, "text", "delta", "content")) == "one two three"
    counted = ("input_tokens", "prompt_tokens", "promptTokenCount")
    assert list(values(whole, *counted)) == list(values(streamed[-1:] + streamed[:1], *counted))[:1] == [11]
    assert [one.usage for one in stub.requests()] == [{"input": 11, "output": 7, "cached": 5}] * 2


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_shell_tool_under_its_own_name(stub: Stub, protocol: Protocol):
    for streams in (False, True):
        answer = post(stub, *protocol("hi [[tool echo RAN42]]", streams=streams))
        assert "echo RAN42" in answer.text.replace('\\"}', "").replace("\\", "")
        assert stub.requests()[-1].tools[0] in answer.text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_error_the_first_time_only(stub: Stub, protocol: Protocol):
    first, second = (post(stub, *protocol("hi [[error 429 retry-after 2 once]]", streams=True)) for _ in range(2))
    assert (first.status_code, first.headers["retry-after"], second.status_code) == (429, "2", 200)
    assert [one.status for one in stub.requests()] == [429, 200]


def test_tools_come_first_and_then_the_answer(stub: Stub):
    path, body = anthropic('[[tool-named Read {"file": "]]"}]] [[tool pwd]] [[say done]]')
    for expected in ({"name": "Read", "input": {"file": "]]"}}, {"name": "Bash", "input": {"command": "pwd"}}):
        answer = post(stub, path, body).json()["content"]
        assert expected.items() <= answer[0].items()
        result = {"type": "tool_result", "tool_use_id": answer[0]["id"], "content": "fine"}
        body["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": [result]}]
    assert post(stub, path, body).json()["content"][0]["text"] == "done"
    assert [role for role, _ in stub.requests()[-1].said] == ["user", "assistant", "tool", "assistant", "tool"]


def test_what_agents_add_is_not_what_the_user_said(stub: Stub):
    path, body = anthropic("<system-reminder>\n[[error 500]]\n</system-reminder>\nhi")
    assert post(stub, path, body).json()["content"][0]["text"] == "STUB: 1 messages, 1 from user; last user line: hi"
    assert stub.requests()[-1].prompts == ["hi"]


def test_a_client_that_leaves_is_noticed(stub: Stub):
    path, body = responses("bye [[until /dev/null/never]]", streams=True)
    with httpx.stream("POST", stub.url + path, json=body, timeout=20) as answer:
        pieces = answer.iter_raw()  # kept: the stream ends with it
        assert b"STUB" in next(pieces) + next(pieces) + next(pieces) + next(pieces)
        assert stub.requests()[-1].status is None
    until(lambda: stub.requests()[-1].gone, "the client's leaving in the log")
    assert stub.requests()[-1].usage is None


def test_a_connection_that_breaks(stub: Stub):
    with pytest.raises(httpx.RemoteProtocolError):
        post(stub, *anthropic("bye [[break]]", streams=True))


def test_a_request_that_is_being_written_down_is_not_there_yet(stub: Stub):
    post(stub, *chat("One."))
    line = stub.log.read_bytes().splitlines()[0]
    with stub.log.open("ab") as log:
        log.write(line[: len(line) // 2])
    assert [one.prompts for one in stub.requests()] == [["One."]]
