"""Who is let in by the server, and with what: every rule against a real one."""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from plait.runner.serving import http_guard
from tests.support.processes.command import plait
from tests.support.processes.served import Served, served

MANY = http_guard.MOST_BODY_BYTES + 1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Served]:
    before = os.umask(0)  # the token's file is private whatever the umask is
    try:
        with served(tmp_path_factory.mktemp("guarded")) as server:
            yield server
    finally:
        os.umask(before)


@pytest.fixture
def client(server: Served) -> Generator[httpx.Client]:
    with server.client() as client:
        yield client


def refused(answer: httpx.Response, code: int, kind: str) -> str:
    error = answer.json()["error"]
    assert (answer.status_code, error["kind"]) == (code, kind), answer.text
    assert set(answer.json()) == {"error"}
    assert set(error) == {"kind", "message"}
    return error["message"]


def test_nothing_is_answered_without_the_token(server: Served) -> None:
    paths = ("/api/runs", "/api/runs/x/events", "/openapi.json", "/nothing", "/")
    with httpx.Client(base_url=server.url, trust_env=False, verify=False) as client:
        for shown in (None, "", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "Bearer caf\xe9"):
            headers = {} if shown is None else {"authorization": shown.format(server.token).encode("latin-1")}
            for answer in [client.get(path, headers=headers) for path in paths]:
                message = refused(answer, 401, "unauthorized")
                assert (answer.headers["www-authenticate"], server.token in message) == ("Bearer", False)


def test_a_token_given_twice_is_none(server: Served) -> None:
    twice = [("authorization", f"Bearer {server.token}")] * 2
    refused(httpx.get(f"{server.url}/api/runs", headers=twice, trust_env=False, verify=False), 401, "unauthorized")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost:1", "127.0.0.1.evil.example:{}", "{}"])
def test_another_host_is_not_this_server(server: Served, host: str) -> None:
    with server.client(host=host.format(urlsplit(server.url).port)) as client:
        refused(client.get("/api/runs"), 403, "forbidden")


def test_this_server_has_three_names(server: Served) -> None:
    for name in ("127.0.0.1", "localhost", "[::1]"):
        with server.client(host=f"{name}:{urlsplit(server.url).port}") as client:
            assert client.get("/api/runs").status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_is_not_allowed_to_send_the_token(server: Served, origin: str) -> None:
    """A browser asks first whether such a page may; nothing is answered without the token, and nothing allows it."""
    preflight = {"origin": origin, "access-control-request-headers": "authorization"}
    answer = httpx.options(f"{server.url}/api/runs", headers=preflight, trust_env=False, verify=False)
    refused(answer, 401, "unauthorized")
    assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
@pytest.mark.parametrize("path", ["/api/runs", "/api/runs/x/cancel", "/api/runs/x/resume"])
def test_what_a_form_can_send_is_refused(client: httpx.Client, path: str, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    refused(client.post(path, content=b"{}", headers=headers), 415, "unsupported_type")


def test_json_may_say_its_charset(client: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    refused(client.post("/api/runs/x/cancel", content=b"{}", headers=headers), 404, "run_not_found")


def test_a_long_body_is_refused(client: httpx.Client) -> None:
    json_ = {"content-type": "application/json"}
    refused(client.post("/api/runs", content=b" " * MANY, headers=json_), 413, "too_large")
    asked = 0

    def endless() -> Iterator[bytes]:
        nonlocal asked
        while True:
            asked += 1
            yield b" " * 65536

    with suppress(httpx.TransportError):  # the connection may end while it is still being sent
        refused(client.post("/api/runs", content=endless(), headers=json_), 413, "too_large")
    assert asked * 65536 < 8 * http_guard.MOST_BODY_BYTES


def test_a_stated_length_is_enough_to_refuse(server: Served) -> None:
    head = (
        f"POST /api/runs HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {MANY}\r\n\r\n"
    )
    assert spoken(server, head.encode()).startswith(b"HTTP/1.1 413 ")


def test_long_headers_are_refused(server: Served) -> None:
    head = f"GET /api/runs HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\nX-Long: {'x' * 40_000}"
    assert spoken(server, head.encode()).startswith(b"HTTP/1.1 400 ")  # before it has come to its end
    assert spoken(server, f"{head}\r\n\r\n".encode()).startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def spoken(server: Served, data: bytes) -> bytes:
    """What the server answers to `data`, until it closes."""
    to = urlsplit(server.url)
    with socket.create_connection((to.hostname, to.port), timeout=60) as connection:
        connection.sendall(data)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


def test_every_answer_is_kept_to_itself(server: Served, client: httpx.Client) -> None:
    bare = httpx.get(server.url, trust_env=False, verify=False)
    for answer in (client.get("/api/runs"), client.get("/nothing"), client.get("/openapi.json"), bare):
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"
        assert "server" not in answer.headers


def test_no_page_is_served(client: httpx.Client) -> None:
    for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
        refused(client.get(path), 404, "not_found")
    assert client.put("/api/runs/x").headers["allow"] == "GET"
    said = refused(client.put("/api/runs"), 405, "method_not_allowed")
    assert said == "there is no PUT /api/runs here; GET /openapi.json says what there is"


def test_what_is_published(client: httpx.Client) -> None:
    published = client.get("/openapi.json").json()
    assert set(published["paths"]) == {
        "/api/runs",
        "/api/runs/wake",
        "/api/runs/{run_id}",
        "/api/runs/{run_id}/preview",
        "/api/runs/{run_id}/resume",
        "/api/runs/{run_id}/pause",
        "/api/runs/{run_id}/tune",
        "/api/runs/{run_id}/cancel",
        "/api/runs/{run_id}/tasks/{task_id}",
        "/api/runs/{run_id}/tasks/{task_id}/answer",
        "/api/runs/{run_id}/tasks/{task_id}/retry",
        "/api/runs/{run_id}/tasks/{task_id}/settle",
        "/api/runs/{run_id}/tasks/{task_id}/continue",
        "/api/runs/{run_id}/events",
        "/api/questions",
    }
    assert [scheme["scheme"] for scheme in published["components"]["securitySchemes"].values()] == ["bearer"]


def test_the_token_is_private(server: Served) -> None:
    assert stat.S_IMODE(server.token_file.stat().st_mode) == 0o600
    assert len(server.token) >= 43  # 32 random bytes


def test_the_token_is_in_no_output_and_goes_with_the_server(tmp_path: Path) -> None:
    with served(tmp_path, "--log", "json", "--log-level", "debug") as own:
        with own.client() as client:
            client.get("/api/runs")
        code, said = own.stop()
        assert (code, own.token in said, str(own.token_file) in said) == (0, False, True)
        assert not own.token_file.exists()


def test_only_this_machine_is_served(tmp_path: Path) -> None:
    refusal = plait(tmp_path, "serve", "--host", "0.0.0.0", "--base-url", "http://127.0.0.1:9")
    assert (refusal.code, "'0.0.0.0' is not one of" in refusal.err) == (2, True)


def test_a_port_that_is_taken(tmp_path: Path, server: Served) -> None:
    port = str(urlsplit(server.url).port)
    refusal = plait(tmp_path, "serve", "--port", port, "--base-url", "http://127.0.0.1:9")
    assert (refusal.code, refusal.out) == (2, "")
    assert refusal.err == (
        f"plait: cannot listen on 127.0.0.1, port {port}: Address already in use; "
        "choose another one with --port, or 0 for any that is free\n"
    )
    assert not (tmp_path / ".plait").exists()


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_guard, "BODY_SECONDS", 0.01)
    sent: list[http_guard.Message] = []

    async def receive() -> http_guard.Message:
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: http_guard.Message) -> None:
        sent.append(message)

    async def app(_scope: http_guard.Scope, _receive: http_guard.Receive, _send: http_guard.Send) -> None:
        raise AssertionError("it was let in")

    headers = [(b"host", b"localhost:1"), (b"authorization", b"Bearer t"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/api/runs", "headers": headers}
    await http_guard.Guard(app, "t", frozenset({"localhost:1"}))(scope, receive, send)
    assert (sent[0]["status"], json.loads(sent[1]["body"])["error"]["kind"]) == (408, "too_slow")


def test_who_sends_a_long_body_to_its_end_hears_why_it_is_refused(server: Served) -> None:
    """Were the connection closed on what is still being sent, its answer would be lost."""
    head = (
        f"POST /api/runs HTTP/1.1\r\nHost: {urlsplit(server.url).netloc}\r\nAuthorization: Bearer {server.token}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {2 * MANY}\r\n\r\n"
    )
    answer = spoken(server, head.encode() + b" " * (2 * MANY))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["kind"] == "too_large"
