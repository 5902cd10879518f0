"""Runners that have all in common, their chance too: copied by a fork, or made with equal seeds."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import anyio

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.errors import RunOwned
from plait.persistence import MemoryStore
from tests.support.fakes import QuickClock, Talker
from tests.support.processes.warm import run

WORKERS = """
import asyncio, json, os, sys
from pathlib import Path
import anyio
from plait.persistence import SQLiteStore
from plait import DAG, ParallelRunner, Task
from plait.errors import RunOwned

async def work(prompt):
    Path(f"{prompt} {os.getpid()}").touch()
    while len(list(Path().glob("refused *"))) < 3 and len(list(Path().glob("a *"))) < 4:
        await anyio.sleep(0.005)
    return prompt

store = SQLiteStore("runs.db")
runner = ParallelRunner(work, store=store)

async def make():
    async with store:
        return await runner.runs.create(DAG([Task("a", "a"), Task("b", "b", depends_on=["a"])]), key="order 17")

async def resume():
    async with store:
        try:
            await runner.resume(run_id)
        except RunOwned:
            Path(f"refused {os.getpid()}").touch()

async def queue():
    async with store:
        return [await runner.runs.create(DAG([Task("a", str(os.getpid()))])) for _ in range(20)]

run_id = asyncio.run(make())
for _ in range(4):
    if not os.fork():
        asyncio.run(resume())
        Path(f"ids {os.getpid()}").write_text(json.dumps(asyncio.run(queue())))
        os._exit(0)
for _ in range(4):
    os.wait()
"""


def test_of_workers_forked_with_their_runner_one_runs_a_run_and_the_others_are_refused(tmp_path: Path) -> None:
    done = run([sys.executable, "-c", WORKERS], cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    files = sorted(path.name.split()[0] for path in tmp_path.glob("* *"))
    assert files == ["a", "b", *["ids"] * 4, *["refused"] * 3]
    ids = [run_id for path in tmp_path.glob("ids *") for run_id in json.loads(path.read_text())]
    assert len(set(ids)) == len(ids) == 80


async def test_the_end_of_a_run_says_nothing_of_one_whose_runner_has_the_same_seed() -> None:
    store, go = MemoryStore(), anyio.Event()

    async def work(prompt: str) -> str:
        if prompt == "long":
            await go.wait()
        return prompt

    one, two, three = (ParallelRunner(work, store=store, rng=random.Random(7)) for _ in range(3))
    async with one.start(DAG([Task("a", "long")]), "long") as long:
        await two.run(DAG([Task("a", "short")]), "short")
        try:
            await three.resume("long")
            refused = False
        except RunOwned:
            refused = True
        go.set()
    assert refused
    assert (await long.result()).status is RunStatus.COMPLETED


async def test_equal_seeds_at_the_same_moment_make_runs_of_different_ids() -> None:
    store, clock = MemoryStore(), QuickClock()
    runners = [ParallelRunner(Talker(), store=store, clock=clock, rng=random.Random(7)) for _ in range(2)]
    ids = [await runner.runs.create(DAG([Task("a", "x")])) for runner in runners]
    assert len(set(ids)) == 2
