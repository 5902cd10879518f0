"""Measured graphs: dependencies by position, conversion to DAGs, and an executor on bare asyncio."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from plait import DAG, Task

Edges = list[list[int]]
"""The positions of the dependencies, by position of the task."""


def fan(tasks: int) -> Edges:
    """Return a graph 1 -> N -> 1."""
    return [[], *[[0] for _ in range(tasks - 2)], list(range(1, tasks - 1))]


def layered(tasks: int, seed: int = 1, width: int | None = None) -> Edges:
    """Return layers of `width` tasks, or else sqrt(N) and at most 100; each task depends on 3 random tasks of the
    previous layer.
    """
    width = width or min(100, max(1, round(tasks**0.5)))
    rng = random.Random(seed)
    edges: Edges = []
    for position in range(tasks):
        start = (position // width) * width
        edges.append(sorted(rng.sample(range(start - width, start), min(3, width))) if start else [])
    return edges


def chain(tasks: int) -> Edges:
    """Return a graph of tasks one after the other."""
    return [[position - 1] if position else [] for position in range(tasks)]


SHAPES = {"fan": fan, "layered": layered, "chain": chain}


def dag(edges: Edges) -> DAG:
    """Return the graph as a DAG."""
    return DAG(Task(f"t{i}", prompt="work", depends_on=[f"t{d}" for d in needed]) for i, needed in enumerate(edges))


def irregular(seed: int, tasks: int) -> tuple[Edges, list[float]]:
    """Return a random graph, and long-tailed durations in seconds."""
    rng = random.Random(seed)
    edges = [sorted(rng.sample(range(max(0, i - 30), i), min(i, rng.randrange(4)))) for i in range(tasks)]
    return edges, [min(0.2, 0.01 * rng.paretovariate(1.5)) for _ in range(tasks)]


async def walk(edges: Edges, at_once: int, node: Callable[[int], Awaitable[None]]) -> None:
    """Execute a graph on bare asyncio: start a task for each node after all dependencies, with at most `at_once`
    concurrent calls of `node`.
    """
    places = asyncio.Semaphore(at_once)
    missing = [len(needed) for needed in edges]
    dependents: list[list[int]] = [[] for _ in edges]
    for position, needed in enumerate(edges):
        for before in needed:
            dependents[before].append(position)

    async def begin(position: int) -> None:
        async with places:
            await node(position)
        for dependent in dependents[position]:
            missing[dependent] -= 1
            if not missing[dependent]:
                nodes.create_task(begin(dependent))

    async with asyncio.TaskGroup() as nodes:
        for position, count in enumerate(list(missing)):
            if not count:
                nodes.create_task(begin(position))
