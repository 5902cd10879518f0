"""The spans of a run, made from its stored rows: one for the run, one for each task, one for each attempt.

Only what has ended has a span, so a span never changes while its run, task or attempt stays as it is. Names and
attributes follow the semantic conventions of OpenTelemetry for generative AI, which are in development: all names are
in this file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, TypeAlias

from plait.clock_and_ids import span_id, trace_id
from plait.persistence.store_protocol import Store
from plait.persistence.store_records import THOUGHTS, AttemptRecord, MessageRecord, RunRecord, TaskRecord
from plait.runner.state.stored_run import stored_record
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


class SpanKind(IntEnum):
    """The kinds of spans used here, with their numbers in OTLP."""

    INTERNAL = 1
    CLIENT = 3


@dataclass(frozen=True, slots=True)
class Span:
    """A span. Times are UTC in ISO 8601."""

    name: str
    kind: SpanKind
    trace_id: str
    span_id: str
    parent_id: str | None
    """The id of the parent; None for the span of the run."""
    start: str
    end: str
    attributes: Mapping[str, AttributeValue]
    links: tuple[str, ...] = ()
    """The ids of linked spans of the same trace."""
    error: str | None = None
    """The error message; None if the work succeeded."""
    traceback: str | None = None
    """The traceback of a function that failed."""


@dataclass(frozen=True, slots=True)
class TracedTask:
    """A stored task with its attempts and, if wanted in the spans, its messages."""

    task: TaskRecord
    attempts: Sequence[AttemptRecord]
    messages: Sequence[MessageRecord] = ()


@dataclass(frozen=True, slots=True)
class _Run:
    record: RunRecord
    specs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, "Mapping[str, Any]"])
    """The stored specs of the backends by name; empty for a run made by a program."""


def run_span(run: RunRecord) -> Span | None:
    """Return the span of the run; None if the run has not ended."""
    if RunStatus(run.status) not in RUN_DONE or run.ended_at is None:
        return None
    failed = RunStatus(run.status) is RunStatus.FAILED
    return Span(
        f"invoke_workflow {run.name}".strip(),
        SpanKind.INTERNAL,
        trace_id(run.run_id),
        span_id(run.run_id),
        None,
        run.started_at or run.created_at,
        run.ended_at,
        _known(
            {
                "gen_ai.operation.name": "invoke_workflow",
                "gen_ai.workflow.name": run.name or None,
                "error.type": "failed" if failed else None,
                "plait.run.id": run.run_id,
                "plait.status": run.status,
                "plait.cost_usd": run.usage.cost_usd,  # tokens are on the attempts alone: collectors add them up
            }
        ),
        error=(run.error or "the run failed") if failed else None,
    )


def task_spans(run: RunRecord, tasks: Iterable[TracedTask]) -> Iterator[Span]:
    """Yield the spans of the ended attempts of each task, then the span of the task if the task has ended."""
    told = _Run(run, _specs(run))
    for traced in tasks:
        yield from (span for attempt in traced.attempts if (span := _attempt_span(told, traced, attempt)) is not None)
        if (whole := _task_span(told, traced)) is not None:
            yield whole


def _specs(run: RunRecord) -> Mapping[str, Mapping[str, Any]]:
    specs = json.loads(run.settings or "{}").get("backends")
    return specs if isinstance(specs, dict) else {}  # pyright: ignore[reportUnknownVariableType]


def _task_span(run: _Run, traced: TracedTask) -> Span | None:
    task, run_id = traced.task, run.record.run_id
    if TaskStatus(task.status) not in TASK_DONE or task.ended_at is None or not traced.attempts:
        return None
    failed = TaskStatus(task.status) is TaskStatus.FAILED
    return Span(
        f"task {task.task_id}",
        SpanKind.INTERNAL,
        trace_id(run_id),
        span_id(run_id, task.task_id),
        span_id(run_id),
        traced.attempts[0].started_at,
        task.ended_at,
        _known(
            {
                "error.type": (task.error_kind or "failed") if failed else None,
                "plait.run.id": run_id,
                "plait.task.id": task.task_id,
                "plait.status": task.status,
                "plait.attempts": task.attempt,
                "plait.added_by": task.added_by,
            }
        ),
        tuple(span_id(run_id, name) for name in task.depends_on),
        (task.error or "the task failed") if failed else None,
    )


def _attempt_span(run: _Run, traced: TracedTask, attempt: AttemptRecord) -> Span | None:
    """Return the span of the attempt, linked to the attempt before; None if the attempt has not ended."""
    run_id, task_id, number = run.record.run_id, attempt.task_id, attempt.attempt
    if attempt.ended_at is None:
        return None
    spec = run.specs.get(attempt.backend, {})
    name, kind, called = _call(spec, attempt)
    failed = AttemptStatus(attempt.status) in _FAILED_ATTEMPTS
    return Span(
        name,
        kind,
        trace_id(run_id),
        span_id(run_id, task_id, number),
        span_id(run_id, task_id),
        attempt.started_at,
        attempt.ended_at,
        _known(
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
                **_content(message for message in traced.messages if message.attempt == number),
            }
        ),
        (span_id(run_id, task_id, number - 1),) if number > 1 else (),
        (attempt.error or f"the attempt was {attempt.status}") if failed else None,
        attempt.traceback,
    )


def _call(spec: Mapping[str, Any], attempt: AttemptRecord) -> tuple[str, SpanKind, dict[str, AttributeValue | None]]:
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
        name, span_kind = f"invoke_agent {agent}", SpanKind.INTERNAL
    elif kind in _MODELS or (kind is None and answered is not None):
        named = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": _MODELS.get(kind or "")}
        name, span_kind = f"chat {model or answered or attempt.backend}", SpanKind.CLIENT
    else:
        named, name, span_kind = {}, f"attempt {attempt.backend}", SpanKind.INTERNAL
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
    told: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    parts: list[dict[str, str]] = []
    for message in messages:
        if message.role == THOUGHTS:
            parts.append({"type": "reasoning", "content": message.content})
            continue
        parts.append({"type": "text", "content": message.content})
        is_answer = message.role == "assistant"
        more = {"finish_reason": "stop"} if is_answer else {}
        told[is_answer].append({"role": message.role, "parts": parts, **more})
        parts = []
    return {
        "gen_ai.input.messages": json.dumps(told[False]) if told[False] else None,
        "gen_ai.output.messages": json.dumps(told[True]) if told[True] else None,
    }


def _known(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    return {name: one for name, one in attributes.items() if one is not None}


class RunTrace:
    """The spans of the run. With `content`, the spans of attempts hold the messages of the conversations."""

    def __init__(self, store: Store, run_id: str, *, content: bool = False) -> None:
        self._store = store
        self._run_id = run_id
        self._content = content
        self._after: int | None = None
        """The number of the last event read; None before the first call."""
        self._told: dict[str, str] = {}
        """The end of each span returned so far. A reopened task ends again."""
        self.is_over = False
        """Whether the run had ended at the last call."""

    async def ended(self) -> list[Span]:
        """Return the spans that have ended since the previous call, of each task in the order of the run. Raises
        RunNotFound, StoreError.
        """
        # The record comes first: a run that has ended has all its events in the store.
        _, run = await stored_record(self._store, self._run_id)
        spans = [*task_spans(run, await self._changed_tasks())]
        if (whole := run_span(run)) is not None:
            spans.append(whole)
        self.is_over = RunStatus(run.status) in RUN_DONE
        fresh = [span for span in spans if self._told.get(span.span_id) != span.end]
        self._told.update((span.span_id, span.end) for span in fresh)
        return fresh

    async def _changed_tasks(self) -> list[TracedTask]:
        is_first, after = self._after is None, self._after or 0
        changed: set[str] = set()
        while page := await self._store.list_events(self._run_id, after):
            after = page[-1].seq
            changed.update(event.task_id for event in page if event.task_id is not None)
        self._after = after
        return await self._read(None if is_first or len(changed) > _READ_ALONE else changed)

    async def _read(self, only: Collection[str] | None) -> list[TracedTask]:
        """Return the tasks in `only`, or all tasks, with their attempts."""
        store, run_id = self._store, self._run_id
        if only is None:
            tasks, attempts = await store.list_tasks(run_id), await store.list_attempts(run_id)
        else:
            tasks = tuple([task for name in only for task in await store.list_tasks(run_id, name)])
            attempts = tuple([one for name in only for one in await store.list_attempts(run_id, name)])
        by_task: defaultdict[str, list[AttemptRecord]] = defaultdict(list)
        for attempt in attempts:
            by_task[attempt.task_id].append(attempt)
        traced = [TracedTask(task, by_task[task.task_id]) for task in sorted(tasks, key=lambda one: one.position)]
        if not self._content:
            return traced
        return [
            TracedTask(one.task, one.attempts, await store.list_messages(run_id, one.task.task_id)) for one in traced
        ]
