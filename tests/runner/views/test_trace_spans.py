"""The attributes of spans, and the sender, without a process of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from plait import DAG, ParallelRunner, PlaitError, Task
from plait.backends import ConversationRequest, Reply, Usage
from plait.clock_and_ids import Clock
from plait.persistence import MemoryStore
from plait.runner.views.trace_spans import RunTrace, Span, SpanSender
from tests.support.collector import collecting


class Model:
    """A backend that reports usage, a model and a session."""

    session_id = "s-1"

    def new_session_id(self) -> str | None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Any]:
        request.on_session(self.session_id)
        yield self

    async def send(self, prompt: str) -> Reply:
        return Reply(prompt, usage=Usage(100, 20, 0.5, "m-2026", 60, 30, 10))


async def spans_on(spec: dict[str, Any] | None) -> dict[str, Span]:
    """The spans of a run on a backend of which the store knows `spec`."""
    store = MemoryStore()
    settings = {} if spec is None else {"backends": {"b": spec}}
    runner = ParallelRunner(backends={"b": Model()}, default="b", store=store)
    run = await runner.run(DAG([Task("a", prompt="x")], name="n"), settings=settings)
    spans = await RunTrace(store, run.run_id).ended()
    return {span["name"]: span for span in spans}


def attributes(span: Span) -> dict[str, Any]:
    """The attributes of a span by name; whole numbers are texts, as in the protocol."""
    return {one["key"]: next(iter(one["value"].values())) for one in span["attributes"]}


async def test_a_call_of_a_model() -> None:
    spans = await spans_on({"kind": "openai", "model": "m"})
    assert spans.keys() == {"chat m", "task a", "invoke_workflow n"}
    call = spans["chat m"]
    assert call["kind"] == 3
    assert {name: one for name, one in attributes(call).items() if name.startswith("gen_ai")} == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "openai",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m-2026",
        "gen_ai.conversation.id": "s-1",
        "gen_ai.usage.input_tokens": "100",
        "gen_ai.usage.output_tokens": "20",
        "gen_ai.usage.cache_read.input_tokens": "60",
        "gen_ai.usage.cache_creation.input_tokens": "30",
        "gen_ai.usage.reasoning.output_tokens": "10",
    }
    whole = attributes(spans["invoke_workflow n"])
    assert attributes(call)["plait.cost_usd"] == whole["plait.cost_usd"] == 0.5
    assert "gen_ai.usage.input_tokens" not in whole


async def test_a_turn_of_an_agent() -> None:
    turn = (await spans_on({"kind": "claude-code"}))["invoke_agent claude-code"]
    told = [attributes(turn)[f"gen_ai.{name}"] for name in ("operation.name", "agent.name", "provider.name")]
    assert told == ["invoke_agent", "claude-code", "anthropic"]


async def test_a_run_of_a_program_names_the_model_that_answered() -> None:
    call = (await spans_on(None))["chat m-2026"]
    assert "gen_ai.provider.name" not in attributes(call)


class Hurried(Clock):
    """A clock whose waits take no time."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    async def sleep(self, seconds: float) -> None:  # type: ignore[override]
        self.waits.append(seconds)


async def test_a_collector_that_is_away_is_asked_again() -> None:
    spans, clock = [*(await spans_on(None)).values()], Hurried()
    with collecting() as there:
        there.answers = [(503, {}, ""), (429, {"retry-after": "7"}, ""), (502, {}, "")]
        sender = SpanSender(f"{there.url}/v1/traces", clock)
        await sender.send(spans)
        await sender.aclose()
        assert len(there.spans) == len(spans)
        assert clock.waits == [1, 7, 4]
    clock.waits.clear()
    sender = SpanSender(f"{there.url}/v1/traces", clock)
    with pytest.raises(PlaitError, match=r"nothing listens at .*OTEL_EXPORTER_OTLP_ENDPOINT"):
        await sender.send(spans)
    await sender.aclose()
    assert len(clock.waits) == 4


async def test_many_spans_are_sent_in_several_requests() -> None:
    (span, *_) = (await spans_on(None)).values()
    with collecting() as there:
        sender = SpanSender(f"{there.url}/v1/traces", Hurried())
        await sender.send([span] * 600)
        await sender.aclose()
        assert ([len(body["resourceSpans"][0]["scopeSpans"][0]["spans"]) for body in there.bodies]) == [256, 256, 88]


def test_the_endpoint_of_the_environment() -> None:

    def found(environment: Mapping[str, str]) -> SpanSender:
        return SpanSender.of_environment(environment, Hurried())

    assert found({}).url == "http://localhost:4318/v1/traces"
    assert found({"OTEL_EXPORTER_OTLP_ENDPOINT": "https://c.example/otlp/"}).url == "https://c.example/otlp/v1/traces"
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://b/t"}
    assert found(named).url == "http://b/t"
    with pytest.raises(PlaitError, match="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT does not begin with http"):
        found({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "ftp://b/t"})
