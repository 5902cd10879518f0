"""Long limits, and the event BackendThrottled: when, how often, in which runs."""

from __future__ import annotations

import json
import time

import anyio
import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus, events
from plait.clock_and_ids import parse_time
from plait.errors import BackendError, ErrorKind
from plait.events import BackendThrottled
from plait.persistence import MemoryStore, Store
from plait.runner.engine.retries import Delays
from tests.support.fakes import QuickClock, Talker
from tests.support.sharing import wide

WEEK = 7 * 86_400.0


def too_many(hint: float | None, status: int | None = 429) -> BackendError:
    error = BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=hint)
    error.status = status
    return error


class Closing:
    """A server with a limit: refuses every call until `reopens`, with a hint, once `after` calls have been answered.

    Its calls overlap: a call waits until all others have come as far. The first refusals wait for each other, `at_once`
    of them: a pause is over at once.
    """

    def __init__(self, clock: QuickClock, after: int, wait: float, at_once: int) -> None:
        self._clock, self._after, self._wait, self._at_once = clock, after, wait, at_once
        self.reopens: float | None = None
        self.refused: list[str] = []
        self.running = 0
        self.most_after = 0
        """The most calls at once between the reopening and the first answer after it."""
        self.answered_after = 0
        self.answered = 0

    async def __call__(self, prompt: str) -> str:
        self.running += 1
        try:
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            if self.reopens is None and self.answered >= self._after:
                self.reopens = self._clock.now + self._wait
            if self.reopens is not None and self._clock.now < self.reopens:
                self.refused.append(prompt)
                wait = self.reopens - self._clock.now
                while len(self.refused) < self._at_once:
                    await anyio.lowlevel.checkpoint()
                raise too_many(wait)
            if self.reopens is not None and not self.answered_after:
                self.most_after = max(self.most_after, self.running)
            self.answered += 1
            self.answered_after += self.reopens is not None
            return prompt
        finally:
            self.running -= 1


async def test_a_limit_of_a_week_is_a_wait_and_one_task_goes_first(store: Store) -> None:
    clock = QuickClock()
    server = Closing(clock, after=3, wait=WEEK, at_once=4)
    async with ParallelRunner(server, store=store, clock=clock, concurrency=4).start(wide("w", 40), "r") as run:
        told = [event async for event in run.events()]
    result = await run.result()
    assert (result.status, result.failed) == (RunStatus.COMPLETED, ())
    assert len(server.refused) == 4, "no more than were under way"
    assert server.most_after == 1
    throttled = [event for event in told if isinstance(event, events.BackendThrottled)]
    paused, goes_on, *rest = throttled
    assert paused.until is not None
    assert WEEK <= parse_time(paused.until) - parse_time(paused.at) <= WEEK + 1.01
    assert (paused.backend, paused.cause, paused.total) == ("default", "429", 4)
    assert (goes_on.until, goes_on.slots, goes_on.total) == (None, 1, 4), "a probe"
    assert [one.until for one in rest] == [None] * len(rest)
    assert (rest[-1].slots, rest[-1].total) == (4, 4)
    stored = await store.list_events("r", kind=BackendThrottled.kind)
    assert [json.loads(one.detail)["until"] for one in stored] == [one.until for one in throttled]


@pytest.mark.parametrize(("wait", "alone"), [(WEEK, True), (5.0, False)])
async def test_one_task_goes_first_after_a_long_pause_only(wait: float, alone: bool) -> None:
    clock = QuickClock()
    began, calls, running, answered, most = clock.now, 0, 0, 0, [0, 0]

    async def server(prompt: str) -> str:
        nonlocal calls, running, answered
        calls += 1
        if calls == 1:
            raise too_many(wait)
        running += 1
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        if clock.now >= began + wait:
            most[answered > 0] = max(most[answered > 0], running)
            answered += 1
        running -= 1
        return prompt

    assert (await ParallelRunner(server, clock=clock, concurrency=8).run(wide("w", 60))).status is RunStatus.COMPLETED
    assert (most[0] == 1) is alone
    assert most[1] >= 4, "then as many as the slots allow"


async def test_a_refusal_of_many_at_once_is_one_event() -> None:
    clock = QuickClock()
    server = Closing(clock, after=0, wait=5.0, at_once=64)
    dag = DAG(Task(f"t{number}", prompt="x", retry=Retry(base_delay=0.0)) for number in range(64))
    async with ParallelRunner(server, clock=clock, concurrency=64).start(dag) as run:
        told = [event async for event in run.events()]
    assert (await run.result()).status is RunStatus.COMPLETED
    assert len(server.refused) == 64
    throttled = [event for event in told if isinstance(event, events.BackendThrottled)]
    assert [event.until is not None for event in throttled] == [True, False], "paused, then with fewer slots"
    assert (throttled[0].slots, throttled[1].slots, throttled[1].total) == (32, 1, 64)


async def test_a_longer_pause_is_reported_again() -> None:
    clock = QuickClock()
    hints = {"a": 2.0, "b": 3000.0}
    meeting = anyio.Event()

    async def server(prompt: str) -> str:
        if prompt not in hints:
            return prompt
        if len(hints) == 2:
            await meeting.wait() if prompt == "b" else await anyio.lowlevel.checkpoint()
        meeting.set()
        error = too_many(hints.pop(prompt), None)
        error.message = "your quota is used up"
        raise error

    dag = DAG(Task(name, prompt=name, retry=Retry(base_delay=0.0)) for name in "ab")
    async with ParallelRunner(server, clock=clock).start(dag) as run:
        told = [event async for event in run.events() if isinstance(event, events.BackendThrottled)]
    lengths = [parse_time(one.until) - parse_time(one.at) for one in told if one.until is not None]
    assert lengths == [pytest.approx(2.0, abs=0.01), pytest.approx(3000.0, abs=0.01)]
    assert {one.cause for one in told} == {"rate_limited"}


async def test_runs_with_the_same_slots_report_the_pause_that_another_run_met() -> None:
    gate, refused = anyio.Event(), False

    class Gated(QuickClock):
        async def sleep(self, seconds: float) -> None:
            if seconds >= 11:
                await gate.wait()
            await super().sleep(seconds)

    clock = Gated()

    async def server(prompt: str) -> str:
        nonlocal refused
        if not refused:
            refused = True
            raise too_many(500.0)
        return prompt

    runner = ParallelRunner(server, concurrency=4, shared_limits=True, clock=clock)
    async with runner.start(wide("first", 1)) as first:
        async for event in first.events():
            if isinstance(event, events.BackendThrottled):
                break
        async with runner.start(wide("other", 20)) as other:
            told: list[events.BackendThrottled] = []
            async for event in other.events():
                if isinstance(event, events.BackendThrottled):
                    told.append(event)
                    gate.set()
            assert (await other.result()).status is RunStatus.COMPLETED
        assert (await first.result()).status is RunStatus.COMPLETED
    assert told[0].until is not None, "reported at the start of the run"
    assert told[1].until is None
    assert (told[-1].slots, told[-1].total) == (4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("hint", [None, 3600.0], ids=["no time", "an hour each time"])
async def test_a_limit_whose_end_is_unknown_fails_no_task(store: Store, hint: float | None) -> None:
    clock = QuickClock()
    reopens, calls = clock.wall() + 8 * 86_400, 0

    async def server(prompt: str) -> str:
        nonlocal calls
        calls += 1
        if clock.wall() < reopens:
            raise too_many(hint)
        return prompt

    result = await ParallelRunner(server, store=store, clock=clock).run(DAG([Task("a", "x"), Task("b", "y")]))
    assert (result.status, result.text) == (RunStatus.COMPLETED, {"a": "x", "b": "y"})
    assert clock.wall() < reopens + 7200
    assert calls < 1000


async def test_a_hint_that_cannot_be_meant_is_none(store: Store) -> None:
    """A server that sends the time of the reset in place of the seconds until then."""
    clock = QuickClock()
    errors = [too_many(1_800_000_300.0)]
    server = Talker(lambda *_: errors.pop() if errors else "done")
    result = await ParallelRunner(server, store=store, clock=clock).run(wide("a", 1))
    assert (result.status, [task.attempts for task in result.tasks.values()]) == (RunStatus.COMPLETED, [2])
    assert max(clock.slept) <= 1.0


class Suspended(QuickClock):
    """A clock of a machine that is suspended during the first sleep, or whose wall clock is set then."""

    def __init__(self, wall_jumps: float) -> None:
        super().__init__()
        self.ran = 0.0
        self._jumps = wall_jumps

    def monotonic(self) -> float:
        return self.ran

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds + self._jumps
        self.ran += seconds
        self._jumps = 0.0
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize(
    ("jumps", "awake"),
    [(WEEK - 60.0, 60.0), (WEEK, 60.0), (-86_400.0, WEEK), (0.0, WEEK)],
    ids=["suspended", "suspended beyond", "set back", "as usual"],
)
async def test_a_delay_survives_a_suspended_machine_and_a_wall_clock_that_is_set(jumps: float, awake: float) -> None:
    clock, over = Suspended(jumps), list[int]()

    async def try_again(position: int) -> None:
        over.append(position)

    async with anyio.create_task_group() as workers:
        Delays(clock, try_again).begin(workers, 7, WEEK)
    assert over == [7]
    assert clock.ran == pytest.approx(awake, abs=0.01)


@pytest.mark.parametrize("way", ["run", "service"])
async def test_a_run_that_waits_for_a_limit_says_so_to_other_processes(way: str) -> None:
    store = MemoryStore()

    class Asleep(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await anyio.sleep_forever()

    clock = Asleep()
    clock.now = time.time()  # the store judges the lease of the run by this host's clock
    service = ParallelRunner(Talker(), store=store, clock=clock).runs
    runner = ParallelRunner(Talker(lambda *_: too_many(WEEK)), store=store, clock=clock)
    async with runner.start(wide("a", 3), "r") as run:
        async for event in run.events():
            if isinstance(event, events.TaskRetried):
                break
        info = await service.get("r", tasks=way == "run")
        (throttled,) = info.throttled
        assert throttled.until is not None
        assert parse_time(throttled.until) >= clock.now + WEEK
        run.stop()
    stopped = await service.get("r")
    assert (stopped.status, stopped.throttled) == (RunStatus.INTERRUPTED, ())
    assert TaskStatus.FAILED not in stopped.counts
