"""Collectors of OpenTelemetry on 127.0.0.1: one that checks requests with OpenTelemetry's own code, and a real one."""

from __future__ import annotations

import http.server
import importlib.util
import json
import re
import socket
import subprocess
import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from opentelemetry.proto_json.collector.trace.v1.trace_service import ExportTraceServiceRequest

from tests.support.agents.logs import wait_for

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
    requests: list[bytes] = field(default_factory=list[bytes])
    headers: list[dict[str, str]] = field(default_factory=list)
    answers: list[tuple[int, dict[str, str], str]] = field(default_factory=list)
    spans: list[Received] = field(default_factory=list)
    """The spans of all requests that were answered with 200."""
    arrived: threading.Event = field(default_factory=threading.Event)

    @property
    def bodies(self) -> list[Any]:
        """The requests as JSON."""
        return [json.loads(one) for one in self.requests]

    def receive(self, headers: dict[str, str], request: bytes) -> tuple[int, dict[str, str], str]:
        self.headers.append(headers)
        self.requests.append(request)
        body = json.loads(request)
        # An unknown field or a value in another form would not come back.
        assert ExportTraceServiceRequest.from_json(request).to_dict() == body
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
            status, more, said = collector.receive(headers, body)
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


ROTEL = importlib.util.find_spec("rotel")
needs_rotel = pytest.mark.skipif(ROTEL is None, reason="needs a real collector: pip install rotel")


@contextmanager
def real_collector(folder: Path) -> Generator[tuple[str, Path]]:
    """Run rotel, a collector of OpenTelemetry, with its files in `folder`. Yield its address, and the file that lists
    the received spans, whole after the end.
    """
    assert ROTEL is not None and ROTEL.origin is not None
    ports = _free_ports(2)
    http_end, grpc_end = (f"127.0.0.1:{port}" for port in ports)
    words = [Path(ROTEL.origin).with_name("rotel-agent"), "start", "--exporter", "blackhole"]
    words += ["--otlp-http-endpoint", http_end, "--otlp-grpc-endpoint", grpc_end]
    words += ["--debug-log", "traces", "--debug-log-verbosity", "detailed"]
    log = folder / "received"
    with log.open("w") as output, subprocess.Popen(words, cwd=folder, stdout=output) as process:
        try:
            wait_for(lambda: _answers(ports[0]))
            yield f"http://{http_end}", log
        finally:
            process.terminate()


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _answers(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
