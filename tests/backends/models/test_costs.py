"""What requests to a model cost, as far as the server tells, in both wire formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Task
from plait import events as events_of_run
from plait.backends import ConversationRequest, Price, Usage
from plait.errors import BackendError
from plait.usage import cost
from tests.support.remotes import dialect, make
from tests.support.wire import Answer, ChatCompletions, Dialect, Messages, events, plain, serve

__all__ = ["dialect"]


async def failure(
    dialect: Dialect, *answers: Answer, request_timeout: float = 10.0, schema: dict[str, Any] | None = None
) -> BackendError:
    async with serve(*answers) as server:
        backend = make(dialect, server.url, request_timeout)
        with pytest.raises(BackendError) as caught:
            async with backend.open(ConversationRequest(output_schema=schema)) as conversation:
                await conversation.send("Hello.")
    return caught.value


def cached(dialect: Dialect) -> int:
    """Return the tokens read from the cache in the answers of `dialect`."""
    return 0 if isinstance(dialect, ChatCompletions) else 3


@pytest.mark.parametrize(
    "reason", ["length", "content_filter", "tool_calls", "model_context_window_exceeded", "pause_turn"]
)
async def test_what_an_unusable_answer_cost_is_told(dialect: Dialect, reason: str) -> None:
    error = await failure(dialect, events(dialect.parts("so far", reason=reason)))
    assert error.usage == Usage(11, 7, model="m", cache_read_tokens=cached(dialect))


@pytest.mark.parametrize("end", ["clean", "cut", "hang", "error"])
async def test_what_a_broken_stream_cost_so_far_is_told(dialect: Dialect, end: str) -> None:
    parts = dialect.parts("half an ", reason=None)
    if isinstance(dialect, ChatCompletions):  # as those servers send it that count as they go
        parts.append(dialect.chunk(None, usage={"prompt_tokens": 11, "completion_tokens": 1}))
    if end == "error":
        parts.append(dialect.error_event("overloaded_error", "sorry"))
    answer = events(parts, end="clean" if end == "error" else end)  # type: ignore[arg-type]
    error = await failure(dialect, answer, request_timeout=1.5 if end == "hang" else 10.0)
    assert error.usage == Usage(11, 1, model="m", cache_read_tokens=cached(dialect), cost_is_partial=True)


@pytest.mark.parametrize("end", ["timeout", "cancel"])
async def test_a_request_that_is_cut_has_cost_at_least_what_was_told(dialect: Dialect, end: str) -> None:
    """OpenAI counts at the end of an answer alone: nothing is known then."""
    begun = anyio.Event()
    async with serve(events(dialect.parts("half an ", reason=None), end="hang")) as server:
        runner = ParallelRunner(make(dialect, server.url), prices={"m": Price(1.0, 10.0)}, cancel_grace=0.1)
        task = Task("a", "Hello.", timeout=1.0 if end == "timeout" else None, retry=0)
        async with runner.start(DAG([task])) as run:
            async for event in run.events():
                if isinstance(event, events_of_run.TaskOutput) and not begun.is_set():
                    begun.set()
                    if end == "cancel":
                        run.cancel()
            usage = (await run.result()).usage
    known = Usage(11, 1, (11 + 10) / 1e6, None, cached(dialect), cost_is_partial=True)
    assert usage == (Usage(cost_is_partial=True) if isinstance(dialect, ChatCompletions) else known)
    assert (usage.cost_is_unknown, cost(usage).startswith("at least $0.0000")) == (
        (True, False) if isinstance(dialect, ChatCompletions) else (False, True)
    )


async def test_a_refused_request_has_cost_nothing(dialect: Dialect) -> None:
    error = await failure(dialect, plain(529, {"error": {"type": "overloaded_error", "message": "sorry"}}))
    assert error.usage == Usage()


async def test_a_repair_that_fails_adds_to_what_the_first_answer_cost(dialect: Dialect) -> None:
    answers = (events(dialect.parts("no")), events(dialect.parts("no", reason="length")))
    error = await failure(dialect, *answers, schema={"type": "array", "items": {"type": "string"}})
    assert error.usage == Usage(22, 14, model="m", cache_read_tokens=2 * cached(dialect))


async def cost_of(usages: Sequence[Any]) -> Usage:
    """What an answer with these usages, one behind the other, is said to have cost."""
    wire = ChatCompletions()
    parts = [wire.chunk({"delta": {"content": "hi"}, "finish_reason": "stop"})]
    parts += [wire.chunk(None, usage=usage) for usage in usages]
    async with serve(events(parts)) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        reply = await conversation.send("Hello.")
    assert reply.text == "hi"
    assert {type(reply.usage.input_tokens), type(reply.usage.output_tokens)} == {int}
    return reply.usage


TOLD = {"prompt_tokens": 11, "completion_tokens": 7}


@pytest.mark.parametrize(
    ("usages", "cost"),
    [
        ([{"prompt_tokens": 11.0, "completion_tokens": 7.0}], Usage(11, 7, model="m")),
        ([{"prompt_tokens": -1, "completion_tokens": 7}], Usage(0, 7, model="m", cost_is_partial=True)),
        ([{"prompt_tokens": float("nan")}, TOLD], Usage(11, 7, model="m", cost_is_partial=True)),
        ([{"prompt_tokens": "11", "completion_tokens": None}], Usage(model="m", cost_is_partial=True)),
        ([{"prompt_tokens": "11", "completion_tokens": 7}], Usage(0, 7, model="m", cost_is_partial=True)),
        ([{"prompt_tokens": True, "completion_tokens": 7}], Usage(0, 7, model="m", cost_is_partial=True)),
        ([{"prompt_tokens": True, "completion_tokens": 1e300}], Usage(model="m", cost_is_partial=True)),
        (["much"], Usage(model="m")),
        ([[]], Usage(model="m")),
        ([{}], Usage(model="m")),
        ([TOLD, {}], Usage(11, 7, model="m")),
        ([TOLD, {"prompt_tokens": 0, "completion_tokens": 0}], Usage(11, 7, model="m")),
        ([{**TOLD, "prompt_tokens_details": {"cached_tokens": 99}}], Usage(11, 7, None, "m", 11)),
        ([{**TOLD, "completion_tokens_details": {"reasoning_tokens": 99}}], Usage(11, 7, None, "m", 0, 0, 7)),
        ([{**TOLD, "prompt_tokens_details": [], "completion_tokens_details": "-"}], Usage(11, 7, model="m")),
    ],
)
async def test_odd_counts_of_tokens_cost_no_answer(usages: Sequence[Any], cost: Usage) -> None:
    assert await cost_of(usages) == cost


DETAILS = {
    "openai": (
        {
            "prompt_tokens": 2006,
            "completion_tokens": 300,
            "total_tokens": 2306,
            "prompt_tokens_details": {"cached_tokens": 1920, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 192, "audio_tokens": 0, "accepted_prediction_tokens": 0},
        },
        Usage(2006, 300, None, "m", 1920, 0, 192),
    ),
    "openrouter": (
        {
            "prompt_tokens": 194,
            "completion_tokens": 2,
            "total_tokens": 196,
            "cost": 0.95,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 100, "audio_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
        Usage(194, 2, 0.95, "m", 0, 100, 0),
    ),
    "deepseek": (
        {
            "prompt_tokens": 20,
            "completion_tokens": 10,
            "total_tokens": 30,
            "prompt_cache_hit_tokens": 16,
            "prompt_cache_miss_tokens": 4,
        },
        Usage(20, 10, None, "m", 16),
    ),
    "moonshot": (
        {"prompt_tokens": 19, "completion_tokens": 21, "total_tokens": 40, "cached_tokens": 10},
        Usage(19, 21, None, "m", 10),
    ),
    "xai": (
        {
            "prompt_tokens": 32,
            "completion_tokens": 9,
            "total_tokens": 135,
            "prompt_tokens_details": {"text_tokens": 32, "cached_tokens": 6},
            "completion_tokens_details": {"reasoning_tokens": 94},
        },
        Usage(32, 103, None, "m", 6, 0, 94),
    ),
}
"""The `usage` of each server in the form of its documentation; xAI counts reasoning beside the completion."""


@pytest.mark.parametrize("server", DETAILS)
async def test_cached_and_reasoning_tokens_are_counted_apart(server: str) -> None:
    told, used = DETAILS[server]
    assert await cost_of([told]) == used


async def test_tokens_written_to_and_read_from_the_cache_of_the_messages_api_are_input() -> None:
    wire = Messages()
    begun = {"id": "m1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    usage = {"input_tokens": 8, "cache_read_input_tokens": 2048, "cache_creation_input_tokens": 512, "output_tokens": 1}
    parts = [
        wire.event("message_start", message={**begun, "usage": usage}),
        wire.event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"}),
        wire.event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}),
        wire.event("message_stop"),
    ]
    async with serve(events(parts)) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        assert (await conversation.send("Hello.")).usage == Usage(2568, 7, None, "m", 2048, 512)


async def test_tokens_that_the_cache_keeps_for_an_hour_are_counted() -> None:
    wire = Messages()
    created = {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 412}
    usage = {"input_tokens": 8, "cache_creation_input_tokens": 512, "cache_creation": created, "output_tokens": 7}
    body = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "hi"}], "model": "m"}
    answer = plain(200, {**body, "stop_reason": "end_turn", "usage": usage})
    async with serve(answer) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        used = (await conversation.send("Hello.")).usage
    assert used == Usage(520, 7, None, "m", 0, 512, cache_write_1h_tokens=412)


@pytest.mark.parametrize(("thought", "counted"), [(400, 400), (501, 500), ("400", 0)])
async def test_reasoning_of_the_messages_api_is_counted_within_the_output(thought: Any, counted: int) -> None:
    wire = Messages()
    begun = {"id": "m1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    usage = {"output_tokens": 500, "output_tokens_details": {"thinking_tokens": thought}}
    parts = [
        wire.event("message_start", message={**begun, "usage": {"input_tokens": 8, "output_tokens": 1}}),
        wire.event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"}),
        wire.event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage),
        wire.event("message_stop"),
    ]
    async with serve(events(parts)) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        used = (await conversation.send("Hello.")).usage
    assert used == Usage(8, 500, None, "m", reasoning_tokens=counted)


async def test_two_reports_on_the_cache_stay_within_the_input() -> None:
    wire = Messages()
    begun = {"id": "m1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    first = {"input_tokens": 10, "cache_creation_input_tokens": 900, "output_tokens": 1}
    last = {"cache_creation_input_tokens": 100, "cache_read_input_tokens": 800, "output_tokens": 7}
    parts = [
        wire.event("message_start", message={**begun, "usage": first}),
        wire.event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"}),
        wire.event("message_delta", delta={"stop_reason": "end_turn"}, usage={**last, "input_tokens": 10}),
        wire.event("message_stop"),
    ]
    async with serve(events(parts)) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        assert (await conversation.send("Hello.")).usage == Usage(910, 7, None, "m", 800, 110)


@pytest.mark.parametrize(
    ("said", "cost"), [(0.0123, 0.0123), (0, 0.0), (-1, None), ("0.1", None), (None, None), (float("nan"), None)]
)
async def test_costs_in_dollars_where_the_server_tells_them(said: Any, cost: float | None) -> None:
    assert await cost_of([{**TOLD, "cost": said}]) == Usage(11, 7, cost, "m")


UPSTREAM = {"is_byok": True, "cost_details": {"upstream_inference_cost": 0.036}}


@pytest.mark.parametrize(
    ("told", "cost"),
    [
        ({"cost": 0, **UPSTREAM}, 0.036),
        ({"cost": 0.004, **UPSTREAM}, 0.04),
        ({"cost": 0.04, **UPSTREAM, "is_byok": False}, 0.04),
        ({"cost": 0, "is_byok": True, "cost_details": {"upstream_inference_cost": None}}, None),
        ({"cost": {"request_cost": 0.005, "total_cost": 0.006}}, 0.006),
        ({"cost": {"currency": "USD"}}, None),
        ({"estimated_cost": 0.0000268}, 0.0000268),
    ],
)
async def test_costs_in_the_forms_of_routers(told: dict[str, Any], cost: float | None) -> None:
    assert await cost_of([{**TOLD, **told}]) == Usage(11, 7, pytest.approx(cost) if cost else cost, "m")


@pytest.mark.parametrize("more", [{"choices": [{"index": 0, "delta": {}, "usage": TOLD}]}, {"x_groq": {"usage": TOLD}}])
async def test_counts_within_the_choice_or_beside_it(more: dict[str, Any]) -> None:
    wire = ChatCompletions()
    parts = [wire.chunk({"delta": {"content": "hi"}, "finish_reason": "stop"}), wire.chunk(None, **more)]
    async with serve(events(parts)) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        assert (await conversation.send("Hello.")).usage == Usage(11, 7, model="m")


async def test_odd_counts_of_the_messages_api_cost_no_answer() -> None:
    wire = Messages()
    begun = {"id": "m1", "type": "message", "role": "assistant", "content": []}
    parts = [
        wire.event("message_start", message={**begun, "usage": {"input_tokens": "8", "cache_read_input_tokens": 3.0}}),
        wire.event("content_block_delta", index=0, delta={"type": "text_delta", "text": "hi"}),
        wire.event("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": -7}),
    ]
    async with serve(events(parts)) as server, make(wire, server.url).open(ConversationRequest()) as conversation:
        assert (await conversation.send("Hello.")).usage == Usage(3, 0, None, None, 3, cost_is_partial=True)
