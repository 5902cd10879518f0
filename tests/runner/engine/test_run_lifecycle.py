"""What a run leaves behind in the process that executes it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task


@pytest.fixture
def as_python_has_it() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("as_python_has_it")
async def test_the_garbage_collector_waits_longer_until_the_last_run_has_ended() -> None:
    seen: list[int] = []
    ends = [anyio.Event(), anyio.Event()]
    entered, ended = [anyio.Event(), anyio.Event()], [anyio.Event(), anyio.Event()]

    async def run(number: int) -> None:
        async def until_told(_prompt: str) -> str:
            entered[number].set()
            await ends[number].wait()
            return "done"

        result = await ParallelRunner(until_told).run(DAG([Task("a", "p")]))
        assert result.status is RunStatus.COMPLETED
        ended[number].set()

    async with anyio.create_task_group() as group:
        for number in (0, 1):
            group.start_soon(run, number)
            await entered[number].wait()
            seen.append(gc.get_threshold()[0])
        for number in (0, 1):  # the first to begin is the first to end
            ends[number].set()
            await ended[number].wait()
            seen.append(gc.get_threshold()[0])
    assert seen == [10_000, 10_000, 10_000, 700]
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.usefixtures("as_python_has_it")
@pytest.mark.parametrize("own", [0, 50_000])
async def test_a_longer_wait_of_the_program_stays(own: int) -> None:
    async def look(_prompt: str) -> str:
        return str(gc.get_threshold()[0])

    gc.set_threshold(own, 10, 10)
    result = await ParallelRunner(look).run(DAG([Task("a", "p")]))
    assert result.text == {"a": str(own)}
    assert gc.get_threshold()[0] == own


@pytest.mark.usefixtures("as_python_has_it")
async def test_what_the_program_sets_during_a_run_stays() -> None:
    async def change(_prompt: str) -> str:
        gc.set_threshold(3_000, 10, 10)
        return "done"

    await ParallelRunner(change).run(DAG([Task("a", "p")]))
    assert gc.get_threshold()[0] == 3_000
