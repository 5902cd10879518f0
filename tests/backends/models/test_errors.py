"""What a server may do to us, in both wire formats, and which kind of error it becomes."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack
from email.utils import formatdate
from typing import Any

import anyio
import pytest

from plait.backends import ConversationRequest
from plait.errors import BackendError, ErrorKind
from tests.support.remotes import Remote, dialect, make
from tests.support.wire import (
    LIMITS,
    Answer,
    ChatCompletions,
    Dialect,
    Exchange,
    Messages,
    Script,
    events,
    hang_up,
    plain,
    serve,
    silence,
)

K = ErrorKind
__all__ = ["dialect"]
SECRET = "sk-canary-9d3f1c77"


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Generator[None]:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("ANTHROPIC_API_KEY", SECRET)
    caplog.set_level("INFO")
    yield
    assert SECRET not in caplog.text


async def fail(backend: Remote) -> BackendError:
    with pytest.raises(BackendError) as caught:
        async with backend.open(ConversationRequest()) as conversation:
            await conversation.send("the-prompt-itself")
    error = caught.value
    # The SDK's error holds the request, and the request the key.
    assert error.__cause__ is None
    assert error.__context__ is None
    assert "\n" not in error.message
    assert SECRET not in f"{error!r} {error} {backend!r}"
    return error


async def failure(dialect: Dialect, answer: Answer, request_timeout: float = 10.0) -> tuple[BackendError, Script]:
    async with serve(answer) as server:
        error = await fail(make(dialect, server.url, request_timeout))
        assert len(server.requests) == 1, "the SDK tried again"
        return error, server


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "invalid_request_error", K.INVALID_REQUEST),
        (400, "context_length_exceeded", K.CONTEXT_OVERFLOW),
        (400, "exceed_context_size_error", K.CONTEXT_OVERFLOW),
        (400, "content_filter", K.REFUSED),
        (401, "authentication_error", K.AUTH),
        (402, "billing_error", K.NO_CREDIT),
        (403, "permission_error", K.AUTH),
        (404, "not_found_error", K.INVALID_REQUEST),
        (408, "timeout", K.TRANSIENT),
        (409, "conflict", K.TRANSIENT),
        (413, "request_too_large", K.CONTEXT_OVERFLOW),
        (422, "unprocessable", K.INVALID_REQUEST),
        (429, "rate_limit_error", K.RATE_LIMITED),
        (429, "insufficient_quota", K.NO_CREDIT),
        (500, "api_error", K.TRANSIENT),
        (502, "bad_gateway", K.TRANSIENT),
        (503, "unavailable_error", K.OVERLOADED),
        (529, "overloaded_error", K.OVERLOADED),
    ],
)
async def test_error_answers(dialect: Dialect, status: int, code: str, kind: ErrorKind) -> None:
    error, server = await failure(dialect, dialect.error(status, code, f"it is so, key {SECRET}\nreally"))
    assert error.kind is kind
    assert f"127.0.0.1:{server.url.rpartition(':')[2]} answered {status}: it is so, key *** really" in error.message
    assert error.retry_after is None


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (400, "prompt is too long: 210000 tokens > 200000 maximum"),
        (400, "This model's maximum context length is 4096 tokens."),
        (400, "input length and `max_tokens` exceed context limit: 198000 + 8192 > 200000"),
        (429, "Request too large for gpt-5 on tokens per min (TPM): Limit 30000, Requested 41000."),
    ],
)
async def test_overlong_prompts_told_in_words_only(dialect: Dialect, status: int, words: str) -> None:
    error, _ = await failure(dialect, dialect.error(status, "rate_limit_exceeded" if status == 429 else "", words))
    assert error.kind is K.CONTEXT_OVERFLOW


async def test_spent_credit_told_in_words_only(dialect: Dialect) -> None:
    answer = dialect.error(400, "invalid_request_error", "Your credit balance is too low to access the API.")
    error, _ = await failure(dialect, answer)
    assert error.kind is K.NO_CREDIT


@pytest.mark.parametrize(
    ("headers", "low", "high"),
    [
        ({"retry_after_ms": "1500"}, 1.5, 1.5),
        ({"retry_after_ms": "250", "retry_after": "9"}, 0.25, 0.25),
        ({"retry_after": "2"}, 2.0, 2.0),
        ({"retry_after": "0.5"}, 0.5, 0.5),
        ({"retry_after": 300}, 200.0, 301.0),
        ({"retry_after": -300}, 0.0, 0.0),
    ],
)
async def test_waiting_time_that_the_server_asks_for(
    dialect: Dialect, headers: dict[str, str | int], low: float, high: float
) -> None:
    now = time.time()
    said = {name: formatdate(now + one, usegmt=True) if isinstance(one, int) else one for name, one in headers.items()}
    error, _ = await failure(dialect, dialect.error(429, "rate_limit_error", "slower", **said))
    assert error.kind is K.RATE_LIMITED
    assert error.retry_after is not None
    assert low <= error.retry_after <= high


async def test_a_quota_told_with_403_and_a_time_to_try_again(dialect: Dialect) -> None:
    """So Azure API Management tells it: {"statusCode": 403, "message": ...}."""
    words = "Out of call volume quota. Quota will be replenished in 02:34:12."
    error, _ = await failure(dialect, plain(403, {"statusCode": 403, "message": words}, retry_after="9252"))
    assert (error.kind, error.retry_after) == (K.RATE_LIMITED, 9252.0)
    error, _ = await failure(dialect, plain(403, {"statusCode": 403, "message": words}))
    assert error.kind is K.AUTH
    error, _ = await failure(dialect, plain(401, {"statusCode": 401, "message": "no key"}, retry_after="9252"))
    assert error.kind is K.AUTH


@pytest.mark.parametrize("header", ["soon", "-3", "nan", "inf", "", "99 Smarch 2026"])
async def test_waiting_times_that_are_none(dialect: Dialect, header: str) -> None:
    error, _ = await failure(dialect, dialect.error(503, "unavailable_error", "loading", retry_after=header))
    assert error.kind is K.OVERLOADED
    assert error.retry_after is None


@pytest.mark.parametrize(("status", "words", "wait"), LIMITS)
async def test_a_limit_and_its_end_told_in_words_only(
    dialect: Dialect, status: int, words: str, wait: float | None
) -> None:
    code = {400: "invalid_request_error", 403: "permission_error"}.get(status, "")
    error, _ = await failure(dialect, dialect.error(status, code, words))
    assert (error.kind, error.retry_after) == (K.RATE_LIMITED, wait)
    error, _ = await failure(dialect, dialect.error(status, code, words, retry_after="7"))
    assert (error.kind, error.retry_after) == (K.RATE_LIMITED, 7.0)
    error, _ = await failure(dialect, dialect.error(401, "authentication_error", words))
    assert error.kind is K.AUTH
    error, _ = await failure(dialect, dialect.error(429, "insufficient_quota", words))
    assert error.kind is K.NO_CREDIT


@pytest.mark.parametrize(
    ("end", "kind", "words"),
    [
        ("clean", K.TRANSIENT, "broke off"),
        ("cut", K.TRANSIENT, " closed the connection in the middle of the answer; the server's log may say why"),
        ("hang", K.TIMEOUT, " within 0.4 s; raise request_timeout"),
    ],
)
async def test_streams_that_stop_midway(dialect: Dialect, end: str, kind: ErrorKind, words: str) -> None:
    parts = dialect.parts("half an ", reason=None)
    limit = 0.4 if end == "hang" else 10.0
    error, _ = await failure(dialect, events(parts, end=end), limit)  # type: ignore[arg-type]
    assert error.kind is kind
    assert words in error.message


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("length", K.TRUNCATED), ("content_filter", K.REFUSED), ("tool_calls", K.INVALID_OUTPUT)],
)
async def test_answers_that_end_for_another_reason(dialect: Dialect, reason: str, kind: ErrorKind) -> None:
    error, _ = await failure(dialect, events(dialect.parts("so far", reason=reason)))
    assert error.kind is kind


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("overloaded_error", K.OVERLOADED),
        ("rate_limit_error", K.RATE_LIMITED),
        ("server_error", K.TRANSIENT),
        ("context_length_exceeded", K.CONTEXT_OVERFLOW),
        ("invalid_request_error", K.INVALID_REQUEST),
        ("authentication_error", K.AUTH),
    ],
)
async def test_errors_inside_a_stream(dialect: Dialect, code: str, kind: ErrorKind) -> None:
    parts = [*dialect.parts(reason=None), dialect.error_event(code, f"sorry, {SECRET}")]
    error, _ = await failure(dialect, events(parts))
    assert error.kind is kind
    assert "broke off the answer: sorry, ***" in error.message


async def test_a_limit_inside_a_stream(dialect: Dialect) -> None:
    told = dialect.error_event("permission_error", "usage limit reached, try again in 3 days")
    error, _ = await failure(dialect, events([*dialect.parts(reason=None), told]))
    assert (error.kind, error.retry_after) == (K.RATE_LIMITED, 259_200.0)


@pytest.mark.parametrize(
    ("code", "kind", "why"),
    [
        ("overloaded_error", K.TRANSIENT, "it had begun (overloaded)"),
        ("rate_limit_error", K.TRANSIENT, "it had begun (rate limited)"),
        ("server_error", K.TRANSIENT, ""),
        ("context_length_exceeded", K.CONTEXT_OVERFLOW, ""),
    ],
)
async def test_a_call_that_has_begun_to_answer_is_not_refused_any_more(
    dialect: Dialect, code: str, kind: ErrorKind, why: str
) -> None:
    parts = [*dialect.parts("half an ", reason=None), dialect.error_event(code, "sorry")]
    error, _ = await failure(dialect, events(parts))
    assert error.kind is kind
    assert f"broke off the answer {why}".rstrip() + ": sorry" in error.message


async def test_a_thought_is_the_beginning_of_an_answer(dialect: Dialect) -> None:
    if isinstance(dialect, Messages):
        thinks = dialect.event("content_block_delta", index=0, delta={"type": "thinking_delta", "thinking": "Hm."})
    else:
        assert isinstance(dialect, ChatCompletions)
        thinks = dialect.chunk({"delta": {"reasoning_content": "Hm."}})
    parts = [*dialect.parts(reason=None), thinks, dialect.error_event("overloaded_error", "sorry")]
    error, _ = await failure(dialect, events(parts))
    assert error.kind is K.TRANSIENT


@pytest.mark.parametrize(
    "make_answer",
    [
        lambda dialect: hang_up,
        lambda dialect: plain(200, b"<html>welcome</html>"),
        lambda dialect: plain(200, b""),
        lambda dialect: events([]),
        lambda dialect: events(["data: {broken\n\n", "event: message_start\ndata: {broken\n\n"]),
        lambda dialect: events(["data: 5\n\n", "event: message_delta\ndata: 5\n\n"]),
        lambda dialect: events(["data: []\n\n", "event: message_delta\ndata: {}\n\n"]),
    ],
    ids=["hang-up", "html", "empty", "no-events", "broken-json", "number", "list"],
)
async def test_answers_that_make_no_sense(dialect: Dialect, make_answer: Callable[[Dialect], Answer]) -> None:
    error, _ = await failure(dialect, make_answer(dialect))
    assert error.kind is K.TRANSIENT


async def test_a_gateway_that_talks_html(dialect: Dialect) -> None:
    error, _ = await failure(dialect, plain(502, b"<html>\n" + b"<p>bad gateway</p>\n" * 10_000))
    assert error.kind is K.TRANSIENT
    assert len(error.message) <= 300


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"detail": [{"msg": "no", "input": {"messages": ["the-prompt-itself"]}}]}, "answered 422: no"),
        (
            {"message": {"detail": [{"loc": ["body", "n", 0], "msg": "not permitted", "input": "the-prompt-itself"}]}},
            "answered 422: body.n.0: not permitted",
        ),
        (
            {
                "object": "Error",
                "message": '{"detail": [{"loc": ["body", "n"], "msg": "no", "input": "the-prompt-itself"}]}',
            },
            "answered 422: body.n: no",
        ),
        ({"message": ["a should not exist", "b has to be a number"]}, "422: a should not exist; b has to be a number"),
        ({"errors": [{"code": 7003, "message": "No route"}]}, "answered 422: No route"),
        ({"error": {"detail": {"prompt": "the-prompt-itself"}}}, "answered 422: no reason given"),
        ({"detail": "Not like this"}, "answered 422: Not like this"),
        ({"error": "Not like this"}, "answered 422: Not like this"),
        ({"error": {"message": None}}, "answered 422: no reason given"),
        ([], "answered 422: "),
        (b"", "answered 422: "),
    ],
)
async def test_error_bodies_of_other_shapes(dialect: Dialect, body: Any, words: str) -> None:
    error, _ = await failure(dialect, plain(422, body))
    assert error.kind is K.INVALID_REQUEST
    assert words in error.message
    assert "the-prompt-itself" not in error.message


async def test_redirects_are_not_followed(dialect: Dialect) -> None:
    async with serve(silence) as other:
        error, _ = await failure(dialect, plain(307, {}, location=f"{other.url}/v1/messages"))
        assert other.requests == []
    assert error.kind is K.INVALID_REQUEST
    assert "base_url" in error.message


async def test_nobody_listens(dialect: Dialect) -> None:
    async with serve(silence) as server:
        url = server.url
    error = await fail(make(dialect, url))
    assert error.kind is K.TRANSIENT
    address = url.removeprefix("http://")
    assert error.message == (
        f"nothing listens at {address} (connection refused); start the server, or check host and port in base_url"
    )


def raw(data: bytes) -> Answer:
    """These bytes, then the end of the connection."""

    async def answer(exchange: Exchange) -> None:
        await exchange.write(data)
        exchange.writer.close()

    return answer


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (hang_up, " closed the connection without an answer"),
        (raw(b"HTTP/1.1 200 OK\r\ncont"), " closed the connection without an answer"),
        (
            raw(_HEAD + b"content-length: 1000\r\n\r\n{"),
            " closed the connection in the middle of the answer; the server's",
        ),
        (raw(b"SSH-2.0-OpenSSH_9\r\n"), " answers, but not as an HTTP server: "),
        (events(["data: {broken\n\n"]), " cannot be read as JSON: "),
    ],
    ids=["hang-up", "half a head", "half a body", "ssh", "json"],
)
async def test_broken_answers_are_told_in_plain_words(dialect: Dialect, answer: Answer, words: str) -> None:
    error, server = await failure(dialect, answer)
    assert error.kind is K.TRANSIENT
    assert words in error.message
    assert server.url.removeprefix("http://") in error.message, "the host is named"
    assert "; " in error.message, "and the next step"
    for raw_name in ("Client", "Error:", "Error(", "ssl:default"):
        assert raw_name not in error.message


async def test_a_host_without_an_address(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")
    error = await fail(make(dialect, "http://no-such-host.invalid:81"))
    assert error.kind is K.TRANSIENT
    assert error.message.startswith("no address is known for the host no-such-host.invalid (")
    assert error.message.endswith("); check the host in base_url, and the network")


async def test_a_server_without_tls(dialect: Dialect) -> None:
    async def plain_only(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(plain_only, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        error = await fail(make(dialect, f"https://{address}"))
    assert error.kind is K.TRANSIENT
    assert error.message.startswith(f"{address} did not begin an encrypted connection: ")
    assert error.message.endswith("; write http:// in base_url if the server has no TLS")


async def test_connecting_has_a_limit_of_its_own(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.models.model_api.CONNECT_LIMIT", 0.3)
    with socket.socket() as deaf, ExitStack() as waiting:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # its backlog is full: whoever comes now hears nothing, as from a host that is away
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(deaf.getsockname())
        with anyio.fail_after(60):
            error = await fail(make(dialect, f"http://127.0.0.1:{deaf.getsockname()[1]}", 600.0))
    assert error.kind is K.TIMEOUT


async def test_silence_is_a_timeout(dialect: Dialect) -> None:
    error, _ = await failure(dialect, silence, request_timeout=0.3)
    assert error.kind is K.TIMEOUT


async def test_a_slow_drip_is_a_timeout_too(dialect: Dialect) -> None:
    answer = events(dialect.parts(*("drip " for _ in range(10_000))), pause=0.05)  # for eight minutes
    error, _ = await failure(dialect, answer, request_timeout=0.4)
    assert error.kind is K.TIMEOUT


@pytest.fixture
async def streaming(dialect: Dialect) -> AsyncGenerator[Script]:
    async with serve(events(dialect.parts("and so ", reason=None), end="hang")) as server:
        yield server


async def test_cancel_frees_the_server(dialect: Dialect, streaming: Script) -> None:
    backend = make(dialect, streaming.url)

    async def talk() -> None:
        async with backend.open(ConversationRequest()) as conversation:
            await conversation.send("Go on for ever.")

    async with anyio.create_task_group() as group:
        group.start_soon(talk)
        await streaming.streaming.wait()
        group.cancel_scope.cancel()
    with anyio.fail_after(60):
        await streaming.gone.wait()


async def test_a_failed_turn_leaves_no_trace_in_the_conversation(dialect: Dialect) -> None:
    broken = dialect.error(500, "server_error", "once")
    async with serve(broken, events(dialect.parts("fine"))) as server:
        async with make(dialect, server.url).open(ConversationRequest()) as conversation:
            with pytest.raises(BackendError):
                await conversation.send("first")
            reply = await conversation.send("second")
        assert [message["content"] for message in server.bodies[-1]["messages"]] == ["second"]
    assert [message.content for message in reply.messages] == ["second", "fine"]
