"""A backend that says it is asked too much is left alone for a while, then asked less, and no task pays for that."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task, TaskStatus
from plait.backends import ConversationRequest, Reply
from plait.errors import BackendError, ErrorKind
from plait.persistence import Store
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import MANY, Account, Pause, SlotPool
from plait.runner.state.run_state import MOST_THROTTLINGS
from tests.support.fakes import QuickClock, Talker, failing
from tests.support.sharing import bring_back, refuse

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


AT_ONCE = Pause(9.0, "429", at_once=True)


def schedule(count: int = 99, width: int = 8, slots: SlotPool | None = None) -> Scheduler:
    """Return a schedule whose tasks hold all `width` slots of the backend."""
    pool = slots or SlotPool(width)
    plan = Scheduler(DAG(Task(f"t{number}", "x") for number in range(count)), ["one"] * count, pool)
    assert taken(plan) == list(range(width))
    return plan


def account(plan: Scheduler) -> Account:
    return plan._queue("one").account  # pyright: ignore[reportPrivateUsage]


def test_a_refusal_delays_its_own_task_alone() -> None:
    plan = schedule()
    refuse(plan, 3)
    assert taken(plan) == [8], "its slot is another one's"
    plan.finish(5, DONE)
    plan.finish(6, DONE)
    assert taken(plan) == [9, 10]
    bring_back(plan, 3)
    plan.finish(7, DONE)
    assert taken(plan) == [3]
    assert not account(plan).pause


def test_refusals_among_completed_calls_never_pause_the_backend() -> None:
    plan = schedule()
    running = list(range(8))
    for _ in range(20):
        refuse(plan, running.pop(0))
        running += taken(plan)
        for _ in range(2):
            plan.finish(running.pop(0), DONE)
        running += taken(plan)
        assert account(plan).pause is None
        assert len(running) == 8, "at the same width"


def test_many_refusals_pause_the_backend_and_halve_its_width() -> None:
    plan = schedule()
    for number in range(MANY):
        assert account(plan).pause is None, f"{number} are refused"
        refuse(plan, number, Pause(5.0 + number, "429"))
        if number < MANY - 1:
            assert taken(plan) == [8 + number]
    assert account(plan).pause == Pause(4.0 + MANY, "429"), "for as long as the last refusal said"
    for position in range(MANY, 7 + MANY):
        plan.finish(position, TaskStatus.FAILED)
    bring_back(plan, 0)
    assert taken(plan) == []
    bring_back(plan, MANY - 1)
    assert len(taken(plan)) == 4


@pytest.mark.parametrize(("width", "many"), [(60, 13), (20, 5), (12, 3), (5, 3)])
def test_how_many_are_many_depends_on_the_calls_under_way(width: int, many: int) -> None:
    plan = schedule(count=width, width=width)
    for position in range(many - 1):
        refuse(plan, position)
        assert not account(plan).pause
    refuse(plan, many - 1)
    assert account(plan).pause
    assert account(plan).slots == width // 2
    for position in range(many, width - 1):
        refuse(plan, position)
    assert account(plan).slots == 1, "as many as got through"


@pytest.mark.parametrize("answered", [1, 4])
def test_once_calls_are_answered_four_refusals_pause_however_many_are_under_way(answered: int) -> None:
    plan = schedule(width=60)
    for position in range(answered):
        plan.finish(position, TaskStatus.COMPLETED)
    for position in range(answered, answered + 3):
        refuse(plan, position)
        assert not account(plan).pause
    refuse(plan, answered + 3)
    assert account(plan).pause


def test_a_refusal_that_holds_for_all_pauses_at_once() -> None:
    plan = schedule()
    refuse(plan, 0, AT_ONCE)
    assert account(plan).pause == AT_ONCE
    assert taken(plan) == []
    refuse(plan, 1, AT_ONCE)
    bring_back(plan, 0)
    assert taken(plan) == [], "until all that it sent away are back"
    for position in range(2, 8):
        plan.finish(position, TaskStatus.FAILED)
    bring_back(plan, 1)
    assert len(taken(plan)) == 4
    assert plan.refusals(0) == (2, 1)


def test_with_every_round_that_completes_one_more_may_run_up_to_the_limit() -> None:
    plan = Scheduler(DAG(Task(f"t{number}", "x") for number in range(99)), ["one"] * 99, SlotPool(99, {"one": 4}))
    assert taken(plan) == [0, 1, 2, 3]
    refuse(plan, 0, AT_ONCE)
    bring_back(plan, 0)
    at_once: list[int] = []
    running = [1, 2, 3]
    for _ in range(30):
        plan.finish(running.pop(0), DONE)
        running += taken(plan)
        at_once.append(len(running))
    assert at_once[:2] == [2, 2], "half of four"
    assert [at_once.index(width) for width in (3, 4)] == [2, 5]
    assert at_once == sorted(at_once)


LONG = Pause(100.0, "429", probe=True)


def after_long_pause(running: int, count: int = 30, slots: SlotPool | None = None) -> Scheduler:
    """Return a schedule after the pause of its task 0. Beside it `running` tasks run since before the pause."""
    plan = Scheduler(DAG(Task(f"t{number}", "x") for number in range(count)), ["one"] * count, slots or SlotPool(8))
    while plan.taken < running + 1:
        plan.take()
    refuse(plan, 0, LONG)
    assert plan.take() is None
    bring_back(plan, 0)
    return plan


Ending = Callable[[Scheduler], object]
ACCEPTED: dict[str, Ending] = {
    "its response begins": lambda plan: plan.accept(0),
    "it is answered": lambda plan: plan.finish(0, DONE),
    "another error fails it": lambda plan: plan.finish(0, TaskStatus.FAILED),
    "another error delays it": lambda plan: plan.set_aside(0),
    "it asks a person": lambda plan: plan.park(0),
}


@pytest.mark.parametrize("ending", ACCEPTED.values(), ids=list(ACCEPTED))
def test_an_accepted_probe_opens_the_backend(ending: Ending) -> None:
    plan = after_long_pause(2)
    assert taken(plan) == [0]
    assert plan.is_probe(0)
    ending(plan)
    taken(plan)
    assert account(plan).taken == 4, "half of the slots"
    assert not plan.accept(0), "once"


def test_a_probe_that_tells_nothing_leaves_the_place_to_another() -> None:
    slots = SlotPool(8, shared=True)
    plan = after_long_pause(2, slots=slots)
    assert taken(plan) == [0]
    plan.withdraw(0)
    assert taken(plan) == [3]
    other = Scheduler(DAG(Task(f"t{number}", "x") for number in range(9)), ["one"] * 9, slots)
    assert taken(other) == []
    plan.release_all()  # the run ends while its task is the probe
    assert taken(other) == [0]
    refuse(other, 0)
    assert taken(other) == [1]


@pytest.mark.parametrize("ending", ["set_aside", "park"])
def test_a_probe_whose_call_is_not_made_leaves_the_place_to_another(ending: str) -> None:
    plan = after_long_pause(2)
    assert taken(plan) == [0]
    plan.spare(0)
    getattr(plan, ending)(0)
    assert plan.take() is not None
    assert plan.take() is None, "the backend has accepted nothing yet"


def test_a_probe_accepted_in_one_run_opens_the_backend_for_the_others() -> None:
    slots = SlotPool(8, shared=True)
    plan = after_long_pause(2, slots=slots)
    other = Scheduler(DAG(Task(f"t{number}", "x") for number in range(9)), ["one"] * 9, slots)
    assert taken(plan) == [0]
    got: list[int | None] = []
    assert other.enqueue(lambda: got.append(other.take()))
    assert got == []
    assert plan.accept(0)
    assert got == [0]


def test_a_task_that_is_refused_for_good_is_no_accepted_probe() -> None:
    plan = after_long_pause(2)
    assert taken(plan) == [0]
    plan.refuse_for_good(0)
    plan.finish(0, TaskStatus.FAILED)
    assert taken(plan) == [3], "another probe"


@pytest.mark.parametrize("running", [1, 2, 5])
def test_one_task_goes_first_after_a_long_pause_beside_tasks_that_run_since_before_it(running: int) -> None:
    plan = after_long_pause(running)
    assert taken(plan) == [0], "at once, and alone"
    for position in range(1, running + 1):
        plan.finish(position, DONE)
        assert taken(plan) == [], "the end of an earlier task tells nothing"
    plan.finish(0, DONE)
    assert len(taken(plan)) >= 1


def test_the_task_that_goes_first_keeps_to_the_limit_of_the_backend() -> None:
    plan = after_long_pause(1, slots=SlotPool(8, {"one": 2}))
    assert plan.take() == 0
    held: Any = {"statuses": [TaskStatus.RUNNING] * 2 + [TaskStatus.PENDING] * 2, "held": [0, 1]}
    full = Scheduler(DAG(Task(f"t{number}", "x") for number in range(4)), ["one"] * 4, SlotPool(8, {"one": 2}), **held)
    full.close("one", None, "429")
    assert full.take() is None
    full.finish(0, DONE)
    assert taken(full) == [2]


def test_another_long_pause_lets_another_task_go_first() -> None:
    plan = after_long_pause(1)
    assert plan.take() == 0
    refuse(plan, 1, LONG)
    bring_back(plan, 1)
    assert taken(plan) == [1], "0 runs since before the second pause"
    plan.finish(0, DONE)
    assert taken(plan) == []
    plan.finish(1, DONE)
    assert taken(plan) != []


def test_when_the_task_that_went_first_is_refused_another_goes_first() -> None:
    plan = after_long_pause(2)
    assert plan.take() == 0
    refuse(plan, 0, LONG)
    bring_back(plan, 0)
    assert taken(plan) == [0]


def test_when_the_run_of_the_task_that_went_first_ends_a_task_of_another_run_goes_first() -> None:
    slots = SlotPool(8, shared=True)
    plan = after_long_pause(4, slots=slots)
    other = Scheduler(DAG(Task(f"t{number}", "x") for number in range(9)), ["one"] * 9, slots)
    assert (plan.take(), other.take()) == (0, None)
    plan.release_all()
    assert taken(other) == [0]
    other.finish(0, DONE)
    running = taken(other)
    assert len(running) > 1
    for position in running:
        other.finish(position, DONE)
    resumed = Scheduler(DAG([Task("t", "t")]), ["one"], slots)
    resumed.close("one", None, "429")
    assert resumed.take() == 0, "its own task goes first, after that of the other run"


def test_a_run_that_ends_while_its_task_is_refused_keeps_no_other_run_waiting() -> None:
    slots = SlotPool(8, shared=True)
    plan = schedule(slots=slots)
    other = Scheduler(DAG(Task(f"t{number}", "x") for number in range(9)), ["one"] * 9, slots)
    refuse(plan, 0, AT_ONCE)
    for position in range(1, 8):
        plan.finish(position, DONE)
    assert taken(other) == []
    plan.release_all()
    assert taken(other)


def test_one_task_goes_first_in_a_resumed_run_beside_the_attempts_that_still_run() -> None:
    statuses = [TaskStatus.RUNNING] * 3 + [TaskStatus.PENDING] * 5
    initial: Any = {"statuses": statuses, "held": [0, 1, 2]}
    plan = Scheduler(DAG(Task(f"t{number}", "x") for number in range(8)), ["one"] * 8, SlotPool(8), **initial)
    plan.close("one", None, "429")
    assert taken(plan) == [3]
    plan.finish(0, DONE)
    assert taken(plan) == []
    plan.finish(3, DONE)
    assert taken(plan) == [4, 5, 6, 7]


async def test_a_backend_that_only_throttles_is_given_up_after_as_many_pauses_as_patience_says() -> None:
    clock, busy = QuickClock(), Talker(lambda *_: BackendError(ErrorKind.OVERLOADED, "529"))
    retry = Retry(attempts=3, base_delay=2.0, max_delay=30.0)
    dag = DAG(Task(name, prompt=name, retry=retry) for name in "abc")
    result = await ParallelRunner(busy, clock=clock, concurrency=1).run(dag)
    assert {task.error_kind for task in result.tasks.values()} == {"overloaded"}
    assert [result[name].attempts for name in "abc"] == [23, 23, 20]
    assert max(clock.slept) <= 30.0


async def test_a_task_that_is_always_throttled_fails_though_others_complete() -> None:
    """Such as one whose prompt is larger than a minute's tokens."""
    server = Talker(lambda prompt, _: too_many() if prompt == "large" else "done")
    dag = DAG([Task("large", prompt="large"), *(Task(f"t{number}", prompt="x") for number in range(40))])
    result = await ParallelRunner(server, clock=QuickClock(), concurrency=2).run(dag)
    assert (result["large"].status, result["large"].attempts) == (TaskStatus.FAILED, 23)
    assert result.failed == ("large",)


async def test_a_task_that_a_person_reopens_is_as_patient_as_a_new_one(store: Store) -> None:
    left = 30

    def answer(prompt: str, _request: ConversationRequest) -> str | Exception:
        nonlocal left
        left -= prompt == "large"
        return too_many() if prompt == "large" and left >= 0 else "done"

    dag = DAG([Task("large", prompt="large"), *(Task(f"t{number}", prompt="x") for number in range(40))])
    runner = ParallelRunner(Talker(answer), clock=QuickClock(), concurrency=2, store=store)
    assert (await runner.run(dag, "r"))["large"].attempts == 23
    again = await runner.resume("r", retry_failed=True)
    assert (again["large"].status, again["large"].attempts) == (DONE, 31)


async def test_a_task_that_meets_a_limit_alone_waits_however_often_it_is_refused() -> None:
    left = 3 * MOST_THROTTLINGS

    async def limited(prompt: str) -> str:
        nonlocal left
        left -= 1
        if left >= 0:
            raise too_many()
        return prompt

    result = await ParallelRunner(limited, clock=QuickClock()).run(DAG([Task("a", "x", retry=Retry(2))]))
    assert (result["a"].status, result["a"].attempts) == (DONE, 3 * MOST_THROTTLINGS + 1)


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
