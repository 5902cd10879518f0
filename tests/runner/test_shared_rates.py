"""Rate limits over real HTTP: one account for all runs of the process, lowered by the server's headers."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from uuid import uuid4

import anyio
import pytest

from plait import ParallelRunner, RateLimits
from plait.backends import OpenAIBackend
from plait.backends.backend_specs import build
from plait.events import BackendThrottled, TaskCompleted
from plait.persistence import SQLiteStore
from plait.runner.client.run_backends import BackendSet
from plait.runner.plan import parse_plan
from tests.support.remotes import dialect, make
from tests.support.sharing import Meter, wide
from tests.support.wire import ChatCompletions, Dialect, Exchange, plain, serve

__all__ = ["dialect"]
WIRE = ChatCompletions()
LIMIT = RateLimits(1)
"""One call, and the next a minute later: a second call within a test means that a limit was not shared."""


@pytest.fixture(autouse=True)
def _own_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", uuid4().hex)  # the port of a test may be that of an earlier one


async def call_or_wait(*runners: ParallelRunner) -> None:
    """Run one task with each runner at a time, until each task has completed or its run says that it waits."""

    async def run_one(runner: ParallelRunner, name: str) -> None:
        async with runner.start(wide(name, 1)) as run:
            async for event in run.events():
                if isinstance(event, (BackendThrottled, TaskCompleted)):
                    break
            run.stop()

    async with anyio.create_task_group() as group:
        for number, runner in enumerate(runners):
            group.start_soon(run_one, runner, f"r{number}-")


def runner_of(url: str, name: str = "api", variable: str = "OPENAI_API_KEY", **options) -> ParallelRunner:
    backend = OpenAIBackend("m", base_url=f"{url}/v1", api_key_env=variable, stream=False)
    return ParallelRunner(backends={name: backend}, rates={name: LIMIT}, **options)


async def test_runners_with_one_account_share_a_limit() -> None:
    async with serve(WIRE.whole("x")) as server:
        await call_or_wait(runner_of(server.url), runner_of(server.url), runner_of(server.url))
        assert len(server.requests) == 1


async def test_runs_that_wait_for_a_limit_end_at_once_when_they_are_cancelled() -> None:
    """At any moment, also before the call that is ahead of them has been made."""

    async def run_three() -> None:
        runner = ParallelRunner(Meter(), rates={"default": LIMIT})
        async with anyio.create_task_group() as group:
            for number in range(3):
                group.start_soon(runner.run, wide(f"r{number}-", 1))

    for turns in range(40):
        running = asyncio.ensure_future(run_three())
        for _ in range(turns):
            await asyncio.sleep(0)
        running.cancel()
        ended, _ = await asyncio.wait([running], timeout=60)
        assert ended


@pytest.mark.slow
async def test_runs_of_a_plans_pydantic_agent_share_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module("pydantic_ai.models.openai")  # takes longer than the calls
    plan = """
backends: {agent: {kind: pydantic-ai, model: "openai-chat:%s", limits: {requests_per_minute: 1}}}
tasks: [{id: t, prompt: x}]
"""
    model, other = uuid4().hex, uuid4().hex
    async with serve(WIRE.whole("x")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", f"{server.url}/v1")
        runners: list[ParallelRunner] = []
        for name in (model, model, other):
            specs = parse_plan(plan % name).backends
            made = {"agent": build(specs["agent"], folder=Path())}
            rates = BackendSet(specs, "agent", Path()).options(made).rates
            runners.append(ParallelRunner(backends=made, rates=rates))
        await call_or_wait(*runners)
        assert sorted(request.body["model"] for request in server.requests) == sorted({model, other})


def test_the_limit_outlives_an_event_loop() -> None:
    async def once(times: list[int]) -> None:
        async with serve(WIRE.whole("x"), port=port[0]) as server:
            port[0] = int(server.url.rpartition(":")[2])
            await call_or_wait(runner_of(server.url))
            times.append(len(server.requests))

    port, times = [0], []
    for _ in range(2):
        anyio.run(once, times)
    assert times == [1, 0]


async def test_another_key_or_name_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTHER_KEY", "other")
    async with serve(WIRE.whole("x")) as server:
        others = runner_of(server.url, variable="OTHER_KEY"), runner_of(server.url, name="second")
        await call_or_wait(runner_of(server.url), *others)
        assert len(server.requests) == 3


@pytest.mark.parametrize("form", ["x-ratelimit-{1}-{0}", "anthropic-ratelimit-{0}-{1}"])
async def test_headers_lower_the_limit(dialect: Dialect, form: str) -> None:
    headers = {form.format("requests", "limit"): "240", form.format("requests", "remaining"): "0"}
    times: list[float] = []

    async def answer(exchange: Exchange) -> None:
        times.append(anyio.current_time())
        await WIRE_OF[dialect.name](exchange, headers)

    async with serve(answer) as server, make(dialect, server.url, stream=False) as backend:
        runner = ParallelRunner(backends={"api": backend}, rates={"api": RateLimits(60_000)}, concurrency=1)
        await runner.run(wide("t", 3))
    assert [after - before >= 0.2 for before, after in pairwise(times)] == [True, True]


async def _chat(exchange: Exchange, headers: dict[str, str]) -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    await plain(200, {"choices": [choice], "model": "m"}, **headers)(exchange)


async def _messages(exchange: Exchange, headers: dict[str, str]) -> None:
    body = {"content": [{"type": "text", "text": "x"}], "stop_reason": "end_turn", "model": "m"}
    await plain(200, body, **headers)(exchange)


WIRE_OF = {"openai": _chat, "anthropic": _messages}


async def test_a_plan_file_sets_limits_which_are_stored_for_a_resume(tmp_path: Path) -> None:
    async with serve(WIRE.whole("x")) as server:
        limits = {"requests_per_minute": 1, "tokens_per_minute": 100_000}
        backend = {"kind": "openai", "model": "m", "base_url": f"{server.url}/v1", "stream": False, "limits": limits}
        tasks = [{"id": f"t{number}", "prompt": "x"} for number in range(3)]
        plan = tmp_path / "plan.json"
        plan.write_text(json.dumps({"backends": {"api": backend}, "tasks": tasks}))
        store = tmp_path / "runs.db"
        command = [sys.executable, "-m", "plait", "run", str(plan), "--store", str(store)]
        process = await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with anyio.fail_after(60):
            while not server.requests:  # noqa: ASYNC110 - the request of another process
                await anyio.sleep(0.05)
            await anyio.sleep(1)
            process.terminate()
            await process.wait()
        assert len(server.requests) == 1
        async with SQLiteStore(store) as opened:
            (run,) = await opened.list_runs()
            record = await opened.get_run(run.run_id)
    assert record is not None
    kept = json.loads(record.settings)["backends"]["api"]["limits"]
    assert kept == limits
