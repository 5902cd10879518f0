"""What the guard lets in, byte by byte: without a socket between, so that each rule is met at its limit."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest

from plait.runner.serving import http_guard
from plait.runner.serving.http_guard import MOST_BODY_BYTES, MOST_HEAD_BYTES, Guard, Message

HOST = "localhost:1"
PRIVATE = [
    (b"cache-control", b"no-store"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
]
SENT = {"host": HOST, "authorization": "Bearer t0ken", "content-type": "application/json"}


class Asked:
    """The answer to one request: the status, the error, and the body that the application got."""

    def __init__(
        self, *chunks: bytes, headers: list[tuple[str, str]] | None = None, gone: bool = False, **scope: Any
    ) -> None:
        self.got: bytes | None = None
        self.sent: list[Message] = []
        self._chunks = list(chunks) or [b""]
        self._gone = gone
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers or SENT.items()]
        self._scope = {"type": "http", "method": "POST", "path": "/api/runs", "headers": pairs, **scope}
        anyio.run(self._ask)

    async def _ask(self) -> None:
        await Guard(self._app, "t0ken", frozenset({HOST, "127.0.0.1:1"}))(self._scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if not self._chunks:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": self._chunks.pop(0), "more_body": bool(self._chunks) or self._gone}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    async def _app(self, _scope: Any, receive: Any, send: Any) -> None:
        first = await receive()
        assert (first["type"], first["more_body"]) == ("http.request", False)
        self.got = first["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]})
        await send({"type": "http.response.body", "body": b"", "after": (await receive())["type"]})

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def kind(self) -> str:
        return json.loads(self.sent[1]["body"])["error"]["kind"]


def changed(**headers: str | None) -> list[tuple[str, str]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return [(name, value) for name, value in {**SENT, **named}.items() if value is not None]


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        (changed(host=None), 403, "forbidden"),
        (changed(host=HOST + "0"), 403, "forbidden"),
        (changed(host=HOST[:-1]), 403, "forbidden"),
        (changed(host="localhost"), 403, "forbidden"),
        ([*SENT.items(), ("host", HOST)], 403, "forbidden"),
        (changed(authorization=None), 401, "unauthorized"),
        (changed(authorization="Bearer "), 401, "unauthorized"),
        (changed(authorization="Bearer t0ke"), 401, "unauthorized"),
        (changed(authorization="Bearer t0kenn"), 401, "unauthorized"),
        (changed(authorization="Bearer T0KEN"), 401, "unauthorized"),
        (changed(authorization="Bearer \xe9"), 401, "unauthorized"),
        (changed(authorization="t0ken"), 401, "unauthorized"),
        (changed(authorization="Basic t0ken"), 401, "unauthorized"),
        ([*SENT.items(), ("authorization", "Bearer t0ken")], 401, "unauthorized"),
        (changed(content_type="application/jsonl"), 415, "unsupported_type"),
        (changed(content_type="application/jso"), 415, "unsupported_type"),
        (changed(content_type="text/plain"), 415, "unsupported_type"),
        (changed(content_type="text/plain; application/json"), 415, "unsupported_type"),
        (changed(content_type=None, content_length="1"), 415, "unsupported_type"),
        (changed(content_type=None, transfer_encoding="chunked"), 415, "unsupported_type"),
    ],
)
def test_what_does_not_fit_exactly_is_refused(headers: list[tuple[str, str]], status: int, kind: str) -> None:
    asked = Asked(headers=headers)
    assert (asked.status, asked.kind, asked.got) == (status, kind, None)
    start, body, end = asked.sent
    sent = dict(start["headers"])
    assert (start["type"], body["type"], end) == (
        "http.response.start",
        "http.response.body",
        {"type": "http.response.body"},
    )
    assert body["more_body"] is True
    assert sent[b"content-length"] == str(len(body["body"])).encode()
    assert (sent[b"content-type"], sent[b"connection"]) == (b"application/json", b"close")
    assert sent.get(b"www-authenticate") == (b"Bearer" if status == 401 else None)
    assert set(PRIVATE) <= set(start["headers"])


@pytest.mark.parametrize(
    "headers",
    [
        changed(),
        changed(host="127.0.0.1:1"),
        changed(authorization="bearer  t0ken "),
        changed(content_type="Application/JSON ; charset=utf-8"),
        changed(content_type=None),
        changed(content_type=None, content_length="0"),
    ],
)
def test_what_fits_is_let_in(headers: list[tuple[str, str]]) -> None:
    asked = Asked(headers=headers)
    assert (asked.status, asked.got, asked.sent[1]["after"]) == (200, b"", "http.disconnect")
    assert asked.sent[0]["headers"] == [(b"x-own", b"1"), *PRIVATE]


def test_a_body_in_pieces_is_given_on_whole() -> None:
    assert Asked(b"[1,", b"", b"2]").got == b"[1,2]"
    assert Asked(b"[1,", gone=True).sent == [], "the client has gone"


def test_the_limits_are_met_exactly() -> None:
    head = sum(len(name) + len(value) for name, value in SENT.items()) + len("x")
    assert Asked(headers=[*SENT.items(), ("x", "y" * (MOST_HEAD_BYTES - head))]).status == 200
    assert Asked(headers=[*SENT.items(), ("x", "y" * (MOST_HEAD_BYTES - head + 1))]).status == 431
    for part in ("raw_path", "query_string"):
        rest = MOST_HEAD_BYTES - head + 1
        assert Asked(**{part: b"/" * rest}).status == 200
        asked = Asked(**{part: b"/" * (rest + 1)})
        assert (asked.status, asked.kind) == (431, "too_large")
    assert MOST_BODY_BYTES == 4_194_304  # as docs/guides/http.md states
    assert Asked(b"x" * MOST_BODY_BYTES).status == 200
    for asked in (
        Asked(b"x" * MOST_BODY_BYTES, b"x"),
        Asked(headers=changed(content_length=str(MOST_BODY_BYTES + 1))),
        Asked(headers=changed(content_length="9" * 5000)),
    ):
        assert (asked.status, asked.kind, asked.got) == (413, "too_large", None)
    assert Asked(headers=changed(content_length=str(MOST_BODY_BYTES))).status == 200
    assert Asked(headers=changed(content_length="many")).status == 200, "what the server's parser makes of it counts"


def test_the_rest_of_a_refused_body_is_read_up_to_twice_the_limit() -> None:
    piece = b"x" * (MOST_BODY_BYTES // 2)
    assert Asked(*[piece] * 9, headers=changed(host="other"))._chunks == [piece] * 4
    assert Asked(*[piece] * 3, headers=changed(host="other"))._chunks == []


@pytest.mark.parametrize("name", ["host", "content_type"])
def test_a_long_value_is_cut_in_the_message(name: str) -> None:
    message = json.loads(Asked(headers=changed(**{name: "=" * 500})).sent[1]["body"])["error"]["message"]
    assert message.count("=") == 80


def test_a_message_without_a_body_is_an_empty_piece() -> None:
    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(_message: Message) -> None:
        raise AssertionError("nothing is sent")

    got: list[bytes] = []

    async def app(_scope: Any, again: Any, _send: Any) -> None:
        got.append((await again())["body"])

    async def ask() -> None:
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/api/runs",
            "headers": [(name.encode(), value.encode()) for name, value in SENT.items()],
        }
        await Guard(app, "t0ken", frozenset({HOST}))(scope, receive, send)

    anyio.run(ask)
    assert got == [b""]


def test_nothing_but_http_is_spoken() -> None:
    with pytest.raises(RuntimeError, match="speaks only HTTP, not websocket"):
        Asked(type="websocket")


def test_the_message_of_an_error_is_clean_text() -> None:
    assert http_guard.problem("kind", "a\ud800b") == {"error": {"kind": "kind", "message": "a\ufffdb"}}
