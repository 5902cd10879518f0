"""An overload that a server reports within an answer: the attempt counts, and other tasks go on meanwhile."""

from __future__ import annotations

import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task, events
from tests.support.remotes import dialect, make
from tests.support.wire import Dialect, Exchange, serve
from tests.support.wire import events as stream

__all__ = ["dialect"]


async def test_an_overload_within_an_answer_counts_as_an_attempt_and_keeps_no_task_out(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-none")
    order: list[str] = []

    async def answer(exchange: Exchange) -> None:
        prompt = exchange.request.body["messages"][-1]["content"]
        order.append(prompt)
        parts = dialect.parts("ok") if prompt != "unlucky" else dialect.parts("half an ", reason=None)
        if prompt == "unlucky":
            parts.append(dialect.error_event("overloaded_error", "Overloaded"))
        await stream(parts)(exchange)

    retry = Retry(attempts=2, base_delay=0.01)
    tasks = [Task("unlucky", prompt="unlucky", retry=retry, weight=9.0), *(Task(name, prompt=name) for name in "abc")]
    async with serve(answer) as server:
        runner = ParallelRunner(make(dialect, server.url), concurrency=1)
        async with runner.start(DAG(tasks)) as run:
            seen = [event async for event in run.events()]
            result = await run.result()
    assert order[0] == "unlucky"
    assert order.count("unlucky") == 2, "as many as attempts"
    assert order[1] in {"a", "b", "c"}, "the slot is free while the task waits"
    assert (result.status, result.failed, result["unlucky"].attempts) == (RunStatus.FAILED, ("unlucky",), 2)
    assert result["unlucky"].error_kind == "transient"
    assert [e.task_id for e in seen if isinstance(e, events.TaskCompleted)] == ["a", "b", "c"]


async def test_an_overload_before_the_answer_is_no_attempt(dialect: Dialect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-none")
    refused = stream([*dialect.parts(reason=None), dialect.error_event("overloaded_error", "Overloaded")])
    task = Task("a", prompt="x", retry=Retry(attempts=2, base_delay=0.01))
    async with serve(refused, refused, refused, stream(dialect.parts("ok"))) as server:
        result = await ParallelRunner(make(dialect, server.url)).run(DAG([task]))
    assert (result.status, result["a"].attempts) == (RunStatus.COMPLETED, 4)
