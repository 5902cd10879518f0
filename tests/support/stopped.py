"""A run that was left half-way, for the tests that go on with it."""

from __future__ import annotations

import anyio

from plait import DAG, ParallelRunner, Task
from plait.persistence import Store

DIAMOND = DAG(
    [
        Task("a", prompt="a"),
        Task("b", prompt="b {{ a }}", depends_on=["a"]),
        Task("c", prompt="c {{ a }}", depends_on=["a"]),
        Task("d", prompt="d {{ b }} {{ c }} {{ who }}", depends_on=["b", "c"]),
    ],
    name="diamond",
    inputs={"who": "Ada"},
)


async def stopped_after(store: Store, dag: DAG, done: int, run_id: str = "r") -> None:
    """A run of `dag` that was left with `done` tasks completed and others under way."""
    count, hanging = 0, anyio.Event()

    async def body(prompt: str) -> str:
        nonlocal count
        count += 1
        if count > done:
            hanging.set()
            await anyio.sleep_forever()
        return f"<{prompt}>"

    async with ParallelRunner(body, store=store).start(dag, run_id) as run:
        await hanging.wait()
        run.stop()
