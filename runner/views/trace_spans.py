"""A run as a trace: its spans, made from its stored rows, and their way to a collector over HTTP. One span for the run,
one for each task, one for each attempt, in the JSON of the OpenTelemetry protocol.

Only what has ended has a span, so a span never changes while its run, task or attempt stays as it is. Names and
attributes follow the semantic conventions of OpenTelemetry for generative AI, which are in development: all names are
in this file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

import anyio.to_thread

from plait.backends.models.http_client import Client, Endpoint, url_fault
from plait.clock_and_ids import Clock, parse_time, span_id, trace_id
from plait.errors import PlaitError
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import THOUGHTS, AttemptRecord, MessageRecord, RunRecord, TaskRecord
from plait.runner.state.stored_run import events_after, stored_record
from plait.statuses import RUN_DONE, TASK_DONE, AttemptStatus, RunStatus, TaskStatus
from plait.usage import Usage

AttributeValue: TypeAlias = "str | bool | int | float"
_AGENTS = {"claude-code": "anthropic", "codex": "openai", "gemini": "gcp.gemini", "acp": None, "pydantic-ai": None}
"""The provider by kind of agent; None if the kind does not determine the provider."""
_MODELS = {"openai": "openai", "anthropic": "anthropic", "local": "llama.cpp"}
"""The provider by kind of model."""
_FAILED_ATTEMPTS = frozenset(
    {AttemptStatus.FAILED, AttemptStatus.SKIPPED, AttemptStatus.RETRIED, AttemptStatus.INTERRUPTED}
)


_READ_ALONE = 50
"""Number of changed tasks up to which each is read by itself, instead of all tasks of the run."""


Span: TypeAlias = "dict[str, Any]"
"""A span in the JSON of the OpenTelemetry protocol."""
_INTERNAL, _CLIENT = 1, 3
"""Kinds of spans in OTLP."""
_STATUS_ERROR = 2


def _span(
    name: str,
    kind: int,
    ids: tuple[str, str, str | None],
    times: tuple[str, str],
    attributes: Mapping[str, AttributeValue | None],
    *,
    error: str | None = None,
    traceback: str | None = None,
    links: Sequence[str] = (),
) -> Span:
    """Return a span. `ids` are those of the trace, of the span and of its parent; attributes that are None are left
    out; `links` are ids of spans of the same trace.
    """
    trace, span, parent = ids
    start, end = times
    ends = _nanoseconds(max(start, end))
    shown: Span = {
        "traceId": trace,
        "spanId": span,
        "name": name,
        "kind": kind,
        "startTimeUnixNano": _nanoseconds(start),
        "endTimeUnixNano": ends,
        "attributes": _attributes(attributes),
    }
    if parent is not None:
        shown["parentSpanId"] = parent
    if links:
        shown["links"] = [{"traceId": trace, "spanId": one} for one in links]
    if error is not None:
        shown["status"] = {"code": _STATUS_ERROR, "message": error}
        exception = {"exception.message": error, "exception.stacktrace": traceback}
        shown["events"] = [{"name": "exception", "timeUnixNano": ends, "attributes": _attributes(exception)}]
    return shown


def _nanoseconds(at: str) -> str:
    return str(round(parse_time(at) * 1000) * 1_000_000)


def _attributes(values: Mapping[str, AttributeValue | None]) -> list[dict[str, Any]]:
    """Return the attributes in the JSON of the protocol, without those that are None."""
    return [{"key": name, "value": _value(one)} for name, one in values.items() if one is not None]


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


def _run_span(run: RunRecord) -> Span | None:
    """Return the span of the run; None if the run has not ended."""
    if RunStatus(run.status) not in RUN_DONE or run.ended_at is None:
        return None
    failed = RunStatus(run.status) is RunStatus.FAILED
    return _span(
        f"invoke_workflow {run.name}".strip(),
        _INTERNAL,
        (trace_id(run.run_id), span_id(run.run_id), None),
        (run.started_at or run.created_at, run.ended_at),
        {
            "gen_ai.operation.name": "invoke_workflow",
            "gen_ai.workflow.name": run.name or None,
            "error.type": "failed" if failed else None,
            "plait.run.id": run.run_id,
            "plait.status": run.status,
            "plait.cost_usd": run.usage.cost_usd,  # tokens are on the attempts alone: collectors add them up
        },
        error=(run.error or "the run failed") if failed else None,
    )


def _task_span(run: RunRecord, task: TaskRecord, attempts: Sequence[AttemptRecord]) -> Span | None:
    run_id = run.run_id
    if TaskStatus(task.status) not in TASK_DONE or task.ended_at is None or not attempts:
        return None
    failed = TaskStatus(task.status) is TaskStatus.FAILED
    return _span(
        f"task {task.task_id}",
        _INTERNAL,
        (trace_id(run_id), span_id(run_id, task.task_id), span_id(run_id)),
        (attempts[0].started_at, task.ended_at),
        {
            "error.type": (task.error_kind or "failed") if failed else None,
            "plait.run.id": run_id,
            "plait.task.id": task.task_id,
            "plait.status": task.status,
            "plait.attempts": task.attempt,
            "plait.added_by": task.added_by,
        },
        error=(task.error or "the task failed") if failed else None,
        links=[span_id(run_id, name) for name in task.depends_on],
    )


def _attempt_span(
    run_id: str, spec: Mapping[str, Any], attempt: AttemptRecord, messages: Sequence[MessageRecord]
) -> Span | None:
    """Return the span of the attempt, linked to the attempt before; None if the attempt has not ended. `spec` is the
    stored spec of the backend, `messages` the conversation of the task.
    """
    task_id, number = attempt.task_id, attempt.attempt
    if attempt.ended_at is None:
        return None
    name, kind, called = _call(spec, attempt)
    failed = AttemptStatus(attempt.status) in _FAILED_ATTEMPTS
    return _span(
        name,
        kind,
        (trace_id(run_id), span_id(run_id, task_id, number), span_id(run_id, task_id)),
        (attempt.started_at, attempt.ended_at),
        {
            **called,
            "gen_ai.conversation.id": attempt.session_id,
            "error.type": (attempt.error_kind or attempt.status) if failed else None,
            "plait.run.id": run_id,
            "plait.task.id": task_id,
            "plait.attempt": number,
            "plait.backend": attempt.backend,
            "plait.status": attempt.status,
            **_usage(attempt.usage),
            **_content(message for message in messages if message.attempt == number),
        },
        error=(attempt.error or f"the attempt was {attempt.status}") if failed else None,
        traceback=attempt.traceback,
        links=[span_id(run_id, task_id, number - 1)] if number > 1 else (),
    )


def _call(spec: Mapping[str, Any], attempt: AttemptRecord) -> tuple[str, int, dict[str, AttributeValue | None]]:
    """Return the name of the attempt's span, its kind, and the attributes of the call."""
    kind, model = spec.get("kind"), spec.get("model")
    answered = attempt.usage.model
    if kind in _AGENTS:
        agent = str(spec.get("agent") or kind)
        named: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": agent,
            "gen_ai.provider.name": _AGENTS.get(agent),
        }
        name, span_kind = f"invoke_agent {agent}", _INTERNAL
    elif kind in _MODELS or (kind is None and answered is not None):
        named = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": _MODELS.get(kind or "")}
        name, span_kind = f"chat {model or answered or attempt.backend}", _CLIENT
    else:
        named, name, span_kind = {}, f"attempt {attempt.backend}", _INTERNAL
    return name, span_kind, {**named, "gen_ai.request.model": model, "gen_ai.response.model": answered}


def _usage(usage: Usage) -> dict[str, AttributeValue | None]:
    """Return tokens and cost. A count that is 0 is left out, because a backend without counts reports 0."""
    counts = {
        "input_tokens": usage.input_tokens,
        "output_tokens": usage.output_tokens,
        "cache_read.input_tokens": usage.cache_read_tokens,
        "cache_creation.input_tokens": usage.cache_write_tokens,
        "reasoning.output_tokens": usage.reasoning_tokens,
    }
    return {
        **{f"gen_ai.usage.{name}": count or None for name, count in counts.items()},
        "plait.cost_usd": usage.cost_usd,
    }


def _content(messages: Iterable[MessageRecord]) -> dict[str, AttributeValue | None]:
    """Return the messages of an attempt as JSON text, those that the model wrote apart from the others."""
    messages_by_side: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    parts: list[dict[str, str]] = []
    for message in messages:
        if message.role == THOUGHTS:
            parts.append({"type": "reasoning", "content": message.content})
            continue
        parts.append({"type": "text", "content": message.content})
        is_answer = message.role == "assistant"
        more = {"finish_reason": "stop"} if is_answer else {}
        messages_by_side[is_answer].append({"role": message.role, "parts": parts, **more})
        parts = []
    return {
        "gen_ai.input.messages": json.dumps(messages_by_side[False]) if messages_by_side[False] else None,
        "gen_ai.output.messages": json.dumps(messages_by_side[True]) if messages_by_side[True] else None,
    }


class RunTrace:
    """The spans of the run. With `content`, the spans of attempts hold the messages of the conversations."""

    def __init__(self, store: Store, run_id: str, *, content: bool = False) -> None:
        self._store = store
        self._run_id = run_id
        self._content = content
        self._after: int | None = None
        """The number of the last event read; None before the first call."""
        self._returned: dict[str, str] = {}
        """The end of each span returned so far. A reopened task ends again."""
        self.is_over = False
        """Whether the run had ended at the last call."""

    async def ended(self) -> list[Span]:
        """Return the spans that have ended since the previous call, of each task in the order of the run: of its
        attempts, then of the task. Raises RunNotFound, StoreError.
        """
        # The record comes first: a run that has ended has all its events in the store.
        _, run = await stored_record(self._store, self._run_id)
        specs = json.loads(run.settings or "{}").get("backends")  # none of a run made by a program
        specs = cast("Mapping[str, Mapping[str, Any]]", specs if isinstance(specs, dict) else {})
        spans: list[Span | None] = []
        for task, attempts in await self._changed_tasks():
            messages = await self._store.list_messages(self._run_id, task.task_id) if self._content else ()
            spans += [_attempt_span(run.run_id, specs.get(one.backend, {}), one, messages) for one in attempts]
            spans.append(_task_span(run, task, attempts))
        spans.append(_run_span(run))
        self.is_over = RunStatus(run.status) in RUN_DONE
        ends = ((span, span["endTimeUnixNano"]) for span in spans if span is not None)
        fresh = [span for span, end in ends if self._returned.get(span["spanId"]) != end]
        self._returned.update((span["spanId"], span["endTimeUnixNano"]) for span in fresh)
        return fresh

    async def _changed_tasks(self) -> list[tuple[TaskRecord, Sequence[AttemptRecord]]]:
        """Return the tasks with events since the previous call, all tasks if they are many, with their attempts."""
        store, run_id = self._store, self._run_id
        is_first, after = self._after is None, self._after or 0
        changed: set[str] = set()
        async for event in events_after(store, run_id, after):
            after = event.seq
            changed |= set() if event.task_id is None else {event.task_id}
        self._after = after
        chosen = (None,) if is_first or len(changed) > _READ_ALONE else changed
        tasks = [task for name in chosen for task in await store.list_tasks(run_id, name)]
        by_task: defaultdict[str, list[AttemptRecord]] = defaultdict(list)
        for name in chosen:
            for attempt in await store.list_attempts(run_id, name):
                by_task[attempt.task_id].append(attempt)
        return [(task, by_task[task.task_id]) for task in sorted(tasks, key=lambda one: one.position)]


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


class SpanSender:
    """Sends spans to the collector at `url`, under the name of the `service`. Each request is repeated while the
    collector is away or overloaded.
    """

    def __init__(
        self, url: str, clock: Clock, *, headers: Mapping[str, str] | None = None, service: str = "plait"
    ) -> None:
        self.url = url
        self._clock = clock
        self._headers = headers or {}
        self._service = service
        self._client: Client | None = None
        self._endpoint = Endpoint(url, "")

    @classmethod
    def of_environment(cls, environment: Mapping[str, str], clock: Clock) -> SpanSender:
        """Return a sender to the collector that the usual variables of OpenTelemetry name. Raises PlaitError for a bad
        URL.
        """
        url = environment.get(TRACES_ENDPOINT)
        variable = TRACES_ENDPOINT if url else ENDPOINT
        if not url:
            url = (environment.get(ENDPOINT) or DEFAULT_ENDPOINT).rstrip("/") + _PATH
        if (fault := url_fault(url)) is not None:
            raise PlaitError(f"{fault.replace('base_url', variable)}; it is like {DEFAULT_ENDPOINT}")
        named = environment.get(_HEADERS, ""), environment.get(_TRACES_HEADERS, "")
        pairs = (part.partition("=") for text in named for part in text.split(",") if "=" in part)
        headers = {unquote(name).strip(): unquote(value).strip() for name, _, value in pairs}
        return cls(url, clock, headers=headers, service=environment.get("OTEL_SERVICE_NAME") or "plait")

    async def send(self, spans: Sequence[Span]) -> None:
        """Send the spans. Raises PlaitError if the collector cannot be reached in several attempts, or refuses spans.
        Spans of earlier requests stay sent, and may be sent again.
        """
        for first in range(0, len(spans), _SPANS_A_REQUEST):
            await self._post(spans[first : first + _SPANS_A_REQUEST])

    async def aclose(self) -> None:
        """Close the connection."""
        if self._client is not None:
            await self._client.aclose()

    async def _post(self, spans: Sequence[Span]) -> None:
        version = metadata.version("plait")
        resource = {"attributes": _attributes({"service.name": self._service, "service.version": version})}
        scope = {"scope": {"name": "plait", "version": version}, "spans": spans}
        body = {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}
        delay = _FIRST_DELAY_S
        for attempt in range(1, _ATTEMPTS + 1):
            why, wait = await self._post_once(body, len(spans))
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
            with await client.post(self.url, body) as response:
                answer = await response.read()
                status, retry_after = response.status, response.headers.get("retry-after", "")
        except Exception as error:  # aiohttp raises many kinds; a failed export is a line, never a traceback
            why = str(client.error_of(error))
            return why.replace("base_url", f"{ENDPOINT}"), 0.0
        if status in _RETRIED:
            return f"HTTP status {status}", float(retry_after) if retry_after.isdecimal() else 0.0
        if status != 200:
            advice = f"check {ENDPOINT}, and the headers in {_HEADERS}"
            return f"HTTP status {status}: {self._endpoint.safe_text(answer.decode(errors='replace'))}; {advice}", None
        return _rejection(answer, count), None

    async def _opened(self) -> Client:
        if self._client is None:
            self._client = await anyio.to_thread.run_sync(
                lambda: Client(self._endpoint, self._headers, request_timeout=_REQUEST_S, connect_timeout=_CONNECT_S)
            )
        return self._client


def _rejection(body: bytes, count: int) -> str | None:
    """Return why the collector rejected spans of a request that it took; None if it took all spans."""
    try:
        partial: dict[str, Any] = json.loads(body or b"{}").get("partialSuccess") or {}
        rejected = int(partial.get("rejectedSpans") or 0)
    except (ValueError, AttributeError, TypeError):
        return None  # a collector that answers in another form has taken the spans
    return f"{rejected} of {count} spans were rejected: {partial.get('errorMessage', '')}" if rejected else None
