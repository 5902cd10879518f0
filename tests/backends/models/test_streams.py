"""Streams of real servers: which text belongs to the answer, what is noise, and what comes after the end."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import pytest

from plait.backends import AnthropicBackend, ConversationRequest, OpenAIBackend, Output, Usage
from plait.errors import BackendError, ErrorKind
from tests.support.remotes import dialect, make
from tests.support.wire import Answer, ChatCompletions, Dialect, Exchange, Messages, events, plain, serve

__all__ = ["dialect"]
CHAT, MESSAGES = ChatCompletions(), Messages()
K = ErrorKind
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}


async def say(wire: Dialect, *answers: Answer, seen: list[Output] | None = None):
    async with serve(*answers) as server, make(wire, server.url) as backend:
        request = ConversationRequest(on_output=(seen if seen is not None else list[Output]()).append)
        async with backend.open(request) as conversation:
            return await conversation.send("Hello.")


async def failure(wire: Dialect, *answers: Answer) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await say(wire, *answers)
    return caught.value


def sse(value: Any) -> str:
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def piece(text: str | None, **more: Any) -> str:
    return CHAT.chunk({"delta": {"content": text}, **more})


def message(text: str, **more: Any) -> dict[str, Any]:
    return {"index": 0, "message": {"role": "assistant", "content": text}, **more}


STOP = CHAT.chunk({"delta": {}, "finish_reason": "stop"})
WHOLE = {"object": "chat.completion", "choices": [message("Hello world", finish_reason="stop")], "usage": USAGE}


@pytest.mark.parametrize(
    "parts",
    [
        [piece("Hello "), piece("world"), sse(WHOLE)],
        [piece("<think>x</think>Hello "), piece("world"), sse(WHOLE)],
        [piece("Hello "), piece("world"), sse({"choices": [message("Hello world")]}), STOP],
        [sse(WHOLE)],
        [sse({"choices": [message("Hello ")]}), sse({"choices": [message("Hello world")]}), STOP],
        [sse({"choices": [message("Hello ")]}), sse({"choices": [message("world")]}), STOP],
        [
            sse({"choices": [{"delta": {"content": "Hello "}, **message("Hello ")}]}),
            sse({"choices": [{"delta": {"content": "world"}, **message("Hello world")}]}),
            sse({"choices": [{"delta": {"content": ""}, **message("Hello world"), "finish_reason": "stop"}]}),
        ],
        [piece("Hello world"), sse({"choices": [message("")]}), STOP],
        [
            piece("Hello "),
            piece("world"),
            sse(
                {"choices": [{"delta": {"content": "Hello world"}, **message("Hello world"), "finish_reason": "stop"}]}
            ),
        ],
    ],
    ids=["at the end", "without thoughts", "beside", "alone", "growing", "pieces", "both", "empty", "once more"],
)
async def test_a_whole_message_comes_in_place_of_its_pieces(parts: list[str]) -> None:
    assert (await say(CHAT, events([*parts, "data: [DONE]\n\n"]))).text == "Hello world"


async def test_what_is_shown_while_it_arrives_makes_up_the_text() -> None:
    seen: list[Output] = []
    await say(CHAT, events([piece("Hello "), sse({"choices": [message("Hello world")]}), STOP]), seen=seen)
    assert [one.text for one in seen if one.kind == "text"] == ["Hello ", "world"]


async def test_another_choice_is_another_answer() -> None:
    other = CHAT.chunk({"index": 1, "delta": {"content": "no"}, "finish_reason": "length"})
    assert (await say(CHAT, events([piece("fi"), other, piece("ne"), STOP, other]))).text == "fine"
    twice = {"choices": [message("fine", finish_reason="stop"), message("no", finish_reason="length")]}
    assert (await say(CHAT, plain(200, twice))).text == "fine"
    without = {"choices": [message("fine", finish_reason="stop"), message("no", finish_reason="stop")]}
    for one in without["choices"]:
        del one["index"]
    assert (await say(CHAT, plain(200, without))).text == "fine"


START = MESSAGES.event("message_start", message={"id": "m1", "model": "m", "usage": {"input_tokens": 8}})
BEGUN = MESSAGES.event("message_start", message={"id": "m1", "content": [{"type": "text", "text": "Hello "}]})
END = [MESSAGES.event("message_delta", delta={"stop_reason": "end_turn"}), MESSAGES.event("message_stop")]


def block(index: int, text: str) -> str:
    return MESSAGES.event("content_block_start", index=index, content_block={"type": "text", "text": text})


def delta(index: int, text: str) -> str:
    return MESSAGES.event("content_block_delta", index=index, delta={"type": "text_delta", "text": text})


@pytest.mark.parametrize(
    "parts",
    [
        [START, block(0, "Hello "), delta(0, "world")],
        [START, block(0, "Hello world")],
        [START, delta(0, "Hello "), delta(0, "world")],
        [START, block(0, ""), block(1, ""), delta(1, "world"), delta(0, "Hello ")],
        [START, block(0, ""), delta(0, "Hel"), START.replace("m1", "m2"), block(0, ""), delta(0, "Hello world")],
        [START, block(0, ""), delta(0, "Hello "), START, delta(0, "world")],
        [START, block(0, ""), delta(0, "Hel"), START, block(0, ""), delta(0, "Hello world")],
        [BEGUN, delta(0, "world")],
        [BEGUN, BEGUN, delta(0, "world")],
        [BEGUN, block(0, "Hello "), delta(0, "world")],
    ],
    ids=[
        "begun",
        "at once",
        "no start",
        "by index",
        "another message",
        "the same message",
        "once more",
        "begun with the message",
        "begun twice",
        "begun in both",
    ],
)
async def test_the_blocks_of_the_messages_api(parts: list[str]) -> None:
    assert (await say(MESSAGES, events([*parts, *END]))).text == "Hello world"


CALL = {"index": 0, "id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CHAT_CALL = CHAT.chunk({"delta": {"tool_calls": [CALL]}})
USE = MESSAGES.event("content_block_start", index=1, content_block={"type": "tool_use", "id": "1", "name": "look"})
SEARCH = USE.replace("tool_use", "server_tool_use")


@pytest.mark.parametrize(
    ("wire", "parts"),
    [
        (CHAT, [piece("Let me look."), CHAT_CALL, STOP]),
        (CHAT, [sse({"choices": [{"message": {"content": "Let me look.", "tool_calls": [CALL]}}]}), STOP]),
        (MESSAGES, [START, block(0, "Let me look."), USE, *END]),
    ],
    ids=["chat", "whole message", "messages"],
)
async def test_words_before_a_call_are_no_answer_whatever_the_reason(wire: Dialect, parts: list[str]) -> None:
    error = await failure(wire, events(parts))
    assert (error.kind, "called a tool" in error.message) == (ErrorKind.INVALID_OUTPUT, True)


@pytest.mark.parametrize(
    ("wire", "parts"),
    [
        (CHAT, [CHAT_CALL, piece("fine"), STOP]),
        (CHAT, [CHAT.chunk({"delta": {"content": "fine", "tool_calls": []}}), STOP]),
        (MESSAGES, [START, block(0, "fine"), SEARCH, *END]),
        (MESSAGES, [START, USE, block(2, "fine"), *END]),
    ],
    ids=["text after it", "no calls", "a tool of the server", "a block after it"],
)
async def test_text_after_a_call_is_the_answer(wire: Dialect, parts: list[str]) -> None:
    assert (await say(wire, events(parts))).text == "fine"


async def test_a_block_of_thoughts_is_no_text() -> None:
    thought = {"type": "thinking", "thinking": "", "text": "x"}
    thinks = MESSAGES.event("content_block_start", index=0, content_block=thought)
    assert (await say(MESSAGES, events([START, thinks, block(1, "fine"), *END]))).text == "fine"
    body = {"type": "message", "content": "fine", "stop_reason": "end_turn"}
    assert (await say(MESSAGES, plain(200, body))).text == "fine"


NOISE = [
    "data:\n\n",
    "data: \n\n",
    ": keep-alive\n\n",
    "data: : PROCESSING\n\n",
    "data: ping\n\n",
    'data: "ping"\n\n',
    "data: []\n\n",
    "data: null\n\n",
    "event: ping\n\n",
    "event: heartbeat\ndata:\n\n",
    "id: 7\nretry: 100\n\n",
    "\n\n\n",
]


@pytest.mark.parametrize("noise", NOISE)
async def test_noise_is_no_event_and_no_end(dialect: Dialect, noise: str) -> None:
    parts = dialect.parts("fi", "ne")
    for place in range(len(parts)):
        assert (await say(dialect, events([*parts[:place], noise, *parts[place:]]))).text == "fine"


async def test_noise_is_told_where_the_answer_broke_off(dialect: Dialect) -> None:
    error = await failure(dialect, events([*dialect.parts("half", reason=None), "data: upstream is gone\n\n"]))
    assert (error.kind, error.message.endswith(": upstream is gone")) == (K.TRANSIENT, True)


@pytest.mark.parametrize("pause", [False, True], ids=["in one packet", "in two packets"])
@pytest.mark.parametrize("tail", ["a broken chunk", "a chunk too short", "a length too short", "a length too long"])
async def test_no_error_of_the_tail_takes_a_whole_answer_away(tail: str, pause: bool, dialect: Dialect) -> None:
    body = "".join(dialect.parts("fine")).encode()
    framing = "Transfer-Encoding: chunked"
    framed = b"%x\r\n%s\r\n" % (len(body), body)
    if tail == "a broken chunk":
        framed += b"ZZZ\r\n"
    elif tail == "a chunk too short":
        framed = framed.removesuffix(b"\r\n") + b" more\r\n"
    else:
        more = b": more\n\n" if tail == "a length too short" else b""
        framing, framed = f"Content-Length: {len(body) + (0 if more else 9)}", body + more
    closed = asyncio.Event()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{framing}\r\n\r\n".encode()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in (head, framed) if pause else (head + framed,):
            writer.write(part)
            await asyncio.sleep(0.05)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        closed.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with make(dialect, url) as backend, backend.open(ConversationRequest()) as conversation:
            assert (await conversation.send("Hello.")).text == "fine"
        await closed.wait()


async def test_half_a_piece_is_no_noise(dialect: Dialect) -> None:
    first, *rest = dialect.parts("fine")
    assert (await failure(dialect, events([first, 'data: {"choices": [{"del\n\n', *rest]))).kind is K.TRANSIENT


async def test_events_that_single_line_ends_separate() -> None:
    lines = "".join(CHAT.parts("fi", "ne")).replace("\n\n", "\n")
    assert (await say(CHAT, events([lines, "\n"]))).text == "fine"


TOO_LARGE = {"code": 400, "message": "the request exceeds the available context size", "type": "invalid_request_error"}


@pytest.mark.parametrize(
    ("part", "kind", "words"),
    [
        (f"error: {json.dumps(TOO_LARGE)}\n\n", K.CONTEXT_OVERFLOW, "exceeds the available context size"),
        ("error: the model crashed\n\n", K.TRANSIENT, "the model crashed"),
        ("event: error\ndata: no room\n\n", K.TRANSIENT, "no room"),
        ("data: Error: no room\n\n", K.TRANSIENT, "Error: no room"),
        (sse([{"error": {"code": 503, "message": "no room"}}]), K.OVERLOADED, "no room"),
        (sse({"error": {"status_code": 498, "message": "no capacity"}}), K.OVERLOADED, "no capacity"),
        (sse({"choices": None, "base_resp": {"status_code": 1002, "status_msg": "rpm"}}), K.RATE_LIMITED, "rpm"),
        (sse({"choices": [{"error": {"code": 502, "message": "no upstream"}}]}), K.TRANSIENT, "no upstream"),
    ],
)
async def test_errors_that_servers_put_into_a_stream(part: str, kind: ErrorKind, words: str) -> None:
    error = await failure(CHAT, events([part, "data: [DONE]\n\n"]))
    assert error.kind is kind
    assert words in error.message


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1002, K.RATE_LIMITED),
        (1008, K.NO_CREDIT),
        (1004, K.AUTH),
        (1027, K.REFUSED),
        (2013, K.INVALID_REQUEST),
        (1000, K.TRANSIENT),
    ],
)
async def test_an_error_of_minimax_has_status_200(code: int, kind: ErrorKind) -> None:
    body = {"choices": [message("half")], "base_resp": {"status_code": code, "status_msg": "the server's words"}}
    error = await failure(CHAT, plain(200, body))
    assert (error.kind, "the server's words" in error.message) == (kind, True)
    fine = {"choices": [message("fine", finish_reason="stop")], "base_resp": {"status_code": 0, "status_msg": ""}}
    assert (await say(CHAT, plain(200, fine))).text == "fine"


def raw(head: str, body: str, *, reset: bool = False) -> Answer:
    """A response as it stands; the connection closes after it."""

    async def answer(exchange: Exchange) -> None:
        await exchange.write(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + body.encode())
        if reset:
            exchange.writer.transport.abort()
        else:
            exchange.writer.close()

    return answer


EVENTS = "Content-Type: text/event-stream\r\n"


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("end", ["whole", "without its last event"])
@pytest.mark.parametrize("form", ["no last chunk", "half a chunk", "too long"])
async def test_a_whole_answer_stays_whole_whatever_its_tail(dialect: Dialect, form: str, end: str, reset: bool) -> None:
    parts = dialect.parts("fine")
    body = "".join(parts if end == "whole" else parts[:-1])
    if form == "too long":
        answer = raw(f"{EVENTS}Content-Length: {len(body) + 9}", body, reset=reset)
    else:
        more = "" if form == "no last chunk" else "ff\r\nda"
        answer = raw(f"{EVENTS}Transfer-Encoding: chunked", f"{len(body):x}\r\n{body}\r\n{more}", reset=reset)
    async with serve(answer) as server, make(dialect, server.url) as backend:
        async with backend.open(ConversationRequest()) as conversation:
            assert (await conversation.send("Hello.")).text == "fine"
        assert len(server.requests) == 1


async def test_a_tail_that_is_no_http_changes_nothing(dialect: Dialect) -> None:
    begun = asyncio.Event()
    *first, second, third, fourth = dialect.parts("fi", "ne")

    async def answer(exchange: Exchange) -> None:
        await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        for parts, more in ((first, ""), ((second, third, fourth), "what?\r\n\r\n")):
            body = "".join(parts)
            await exchange.write(f"{len(body):x}\r\n{body}\r\n{more}".encode())
            await begun.wait()

    async with serve(answer) as server, make(dialect, server.url) as backend:
        request = ConversationRequest(on_output=lambda _output: begun.set())
        async with backend.open(request) as conversation:
            assert (await conversation.send("Hello.")).text == "fine"
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    "tail", ["data: {bad", 'data: {"error": {"message": "late"}}', "event: error\ndata: late", "error: late"]
)
async def test_an_error_after_the_end_changes_nothing(dialect: Dialect, tail: str) -> None:
    parts = [*dialect.parts("fine")[:-1], f"{tail}\n\n"]
    assert (await say(dialect, events(parts))).text == "fine"


async def test_an_error_after_a_bad_end_is_told() -> None:
    parts = [piece("half"), CHAT.chunk({"delta": {}, "finish_reason": "error"}), sse({"error": {"message": "words"}})]
    error = await failure(CHAT, events(parts))
    assert (error.kind, "words" in error.message) == (K.TRANSIENT, True)


async def test_an_answer_whose_count_was_lost_with_its_tail_has_an_unknown_cost() -> None:
    body = piece("fine") + STOP
    reply = await say(CHAT, raw(f"{EVENTS}Content-Length: {len(body) + 9}", body))
    assert (reply.text, reply.usage) == ("fine", Usage(model="m", cost_is_partial=True))


async def test_an_answer_that_breaks_off_before_its_end_is_none(dialect: Dialect) -> None:
    body = "".join(dialect.parts("half", reason=None))
    assert (await failure(dialect, raw(f"{EVENTS}Content-Length: {len(body) + 9}", body))).kind is K.TRANSIENT


async def test_a_whole_value_of_json_stays_whole_whatever_its_length() -> None:
    body = json.dumps({"choices": [message("fine", finish_reason="stop")], "usage": USAGE})
    head = "Content-Type: application/json\r\nContent-Length: "
    assert (await say(CHAT, raw(f"{head}{len(body) + 9}", body))).text == "fine"
    assert (await failure(CHAT, raw(f"{head}{len(body) + 9}", body[:-9]))).kind is K.TRANSIENT
    assert (await say(CHAT, plain(200, b"\xef\xbb\xbf" + body.encode()))).text == "fine"


async def test_an_error_keeps_its_status_whatever_its_length(dialect: Dialect) -> None:
    async def answer(exchange: Exchange) -> None:
        await exchange.write(b"HTTP/1.1 401 No\r\nContent-Length: 99\r\n\r\n" + b'{"error": {"message": "no key"}}')
        exchange.writer.close()

    error = await failure(dialect, answer)
    assert (error.kind, error.status, "no key" in error.message) == (K.AUTH, 401, True)


async def test_a_head_of_many_long_fields(dialect: Dialect) -> None:
    body = "".join(dialect.parts("fine"))
    many = "".join(f"X-{number}: x\r\n" for number in range(900))
    assert (await say(dialect, raw(f"X-Long: {'a' * 60_000}\r\n{EVENTS}Connection: close", body))).text == "fine"
    assert (await say(dialect, raw(f"{many}{EVENTS}Connection: close", body))).text == "fine"


@pytest.mark.parametrize(
    ("answer", "thoughts"),
    [("<think>\nsecret plan\n</think>\n\nfour", "secret plan"), ("so, four\n</think>\nfour", "so, four"), ("four", "")],
)
async def test_thoughts_are_no_part_of_the_answer_and_of_its_history(
    dialect: Dialect, answer: str, thoughts: str
) -> None:
    async with (
        serve(events(dialect.parts(answer))) as server,
        make(dialect, server.url) as backend,
        backend.open(ConversationRequest()) as conversation,
    ):
        reply = await conversation.send("2 + 2?")
        await conversation.send("And 3 + 3?")
    assert (reply.text, reply.messages[-1].content, reply.messages[-1].thoughts) == ("four", "four", thoughts)
    assert server.bodies[-1]["messages"][1] == {"role": "assistant", "content": "four"}


@pytest.mark.parametrize("kind", [OpenAIBackend, AnthropicBackend])
async def test_an_answer_of_thoughts_alone_is_none(kind: type[OpenAIBackend | AnthropicBackend]) -> None:
    wire = CHAT if kind is OpenAIBackend else MESSAGES
    error = await failure(wire, events(wire.parts("<think>\nhm\n</think>\n")))
    assert (error.kind, "nothing but thoughts" in error.message) == (K.INVALID_OUTPUT, True)
    assert error.usage.output_tokens == 7


async def test_an_answer_that_came_beside_the_text_is_none() -> None:
    """So LM Studio and vLLM send an answer in JSON if they look for it in the thoughts of the model."""
    thought = CHAT.chunk({"delta": {"content": "", "reasoning_content": '{"n": 4}'}})
    block = MESSAGES.event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "4"})
    for wire, piece in ((CHAT, thought), (MESSAGES, block)):
        begin, *rest = wire.parts()
        error = await failure(wire, events([begin, piece, *rest]))
        assert (error.kind, "nothing but thoughts" in error.message) == (K.INVALID_OUTPUT, True)
    error = await failure(CHAT, events(CHAT.parts("")))
    assert error.message == "the model's answer is empty"
