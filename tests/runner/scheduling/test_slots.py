"""Places that several schedules share: who is offered what comes free."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import anyio.lowlevel
import pytest

from plait import DAG, ParallelRunner, RateLimits, Task, TaskStatus
from plait.runner.scheduling.own_limits import CallSize, RateGate, RateLimiter
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import Account, Pause, SlotPool
from tests.support.sharing import COMPLETED, bring_back, refuse, run_all, wide

AT_ONCE = Pause(at_once=True)


class Pair:
    """Two schedules that share two places: the first one has both, and both stand in line."""

    def __init__(self) -> None:
        places = SlotPool(2, shared=True)
        self.first, self.second = (Scheduler(wide(name, 5), ["x"] * 5, places) for name in "ab")
        assert (self.first.take(), self.first.take(), self.first.take(), self.second.take()) == (0, 1, None, None)
        self.got: list[tuple[str, int | None]] = []
        assert self.first.enqueue(lambda: self.got.append(("first", self.first.take())))
        assert self.second.enqueue(lambda: self.got.append(("second", self.second.take())))


@pytest.mark.parametrize(
    "frees",
    [lambda one: one.finish(0, TaskStatus.COMPLETED), lambda one: one.park(0), lambda one: one.set_aside(0)],
    ids=["finish", "park", "set aside"],
)
def test_what_comes_free_is_offered_to_others_before_the_one_who_had_it(frees: Callable[[Scheduler], None]) -> None:
    pair = Pair()
    frees(pair.first)
    assert (pair.got, pair.first.take()) == ([("second", 0)], None)


def test_a_backend_that_may_be_asked_again_is_offered_to_others_first() -> None:
    pair = Pair()
    refuse(pair.first, 0, AT_ONCE)
    assert pair.second.take() is None
    pair.first.finish(1, TaskStatus.COMPLETED)
    pair.got.clear()
    bring_back(pair.first, 0)
    assert (pair.got, pair.first.take()) == ([("second", 0)], None), "one at once, as it has throttled"


def test_a_resumed_run_whose_task_was_sent_away_does_not_make_others_go_one_by_one() -> None:
    places = SlotPool(8, shared=True)
    busy = Scheduler(wide("a", 20), ["x"] * 20, places)
    assert [busy.take() for _ in range(8)] == list(range(8))
    resumed = Scheduler(wide("b", 1), ["x"], places, later=[0])
    resumed.close("x", None, "429")
    assert busy.slots_of("x") == (8, 8), "and does not close what accepts calls"
    refuse(busy, 0, AT_ONCE)
    for number in range(1, 8):
        busy.finish(number, TaskStatus.FAILED)
    bring_back(resumed, 0)
    bring_back(busy, 0)
    assert [busy.take() for _ in range(5)] == [0, 8, 9, 10, None], "half as many as there were"


def test_a_backend_has_never_more_than_its_limit_whoever_held_turns_on_it_before() -> None:
    places = SlotPool(8, {"x": 4}, shared=True)
    statuses = [TaskStatus.RUNNING] * 8 + [TaskStatus.PENDING] * 12
    resumed = Scheduler(wide("a", 20), ["x"] * 20, places, statuses=statuses, held=range(8))
    refuse(resumed, 0, AT_ONCE)
    for position in range(1, 8):
        resumed.finish(position, TaskStatus.COMPLETED)
    bring_back(resumed, 0)
    assert [resumed.take(), resumed.take(), resumed.take()] == [0, 8, None], "half of the limit"


def own_slots(account: Account, name: str, most: int, limits: dict[str, int] | None = None) -> Scheduler:
    """Return a schedule with slots of its own on `account`, all of them taken."""
    found = Scheduler(wide(name, 20), ["x"] * 20, SlotPool(most, limits, account_of=lambda _: account))
    taken(found)
    return found


def test_runs_with_slots_of_their_own_share_what_the_account_lets_through() -> None:
    account = Account()
    first, second = own_slots(account, "a", 4), own_slots(account, "b", 5, {"x": 2})
    assert (first.taken, second.taken) == (4, 2), "each its own limits"
    assert first.slots_of("x") == second.slots_of("x") == (6, 6)
    refuse(first, 0, AT_ONCE)
    for position in (0, 1):
        second.finish(position, TaskStatus.FAILED)
    assert (first.take(), second.take()) == (None, None), "closed for both"
    assert first.enqueue(lambda: None)
    assert second.enqueue(lambda: offered.append(second.take()))
    offered: list[int | None] = []
    bring_back(first, 0)
    assert offered == [], "three still run, and half of six may"
    first.finish(1, TaskStatus.FAILED)
    assert offered == [2], "to the other run first, and one"
    assert second.enqueue(lambda: offered.append(second.take()))
    first.release_all()
    assert offered == [2, 3], "within its own limit"
    assert (second.slots_of("x"), account.pause) == ((2, 2), None), "half of six is enough for the run that stays"
    assert not second.enqueue(lambda: None)


def test_who_has_left_is_offered_nothing_and_has_nothing() -> None:
    pair = Pair()
    pair.second.release_all()
    pair.first.finish(0, TaskStatus.COMPLETED)
    assert (pair.got, pair.first.take()) == ([], 2)
    assert pair.second.enqueue(lambda: pair.got.append(("second", pair.second.take())))
    pair.first.release_all()
    assert (pair.got, pair.second.take(), pair.second.take()) == ([("second", 0)], 1, None)


async def test_a_run_that_is_busy_on_one_backend_keeps_its_turn_for_another() -> None:
    """The run `a` would rather do its long tasks on y each time that it is offered a place, and b and c want x."""
    order: list[str] = []

    async def note(prompt: str) -> str:
        order.append(prompt)
        for _ in range(3):
            await anyio.lowlevel.checkpoint()
        return prompt

    runner = ParallelRunner(
        backends={"x": note, "y": note}, concurrency=3, limits={"x": 1}, shared_limits=True, store=None
    )
    busy = [Task(f"y{number}", prompt="a on y", backend="y", weight=5) for number in range(40)]
    only = Task("x", prompt="a on x", backend="x")
    assert await run_all(runner, [DAG([*busy, only]), wide("b", 15, "x"), wide("c", 15, "x")]) == [COMPLETED] * 3
    on_x = [prompt for prompt in order if prompt != "a on y"]
    assert on_x.index("a on x") <= 3


def taken(scheduler: Scheduler) -> list[int]:
    """Take every task that may start."""
    found: list[int] = []
    while (position := scheduler.take()) is not None:
        found.append(position)
    return found


def test_a_pool_that_is_widened_starts_more_tasks_and_never_fewer() -> None:
    slots = SlotPool(1, {"few": 2})
    scheduler = Scheduler(DAG(Task(f"t{n}", "p") for n in range(5)), ["many"] * 2 + ["few"] * 3, slots)
    assert taken(scheduler) == [0]
    scheduler.widen(4)
    assert taken(scheduler) == [1, 2, 3]
    assert (scheduler.slots_of("many"), scheduler.slots_of("few")) == ((4, 4), (2, 2))
    scheduler.widen(2)
    scheduler.finish(0, TaskStatus.COMPLETED)
    assert taken(scheduler) == []  # the limit of `few` holds
    scheduler.finish(2, TaskStatus.COMPLETED)
    assert taken(scheduler) == [4]


def test_a_run_that_waits_for_a_limit_of_rate_holds_no_slot_that_another_run_could_use() -> None:
    now = [0.0]
    gate = RateGate(RateLimiter(RateLimits(requests_per_minute=60), now[0]), lambda: now[0])
    accounts = {"limited": Account(gate), "free": Account()}
    slots = SlotPool(1, shared=True, account_of=accounts.__getitem__)
    first = Scheduler(wide("a", 2), ["limited"] * 2, slots)
    second = Scheduler(wide("b", 2), ["free"] * 2, slots)
    calls: list[Callable[[], None]] = []

    def start_timer(_seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        calls.append(call)
        return calls.clear

    first.rates.timer = start_timer
    started: list[tuple[str, int]] = []

    def take(name: str, scheduler: Scheduler) -> None:
        while (position := scheduler.take()) is not None:
            started.append((name, position))
        scheduler.enqueue(partial(take, name, scheduler))

    take("a", first)
    take("b", second)
    first.finish(0, TaskStatus.COMPLETED)
    take("a", first)
    assert started == [("a", 0), ("b", 0)], "the rate of the first run is used up"
    assert slots.taken == 1
    now[0] = 2.0
    second.finish(0, TaskStatus.COMPLETED)
    assert started == [("a", 0), ("b", 0), ("a", 1)], "it keeps its turn at the slots"
    first.finish(1, TaskStatus.COMPLETED)
    assert started == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


class Served:
    """Runs that share one slot, each of which takes it whenever it may, and says so in `started`."""

    def __init__(self, **priorities: int) -> None:
        self.started: list[str] = []
        pool = SlotPool(1, shared=True)
        self.runs = {
            name: Scheduler(wide(name, 3), ["x"] * 3, pool, priority=priority) for name, priority in priorities.items()
        }
        self.left = dict.fromkeys(priorities, 0)
        for name in self.runs:
            self.take(name)

    def take(self, name: str) -> None:
        while self.runs[name].take() is not None:
            self.started.append(name)
        self.runs[name].enqueue(partial(self.take, name))

    def finish(self, name: str) -> None:
        """End the task under way, and take what may start then, as an executor does."""
        self.runs[name].finish(self.left[name], TaskStatus.COMPLETED)
        self.left[name] += 1
        self.take(name)


def test_runs_of_a_higher_priority_come_first_and_leave_the_rest_to_others() -> None:
    served = Served(low=0, high=5)
    for _ in range(6):
        served.finish(served.started[-1])
    assert served.started == ["low", "high", "high", "high", "low", "low"]


def test_runs_of_one_priority_take_turns() -> None:
    served = Served(a=1, b=1)
    for _ in range(6):
        served.finish(served.started[-1])
    assert served.started == ["a", "b", "a", "b", "a", "b"]


def test_runs_of_a_higher_priority_have_their_turn_at_a_limit_of_rate_first() -> None:
    gate, turns = RateGate(RateLimiter(RateLimits(60), 0.0), lambda: 0.0), list[str]()
    timers: list[Callable[[], None]] = []

    def start_timer(_seconds: object, call: Callable[[], None]) -> Callable[[], None]:
        timers.append(call)
        return lambda: timers.remove(call)

    for name, priority in (("a", 0), ("b", 0), ("c", 5), ("d", 5)):
        gate.join(name, CallSize(0), partial(turns.append, name), start_timer, 1, priority)
    while timers:
        timers.pop()()
    assert turns == ["c", "d", "a", "b"]
