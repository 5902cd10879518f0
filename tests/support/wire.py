"""HTTP servers on 127.0.0.1 that speak the wire formats of chat completions and of the messages API, by script.

A `Script` answers each request with the next of its answers, the last one over and over. An answer is a function that
writes to the connection, so that it may also be late, broken or endless.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

Answer = Callable[["Exchange"], Awaitable[None]]
End = Literal["clean", "cut", "hang"]


@dataclass
class Request:
    """One request as it came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Exchange:
    """A request and the connection to answer it on."""

    request: Request
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    server: Script

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def head(self, status: int, headers: dict[str, str]) -> None:
        lines = [f"HTTP/1.1 {status} Status", *(f"{name}: {value}" for name, value in headers.items())]
        await self.write("\r\n".join([*lines, "", ""]).encode())

    async def until_gone(self) -> None:
        """Wait until the client closes the connection, and say so."""
        while await self.reader.read(1024):
            pass
        self.server.gone.set()


@dataclass
class Script:
    """A running server and what it has seen."""

    answers: list[Answer]
    requests: list[Request] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    streaming: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    opened: int = 0
    """All connections so far, closed ones included."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    @property
    def bodies(self) -> list[Any]:
        return [request.body for request in self.requests]

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.opened += 1
        self.idle.clear()
        try:
            # Kept open between requests, as servers do: it is the client that has to let go.
            while (request := await _read(reader)) is not None:
                self.requests.append(request)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                await answer(Exchange(request, reader, writer, self))
        except (ConnectionError, asyncio.IncompleteReadError):
            self.gone.set()
        finally:
            self.connections -= 1
            if not self.connections:
                self.idle.set()
            writer.close()


@asynccontextmanager
async def serve(*answers: Answer, port: int = 0) -> AsyncGenerator[Script]:
    """A server that gives these answers, on `port` or on any free one."""
    script = Script(list(answers))
    handlers: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        try:
            await script.handle(reader, writer)
        except asyncio.CancelledError:
            pass  # the server closes; the stream's own callback would log this as an error
        finally:
            handlers.discard(task)

    server = await asyncio.start_server(handle, "127.0.0.1", port)
    script.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield script
    finally:
        server.close()
        for task in handlers:
            task.cancel()
        if handlers:
            await asyncio.wait(handlers)
        await server.wait_closed()


async def _read(reader: asyncio.StreamReader) -> Request | None:
    """The next request; None if the client closed the connection in place of one."""
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    length = int(headers.get("content-length", "0"))
    body = await reader.readexactly(length)
    return Request(method, path, headers, json.loads(body) if body else None)


def plain(status: int, body: bytes | dict[str, Any], **headers: str) -> Answer:
    """A whole answer at once. `headers` have `_` for `-`."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(exchange: Exchange) -> None:
        kind = "text/html" if isinstance(body, bytes) else "application/json"
        extra = {name.replace("_", "-"): value for name, value in headers.items()}
        await exchange.head(status, {"content-type": kind, "content-length": str(len(data)), **extra})
        await exchange.write(data)

    return answer


def events(parts: Sequence[str], *, end: End = "clean", pause: float = 0.0) -> Answer:
    """A stream of server-sent events, each part as it stands, `pause` seconds apart."""

    async def answer(exchange: Exchange) -> None:
        await exchange.head(200, {"content-type": "text/event-stream", "transfer-encoding": "chunked"})
        for part in parts:
            data = part.encode()
            await exchange.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            exchange.server.streaming.set()
            await asyncio.sleep(pause)
        if end == "clean":
            await exchange.write(b"0\r\n\r\n")
        elif end == "cut":
            exchange.writer.transport.abort()
        else:
            await exchange.until_gone()

    return answer


async def silence(exchange: Exchange) -> None:
    """No answer at all, until the client goes."""
    exchange.server.streaming.set()
    await exchange.until_gone()


async def hang_up(exchange: Exchange) -> None:
    """The connection closed without a byte."""
    exchange.writer.transport.abort()


LIMITS: list[tuple[int, str, float | None]] = [
    (400, "You have reached your specified API usage limits. You will regain access on 2000-01-01 at 00:00 UTC.", 0.0),
    (403, "weekly usage limit reached, resets in 4 days 20 hours", 417_600.0),
    (429, "Rate limit reached. Please try again in 11.054s", 11.054),
    (403, "Your quota will reset after 21h2m3s", 75_723.0),
    (500, "Weekly limit reached", None),
]
"""Status and message of used-up limits, and the seconds to wait."""


class Dialect(Protocol):
    """A wire format: the same things said in it."""

    name: str
    prefix: str

    def parts(self, *texts: str, reason: str | None = "stop") -> list[str]:
        """The events of an answer in these pieces; without a reason the end is left out."""
        ...

    def whole(self, text: str) -> Answer:
        """An answer in one piece."""
        ...

    def error(self, status: int, code: str, message: str, **headers: str) -> Answer:
        """An error answer."""
        ...

    def error_event(self, code: str, message: str) -> str:
        """An error in the midst of a stream."""
        ...


class ChatCompletions:
    """What OpenAI and its many likes speak."""

    name = "openai"
    prefix = "/v1"

    def parts(self, *texts: str, reason: str | None = "stop") -> list[str]:
        deltas = [self.chunk({"delta": {"role": "assistant", "content": ""}})]
        deltas += [self.chunk({"delta": {"content": text}}) for text in texts]
        if reason is None:
            return deltas
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        end = [self.chunk({"delta": {}, "finish_reason": reason}), self.chunk(None, usage=usage), "data: [DONE]\n\n"]
        return [*deltas, *end]

    def chunk(self, choice: dict[str, Any] | None, **more: Any) -> str:
        choices = [] if choice is None else [{"index": 0, "finish_reason": None, **choice}]
        base = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
        return f"data: {json.dumps({**base, **more})}\n\n"

    def whole(self, text: str) -> Answer:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        return plain(200, {"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})

    def error(self, status: int, code: str, message: str, **headers: str) -> Answer:
        body = {"error": {"message": message, "type": code, "param": None, "code": code}}
        return plain(status, body, **headers)

    def error_event(self, code: str, message: str) -> str:
        return f"data: {json.dumps({'error': {'message': message, 'type': code, 'code': code}})}\n\n"


class Messages:
    """What Anthropic speaks."""

    name = "anthropic"
    prefix = ""
    reasons: ClassVar[dict[str, str]] = {"stop": "end_turn", "length": "max_tokens", "content_filter": "refusal"}

    def parts(self, *texts: str, reason: str | None = "stop") -> list[str]:
        message = {"id": "m1", "type": "message", "role": "assistant", "model": "m", "content": [],
                   "stop_reason": None, "stop_sequence": None,
                   "usage": {"input_tokens": 8, "cache_read_input_tokens": 3, "output_tokens": 1}}  # fmt: skip
        found = [
            self.event("message_start", message=message),
            self.event("content_block_start", index=0, content_block={"type": "text", "text": ""}),
            self.event("ping"),
            *(self.event("content_block_delta", index=0, delta={"type": "text_delta", "text": t}) for t in texts),
        ]
        if reason is None:
            return found
        delta = {"stop_reason": self.reasons.get(reason, reason), "stop_sequence": None}
        return [
            *found,
            self.event("content_block_stop", index=0),
            self.event("message_delta", delta=delta, usage={"output_tokens": 7}),
            self.event("message_stop"),
        ]

    def event(self, kind: str, **more: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n"

    def whole(self, text: str) -> Answer:
        usage = {"input_tokens": 8, "cache_read_input_tokens": 3, "output_tokens": 7}
        content = [{"type": "text", "text": text}]
        end = {"stop_reason": "end_turn", "usage": usage}
        return plain(200, {"type": "message", "role": "assistant", "model": "m", "content": content, **end})

    def error(self, status: int, code: str, message: str, **headers: str) -> Answer:
        return plain(status, {"type": "error", "error": {"type": code, "message": message}}, **headers)

    def error_event(self, code: str, message: str) -> str:
        return self.event("error", error={"type": code, "message": message})
