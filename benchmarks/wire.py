"""The cost of calls to a model's API: plait with a SQLite store, bare aiohttp, and the `openai` SDK where installed.

The server is `benchmarks.model_server` in a process of its own. It shares the cores with the client, so its slots are
less busy than over a network; compare clients measured in the same minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import aiohttp

from benchmarks import graphs
from benchmarks.gauge import figures, spent
from benchmarks.model_server import ANSWER
from benchmarks.stores import sqlite_store
from plait.backends import ConversationRequest, OpenAIBackend
from plait.runner import ParallelRunner, RunStatus

Call = Callable[[], Awaitable[str]]
SHAPES = {
    "fan": lambda calls: [[] for _ in range(calls)],
    "layered": lambda calls: graphs.layered(calls, width=500),
    "chain": graphs.chain,
}


@contextmanager
def model_server(slots: str, seconds: str) -> Iterator[str]:
    """Run the server. The value is its URL."""
    command = [sys.executable, "-m", "benchmarks.model_server", slots, seconds]
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
async def sdk(url: str) -> AsyncIterator[Call]:
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

    async with openai.AsyncOpenAI(api_key="k", base_url=f"{url}/v1") as client:
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


async def calls(client: str, shape: str, count: str, slots: str, seconds: str) -> dict[str, float]:
    """Measure `count` streamed calls of a graph, as many at once as the server has slots."""
    edges = SHAPES[shape](int(count))
    with model_server(slots, seconds) as url:
        if client == "plait":
            found = await _run(edges, url, int(slots))
        else:
            async with CLIENTS[client](url) as call:
                found = await _walk(edges, call, int(slots))
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


async def _run(edges: graphs.Edges, url: str, at_once: int) -> dict[str, float]:
    dag = graphs.dag(edges)
    backend = OpenAIBackend("m", base_url=f"{url}/v1")
    async with sqlite_store() as store, backend:
        before = spent()
        result = await ParallelRunner(backend, store=store, concurrency=at_once).run(dag)
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


MEASURES: dict[str, Callable[..., Awaitable[dict[str, float]]]] = {"calls": calls, "one_call": one_call}
