"""`Runs.wake`: which runs go on by themselves, and when."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import ParallelRunner, RunStatus, SQLiteStore, Store, Task, ask
from plait.clock_and_ids import Clock
from plait.errors import BackendError, BackendMissing, ErrorKind, PlaitError
from plait.events import RunCancelling, RunClaimed
from plait.persistence.store_records import Batch
from plait.runner.client import runs as client
from plait.runner.engine.lease import claim_for_this_process, unregister
from tests.support.polling import until

TASKS = [Task(f"t{n}", f"t{n}") for n in range(4)]
_WAIT = 3600.0


class Shifted(Clock):
    """The system clock, some days back: SQLite judges by the real one what is due."""

    def __init__(self) -> None:
        self.shift = -30 * 86_400.0

    def wall(self) -> float:
        return time.time() + self.shift


class Limited:
    """A backend with a limit until `open`."""

    def __init__(self) -> None:
        self.open = False
        self.calls = 0

    async def __call__(self, prompt: str) -> str:
        self.calls += 1
        if not self.open:
            raise BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=_WAIT)
        return prompt


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    async with SQLiteStore(tmp_path / "runs.db") as opened:
        yield opened


CLOCK = Shifted()


def runner(store: Store, backend: Any, **options: Any) -> ParallelRunner:
    return ParallelRunner(backend, store=store, clock=CLOCK, **options)


async def woken(store: Store, backend: Any, **how: Any) -> dict[str, PlaitError | None]:
    told: dict[str, PlaitError | None] = {}
    async with runner(store, backend).runs as runs:
        await runs.wake(told.__setitem__, **how)
        await runs.driven_to_end()
    return told


async def status(store: Store, run_id: str = "r") -> RunStatus:
    return (await ParallelRunner(Limited(), store=store).runs.get(run_id)).status


async def dead_owner(store: Store, run_id: str) -> None:
    """Let the run have an owner that has died."""
    record = await store.get_run(run_id)
    assert record is not None
    owner = claim_for_this_process("2026-11-29T00:00:00.000Z")
    unregister(owner)
    claim = RunClaimed(owner.claimed_at, owner, 1.0)
    await store.write(Batch(run_id, record.epoch, record.last_seq + 1, (claim,)))


async def test_a_parked_run_goes_on_once_its_time_has_come(store: Store) -> None:
    backend = Limited()
    await runner(store, backend, park=True).run(TASKS, "r")
    calls = backend.calls
    assert await woken(store, backend) == {}
    CLOCK.shift += _WAIT + 10
    assert await woken(store, backend) == {"r": None}
    assert (await status(store), backend.calls) == (RunStatus.PARKED, calls + 1), "the probe was refused"
    backend.open = True
    CLOCK.shift += _WAIT + 10
    assert await woken(store, backend) == {"r": None}
    assert await status(store) is RunStatus.COMPLETED
    assert await woken(store, backend) == {}


async def test_a_run_that_parks_goes_on_after_the_death_of_its_process(store: Store) -> None:
    backend = Limited()
    for run_id, parks in (("parks", True), ("stays", False)):
        async with runner(store, backend, park=parks).start(TASKS, run_id) as run:
            run.stop()
        await dead_owner(store, run_id)
    assert await woken(store, backend) == {"parks": None}
    assert (await status(store, "parks"), await status(store, "stays")) == (
        RunStatus.PARKED,
        RunStatus.INTERRUPTED,
    )


async def test_a_cancellation_that_was_cut_short_by_the_death_of_the_process_ends(store: Store) -> None:
    backend = Limited()
    await runner(store, backend, park=True).run(TASKS, "r")
    await dead_owner(store, "r")
    record = await store.get_run("r")
    assert record is not None
    cancelling = RunCancelling("2026-11-29T00:00:01.000Z", "r")
    await store.write(Batch("r", record.epoch, record.last_seq + 1, (cancelling,)))
    calls = backend.calls
    assert await woken(store, backend) == {"r": None}
    assert (await status(store), backend.calls) == (RunStatus.CANCELLED, calls)


async def test_a_run_that_parked_once_goes_on_after_the_death_of_its_process(store: Store) -> None:
    backend = Limited()
    async with runner(store, backend).start(TASKS, "r") as run:
        run.stop()
    await runner(store, backend, park=True).resume("r")
    await dead_owner(store, "r")
    assert await woken(store, backend) == {"r": None}


async def test_a_run_that_a_person_has_stopped_stays_stopped(store: Store) -> None:
    backend = Limited()
    async with runner(store, backend, park=True).start(TASKS, "r") as run:
        run.stop()
    assert await status(store) is RunStatus.INTERRUPTED
    assert await woken(store, backend) == {}


@pytest.mark.parametrize(("parks", "then"), [(True, RunStatus.PARKED), (False, RunStatus.INTERRUPTED)])
async def test_a_run_that_parks_goes_on_after_a_shutdown(store: Store, *, parks: bool, then: RunStatus) -> None:
    backend = Limited()
    async with runner(store, backend, park=parks).start(TASKS, "r") as run:
        run.stop(until_woken=True)
    assert (await run.result()).status is then
    assert await woken(store, backend) == ({"r": None} if parks else {})


async def test_a_woken_run_whose_process_is_stopped_goes_on_with_the_next(store: Store) -> None:
    backend = Limited()
    await runner(store, backend, park=True).run(TASKS, "r")
    CLOCK.shift += _WAIT + 10
    hung = anyio.Event()

    async def hangs(_prompt: str) -> str:
        hung.set()
        await anyio.sleep_forever()
        return ""

    async with runner(store, hangs).runs as runs:
        await runs.wake()
        await hung.wait()
    assert await status(store) is RunStatus.PARKED
    backend.open = True
    assert await woken(store, backend) == {"r": None}
    assert await status(store) is RunStatus.COMPLETED


async def test_a_question_that_is_answered_lets_a_run_go_on_that_parks(store: Store) -> None:
    async def asks(prompt: str) -> str:
        return str(await ask(f"{prompt}?"))

    for run_id, parks in (("parks", True), ("stays", False)):
        await runner(store, asks, park=parks).run([Task("a", "a")], run_id)
    assert await woken(store, asks) == {}
    for run_id in ("parks", "stays"):
        await runner(store, asks).runs.answer(run_id, "a", "yes")
    assert await woken(store, asks) == {"parks": None}
    assert await status(store, "parks") is RunStatus.COMPLETED


async def test_what_keeps_a_run_from_going_on_is_told_and_the_others_go_on(store: Store) -> None:
    backend = Limited()
    for run_id, name in (("first", "gone"), ("second", "default")):
        options: dict[str, Any] = {"backends": {name: backend}, "default": name, "store": store, "clock": CLOCK}
        await ParallelRunner(**options, park=True).run([Task("a", "a", backend=name)], run_id)
    CLOCK.shift += _WAIT + 10
    backend.open = True
    told = await woken(store, backend)
    assert list(told) == ["first", "second"]
    assert isinstance(told["first"], BackendMissing)
    assert told["second"] is None
    assert await status(store, "second") is RunStatus.COMPLETED


async def test_only_posted_runs_are_woken_by_a_server(store: Store) -> None:
    backend = Limited()
    for run_id, settings in (("posted", {"posted": True}), ("other", {})):
        await runner(store, backend, park=True).run(TASKS, run_id, settings=settings)
    CLOCK.shift += _WAIT + 10
    served = runner(store, backend).runs
    assert await woken(store, backend, fits=served.is_posted) == {"posted": None}


async def test_so_many_runs_go_on_at_once_and_the_others_afterwards(store: Store) -> None:
    most, told, may_answer = client.MOST_WOKEN, list[str](), anyio.Event()

    async def held(prompt: str) -> str:
        await may_answer.wait()
        return prompt

    for number in range(most + 2):
        await runner(store, Limited(), park=True).run(TASKS, f"r{number}")
    CLOCK.shift += _WAIT + 10
    async with runner(store, held).runs as runs:
        for _ in range(2):
            await runs.wake(lambda run_id, _error: told.append(run_id))
            assert (len(told), len(runs.driven)) == (most, most)
        may_answer.set()
        await runs.driven_to_end()
        await runs.wake(lambda run_id, _error: told.append(run_id))
        await runs.driven_to_end()
    assert sorted(told) == sorted(f"r{number}" for number in range(most + 2))


async def test_the_end_of_any_run_makes_room(store: Store) -> None:
    may_answer = {name: anyio.Event() for name in ("first", "second")}

    async def held(prompt: str) -> str:
        await may_answer[prompt].wait()
        return prompt

    async with runner(store, held).runs as runs:
        for name in may_answer:
            await runs.start(await runs.create([Task("a", name)], name))
        may_answer["second"].set()
        with anyio.fail_after(60):
            await runs.one_gone()
        assert runs.driven == ("first",)
        may_answer["first"].set()
        await runs.driven_to_end()


async def test_a_server_looks_again_and_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "WAKE_EVERY_S", 0.01)
    backend, told = Limited(), list[str]()
    await runner(store, backend, park=True).run(TASKS, "r")
    async with runner(store, backend).runs as runs, anyio.create_task_group() as group:
        group.start_soon(lambda: runs.keep_waking(lambda run_id, _error: told.append(run_id)))
        backend.open = True
        CLOCK.shift += _WAIT + 10
        await until(lambda: told)
        await runs.driven_to_end()
        group.cancel_scope.cancel()
    assert (told, await status(store)) == (["r"], RunStatus.COMPLETED)


async def test_wakers_at_the_same_time_run_a_run_once(store: Store) -> None:
    backend = Limited()
    await runner(store, backend, park=True).run(TASKS, "r")
    CLOCK.shift += _WAIT + 10
    backend.open, backend.calls = True, 0
    told = list[dict[str, PlaitError | None]]()

    async def wakes() -> None:
        told.append(await woken(store, backend))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(wakes)
    assert (sorted(map(len, told)), backend.calls) == ([0, 0, 0, 1], len(TASKS))
