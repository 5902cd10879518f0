"""A store given as a path or an address: opened for a call or a block, and closed with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from plait import DAG, Orchestrator, ParallelRunner, RunStatus, Task
from plait.errors import StoreNotOpen, StoreUnusable
from plait.persistence import PostgresStore, SQLiteStore
from tests.support.fakes import Talker
from tests.support.stores.postgres import empty, worker_dsn

TASKS = [Task("a", prompt="a"), Task("b", prompt="b {{ a }}", depends_on=["a"])]


@pytest.mark.parametrize("kind", [str, Path])
async def test_each_call_opens_the_file_and_closes_it(tmp_path: Path, kind: type[str] | type[Path]) -> None:
    runner = ParallelRunner(Talker(), store=kind(tmp_path / "x.db"))
    assert not (tmp_path / "x.db").exists()
    run_id = await runner.runs.create(TASKS)
    with pytest.raises(StoreNotOpen):
        await runner.runs.options.store.get_run(run_id)  # type: ignore[union-attr]
    assert (await runner.runs.preview(run_id)).tasks
    result = await runner.resume(run_id)
    assert result.status is RunStatus.COMPLETED
    fork = await runner.runs.fork(run_id, "b", prompts={"b": "c {{ a }}"})
    async with runner.runs.start_fork(fork) as run:
        assert (await run.result()).status is RunStatus.COMPLETED
    assert (await runner.runs.continue_task(run_id, "a", "More?")).text
    assert await runner.runs.questions(run_id) == []
    async with SQLiteStore(tmp_path / "x.db", mode="existing") as store:
        assert len(await store.list_runs()) == 2


async def test_in_a_block_the_store_stays_open_and_calls_may_overlap(tmp_path: Path) -> None:
    runner = ParallelRunner(Talker(), store=tmp_path / "x.db")
    async with runner:
        result = await runner.run(TASKS)
        assert runner.runs.options.store is not None
        assert await runner.runs.options.store.get_run(result.run_id) is not None
    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(runner.run, TASKS)
    async with runner:
        assert len(await runner.runs.options.store.list_runs()) == 6
    with pytest.raises(StoreNotOpen):
        await runner.runs.options.store.list_runs()


async def test_a_cancelled_call_closes_the_file(tmp_path: Path) -> None:
    async def forever(prompt: str) -> str:
        scope.cancel()
        await anyio.sleep_forever()
        return prompt

    runner = ParallelRunner(forever, store=tmp_path / "x.db")
    with anyio.CancelScope() as scope:
        await runner.run(TASKS)
    with pytest.raises(StoreNotOpen):
        await runner.runs.options.store.list_runs()  # type: ignore[union-attr]
    async with SQLiteStore(tmp_path / "x.db", mode="existing") as store:
        (stored,) = await store.list_runs()
    again = ParallelRunner(Talker(), store=tmp_path / "x.db")
    assert (await again.resume(stored.run_id)).status is RunStatus.COMPLETED


async def test_a_file_that_is_no_store_is_refused_before_a_call(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("This is a letter, and not a database. " * 100)
    talker = Talker()
    with pytest.raises(StoreUnusable):
        await ParallelRunner(talker, store=str(tmp_path / "x.db")).run(TASKS)
    assert talker.prompts == []


async def test_a_service_and_an_orchestrator_take_a_path(tmp_path: Path) -> None:
    async with ParallelRunner(Talker(), store=tmp_path / "x.db").runs as service:
        run_id = await service.create(TASKS)
        await service.start(run_id)
        async for _ in service.events(run_id):
            pass
        assert (await service.get(run_id)).status is RunStatus.COMPLETED

    async def plan(prompt: str) -> str:
        return '{"tasks": [], "done": true}'

    first = await Orchestrator("Reach it", backends=plan, store=tmp_path / "x.db").run()
    again = await Orchestrator.resume(first.run_id, store=tmp_path / "x.db", backends=plan)
    assert (await again.run()).run_id == first.run_id


@pytest.fixture
def dsn() -> str:
    return worker_dsn()


async def test_an_address_is_that_of_a_server(dsn: str) -> None:
    await empty(dsn)
    runner = ParallelRunner(Talker(), store=dsn)
    result = await runner.run(TASKS)
    async with PostgresStore(dsn) as store:
        assert [run.run_id for run in await store.list_runs()] == [result.run_id]


PROGRAM = """
import asyncio
from plait import ParallelRunner, Task

async def shout(prompt):
    return prompt.upper()

runner = ParallelRunner(shout, store="x.db")
for _ in range(2):
    print(asyncio.run(runner.run([Task("a", "hello")], key="greeting")).text["a"])
"""


def test_a_program_leaves_nothing_open(tmp_path: Path) -> None:
    """Also over two event loops."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("HELLO\nHELLO\n", "", 0)


async def test_a_list_of_tasks_is_a_dag(tmp_path: Path) -> None:
    runner = ParallelRunner(Talker(), store=tmp_path / "x.db")
    first = await runner.run(task for task in TASKS)
    assert first.status is RunStatus.COMPLETED
    preview = await runner.runs.preview_like(TASKS, first.run_id)
    assert [step.task_id for step in preview.tasks] == ["a", "b"]
    async with runner.start(TASKS, like=preview) as run:
        assert (await run.result()).text == first.text
    assert await runner.runs.create(TASKS, key="k") == await runner.runs.create(DAG(TASKS), key="k")
