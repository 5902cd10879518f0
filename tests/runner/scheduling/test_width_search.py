"""A width that finds itself: against servers of which nobody says how much they take, on a virtual clock."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from statistics import mean

import pytest

from plait.runner.domain.dag import DAG
from plait.runner.scheduling.scheduler import Scheduler
from plait.runner.scheduling.slots import FIRST_WIDTH, Account, Concurrency, Pause, SlotPool, WidthSearch
from plait.statuses import TaskStatus
from plait.task import Task
from tests.support.sharing import bring_back, refuse

ROWS = 1000
SPREAD = 0.35
"""Standard deviation of the logarithm of the time of a call, of which the median is 1 s."""
REFUSED_AFTER_S = 0.01


@dataclass
class Server:
    """Serves `slots` calls at once, and lets the others wait. Refuses a call, for at least a second, if its bucket is
    empty, or at random.
    """

    seed: int = 7
    slots: float = inf
    per_minute: float = 0.0
    share: float = 0.0
    refused: int = 0
    most: int = 0
    _level: float = field(init=False)
    _at: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._level = self.per_minute / 60 * 2

    def refusal(self, now: float) -> float | None:
        """Return the seconds that a refused call has to wait; None for a call that is accepted."""
        wait = 0.0
        if self.per_minute:
            rate = self.per_minute / 60
            self._level, self._at = min(rate * 2, self._level + (now - self._at) * rate), now
            wait = max(0.0, (1 - self._level) / rate)
            self._level -= not wait
        if wait or self.random.random() < self.share:
            self.refused += 1
            return max(1.0, wait)
        return None


class Job:
    """A run of `rows` calls against `server`, as the executor plays it: refused calls are tried again later."""

    def __init__(self, server: Server, width: Concurrency, rows: int = ROWS) -> None:
        self.now = 0.0
        self.widths: list[int] = []
        self._server = server
        self._plan = Scheduler(DAG(Task(f"t{row}", "x") for row in range(rows)), ["one"] * rows, SlotPool(width))
        self._account: Account = self._plan._queue("one").account  # pyright: ignore[reportPrivateUsage]
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = count()
        self._random = random.Random(server.seed + 1)
        self._served = 0
        self._waiting: deque[tuple[int, float]] = deque()
        self._under_way: set[int] = set()

    def play(self) -> float:
        """Return the seconds until all rows are done."""
        self._start()
        while self._due:
            self.now, _, act = heapq.heappop(self._due)
            act()
            self._start()
            self.widths.append(self._account.slots)
        assert self._plan.exhausted
        return self.now

    def _in(self, seconds: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._order), act))

    def _start(self) -> None:
        while (row := self._plan.take()) is not None:
            began = self.now
            self._under_way.add(row)
            self._server.most = max(self._server.most, len(self._under_way))
            wait = self._server.refusal(self.now)
            if wait is not None:
                self._in(REFUSED_AFTER_S, lambda row=row, wait=wait: self._refuse(row, wait))
            elif self._served < self._server.slots:
                self._serve(row, began)
            else:
                self._waiting.append((row, began))

    def _serve(self, row: int, began: float) -> None:
        self._served += 1
        self._in(self._random.lognormvariate(0.0, SPREAD), lambda: self._end(row, began))

    def _end(self, row: int, began: float) -> None:
        self._served -= 1
        self._under_way.remove(row)
        if self._waiting:
            self._serve(*self._waiting.popleft())
        if self._plan.searches:
            self._plan.call_ended(row, self.now - began, self.now)
        self._plan.finish(row, TaskStatus.COMPLETED)

    def _refuse(self, row: int, wait: float) -> None:
        self._under_way.remove(row)
        wait += self._random.uniform(0, 0.25)
        refuse(self._plan, row, Pause(self.now + wait, "429"))
        self._in(wait, lambda: bring_back(self._plan, row))


SERVERS: dict[str, dict[str, float]] = {
    "64 slots": {"slots": 64},
    "8 slots": {"slots": 8},
    "a bucket of 1,200 a minute": {"per_minute": 1200},
    "8 % refused at random": {"slots": 64, "share": 0.08},
}


def mean_time(server: Mapping[str, float], width: Concurrency) -> float:
    return mean(Job(Server(seed, **server), width).play() for seed in range(3))


@pytest.mark.parametrize("name", SERVERS)
def test_a_run_takes_about_as_long_as_with_the_best_width(name: str) -> None:
    best = min(mean_time(SERVERS[name], width) for width in (8, 20, 64, 128))
    assert mean_time(SERVERS[name], "auto") <= 1.15 * best


def test_the_width_begins_at_eight_and_doubles_with_each_round() -> None:
    search, width, widths = WidthSearch(), float(FIRST_WIDTH), list[float]()
    for second in range(1, 5):
        for _ in range(int(width)):  # all calls of a second end at once, and as many begin as there are slots
            width = search.call_ended(width, int(width), took=1.0, now=float(second))
        widths.append(width)
    assert widths == [16, 32, 64, 128]


def test_a_server_that_queues_calls_is_asked_for_not_much_more_than_it_serves() -> None:
    server = Server(slots=8)
    Job(server, "auto").play()
    assert server.most <= 5 * 8


def test_refusals_halve_the_width_and_end_the_doubling() -> None:
    server = Server(per_minute=1200)
    job = Job(server, "auto")
    job.play()
    after = job.widths[job.widths.index(max(job.widths)) :]
    assert min(after) <= max(job.widths) // 2
    assert server.refused <= 60


def test_random_refusals_are_no_limit() -> None:
    job = Job(Server(slots=64, share=0.08), "auto")
    job.play()
    assert max(job.widths) >= 64


def test_a_width_that_is_not_used_is_not_raised() -> None:
    search, width = WidthSearch(), float(FIRST_WIDTH)
    for second in range(1, 100):
        width = search.call_ended(width, 3, took=1.0, now=float(second))
    assert width == FIRST_WIDTH


def test_calls_that_take_longer_for_what_they_ask_narrow_nothing_for_long() -> None:
    """Ten times as long for every call from one moment on, however many are under way."""
    search, width, now = WidthSearch(), 64.0, 0.0
    widths: list[float] = []
    for took in [1.0] * 3 + [10.0] * 8:
        now += took
        for _ in range(int(width)):
            width = search.call_ended(width, int(width), took, now)
        widths.append(width)
    assert min(widths) < 128, "halved, to see whether it helps"
    assert widths[-1] >= 128, "and taken back, as it does not"
