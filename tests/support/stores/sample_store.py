"""A small SQLite store with something of everything in it."""

from __future__ import annotations

from pathlib import Path

from plait import DAG, FailureMode, ParallelRunner, Retry, Task
from plait.persistence import SQLiteStore


async def sample_store(path: Path) -> str:
    """A store with a run in it that met success, a retry, a failure and a conversation that goes on."""
    calls: list[str] = []

    async def answer(prompt: str) -> str:
        calls.append(prompt)
        if "fail" in prompt or ("retry" in prompt and len([call for call in calls if call == prompt]) == 1):
            raise RuntimeError("as planned")
        return f"You said: {prompt}"

    retry = Retry(attempts=2, base_delay=0, on=frozenset({"unexpected"}))
    tasks = [
        Task("first", prompt="good"),
        Task("second", prompt="retry {{ first }}", depends_on=["first"], retry=retry),
        Task("third", prompt="fail", failure_mode=FailureMode.SOFT),
        Task("fourth", prompt="go on", continues="first"),
    ]
    async with SQLiteStore(path) as store:
        return (await ParallelRunner(answer, store=store).run(DAG(tasks, name="sample"))).run_id
