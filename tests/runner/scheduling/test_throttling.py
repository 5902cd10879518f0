"""A backend that says it is asked too much is left alone for a while, then asked less, and no task pays for that."""

from __future__ import annotations

import random

import anyio
import pytest

from plait.backends import BackendError, ConversationRequest, ErrorKind, Reply
from plait.persistence import Store
from plait.runner import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import SlotPool
from tests.support.fakes import QuickClock, Talker, failing

DONE = TaskStatus.COMPLETED


def too_many(hint: float | None = None) -> BackendError:
    return BackendError(ErrorKind.RATE_LIMITED, "slow down", retry_after=hint)


class Bucket:
    """A server that takes so many requests a second, and a burst of them, and says when it takes the next one."""

    def __init__(self, clock: QuickClock, rate: float, burst: float) -> None:
        self._clock, self._rate, self._burst = clock, rate, burst
        self._left, self._at = burst, clock.now
        self.calls = 0

    async def __call__(self, prompt: str) -> str:
        self.calls += 1
        self._left = min(self._burst, self._left + (self._clock.now - self._at) * self._rate)
        self._at = self._clock.now
        if self._left < 1:
            raise too_many((1 - self._left) / self._rate)
        self._left -= 1
        return prompt


@pytest.mark.parametrize("concurrency", [8, 256])
async def test_a_rate_limit_fails_no_task_and_is_met_seldom(concurrency: int) -> None:
    clock = QuickClock()
    server = Bucket(clock, rate=3.0, burst=10.0)
    dag = DAG(Task(f"t{number}", prompt="x") for number in range(300))
    result = await ParallelRunner(server, clock=clock, concurrency=concurrency, rng=random.Random(1)).run(dag)
    assert result.status is RunStatus.COMPLETED
    assert server.calls < 300 + concurrency + 200


def taken(plan: Scheduler) -> list[int]:
    positions: list[int] = []
    while (position := plan.take()) is not None:
        positions.append(position)
    return positions


def test_nothing_starts_on_a_throttling_backend_until_all_it_sent_away_are_back_and_then_half_as_many() -> None:
    plan = Scheduler(DAG(Task(f"t{number}") for number in range(30)), ["one"] * 20 + ["two"] * 10, SlotPool(12))
    assert taken(plan) == list(range(12))
    plan.throttle(3)
    plan.throttle(4)
    assert taken(plan) == [20, 21], "the places are free for other backends"
    plan.finish(20, DONE)
    plan.finish(21, DONE)
    plan.requeue(3)
    assert taken(plan) == [22, 23]
    for position in (22, 23, *range(5, 12)):
        plan.finish(position, DONE)
    plan.requeue(4)  # three are at work still, of 12 that were; seven have completed since
    assert taken(plan)[:4] == [3, 4, 12, 13]
    assert plan.closings(0) == 0, "as some have completed"


def test_with_every_four_that_complete_one_more_may_run_up_to_the_limit() -> None:
    plan = Scheduler(DAG(Task(f"t{number}") for number in range(99)), ["one"] * 99, SlotPool(99, {"one": 4}))
    assert taken(plan) == [0, 1, 2, 3]
    plan.throttle(0)
    plan.requeue(0)
    at_once: list[int] = []
    running = [1, 2, 3]
    for _ in range(30):
        plan.finish(running.pop(0), DONE)
        running += taken(plan)
        at_once.append(len(running))
    assert at_once[:2] == [2, 2], "half of four"
    assert (at_once[8], at_once[29]) == (4, 4)
    assert at_once == sorted(at_once)


async def test_a_backend_that_only_throttles_is_given_up_for_all_tasks_together() -> None:
    clock, busy = QuickClock(), Talker(lambda *_: BackendError(ErrorKind.OVERLOADED, "529"))
    retry = Retry(attempts=3, base_delay=2.0, max_delay=30.0)
    dag = DAG(Task(name, prompt=name, retry=retry) for name in "abc")
    result = await ParallelRunner(busy, clock=clock, concurrency=1).run(dag)
    assert {task.error_kind for task in result.tasks.values()} == {"overloaded"}
    assert [result[name].attempts for name in "abc"] == [23, 3, 3]
    assert max(clock.slept) <= 30.0


async def test_a_task_that_is_always_throttled_fails_though_others_complete() -> None:
    """Such as one whose prompt is larger than a minute's tokens."""
    server = Talker(lambda prompt, _: too_many() if prompt == "large" else "done")
    dag = DAG([Task("large", prompt="large"), *(Task(f"t{number}", prompt="x") for number in range(40))])
    result = await ParallelRunner(server, clock=QuickClock(), concurrency=2).run(dag)
    assert (result["large"].status, result["large"].attempts) == (TaskStatus.FAILED, 23)
    assert result.failed == ("large",)


async def test_who_wants_no_second_attempt_gets_none() -> None:
    server = Talker(lambda *_: too_many(0.0))
    task = Task("a", prompt="x", retry=Retry(attempts=1))
    assert (await ParallelRunner(server, clock=QuickClock()).run(DAG([task])))["a"].attempts == 1


async def test_a_resumed_run_leaves_the_backend_alone_as_well_and_counts_no_throttling(store: Store) -> None:
    clock = QuickClock()
    throttles = failing(too_many(60.0), 4)

    def answer(prompt: str, request: ConversationRequest) -> str | Reply | Exception:
        if len(server.prompts) == 4:
            run.stop()
        return throttles(prompt, request)

    server = Talker(answer)
    dag = DAG([Task("a", prompt="a"), Task("b", prompt="b", depends_on=["first"]), Task("first", backend="other")])

    async def hang(_prompt: str) -> str:
        await anyio.sleep_forever()
        return "never"

    runner = ParallelRunner(server, backends={"other": hang}, store=store, clock=clock)
    async with runner.start(dag, "r") as run:
        assert (await run.result()).status is RunStatus.INTERRUPTED
    assert server.prompts == ["a"] * 4

    async def go(_prompt: str) -> str:
        return "gone"

    result = await ParallelRunner(server, backends={"other": go}, store=store, clock=clock).resume("r")
    assert result.status is RunStatus.COMPLETED
    assert server.prompts[4] == "a", "b could start at once, and waits for as long as the server asked a to"
    assert result["a"].attempts == 5
