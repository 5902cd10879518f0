"""What requests to a model cost, as far as the server tells, in both wire formats."""

from __future__ import annotations

from typing import Any

import pytest

from backends import BackendError, Opening, Usage
from tests.support.remotes import dialect, make
from tests.support.wire import Answer, ChatCompletions, Dialect, events, serve

__all__ = ["dialect"]


async def failure(
    dialect: Dialect, *answers: Answer, request_timeout: float = 10.0, schema: dict[str, Any] | None = None
) -> BackendError:
    async with serve(*answers) as server:
        backend = make(dialect, server.url, request_timeout)
        with pytest.raises(BackendError) as caught:
            async with backend.open(Opening(output_schema=schema)) as conversation:
                await conversation.send("Hello.")
    return caught.value


@pytest.mark.parametrize(
    "reason", ["length", "content_filter", "tool_calls", "model_context_window_exceeded", "pause_turn"]
)
async def test_what_an_unusable_answer_cost_is_told(dialect: Dialect, reason: str) -> None:
    error = await failure(dialect, events(dialect.parts("so far", reason=reason)))
    assert error.usage == Usage(11, 7)


@pytest.mark.parametrize("end", ["clean", "cut", "hang", "error"])
async def test_what_a_broken_stream_cost_so_far_is_told(dialect: Dialect, end: str) -> None:
    parts = dialect.parts("half an ", reason=None)
    if isinstance(dialect, ChatCompletions):  # as those servers send it that count as they go
        parts.append(dialect.chunk(None, usage={"prompt_tokens": 11, "completion_tokens": 1}))
    if end == "error":
        parts.append(dialect.error_event("overloaded_error", "sorry"))
    answer = events(parts, end="clean" if end == "error" else end)  # type: ignore[arg-type]
    error = await failure(dialect, answer, request_timeout=1.5 if end == "hang" else 10.0)
    assert error.usage == Usage(11, 1)


async def test_a_repair_that_fails_adds_to_what_the_first_answer_cost(dialect: Dialect) -> None:
    answers = (events(dialect.parts("no")), events(dialect.parts("no", reason="length")))
    error = await failure(dialect, *answers, schema={"type": "array", "items": {"type": "string"}})
    assert error.usage == Usage(22, 14)
