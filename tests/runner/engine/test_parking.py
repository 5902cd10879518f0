"""Runs that park: everything left waits for a time, the process ends, and the next one keeps to that time."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from plait import Check, MemoryStore, ParallelRunner, RunStatus, SQLiteStore, Store, Task, ask
from plait.clock_and_ids import Clock, parse_time
from plait.errors import BackendError, ErrorKind, PlaitError
from plait.events import RunParked, TaskRetried
from plait.runner.engine.executor import PARK_S
from tests.support.seeded_loop import VirtualClock, run_seeded

HOURS = 3600.0
DAY = 24 * HOURS


class Shifted(Clock):
    """The system clock, `shift` seconds off: 30 days back, since SQLite judges by the real one what is due."""

    def __init__(self) -> None:
        self.shift = -30 * DAY

    def wall(self) -> float:
        return time.time() + self.shift


@dataclass
class Provider:
    """A backend that answers `left` calls, and then refuses for `wait` seconds."""

    clock: Shifted
    left: int = 3
    wait: float = 5 * HOURS
    closed_until: float | None = None
    calls: list[str] = field(default_factory=list[str])
    refused: list[str] = field(default_factory=list[str])

    async def __call__(self, prompt: str) -> str:
        self.calls.append(prompt)
        await anyio.lowlevel.checkpoint()
        if self.left == 0 and self.closed_until is None:
            self.closed_until = self.clock.wall() + self.wait
        if self.closed_until is not None and self.clock.wall() < self.closed_until:
            self.refused.append(prompt)
            left = self.closed_until - self.clock.wall()
            raise BackendError(ErrorKind.RATE_LIMITED, "usage limit reached", retry_after=left)
        self.left -= self.closed_until is None
        return prompt


TASKS = [Task(f"t{n}", f"t{n}") for n in range(10)]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    async with SQLiteStore(tmp_path / "runs.db") as opened:
        yield opened


@pytest.fixture
def provider() -> Provider:
    return Provider(Shifted())


def runner(store: Store | None, provider: Provider, **options: Any) -> ParallelRunner:
    with_defaults: dict[str, Any] = {"concurrency": 2, "park": True, **options}
    return ParallelRunner(provider, store=store, clock=provider.clock, **with_defaults)


async def parked_at(store: Store) -> list[float]:
    return [parse_time(RunParked(one.at, "r", until=until_of(one.detail)).until) for one in await ends(store)]


async def ends(store: Store) -> list[Any]:
    return list(await store.list_events("r", kind=RunParked.kind))


def until_of(detail: str) -> str:
    return detail.partition('"until":"')[2].partition('"')[0]


async def test_a_run_ends_as_parked_once_all_that_is_left_waits_for_a_time(store: Store, provider: Provider) -> None:
    result = await runner(store, provider).run(TASKS, "r")
    assert (result.status, len(result.text), len(provider.refused)) == (RunStatus.PARKED, 3, 2)
    record = await store.get_run("r")
    assert record is not None
    assert (record.status, record.owner) == ("running", None)
    assert result.due_at is not None
    assert provider.closed_until is not None
    assert provider.closed_until <= parse_time(result.due_at) < provider.closed_until + 10
    assert await parked_at(store) == [parse_time(result.due_at)]
    shown = await runner(store, provider).runs.get("r")
    assert (shown.status, shown.due_at) == (RunStatus.PARKED, result.due_at)
    waits = [task.waits.kind.value for task in shown.tasks.values() if task.waits is not None]
    assert waits == ["retry"] * 2 + ["throttled"] * 5
    assert {task.waits.backend for task in shown.tasks.values() if task.waits} == {None, "default"}
    assert [one.backend for one in shown.throttled] == ["default"]


async def test_a_resume_before_the_time_calls_nothing_and_keeps_the_time(store: Store, provider: Provider) -> None:
    before = await runner(store, provider).run(TASKS, "r")
    calls = list(provider.calls)
    for _ in range(3):
        provider.clock.shift += HOURS
        again = await runner(store, provider).resume("r")
        assert (again.status, provider.calls) == (RunStatus.PARKED, calls)
    times = await parked_at(store)
    assert before.due_at is not None
    assert max(times) - min(times) < 1.5, "the time is stored once"


async def test_after_the_time_one_probe_goes_first_and_then_the_rest(store: Store, provider: Provider) -> None:
    await runner(store, provider).run(TASKS, "r")
    calls = len(provider.calls)
    provider.clock.shift += provider.wait + 10
    assert provider.closed_until is not None
    provider.closed_until += HOURS  # the limit has not ended, though its time has come
    still = await runner(store, provider).resume("r")
    assert (still.status, len(provider.calls)) == (RunStatus.PARKED, calls + 1), "one probe"
    provider.clock.shift += HOURS + 10
    done = await runner(store, provider).resume("r")
    assert (done.status, len(done.text)) == (RunStatus.COMPLETED, 10)
    assert len(provider.calls) == calls + 1 + 7, "nothing is called twice"


async def test_a_run_without_park_stays_and_a_stop_interrupts_it(store: Store, provider: Provider) -> None:
    async with runner(store, provider, park=False).start(TASKS, "r") as run:
        told = 0
        async for event in run.events():
            told += isinstance(event, TaskRetried)
            if told == 2:
                break
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert run.status is RunStatus.RUNNING
        run.stop()
    assert (await run.result()).status is RunStatus.INTERRUPTED
    assert await ends(store) == []
    assert await runner(store, provider).runs.due(provider.clock.wall() + DAY) == [], "a person has stopped it"


@pytest.mark.parametrize(("wait", "parks"), [(PARK_S + 5, True), (0.02, False)])
async def test_a_short_wait_is_waited_for(store: Store, provider: Provider, wait: float, *, parks: bool) -> None:
    provider.wait = wait
    result = await runner(store, provider).run(TASKS, "r")
    assert result.status is (RunStatus.PARKED if parks else RunStatus.COMPLETED)


async def test_a_run_without_a_store_does_not_park(provider: Provider) -> None:
    provider.wait = 0.02
    assert (await runner(None, provider).run(TASKS, "r")).status is RunStatus.COMPLETED


async def test_another_backend_goes_on_before_the_run_parks(store: Store, provider: Provider) -> None:
    async def other(prompt: str) -> str:
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        return prompt

    provider.left = 0
    tasks = [Task("a", "a"), Task("b", "b", backend="other"), Task("c", "c", ["b"], backend="other")]
    backends = {"default": provider, "other": other}
    options: dict[str, Any] = {"backends": backends, "default": "default", "store": store, "clock": provider.clock}
    result = await ParallelRunner(**options, park=True).run(tasks, "r")
    assert (result.status, set(result.text)) == (RunStatus.PARKED, {"b", "c"})


async def test_a_failed_task_and_its_dependents_do_not_keep_a_run_from_parking(
    store: Store, provider: Provider
) -> None:
    async def fails(prompt: str) -> str:
        raise ValueError(prompt)

    provider.left = 0
    tasks = [Task("a", "a"), Task("b", "b", backend="other"), Task("c", "c", ["b"])]
    options: dict[str, Any] = {"backends": {"default": provider, "other": fails}, "default": "default"}
    result = await ParallelRunner(**options, store=store, clock=provider.clock, park=True).run(tasks, "r")
    assert (result.status, result.failed) == (RunStatus.PARKED, ("b",))


async def test_a_parked_run_with_a_question_is_due_at_its_deadline_and_once_answered(
    store: Store, provider: Provider
) -> None:
    async def asks(prompt: str) -> str:
        return str(await ask(f"{prompt}?", deadline=HOURS, default="none"))

    provider.left = 0
    tasks = [Task("a", "a"), Task("b", "b", backend="person"), Task("c", "c {{ b }}", ["b"])]
    options: dict[str, Any] = {
        "backends": {"default": provider, "person": asks},
        "default": "default",
        "store": store,
        "clock": provider.clock,
        "park": True,
    }
    result = await ParallelRunner(**options).run(tasks, "r")
    assert result.status is RunStatus.PARKED
    assert result.due_at is not None
    assert abs(parse_time(result.due_at) - (provider.clock.wall() + HOURS)) < 30, "the deadline, before the limit"
    woken: list[tuple[str, PlaitError | None]] = []

    async def wake() -> None:
        async with ParallelRunner(**options).runs as runs:
            await runs.wake(lambda run_id, error: woken.append((run_id, error)))
            await runs.driven_to_end()

    await wake()
    assert woken == []
    await ParallelRunner(**options).runs.answer("r", "b", "yes")
    calls = list(provider.calls)
    await wake()
    assert woken == [("r", None)]
    shown = await ParallelRunner(**options).runs.get("r")
    assert (shown.status, shown.tasks["b"].text, provider.calls) == (RunStatus.PARKED, "yes", calls)
    provider.clock.shift += provider.wait + 10
    await wake()
    assert (await ParallelRunner(**options).runs.get("r")).status is RunStatus.COMPLETED


async def test_a_parked_run_can_be_cancelled(store: Store, provider: Provider) -> None:
    await runner(store, provider).run(TASKS, "r")
    assert await runner(store, provider).runs.cancel("r") is RunStatus.CANCELLED
    assert await store.list_claimable() == ()


async def test_after_a_probe_that_was_cut_another_probe_goes_first(store: Store, provider: Provider) -> None:
    provider.left = 0
    await runner(store, provider, concurrency=1).run(TASKS, "r")
    provider.clock.shift += provider.wait + 10
    called = anyio.Event()

    async def hangs(_prompt: str) -> str:
        called.set()
        await anyio.sleep_forever()
        return ""

    async with ParallelRunner(hangs, store=store, clock=provider.clock).start_resume("r") as run:
        await called.wait()
        run.stop()
    assert provider.closed_until is not None
    provider.closed_until += HOURS  # the limit has not ended, though its time has come
    calls = len(provider.calls)
    result = await runner(store, provider, concurrency=4).resume("r")
    assert (result.status, len(provider.calls)) == (RunStatus.PARKED, calls + 1)


async def test_a_run_of_one_task_parks_again_and_again(store: Store, provider: Provider) -> None:
    provider.left = 0
    result = await runner(store, provider).run([Task("a", "a")], "r")
    for _ in range(3):
        assert result.status is RunStatus.PARKED
        provider.clock.shift += provider.wait + 10
        assert provider.closed_until is not None
        provider.closed_until = provider.clock.wall() + provider.wait
        result = await runner(store, provider).resume("r")
    assert len(provider.calls) == 4


def test_an_answer_that_waits_for_its_judge_keeps_the_run_here() -> None:
    """It is in the memory of this process alone, and would have to be paid for again."""
    called: list[str] = []

    async def answers(prompt: str) -> str:
        called.append(prompt)
        await anyio.sleep(1)
        return prompt

    async def strict(prompt: str) -> object:
        if prompt == "b" and called.count("b") == 0:
            called.append(prompt)
            raise BackendError(ErrorKind.RATE_LIMITED, "limit", retry_after=2 * PARK_S)
        return {"ok": True, "reason": "fine"}

    async def run() -> RunStatus:
        tasks = [
            Task("a", "a", check=Check(judge="Fine? {{ answer }}", backend="strict")),
            Task("b", "b", backend="strict"),
        ]
        runner = ParallelRunner(
            answers, backends={"strict": strict}, store=MemoryStore(), clock=VirtualClock(), park=True, concurrency=4
        )
        return (await runner.run(tasks)).status

    assert run_seeded(run, 0) is RunStatus.COMPLETED
    assert called == ["a", "b"] or called == ["b", "a"]
