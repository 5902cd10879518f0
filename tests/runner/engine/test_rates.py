"""Rate limits of a backend: kept by all runs together, in turn, with exact wakes and no slot held while waiting."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from weakref import ReferenceType, ref

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, RateLimits, RunStatus, Task, TaskStatus, events
from plait.backends import ConversationRequest, Message, Usage
from plait.backends.models.model_api import ReplayConversation
from plait.events import TaskStarted
from plait.persistence import MemoryStore
from plait.runner.engine.run_options import RunOptions
from plait.runner.scheduling.own_limits import RateLimiter
from plait.runner.views.event_sentences import throttling
from tests.support.hosts import functions
from tests.support.hosts.world import HostFolder
from tests.support.seeded_loop import TICK_S, VirtualClock, run_seeded
from tests.support.sharing import wide
from tests.support.stores.held import HeldStore

SEEDS = range(5)


class Calls:
    """A backend whose calls take `seconds`, and the times at which they began."""

    def __init__(self, seconds: float = 0.5, usage: Usage | None = None) -> None:
        self.seconds, self.usage = seconds, usage
        self.began: list[tuple[float, str]] = []
        self.account: str | None = None

    def new_session_id(self) -> None:
        return None

    def open(self, request: ConversationRequest) -> AsyncExitStack:
        return _Open(self, request)

    async def answer(self, messages: list[Message]) -> Message:
        self.began.append((asyncio.get_running_loop().time(), messages[-1].content))
        await anyio.sleep(self.seconds)
        return Message("assistant", "done", self.usage or Usage())

    @property
    def gaps(self) -> list[float]:
        times = [at for at, _ in self.began]
        return [after - before for before, after in pairwise(times)]


class _Open(AsyncExitStack):
    def __init__(self, calls: Calls, request: ConversationRequest) -> None:
        super().__init__()
        self._conversation = ReplayConversation(calls.answer, request)

    async def __aenter__(self) -> ReplayConversation:
        return self._conversation


def make_runner(calls: Calls, rates: RateLimits, **options) -> ParallelRunner:
    return ParallelRunner(
        backends={"api": calls, "free": Calls(0.1)},
        default="api",
        rates={"api": rates},
        clock=VirtualClock(),
        **options,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_begin_at_the_moment_the_limit_allows(seed) -> None:
    calls = Calls()

    async def main() -> None:
        runner = make_runner(calls, RateLimits(60))
        assert (await runner.run(wide("t", 20))).status is RunStatus.COMPLETED

    run_seeded(main, seed)
    assert len(calls.began) == 20
    assert all(1 - 2 * TICK_S <= gap <= 1 + 2 * TICK_S for gap in calls.gaps), calls.gaps


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_runs_take_turns(seed, shared) -> None:
    calls = Calls()

    async def main() -> None:
        runner = make_runner(calls, RateLimits(60), shared_limits=shared, concurrency=50)
        async with anyio.create_task_group() as group:
            for name, count in (("a", 40), ("b", 10), ("c", 10)):
                group.start_soon(runner.run, wide(name, count))

    run_seeded(main, seed)
    assert len(calls.began) == 60
    first = Counter(prompt for _, prompt in calls.began[:30])
    assert max(first.values()) - min(first.values()) <= 2, first
    assert all(gap <= 1 + 2 * TICK_S for gap in calls.gaps)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_runners_keep_to_the_limit_of_one_account_together(seed) -> None:
    """As of two runs in one worker: each has a runner of its own, and the server counts for both."""
    calls = Calls()
    calls.account = f"server and key {seed}"

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for name in "ab":
                group.start_soon(make_runner(calls, RateLimits(60), concurrency=9).run, wide(name, 15))

    run_seeded(main, seed)
    assert Counter(prompt for _, prompt in calls.began) == {"a": 15, "b": 15}
    assert all(1 - 2 * TICK_S <= gap <= 1 + 2 * TICK_S for gap in calls.gaps), calls.gaps


def test_a_limit_holds_for_the_run_of_a_runner_that_does_not_name_it() -> None:
    calls = Calls(0.1)
    calls.account = "a server and key with one limit"

    async def main() -> None:
        plain = ParallelRunner(backends={"api": calls}, clock=VirtualClock())
        async with anyio.create_task_group() as group:
            group.start_soon(make_runner(calls, RateLimits(60)).run, wide("a", 5))
            group.start_soon(plain.run, wide("b", 5))

    run_seeded(main, 0)
    assert len(calls.began) == 10
    assert all(1 - 2 * TICK_S <= gap <= 1 + 2 * TICK_S for gap in calls.gaps), calls.gaps


@pytest.mark.parametrize("seed", SEEDS)
def test_a_waiting_task_holds_no_slot(seed) -> None:
    calls = Calls()
    free: list[float] = []

    async def quick(_prompt: str) -> str:
        free.append(asyncio.get_running_loop().time())
        await anyio.sleep(0.1)
        return "done"

    async def main() -> None:
        runner = ParallelRunner(
            backends={"api": calls, "free": quick},
            rates={"api": RateLimits(60)},
            concurrency=2,
            clock=VirtualClock(),
        )
        limited = [Task(f"l{number}", prompt="x", backend="api", weight=9) for number in range(5)]
        assert (await runner.run(DAG([*limited, *wide("f", 20, "free")]))).status is RunStatus.COMPLETED

    run_seeded(main, seed)
    assert free[-1] - free[0] < 2, "20 calls of 0.1 s beside five that wait for seconds"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_without_a_free_slot_delays_nobody(seed) -> None:
    calls = Calls(seconds=30)

    async def main() -> None:
        runner = make_runner(calls, RateLimits(60), concurrency=1)
        async with anyio.create_task_group() as group:
            for name in "abc":
                group.start_soon(runner.run, wide(name, 3))

    run_seeded(main, seed)
    assert {prompt for _, prompt in calls.began[:3]} == {"a", "b", "c"}
    assert calls.began[2][0] - calls.began[0][0] < 2.1


@pytest.mark.parametrize("seed", SEEDS)
def test_cancelled_runs_leave_the_line(seed) -> None:
    calls = Calls()

    async def main() -> None:
        runner = make_runner(calls, RateLimits(60))
        async with runner.start(wide("a", 50)) as first:
            await anyio.sleep(1.5)
            async with anyio.create_task_group() as group:
                group.start_soon(runner.run, wide("b", 4))
                await anyio.sleep(0.1)
                first.cancel()

    run_seeded(main, seed)
    assert Counter(prompt for _, prompt in calls.began)["b"] == 4
    assert max(calls.gaps) <= 1 + 2 * TICK_S, "the cancelled run's turn is taken at once"


@pytest.mark.parametrize("ends", ["stop", "cancel", "outside"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_that_ends_slowly_delays_nobody(seed, ends) -> None:
    calls = Calls(0.1)

    async def cleans_up(_prompt: str) -> str:
        try:
            await anyio.sleep(600)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(30)
        return "done"

    async def main() -> None:
        runner = ParallelRunner(
            backends={"api": calls, "slow": cleans_up},
            rates={"api": RateLimits(60)},
            clock=VirtualClock(),
        )
        slow = DAG([Task("slow", prompt="x", backend="slow"), *wide("a", 50, "api")])
        async with anyio.create_task_group() as group:
            with anyio.CancelScope() as outside:
                async with runner.start(slow) as first:
                    group.start_soon(runner.run, wide("b", 8, "api"))
                    await anyio.sleep(3.2)
                    outside.cancel() if ends == "outside" else getattr(first, ends)()
                    await first.result()

    run_seeded(main, seed)
    assert Counter(prompt for _, prompt in calls.began)["b"] == 8
    assert max(calls.gaps) <= 1 + 2 * TICK_S


def test_a_raised_limit_lets_waiting_runs_go_on_at_once() -> None:
    calls = Calls(0.1)
    calls.account = "a key that no other test has, whose clock is another"

    async def main() -> float:
        first, second = make_runner(calls, RateLimits(2)), make_runner(calls, RateLimits(6000))
        async with anyio.create_task_group() as group:
            group.start_soon(first.run, wide("a", 5))
            await anyio.sleep(1)
            group.start_soon(second.run, wide("b", 5))
        return asyncio.get_running_loop().time()

    assert run_seeded(main, 0) - calls.began[0][0] < 2
    assert len(calls.began) == 10


@pytest.mark.parametrize("seed", SEEDS)
def test_tokens_are_settled_by_usage(seed) -> None:
    calls = Calls(usage=Usage(100, 100))

    async def main() -> None:
        runner = make_runner(calls, RateLimits(tokens_per_minute=12_000), concurrency=1)
        assert (await runner.run(wide("t", 100))).status is RunStatus.COMPLETED

    run_seeded(main, seed)
    later = calls.gaps[40:]
    assert sum(later) / len(later) == pytest.approx(1.0, rel=0.05), "200 tokens of 200 a second"


def test_a_call_that_was_never_made_gives_its_share_back() -> None:
    calls = Calls()
    tasks = [
        Task("text", prompt="x", backend="free"),
        Task("bad", prompt="{{ text.no_field }}", depends_on=["text"], failure_mode=FailureMode.SOFT),
        Task("good", prompt="good", depends_on=["bad"]),
    ]

    async def main() -> float:
        runner = make_runner(calls, RateLimits(1))
        result = await runner.run(DAG(tasks))
        assert [result.tasks[name].status for name in ("bad", "good")] == [TaskStatus.FAILED, TaskStatus.COMPLETED]
        return asyncio.get_running_loop().time()

    assert run_seeded(main, 0) < 50
    assert [prompt for _, prompt in calls.began] == ["good"]


def test_a_run_that_is_stopped_before_its_call_begins_gives_the_share_back() -> None:
    calls = Calls()

    async def main() -> float:
        held = HeldStore(MemoryStore(), lambda changes: any(isinstance(one, TaskStarted) for one in changes))
        runner = make_runner(calls, RateLimits(1), store=held)
        async with runner.start(DAG([Task("never", "never")])) as run:
            await held.holding.wait()  # the share is taken, and the start is being stored
            run.stop()
            held.let_go.set()
        assert (await runner.run(DAG([Task("next", "next")]))).status is RunStatus.COMPLETED
        return asyncio.get_running_loop().time()

    assert run_seeded(main, 0) < 50
    assert [prompt for _, prompt in calls.began] == ["next"]


async def test_the_limiter_of_one_runner_ends_with_the_runner() -> None:
    options = RunOptions(backends={"api": Calls()}, rates={"api": RateLimits(60)}, clock=VirtualClock())
    limiters: list[ReferenceType[RateLimiter]] = []
    for _ in range(2):
        gate = options.account("api").gate
        assert gate is not None
        limiters.append(ref(gate.limiter))
    del gate
    limiter = limiters[0]
    assert limiters[1]() is limiter()
    del options
    gc.collect()
    assert limiter() is None


async def test_an_attempt_that_no_host_began_gives_its_share_back(tmp_path: Path) -> None:
    world = HostFolder(tmp_path / "hosts")
    world.set_away("m1")
    backend = world.hosts("m1").placed(functions.echo)
    runner = ParallelRunner(backends={"m1": backend}, default="m1", rates={"m1": RateLimits(1)})
    with anyio.fail_after(60):  # at the limit, the third task would begin after 2 minutes
        result = await runner.run(DAG(Task(f"t{number}", prompt="x", retry=0) for number in range(3)))
    assert {one.error_kind for one in result.tasks.values()} == {"transient"}


@pytest.mark.parametrize("wrong", [{"nothing": RateLimits(60)}])
def test_rates_name_a_backend(wrong) -> None:
    with pytest.raises(ValueError, match="rates names 'nothing', which is no backend of this runner"):
        ParallelRunner(Calls(), rates=wrong)


def test_a_run_that_waits_for_its_limit_says_so_once() -> None:
    async def main() -> None:
        calls = Calls()
        async with make_runner(calls, RateLimits(60)).start(wide("w", 6)) as run:
            told = [event async for event in run.events() if isinstance(event, events.BackendThrottled)]
        assert (await run.result()).status is RunStatus.COMPLETED
        assert [(event.backend, event.cause, event.until) for event in told] == [("api", "limits", None)]
        assert throttling(told[0], 0.0) == (
            "api has reached its own rate limits; further tasks start as the limits allow"
        )

    run_seeded(main, 1)
