"""Tasks of the loop that are cancelled one and all, as `asyncio.run` does at its end: what they ran is written down."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store
from tests.support.stores.faulty_store import Fault, FaultyStore, on_write

ONE = DAG([Task("a", "a")])


class Held:
    """A backend that never answers; `asked` says that it was asked."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def __call__(self, _prompt: str) -> str:
        self.asked.set()
        return await asyncio.get_running_loop().create_future()


async def quick(prompt: str) -> str:
    return prompt


async def cancel_all() -> None:
    """Cancel every other task, and wait for them as `asyncio.run` does."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.wait(others)
    assert asyncio.all_tasks() == {asyncio.current_task()}, "something was left running"


async def was_left(store: Store) -> None:
    record, (task,) = await store.get_run("r"), await store.list_tasks("r")
    assert record is not None
    assert (record.owner, task.status, task.crashes) == (None, "pending", 0)


def test_programs_that_end_without_awaiting_their_run_do_not_count_as_crashes(tmp_path: Path) -> None:
    kept: list[asyncio.Task[object]] = []

    async def program(*, first: bool) -> None:
        held = Held()
        store = await SQLiteStore(tmp_path / "runs.db").__aenter__()  # and nobody closes it
        runner = ParallelRunner(held, store=store)
        kept.append(asyncio.create_task(runner.run(ONE, "r") if first else runner.resume("r")))
        await held.asked.wait()

    for number in range(3):
        asyncio.run(program(first=not number))
        assert kept[-1].cancelled()

    async def look() -> None:
        async with SQLiteStore(tmp_path / "runs.db") as store:
            await was_left(store)
            assert (await ParallelRunner(quick, store=store).resume("r")).status is RunStatus.COMPLETED

    asyncio.run(look())


async def test_a_run_whose_tasks_are_all_cancelled_is_left(store: Store) -> None:
    held = Held()
    run = asyncio.create_task(ParallelRunner(held, store=store).run(ONE, "r"))
    await held.asked.wait()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # twice, before either is heard of
    await cancel_all()
    assert run.cancelled()
    await was_left(store)


class Cut(MemoryStore):
    """Holds its `number`-th write up for ever, before or `after` it took effect."""

    def __init__(self, number: int, *, after: bool) -> None:
        super().__init__()
        self.left, self.after = number, after
        self.at = asyncio.Event()

    async def write(self, batch: Batch) -> None:
        self.left -= 1
        if self.left or self.after:
            await super().write(batch)
        if not self.left:
            self.at.set()
            await asyncio.get_running_loop().create_future()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("number", "attempts"), [(1, 1), (2, 2), (3, 1)])
async def test_a_write_that_was_cut_by_that_is_made_up_for(number: int, attempts: int, after: bool) -> None:
    store = Cut(number, after=after)
    asyncio.create_task(ParallelRunner(quick, store=store).run(ONE, "r"))  # noqa: RUF006 - that is the point
    await store.at.wait()
    await cancel_all()
    record = await store.get_run("r")
    assert record is not None
    assert record.owner is None
    again = await ParallelRunner(quick, store=store).resume("r")
    assert (again.status, again["a"].attempts) == (RunStatus.COMPLETED, attempts)


@pytest.mark.parametrize("for_ever", [False, True])
async def test_a_store_that_hangs_then_is_waited_for_no_longer_than_its_time_out(for_ever: bool) -> None:
    held, store = Held(), FaultyStore(MemoryStore())
    asyncio.create_task(ParallelRunner(held, store=store, store_timeout=0.3).run(ONE, "r"))  # noqa: RUF006
    await held.asked.wait()
    leaving = store.writes + 1
    store.faults = on_write(lambda number: Fault.HANG if for_ever or number == leaving else None)
    async with asyncio.timeout(60):
        await cancel_all()
    assert store.writes > leaving
    if not for_ever:
        await was_left(store)
