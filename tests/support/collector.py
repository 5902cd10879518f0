"""A collector of OpenTelemetry on 127.0.0.1, which decodes the spans that it receives over HTTP as JSON."""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

_SPAN = {"traceId", "spanId", "parentSpanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano", "attributes",
         "links", "status", "events"}  # fmt: skip


@dataclass
class Received:
    """A span, with its attributes as a mapping."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    kind: int
    start: int
    end: int
    attributes: dict[str, Any]
    links: list[str]
    status: dict[str, Any]
    events: list[dict[str, Any]]


@dataclass
class Collector:
    """A running collector. `answers` are the statuses, headers and bodies of the next answers; 200 follows."""

    url: str = ""
    bodies: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)
    """The spans of all requests that were answered with 200."""
    arrived: threading.Event = field(default_factory=threading.Event)

    def receive(self, headers: dict[str, str], body: Any) -> tuple[int, dict[str, str], str]:
        self.headers.append(headers)
        self.bodies.append(body)
        answer = self.answers.pop(0) if self.answers else (200, {}, "{}")
        if answer[0] == 200:
            self.spans += decoded(body)
        self.arrived.set()
        return answer


def decoded(body: Any) -> list[Received]:
    """The spans of a request, checked against the protocol."""
    (of_resource,) = body["resourceSpans"]
    (of_scope,) = of_resource["scopeSpans"]
    return [_decoded(span) for span in of_scope["spans"]]


def _decoded(span: dict[str, Any]) -> Received:
    assert span.keys() <= _SPAN
    assert re.fullmatch("[0-9a-f]{32}", span["traceId"])
    for one in (
        span["spanId"],
        span.get("parentSpanId", "0" * 16),
        *(link["spanId"] for link in span.get("links", ())),
    ):
        assert re.fullmatch("[0-9a-f]{16}", one)
    assert span["kind"] in range(1, 6)
    start, end = (span[name] for name in ("startTimeUnixNano", "endTimeUnixNano"))
    assert isinstance(start, str)
    assert int(start) <= int(end)
    events = [{**one, "attributes": values(one["attributes"])} for one in span.get("events", ())]
    return Received(
        span["traceId"],
        span["spanId"],
        span.get("parentSpanId"),
        span["name"],
        span["kind"],
        int(start),
        int(end),
        values(span["attributes"]),
        [link["spanId"] for link in span.get("links", ())],
        span.get("status", {}),
        events,
    )


def values(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """The attributes as a mapping."""
    found: dict[str, Any] = {}
    for one in attributes:
        ((kind, value),) = one["value"].items()
        assert isinstance(value, {"stringValue": str, "intValue": str, "doubleValue": float, "boolValue": bool}[kind])
        assert one["key"] not in found
        found[one["key"]] = int(value) if kind == "intValue" else value
    return found


@contextmanager
def collecting() -> Generator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            assert self.headers["content-type"] == "application/json"
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, more, said = collector.receive(headers, json.loads(body))
            self.send_response(status)
            for name, value in {**more, "content-length": str(len(said))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, *_args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{cast('Any', server.server_address)[1]}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()
