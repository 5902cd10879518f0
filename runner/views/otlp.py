"""Spans in the JSON of the OpenTelemetry protocol, and their way to a collector over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any
from urllib.parse import unquote

import anyio.to_thread

from plait.backends.models.endpoint import Endpoint, url_fault
from plait.backends.models.http_client import Client
from plait.clock_and_ids import Clock
from plait.errors import PlaitError
from plait.runner.domain.asked_question import parse_time
from plait.runner.views.trace_spans import AttributeValue, Span

DEFAULT_ENDPOINT = "http://localhost:4318"
ENDPOINT, TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_HEADERS, _TRACES_HEADERS = "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"
_PATH = "/v1/traces"
_SPANS_A_REQUEST = 256
_ATTEMPTS = 5
_FIRST_DELAY_S = 1.0
_LONGEST_DELAY_S = 30.0
_REQUEST_S, _CONNECT_S = 30.0, 10.0
_RETRIED = frozenset({429, 502, 503, 504})
_STATUS_ERROR = 2


@dataclass(frozen=True, slots=True)
class Collector:
    """The receiver of the spans."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    service: str = "plait"
    """The name of the service that the spans belong to."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> Collector:
        """Return the collector that the usual variables of OpenTelemetry name. Raises PlaitError for a bad URL."""
        url = environment.get(TRACES_ENDPOINT)
        variable = TRACES_ENDPOINT if url else ENDPOINT
        if not url:
            url = (environment.get(ENDPOINT) or DEFAULT_ENDPOINT).rstrip("/") + _PATH
        if (fault := url_fault(url)) is not None:
            raise PlaitError(f"{fault.replace('base_url', variable)}; it is like {DEFAULT_ENDPOINT}")
        named = environment.get(_HEADERS, ""), environment.get(_TRACES_HEADERS, "")
        headers = {name: value for text in named for name, value in _headers(text).items()}
        return cls(url, headers, environment.get("OTEL_SERVICE_NAME") or "plait")


def _headers(text: str) -> dict[str, str]:
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {unquote(name).strip(): unquote(value).strip() for name, _, value in pairs}


def as_otlp(spans: Sequence[Span], service: str) -> dict[str, Any]:
    """Return the body of an export request. The same spans give the same body."""
    version = metadata.version("plait")
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes({"service.name": service, "service.version": version})},
                "scopeSpans": [{"scope": {"name": "plait", "version": version}, "spans": [*map(_span, spans)]}],
            }
        ]
    }


def _span(span: Span) -> dict[str, Any]:
    told: dict[str, Any] = {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "name": span.name,
        "kind": span.kind.value,
        "startTimeUnixNano": _nanoseconds(span.start),
        "endTimeUnixNano": _nanoseconds(max(span.start, span.end)),
        "attributes": _attributes(span.attributes),
    }
    if span.parent_id is not None:
        told["parentSpanId"] = span.parent_id
    if span.links:
        told["links"] = [{"traceId": span.trace_id, "spanId": one} for one in span.links]
    if span.error is not None:
        told["status"] = {"code": _STATUS_ERROR, "message": span.error}
        exception: dict[str, AttributeValue] = {"exception.message": span.error}
        if span.traceback is not None:
            exception["exception.stacktrace"] = span.traceback
        event = {"name": "exception", "timeUnixNano": told["endTimeUnixNano"], "attributes": _attributes(exception)}
        told["events"] = [event]
    return told


def _nanoseconds(at: str) -> str:
    return str(round(parse_time(at) * 1000) * 1_000_000)


def _attributes(values: Mapping[str, AttributeValue]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(one)} for name, one in values.items()]


def _value(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}  # 64 bits, as text
        case float():
            return {"doubleValue": value}
        case _:
            return {"stringValue": value}


class SpanSender:
    """Sends spans to a collector. Each request is repeated while the collector is away or overloaded."""

    def __init__(self, collector: Collector, clock: Clock) -> None:
        self._collector = collector
        self._clock = clock
        self._client: Client | None = None
        self._endpoint = Endpoint(collector.url, "")

    async def send(self, spans: Sequence[Span]) -> None:
        """Send the spans. Raises PlaitError if the collector cannot be reached in several attempts, or refuses spans.
        Spans of earlier requests stay sent, and may be sent again.
        """
        for first in range(0, len(spans), _SPANS_A_REQUEST):
            batch = spans[first : first + _SPANS_A_REQUEST]
            await self._post(as_otlp(batch, self._collector.service), len(batch))

    async def aclose(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, body: Mapping[str, Any], count: int) -> None:
        delay = _FIRST_DELAY_S
        for attempt in range(1, _ATTEMPTS + 1):
            why, wait = await self._post_once(body, count)
            if why is None:
                return
            if wait is None or attempt == _ATTEMPTS:
                raise PlaitError(f"the spans were not taken by {self._endpoint.name}: {why}")
            await self._clock.sleep(min(max(wait, delay), _LONGEST_DELAY_S))
            delay *= 2

    async def _post_once(self, body: Mapping[str, Any], count: int) -> tuple[str | None, float | None]:
        """Return the reason of a failure, None without one, and the least delay before the next attempt in seconds;
        None if a further attempt is useless.
        """
        client = await self._opened()
        try:
            with await client.post(self._collector.url, body) as response:
                said = await response.read()
                status, retry_after = response.status, response.headers.get("retry-after", "")
        except Exception as error:
            why = str(client.error_of(error))
            return why.replace("base_url", f"{ENDPOINT}"), 0.0
        if status in _RETRIED:
            return f"HTTP status {status}", float(retry_after) if retry_after.isdecimal() else 0.0
        if status != 200:
            advice = f"check {ENDPOINT}, and the headers in {_HEADERS}"
            return f"HTTP status {status}: {self._endpoint.safe_text(said.decode(errors='replace'))}; {advice}", None
        return _rejection(said, count), None

    async def _opened(self) -> Client:
        if self._client is None:
            headers = self._collector.headers
            self._client = await anyio.to_thread.run_sync(
                lambda: Client(self._endpoint, headers, request_timeout=_REQUEST_S, connect_timeout=_CONNECT_S)
            )
        return self._client


def _rejection(said: bytes, count: int) -> str | None:
    """Return why the collector rejected spans of a request that it took; None if it took all spans."""
    try:
        told: dict[str, Any] = json.loads(said or b"{}").get("partialSuccess") or {}
        rejected = int(told.get("rejectedSpans") or 0)
    except (ValueError, AttributeError, TypeError):
        return None  # a collector that answers in another form has taken the spans
    return f"{rejected} of {count} spans were rejected: {told.get('errorMessage', '')}" if rejected else None
