"""Connections of the client: kept, closed, broken, cancelled, per event loop, and through a proxy."""

from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from unittest import mock

import anyio
import pytest

from plait.backends import ConversationRequest, OpenAIBackend
from plait.backends.models import http_client
from plait.backends.models.local_model import _LlamaServer
from plait.errors import BackendError, BackendUnavailable, ErrorKind
from tests.support.remotes import Remote, dialect, make
from tests.support.wire import Answer, ChatCompletions, Dialect, Exchange, events, hang_up, plain, serve

__all__ = ["dialect"]
WIRE = ChatCompletions()


async def say(backend: Remote) -> str:
    async with backend.open(ConversationRequest()) as conversation:
        return (await conversation.send("Hello.")).text


async def failure(backend: Remote) -> BackendError:
    with pytest.raises(BackendError) as caught:
        await say(backend)
    assert caught.value.__context__ is None
    return caught.value


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that lets no connection go because this machine has been at something else."""
    monkeypatch.setattr(http_client, "IDLE_LIMIT", 600.0)
    monkeypatch.setattr(http_client, "_TAIL_LIMIT", 600.0)


@pytest.mark.usefixtures("patient")
async def test_one_connection_serves_many_requests(dialect: Dialect) -> None:
    async with serve(events(dialect.parts("x"))) as server, make(dialect, server.url) as backend:
        for _ in range(20):
            assert await say(backend) == "x"
        assert server.opened == 1


@pytest.mark.usefixtures("patient")
async def test_no_more_connections_than_requests_at_once() -> None:
    async with serve(events(WIRE.parts("x"), pause=0.001)) as server, make(WIRE, server.url) as backend:
        places = asyncio.Semaphore(8)

        async def ask() -> None:
            async with places:
                await say(backend)

        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(ask)
        assert len(server.requests) == 200
        assert server.opened <= 8


@pytest.mark.parametrize(
    "answer",
    [
        plain(429, {"error": {"message": "slow down"}}),
        plain(200, {"error": {"message": "no slot"}}),
        events(WIRE.parts("x", reason="length")),
    ],
)
@pytest.mark.usefixtures("patient")
async def test_a_failed_answer_keeps_its_connection(answer: Answer) -> None:
    async with serve(answer, events(WIRE.parts("x"))) as server, make(WIRE, server.url) as backend:
        await failure(backend)
        assert await say(backend) == "x"
        assert server.opened == 1


async def test_a_stream_that_goes_on_after_its_end_is_let_go(dialect: Dialect) -> None:
    endless = events(dialect.parts("whole"), end="hang")
    async with serve(endless, events(dialect.parts("x"))) as server, make(dialect, server.url, 10.0) as backend:
        with anyio.fail_after(60):
            assert await say(backend) == "whole"
            await server.gone.wait()
        assert await say(backend) == "x"
        assert server.opened == 2


async def test_idle_connections_are_closed_by_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    assert http_client.IDLE_LIMIT < 5.0, "uvicorn, Node and llama.cpp close after 5 s"
    monkeypatch.setattr(http_client, "IDLE_LIMIT", 0.1)
    async with serve(events(WIRE.parts("x"))) as server, make(WIRE, server.url) as backend:
        await say(backend)
        with anyio.fail_after(60):
            await server.idle.wait()
        await say(backend)
        assert server.opened == 2


@pytest.mark.parametrize("earlier", [0, 1], ids=["a fresh connection", "a kept connection"])
@pytest.mark.usefixtures("patient")
async def test_a_connection_that_breaks_before_the_answer_is_one_failed_request(earlier: int, dialect: Dialect) -> None:
    answers = [events(dialect.parts("x"))] * earlier
    async with serve(*answers, hang_up, events(dialect.parts("y"))) as server, make(dialect, server.url) as backend:
        for _ in range(earlier):
            await say(backend)
        error = await failure(backend)
        assert error.kind is ErrorKind.TRANSIENT
        assert len(server.requests) == earlier + 1, "sent once"
        assert server.opened == 1
        assert await say(backend) == "y"


def hanging_up(answer: Answer, name: str) -> Answer:
    """The answer of a server called `name`, which then closes the connection without notice, as llama.cpp does."""

    async def closing(exchange: Exchange) -> None:
        write = exchange.write

        async def named(data: bytes) -> None:
            await write(data.replace(b"content-type:", f"server: {name}\r\ncontent-type:".encode(), 1))

        exchange.write = named  # type: ignore[method-assign]
        await answer(exchange)
        # The client may see the end of the answer before the end of the connection.
        await asyncio.sleep(0.05)
        exchange.writer.close()

    return closing


async def test_a_server_that_hangs_up_after_its_streams_fails_no_request() -> None:
    answer = hanging_up(events(WIRE.parts("x")), "llama.cpp")
    async with serve(answer) as server, make(WIRE, server.url) as backend:
        for _ in range(5):
            assert await say(backend) == "x"
        assert len(server.requests) == server.opened == 5
        assert [one.headers.get("connection") for one in server.requests] == [None, *["close"] * 4]


async def test_cancelling_closes_the_connection(dialect: Dialect) -> None:
    async with serve(events(dialect.parts("x", reason=None), end="hang")) as server, make(dialect, server.url) as one:
        async with anyio.create_task_group() as group:
            group.start_soon(say, one)
            with anyio.fail_after(60):
                await server.streaming.wait()
            group.cancel_scope.cancel()
        with anyio.fail_after(60):
            await server.gone.wait()


@pytest.mark.usefixtures("patient")
def test_each_event_loop_has_connections_of_its_own_which_end_with_it(dialect: Dialect) -> None:
    backends: list[Remote] = []

    async def main() -> None:
        async with serve(events(dialect.parts("x"))) as server:
            backend = backends[0] if backends else make(dialect, server.url)
            backend.base_url = server.url + dialect.prefix
            backends[:] = [backend]
            backend._client = None
            assert await say(backend) == "x"
            assert await say(backend) == "x"
            assert server.opened == 1

    for _ in range(3):
        anyio.run(main)
    gc.collect()  # a connection left open would warn, and warnings are errors here


@pytest.mark.usefixtures("patient")
def test_one_client_is_used_by_several_event_loops_in_turn() -> None:
    async def main(port: int) -> int:
        async with serve(events(WIRE.parts("x")), port=port) as server:
            backend.base_url = f"{server.url}/v1"
            assert [await say(backend), await say(backend)] == ["x", "x"]
            assert server.opened == 1
            return int(server.url.rpartition(":")[2])

    backend = OpenAIBackend("m")
    port = anyio.run(main, 0)
    client = backend._client
    anyio.run(main, port)
    assert backend._client is client is not None
    assert len(client._sessions) == 1, "the session of the loop before is forgotten"


async def test_a_backend_that_is_dropped_closes_its_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_LIMIT", 600.0)
    async with serve(events(WIRE.parts("x"))) as server:
        await say(make(WIRE, server.url))
        gc.collect()
        with anyio.fail_after(60):
            await server.idle.wait()


PROGRAM = """
import anyio, asyncio, sys
from plait.backends import OpenAIBackend, ConversationRequest

backend = OpenAIBackend("m", base_url=sys.argv[1])

async def main():
    async with backend.open(ConversationRequest()) as conversation:
        print((await conversation.send("?")).text)

how = sys.argv[2]
if how == "run":
    asyncio.run(main())
elif how == "anyio":
    anyio.run(main)
else:
    asyncio.new_event_loop().run_until_complete(main())
"""


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("run", ("-X", "dev", "-W", "error")),
        pytest.param("anyio", ("-X", "dev", "-W", "error"), marks=pytest.mark.slow),
        pytest.param("loop", (), marks=pytest.mark.slow),  # asyncio itself warns of a loop that nobody closes
    ],
)
async def test_a_program_that_closes_nothing_ends_without_a_word(how: str, options: tuple[str, ...]) -> None:
    async with serve(events(WIRE.parts("x"))) as server:
        command = [sys.executable, *options, "-c", PROGRAM, f"{server.url}/v1", how]
        done = await anyio.run_process(command, check=False)
    complaints = [line for line in done.stderr.decode().splitlines() if not line.startswith("Executing <")]
    assert (done.returncode, done.stdout, complaints) == (0, b"x\n", [])


async def test_connecting_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.backends.models.model_api.CONNECT_LIMIT", 0.1)
    # The kernel accepts the connection, and nobody answers the handshake.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        error = await failure(OpenAIBackend("m", base_url=f"https://127.0.0.1:{port}/v1"))
    assert error.kind is ErrorKind.TIMEOUT
    assert error.message.startswith(f"no connection to 127.0.0.1:{port} within 0.1 s; check ")


async def test_no_cookies_and_no_compression() -> None:
    answer = plain(200, {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}, set_cookie="a=b")
    async with serve(answer) as server, make(WIRE, server.url) as backend:
        await say(backend)
        await say(backend)
    assert "cookie" not in server.requests[1].headers
    assert server.requests[1].headers["accept-encoding"] == "identity"
    assert server.requests[1].headers["user-agent"] == "plait"


async def test_netrc_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".netrc").write_text("default login me password canary\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    async with serve(events(WIRE.parts("x"))) as server, make(WIRE, server.url) as backend:
        await say(backend)
    assert "authorization" not in server.requests[0].headers


@pytest.fixture
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return monkeypatch


async def test_the_proxy_of_the_environment_is_used(no_proxies: pytest.MonkeyPatch) -> None:
    async with serve(events(WIRE.parts("x"))) as proxy:
        no_proxies.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:secret@"))
        assert await say(OpenAIBackend("m", base_url="http://far.example/v1")) == "x"
        no_proxies.setenv("NO_PROXY", "far.example")
        assert (await failure(OpenAIBackend("m", base_url="http://far.example:9/v1"))).kind is ErrorKind.TRANSIENT
    [request] = proxy.requests
    assert request.path == "http://far.example/v1/chat/completions"
    assert request.headers["proxy-authorization"] == "Basic bWU6c2VjcmV0"


async def test_no_proxy_comes_between_plait_and_its_own_server(no_proxies: pytest.MonkeyPatch) -> None:
    no_proxies.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    async with serve(events(WIRE.parts("x"))) as server:
        assert (await failure(make(WIRE, server.url))).kind is ErrorKind.TRANSIENT
        assert await say(_LlamaServer(mock.Mock(), "key", "m", base_url=f"{server.url}/v1")) == "x"


@pytest.mark.parametrize("proxy", ["nonsense://here", "socks5://127.0.0.1:1080", "http://", "http://h:x"])
async def test_a_proxy_that_cannot_be_one(proxy: str, no_proxies: pytest.MonkeyPatch) -> None:
    no_proxies.setenv("ALL_PROXY", proxy)
    with pytest.raises(BackendUnavailable, match=r"the proxy in ALL_PROXY has to be like http://"):
        await say(OpenAIBackend("m", base_url="http://127.0.0.1:9/v1"))


@asynccontextmanager
async def tls_server(folder: Path) -> AsyncGenerator[tuple[str, Path]]:
    """A server on 127.0.0.1 with a certificate of its own: the URL and the certificate."""
    key, certificate = folder / "key.pem", folder / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:")
                await reader.readexactly(length)
                body = "".join(WIRE.parts("x")).encode()
                size = str(len(body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: " + size + b"\r\n\r\n" + body)
        except (OSError, asyncio.IncompleteReadError):
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0, ssl=context)
    async with server:
        yield f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", certificate


async def test_a_certificate_is_checked_and_ssl_cert_file_names_those_to_trust(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with tls_server(tmp_path) as (url, certificate):
        error = await failure(OpenAIBackend("m", base_url=url))
        assert error.kind is ErrorKind.TRANSIENT
        assert " is not trusted: self-signed certificate; SSL_CERT_FILE may name a file" in error.message
        assert error.message.endswith("; SSL_CERT_FILE may name a file with the certificate to trust")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", PROGRAM, url, "run"]
        done = await anyio.run_process(command, check=False)
        complaints = [line for line in done.stderr.decode().splitlines() if not line.startswith("Executing <")]
        assert (done.returncode, done.stdout, complaints) == (0, b"x\n", [])


async def test_an_https_server_is_reached_through_a_proxy_that_reads_no_key(
    tmp_path: Path, no_proxies: pytest.MonkeyPatch
) -> None:
    heads: list[bytes] = []

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass bytes on to the server that CONNECT names."""
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        host, _, port = heads[-1].split()[1].decode().partition(":")
        there, to_there = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        async with anyio.create_task_group() as ways:
            ways.start_soon(_pass_on, reader, to_there)
            ways.start_soon(_pass_on, there, writer)

    proxy = await asyncio.start_server(connect, "127.0.0.1", 0)
    async with tls_server(tmp_path) as (url, certificate), proxy:
        no_proxies.setenv("SSL_CERT_FILE", str(certificate))
        no_proxies.setenv("HTTPS_PROXY", f"http://me:secret@127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        no_proxies.setenv("FAR_KEY", "sk-far")
        async with OpenAIBackend("m", base_url=url, api_key_env="FAR_KEY") as backend:
            assert await say(backend) == "x"
    (head,) = heads
    assert head.startswith(f"CONNECT {url[8:-3]} HTTP/1.1\r\n".encode())
    assert b"Proxy-Authorization: Basic bWU6c2VjcmV0" in head
    assert b"sk-far" not in head


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
    writer.close()
