"""The cost of calls to a model's API: plait with a SQLite store, bare aiohttp, and the `openai` SDK where installed.

The server is `benchmarks.model_server` in a process of its own. It shares the cores with the client, so its slots are
less busy than over a network; compare clients measured in the same minutes.
"""

from __future__ import annotations

import json
import operator
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from tempfile import TemporaryDirectory
from typing import Annotated, TypedDict

import aiohttp

from benchmarks import graphs
from benchmarks.gauge import figures, spent
from benchmarks.model_server import ANSWER
from benchmarks.stores import sqlite_store
from plait import ParallelRunner, RateLimits, RunStatus
from plait.backends import ConversationRequest, OpenAIBackend
from plait.runner.scheduling.slots import Concurrency

Call = Callable[[], Awaitable[str]]
SHAPES = {
    "fan": lambda calls: [[] for _ in range(calls)],
    "layered": lambda calls: graphs.layered(calls, width=500),
    "chain": graphs.chain,
}


@contextmanager
def model_server(*arguments: str) -> Iterator[str]:
    """Run the server. The value is its URL."""
    command = [sys.executable, "-m", "benchmarks.model_server", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def figures_of(url: str) -> dict[str, float]:
    """Return the figures of the server since the last time."""
    with urllib.request.urlopen(f"{url}/figures") as response:
        return json.load(response)


@asynccontextmanager
async def bare(url: str) -> AsyncIterator[Call]:
    """The least code on aiohttp that streams an answer: events cut at blank lines, JSON, and the text put together."""
    body = {"model": "m", "messages": [{"role": "user", "content": "work"}], "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip

    async def call() -> str:
        texts: list[str] = []
        rest = b""
        async with session.post(f"{url}/v1/chat/completions", json=body) as response:
            async for piece in response.content.iter_any():
                *events, rest = (rest + piece).split(b"\n\n")
                for event in events:
                    data = event.removeprefix(b"data: ")
                    if data == b"[DONE]":
                        continue
                    texts.extend(choice["delta"].get("content") or "" for choice in json.loads(data)["choices"])
        return "".join(texts)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield call


@asynccontextmanager
async def sdk(url: str, max_retries: int = 2) -> AsyncIterator[Call]:
    """The official SDK, as its manual streams an answer."""
    import openai  # type: ignore[import-not-found] # noqa: PLC0415

    async def call() -> str:
        texts: list[str] = []
        stream = await client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "work"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in stream:
            texts.extend(choice.delta.content or "" for choice in chunk.choices)
        return "".join(texts)

    async with openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1", max_retries=max_retries) as client:
        yield call


@asynccontextmanager
async def adapter(url: str) -> AsyncIterator[Call]:
    """plait's adapter without a runner."""

    async def call() -> str:
        async with backend.open(ConversationRequest()) as conversation:
            return (await conversation.send("work")).text

    async with OpenAIBackend("m", base_url=f"{url}/v1") as backend:
        yield call


CLIENTS = {"bare": bare, "adapter": adapter, "sdk": sdk}


async def _run_graph(edges: graphs.Edges, url: str, at_once: int) -> dict[str, float]:
    """Run the calls as nodes of a LangGraph graph with ChatOpenAI, each streamed, with a SQLite saver."""
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found] # noqa: PLC0415
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver  # type: ignore[import-not-found] # noqa: PLC0415
    from langgraph.graph import StateGraph  # noqa: PLC0415

    model = ChatOpenAI(model="m", base_url=f"{url}/v1", api_key="k", streaming=True, stream_usage=True, max_retries=0)

    class State(TypedDict, total=False):
        answers: Annotated[dict[str, str], operator.or_]

    def node(name: str) -> Callable[[State], Awaitable[State]]:
        async def call(_state: State) -> State:
            return {"answers": {name: str((await model.ainvoke("work")).content)}}

        return call

    builder = StateGraph(State)
    for position, needed in enumerate(edges):
        builder.add_node(f"t{position}", node(f"t{position}"))
        for before in needed or ["__start__"]:
            builder.add_edge(f"t{before}" if needed else "__start__", f"t{position}")
    with TemporaryDirectory() as folder:
        async with AsyncSqliteSaver.from_conn_string(f"{folder}/graph.db") as saver:
            graph = builder.compile(checkpointer=saver)
            options = {"configurable": {"thread_id": "1"}, "max_concurrency": at_once}
            before_run = spent()
            found = await graph.ainvoke({"answers": {}}, options)
            assert len(found["answers"]) == len(edges)
            return figures(before_run, len(edges))


async def calls(client: str, shape: str, count: str, slots: str, seconds: str) -> dict[str, float]:
    """Measure `count` streamed calls of a graph, as many at once as the server has slots."""
    edges = SHAPES[shape](int(count))
    with model_server(slots, seconds) as url:
        if client == "plait":
            found = await _run(edges, url, int(slots))
        elif client == "langgraph":
            found = await _run_graph(edges, url, int(slots))
        else:
            async with CLIENTS[client](url) as call:
                found = await _walk(edges, call, int(slots))
        served = figures_of(url)
    assert served["served"] == len(edges), served
    return found | served


async def rated(kept: str, count: str, slots: str, seconds: str, capacity_s: str) -> dict[str, float]:
    """Measure `count` calls against a server whose bucket refills at 60 % of what the slots would serve, and holds the
    refill of `capacity_s`. With `kept`, "limited" or "unlimited", the limit is given to plait or not.
    """
    per_minute = 0.6 * int(slots) / float(seconds) * 60
    with model_server(slots, seconds, str(per_minute), str(per_minute / 60 * float(capacity_s))) as url:
        rates = {"default": RateLimits(requests_per_minute=per_minute)} if kept == "limited" else {}
        found = await _run(SHAPES["fan"](int(count)), url, int(slots), rates)
        served = figures_of(url)
    assert served["served"] == int(count), served
    return found | served | {"refused_share": served["refused"] / (served["refused"] + served["served"])}


async def refused(client: str, count: str, at_once: str, seconds: str, *limit: str) -> dict[str, float]:
    """Measure `count` calls, `at_once` of them, against a server that refuses some with 429: a share at random, or by a
    bucket of requests a minute and a capacity. No client is told the limit. The SDK retries up to 20 times.
    """
    edges = SHAPES["fan"](int(count))
    with model_server(at_once, seconds, *limit) as url:
        if client == "plait":
            found = await _run(edges, url, int(at_once))
        else:
            async with sdk(url, max_retries=20) as call:
                found = await _walk(edges, call, int(at_once))
        served = figures_of(url)
    assert served["served"] == len(edges), served
    return found | served


async def width(at_once: str, count: str, slots: str, seconds: str, *limit: str) -> dict[str, float]:
    """Measure `count` calls, `at_once` of them or "auto", against a server of which plait is told nothing."""
    edges = SHAPES["fan"](int(count))
    with model_server(slots, seconds, *limit) as url:
        found = await _run(edges, url, "auto" if at_once == "auto" else int(at_once))
        served = figures_of(url)
    assert served["served"] == len(edges), served
    return found | served


async def _walk(edges: graphs.Edges, call: Call, at_once: int) -> dict[str, float]:
    results: list[str | None] = [None] * len(edges)

    async def node(position: int) -> None:
        results[position] = await call()

    before = spent()
    await graphs.walk(edges, at_once, node)
    assert set(results) == {ANSWER}
    return figures(before, len(edges))


async def _run(
    edges: graphs.Edges, url: str, at_once: Concurrency, rates: Mapping[str, RateLimits] | None = None
) -> dict[str, float]:
    dag = graphs.dag(edges)
    backend = OpenAIBackend("m", base_url=f"{url}/v1")
    async with sqlite_store() as store, backend:
        before = spent()
        result = await ParallelRunner(backend, store=store, concurrency=at_once, rates=rates).run(dag)
        assert result.status is RunStatus.COMPLETED, result.error
        assert {task.text for task in result.tasks.values()} == {ANSWER}
        assert not result.degraded
        return figures(before, len(dag))


ONE_CALL = {
    "plait": """
import sys, asyncio
from plait import ConversationRequest, OpenAIBackend
async def main():
    async with OpenAIBackend("m", base_url=sys.argv[1]).open(ConversationRequest()) as conversation:
        print(len((await conversation.send("work")).text))
asyncio.run(main())
""",
    "sdk": """
import sys, asyncio, openai
async def main():
    client = openai.AsyncOpenAI(api_key="k", base_url=sys.argv[1])
    stream = await client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "work"}], stream=True)
    print(len("".join([chunk.choices[0].delta.content or "" async for chunk in stream])))
asyncio.run(main())
""",
}


async def one_call(client: str) -> dict[str, float]:
    """Measure a whole process that imports the client and streams one answer, which takes 1 ms."""
    with model_server("1", "0.001") as url:
        before = time.perf_counter()
        command = [sys.executable, "-c", ONE_CALL[client], f"{url}/v1"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        wall = time.perf_counter() - before
    assert done.stdout.strip() == str(len(ANSWER))
    return {"wall_s": wall}


MEASURES: dict[str, Callable[..., Awaitable[dict[str, float]]]] = {
    "calls": calls,
    "rated": rated,
    "refused": refused,
    "width": width,
    "one_call": one_call,
}
