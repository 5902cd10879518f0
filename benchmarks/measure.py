"""A single measurement: `python -m benchmarks.measure NAME ARGUMENTS...` prints a JSON object.

A separate process gives each figure a cold cache, a separate peak of memory, and no garbage of earlier measurements.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from benchmarks import agents, connections, dask, graphs, growing, hosts, like, stores, wire
from benchmarks.gauge import ANSWER, AT_ONCE, body, figures, spent
from benchmarks.prototype import durable as durable_prototype
from benchmarks.stores import sqlite_store
from plait import DAG, ParallelRunner, RunStatus, Task
from plait.backends import ConversationRequest, FunctionBackend
from plait.persistence import Batch, Store


async def bare(shape: str, tasks: str) -> dict[str, float]:
    """Measure the graph on bare asyncio, without store and events."""
    edges = graphs.SHAPES[shape](int(tasks))
    results: list[str | None] = [None] * len(edges)

    async def node(position: int) -> None:
        results[position] = await body("work")

    before = spent()
    await graphs.walk(edges, AT_ONCE, node)
    assert all(results)
    return figures(before, len(edges))


async def tight(shape: str, tasks: str) -> dict[str, float]:
    """Measure the tightest asyncio code found: all tasks created in advance, explicit futures, and calls that never
    wait.
    """
    edges = graphs.SHAPES[shape](int(tasks))
    before = spent()
    done = [asyncio.get_running_loop().create_future() for _ in edges]
    places = asyncio.Semaphore(AT_ONCE)
    results: list[str | None] = [None] * len(edges)

    async def node(position: int) -> None:
        for needed in edges[position]:
            await done[needed]
        async with places:
            results[position] = await answer()
        done[position].set_result(None)

    async def answer() -> str:
        return ANSWER

    async with asyncio.TaskGroup() as group:
        for position in range(len(edges)):
            group.create_task(node(position))
    assert all(results)
    return figures(before, len(edges))


async def prototype(shape: str, tasks: str) -> dict[str, float]:
    """Measure the graph with `benchmarks.prototype`."""
    return await durable_prototype(graphs.SHAPES[shape](int(tasks)))


async def no_store(shape: str, tasks: str) -> dict[str, float]:
    """Measure a run of plait without a store."""
    dag = graphs.dag(graphs.SHAPES[shape](int(tasks)))
    before = spent()
    result = await ParallelRunner(body, concurrency=AT_ONCE).run(dag)
    assert result.status is RunStatus.COMPLETED
    return figures(before, len(dag))


class Counting:
    """A store that counts the writes to the inner store."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.writes = 0

    async def write(self, batch: Batch) -> None:
        self.writes += 1
        await self.inner.write(batch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def durable(shape: str, tasks: str, at_once: str = str(AT_ONCE)) -> dict[str, float]:
    """Measure a run of plait with a SQLite store."""
    dag = graphs.dag(graphs.SHAPES[shape](int(tasks)))
    async with sqlite_store() as inner:
        store = Counting(inner)
        before = spent()
        result = await ParallelRunner(body, store=store, concurrency=int(at_once)).run(dag)
        assert result.status is RunStatus.COMPLETED
        assert not result.degraded
        return figures(before, len(dag)) | {"commits": store.writes}


async def build(tasks: str) -> dict[str, float]:
    """Measure the construction and validation of a layered DAG, without and with the priorities."""
    edges = graphs.layered(int(tasks))
    tasks_ = [Task(f"t{i}", "x", depends_on=[f"t{d}" for d in needed]) for i, needed in enumerate(edges)]
    before = spent()
    dag = DAG(tasks_)
    built = figures(before, len(dag))
    dag.priorities()
    return built | {"scheduled_s": time.perf_counter() - before[0]}


async def resume(tasks: str = "10000", done: str = "9000") -> dict[str, float]:
    """Measure the time from `resume` to the first backend call, with `done` of `tasks` layered tasks done."""
    count, first = 0, 0.0
    stop_at = int(done)
    run: Any = None

    async def until_stop(_prompt: str) -> str:
        nonlocal count
        count += 1
        if count == stop_at:
            run.stop()
        return ANSWER

    async def note_first(_prompt: str) -> str:
        nonlocal first
        first = first or time.perf_counter()
        return ANSWER

    async with sqlite_store() as store:
        async with ParallelRunner(until_stop, store=store, concurrency=AT_ONCE).start(
            graphs.dag(graphs.layered(int(tasks))), "r"
        ) as run:
            pass
        before = spent()
        result = await ParallelRunner(note_first, store=store, concurrency=AT_ONCE).resume("r")
        assert result.status is RunStatus.COMPLETED
        return {"first_task_s": first - before[0], "reused": result.reused, "rest_s": time.perf_counter() - before[0]}


async def lag(tasks: str = "4000", at_once: str = "200") -> dict[str, float]:
    """Measure the lag of the event loop, sampled every millisecond, during a durable run of tasks that sleep 20 ms."""
    late: list[float] = []

    async def sleeping(_prompt: str) -> str:
        await anyio.sleep(0.02)
        return ANSWER * 5

    async with sqlite_store() as store, anyio.create_task_group() as group:
        group.start_soon(_sample, late)
        runner = ParallelRunner(sleeping, store=store, concurrency=int(at_once))
        await runner.run(graphs.dag(graphs.layered(int(tasks))))
        group.cancel_scope.cancel()
    late.sort()
    return {"p50_ms": late[len(late) // 2] * 1e3, "p99_ms": late[int(len(late) * 0.99)] * 1e3, "max_ms": late[-1] * 1e3}


async def _sample(late: list[float]) -> None:
    while True:
        before = time.perf_counter()
        await anyio.sleep(0.001)
        late.append(time.perf_counter() - before - 0.001)


async def checks(count: str = "64") -> dict[str, float]:
    """Measure the lag of the event loop, sampled every millisecond, while answers of 1 MB are read and checked."""
    text = json.dumps([{"name": f"name {n}", "score": n * 1.5, "tags": ["a", "b", "c"]} for n in range(16_000)])
    item = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^name [0-9]+$"},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        },
        "required": ["name", "score", "tags"],
    }
    schema = {"type": "array", "items": item, "uniqueItems": True}

    backend, request = FunctionBackend(_say(text)), ConversationRequest(output_schema=schema)

    async def check() -> None:
        async with backend.open(request) as conversation:
            assert (await conversation.send("work")).data

    await check()  # imports the validator
    late: list[float] = []
    before = spent()
    async with anyio.create_task_group() as sampling:
        sampling.start_soon(_sample, late)
        async with anyio.create_task_group() as group:
            for _ in range(int(count)):
                group.start_soon(check)
        sampling.cancel_scope.cancel()
    return {"mb": len(text) / 1e6, "max_ms": max(late) * 1e3} | figures(before, int(count))


def _say(text: str) -> Callable[[str], Awaitable[str]]:
    async def say(_prompt: str) -> str:
        return text

    return say


async def makespan(seed: str, at_once: str = "16", tasks: str = "300") -> dict[str, float]:
    """Measure a random graph of sleeping tasks against max(critical path, work / `at_once`)."""
    edges, durations = graphs.irregular(int(seed), int(tasks))
    dag = DAG(
        Task(f"t{i}", prompt=str(durations[i]), weight=durations[i], depends_on=[f"t{d}" for d in needed])
        for i, needed in enumerate(edges)
    )

    async def sleeping(prompt: str) -> str:
        await anyio.sleep(float(prompt))
        return ANSWER

    bound = max(*dag.priorities(), sum(durations) / int(at_once))
    async with sqlite_store() as store:
        before = time.perf_counter()
        await ParallelRunner(sleeping, store=store, concurrency=int(at_once)).run(dag)
        took = time.perf_counter() - before
    return {"bound_s": bound, "took_s": took, "over": (took - max(durations)) / bound}


async def start_up() -> dict[str, float]:
    """Measure `plait --help` in a new process."""
    before = time.perf_counter()
    subprocess.run([sys.executable, "-m", "plait", "--help"], stdout=subprocess.DEVNULL, check=True)
    return {"wall_s": time.perf_counter() - before}


MEASURES: dict[str, Callable[..., Awaitable[dict[str, float]]]] = {
    f.__name__: f for f in (bare, tight, prototype, no_store, durable, build, resume, lag, checks, makespan, start_up)
} | {
    **growing.MEASURES,
    **agents.MEASURES,
    **connections.MEASURES,
    **wire.MEASURES,
    **stores.MEASURES,
    **hosts.MEASURES,
    **dask.MEASURES,
    **like.MEASURES,
}


def main() -> None:
    name, *arguments = sys.argv[1:]
    found = anyio.run(_run, name, arguments)  # unlike asyncio.run, loads the loop before the clock starts
    print(json.dumps(found | {"load": os.getloadavg()[0]}))


async def _run(name: str, arguments: list[str]) -> dict[str, float]:
    return await MEASURES[name](*arguments)


if __name__ == "__main__":
    main()
