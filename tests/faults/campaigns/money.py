"""Random runs within a budget: parallel calls of random cost, SIGKILL at random boundaries, resumes and raises.

The provider charges a call as it begins, and writes that into a file which plait does not know: what a killed process
had called is paid for. Never may the bill exceed the highest budget that was given so far, nor that of one task its
`max_cost`; and at the end nothing may be left reserved.

A third of the seeds play up to three such runs, in a process each, on one account with a `usd_per_day`. Time passes in
leaps: some calls take hours, and who waits for the account sleeps no longer than for a moment, and finds it to be later
for all, midnight and days included, while other calls are under way. No day may cost more than its limit, nor more than
the account has counted; a call counts on the day on which the store granted it. Without a kill on the last day nothing
is left reserved, and after the next midnight a call is made at once.

`python -m tests.faults.campaigns.money SEED ...` plays seeds, `--count N` those from 0 on, `--planted` the bugs.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sqlite3
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from fcntl import LOCK_EX, flock
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest import mock

import anyio
import anyio.lowlevel

from plait import DAG, ParallelRunner, RateLimits, Retry, RunStatus, SQLiteStore, Task, TaskStatus, failpoints
from plait.backends import Conversation, ConversationRequest, Reply
from plait.backends.prices import Billing, Price
from plait.clock_and_ids import Clock, parse_time
from plait.errors import BackendError, ErrorKind
from plait.persistence.store_records import TaskRecord
from plait.persistence.tables import Reading
from plait.runner.engine import run_options, stored_ledger
from plait.runner.engine.stored_ledger import StoredLedger, TransactingStore
from plait.runner.recovery import resume
from plait.runner.scheduling import account_ledger
from plait.runner.scheduling.own_limits import Demand, Grant, RateGate, Reservation
from plait.runner.scheduling.scheduler import RunRates
from plait.runner.state import budget as money
from plait.runner.state.budget import Budget
from plait.runner.state.run_state import RunState
from plait.usage import Usage
from tests.faults.campaigns import killed_runs
from tests.faults.campaigns.killed_runs import Campaign, begin, ended
from tests.faults.campaigns.report import Scale

RUNS: dict[Scale, int] = {"quick": 40, "nightly": 1_000}
MOST = 4
"""The most that a call costs, in US dollars: as many tokens, a dollar each."""
_KILLS = 7
"""A person is asked about a task at the tenth death of its process."""
_ROUNDS = 60
"""The most processes of a run, beside one a day."""
_CLOSE = 1e-6
_DAY_S = 86_400


@dataclass(frozen=True)
class Story:
    """One run, by its seed."""

    tasks: tuple[Task, ...]
    budget: float
    concurrency: int

    @classmethod
    def of(cls, seed: int, number: int = 0) -> Story:
        rng = random.Random(f"money {seed}" if not number else f"money {seed} {number}")
        number = rng.randint(4, 12)
        tasks: list[Task] = []
        for n in range(number):
            needs = [f"t{one}" for one in rng.sample(range(n), min(n, rng.choice((0, 0, 0, 1, 2))))]
            limit = rng.choice((None, None, None, rng.uniform(0, 6)))
            backend = "free" if rng.random() < 0.15 else "paid"
            retry = Retry(attempts=rng.choice((1, 3)), base_delay=0.0)
            tasks.append(Task(f"t{n}", f"prompt {n}", needs, backend, retry=retry, max_cost=limit, failure_mode="skip"))
        return cls(tuple(tasks), rng.uniform(0, MOST * number), rng.randint(1, 6))


@dataclass(frozen=True)
class Account:
    """What the runs of a seed share."""

    usd_per_day: float | None
    runs: int
    park: bool
    begins: float
    """The time of the first process, in seconds from the last midnight."""

    @classmethod
    def of(cls, seed: int) -> Account:
        rng = random.Random(f"account {seed}")
        if rng.random() > 1 / 3:
            return cls(None, 1, park=False, begins=0.0)
        begins = rng.choice((rng.uniform(0, _DAY_S), _DAY_S - rng.uniform(0, 1)))
        return cls(rng.uniform(0.5 * MOST, 6 * MOST), rng.randint(1, 3), rng.random() < 0.5, begins)


class Time:
    """The time of all processes of a seed: the real one, and what has been leapt over, which a file has."""

    def __init__(self, file: Path, begins: float) -> None:
        self._file = file
        file.write_bytes(struct.pack("d", begins - time.time() % _DAY_S))

    def now(self) -> float:
        [leapt] = struct.unpack("d", self._file.read_bytes())
        return time.time() + float(leapt)

    @property
    def day(self) -> int:
        return int(self.now() // _DAY_S)

    def leap_to(self, at: float) -> None:
        with self._file.open("r+b", buffering=0) as file:
            flock(file, LOCK_EX)  # given back at a kill
            [leapt] = struct.unpack("d", file.read(8))
            file.seek(0)
            file.write(struct.pack("d", max(leapt, at - time.time())))


class LeapingClock(Clock):
    """The clock of who waits for the account. A run that parks is left to wait for midnight until it does."""

    def __init__(self, of_all: Time, rng: random.Random, *, park: bool) -> None:
        self._of_all = of_all
        self._rng = rng
        self._park = park
        self.wall = of_all.now

    async def sleep(self, seconds: float) -> None:
        if self._park and seconds > 60:
            await anyio.sleep_forever()
        later = self._rng.uniform(0, _DAY_S / 3) if self._rng.random() < 0.3 else 0.0
        self._of_all.leap_to(self.wall() + seconds + later)
        await anyio.sleep(0.001)


class Provider:
    """Charges each call in `bill`, a line each: the task, its cost, the day on which it was granted."""

    account = "a server and a key"

    def __init__(self, bill: Path, rng: random.Random, of_all: Time | None) -> None:
        self._bill = bill
        self._of_all = of_all
        self.rng = rng
        self.granted = 0
        """The day of the last grant."""
        self.days: dict[str, int] = defaultdict(int)
        """The days on which the calls of the tasks were granted."""

    @property
    def billing(self) -> Billing:
        return Billing(None, "m", price=Price(input=0.0, output=1_000_000.0), max_output_tokens=MOST)

    def new_session_id(self) -> str | None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        yield _Call(self, request.idempotency_key.partition(":")[2])

    async def call(self, task_id: str, prompt: str) -> Reply:
        rng = self.rng
        cost, fate = rng.uniform(0, MOST), rng.random()
        cost = 0.0 if fate < 0.1 else MOST if fate < 0.2 else cost
        with self._bill.open("a") as bill:
            bill.write(f"{task_id} {cost!r} {self.days[task_id]}\n")
        for _ in range(rng.randint(0, 6)):
            await anyio.lowlevel.checkpoint()
        if self._of_all is not None and rng.random() < 0.2:
            self._of_all.leap_to(self._of_all.now() + rng.uniform(0, _DAY_S / 2))
        if fate < 0.1:
            raise BackendError(ErrorKind.OVERLOADED, "full")
        if fate > 0.9:
            raise BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(1, 1, cost))
        if fate > 0.85:
            raise BackendError(ErrorKind.TRANSIENT, "cut", usage=Usage(cost_is_partial=True))
        return Reply(prompt, usage=Usage(1, 1, cost))


@dataclass
class _Call:
    provider: Provider
    task_id: str
    session_id: str | None = None

    async def send(self, prompt: str) -> Reply:
        return await self.provider.call(self.task_id, prompt)


@dataclass
class Told(killed_runs.Told):
    """What the runs of a seed showed."""

    raises: int = 0
    calls: int = 0
    days: int = 0
    """The days on which an account with a limit of a day had calls."""


@dataclass
class Run:
    """A run of a seed, over all its processes."""

    run_id: str
    story: Story
    folder: Path
    """Of the processes of the run; the next one has the store."""
    limits: dict[str, float]
    """The highest limits so far: of the run, and of tasks."""
    answers: dict[tuple[str, str], float] = field(default_factory=dict[tuple[str, str], float])
    kills: int = 0
    is_over: bool = False

    @classmethod
    def of(cls, number: int, story: Story, place: Path) -> Run:
        limits = {"": story.budget, **{one.id: one.max_cost for one in story.tasks if one.max_cost is not None}}
        folder = place / f"r{number}"
        folder.mkdir()
        return cls(folder.name, story, folder, limits)

    @property
    def bill(self) -> list[tuple[str, float, int]]:
        return bill_of(self.folder)


def bill_of(folder: Path) -> list[tuple[str, float, int]]:
    """Return the calls so far: the task, what it cost, the day."""
    bill = folder / "bill"
    lines = [line.split() for line in bill.read_text().splitlines()] if bill.exists() else []
    return [(task_id, float(cost), int(day)) for task_id, cost, day in lines]


def tell(seed: int, bug: str | None = None) -> Told:
    """Play one seed to its end, in processes of its own. Call it in a process without threads."""
    account, told, rng = Account.of(seed), Told("money", seed), random.Random(f"kills {seed}")
    if bug in OF_A_DAY and account.usd_per_day is None:
        return told
    with tempfile.TemporaryDirectory(prefix="plait-money-") as name:
        place, last_kill = Path(name), -1
        clock = Time(place / "clock", account.begins)
        runs = [Run.of(number, Story.of(seed, number), place) for number in range(account.runs)]
        days = 0 if account.usd_per_day is None else sum(len(run.story.tasks) for run in runs)
        for turn in range(_ROUNDS + days):
            begun = list[tuple[Run, int]]()
            for number, run in enumerate(runs):
                kill = rng.randint(1, 60) if run.kills < _KILLS else None
                if not run.is_over:
                    random_seed = seed * 1_000 + turn + number * 500_000
                    work = partial(_execute, account, run, clock, kill, random_seed, bug)
                    begun.append((run, begin(work, run.folder)))
            ends = [(run, ended(child, run.folder)) for run, child in begun]
            _judge(account, runs, told)
            for run, end in ends:
                if isinstance(end, str):
                    told.kills[end] += 1
                    run.kills += 1
                    last_kill = clock.day
                else:
                    _go_on_after(run, end, clock, rng, told)
            if told.violations:
                return told
            if all(run.is_over for run in runs):
                if account.usd_per_day is not None:
                    _judge_account(account, place, clock, last_kill, bug, told)
                return told
        told.broken(f"no end after {_ROUNDS + days} processes")
    return told


def _go_on_after(run: Run, end: Mapping[str, Any], clock: Time, rng: random.Random, told: Told) -> None:
    """Prepare the next process of a run that was not killed."""
    run.answers = {}
    for task_id, way, limit in end.get("asks", ()):
        run.answers[task_id, way] = limit + rng.uniform(0.1, 2 * MOST)
        key = "" if way == "budget" else task_id
        run.limits[key] = max(run.limits.get(key, 0.0), run.answers[task_id, way])
        told.raises += 1
    if end["status"] == RunStatus.PARKED:
        if rng.random() < 0.8:  # else it parks again
            clock.leap_to(end["due"] + rng.uniform(0, 1))
    elif end["status"] != RunStatus.WAITING_INPUT:
        run.is_over = True
        _judge_end(end, told)
    elif not run.answers:
        told.broken("the run waits, and nothing asks")


def _judge(account: Account, runs: Sequence[Run], told: Told) -> None:
    """Compare the bills with the limits given so far."""
    days: dict[int, list[float]] = defaultdict(list)
    told.calls = sum(len(run.bill) for run in runs)
    for run in runs:
        paid = Counter[str]()
        for task_id, cost, day in run.bill:
            paid[task_id] += cost  # type: ignore[assignment]  # pyright: ignore[reportArgumentType]
            days[day] += [cost] if cost else []
        total = sum(paid.values())
        if total > run.limits[""] + _CLOSE:
            told.broken(f"{total:.4f} spent of {run.limits['']:.4f}")
        for task_id, cost in paid.items():
            if cost > run.limits.get(task_id, float("inf")) + _CLOSE:
                told.broken(f"{cost:.4f} spent by {task_id} of {run.limits[task_id]:.4f}")
    if account.usd_per_day is not None:
        told.days = sum(map(bool, days.values()))
        if (uncounted := runs[0].folder.parent / "uncounted").exists():
            told.broken(uncounted.read_text())
        for day, costs in days.items():
            if sum(costs) > account.usd_per_day + _CLOSE and len(costs) > 1:  # one alone may exceed it
                told.broken(f"{sum(costs):.4f} spent of {account.usd_per_day:.4f} on day {day}")


def _judge_end(ended: Mapping[str, Any], told: Told) -> None:
    if ended["status"] != RunStatus.COMPLETED or ended.get("unfinished"):
        told.broken(f"the run is {ended['status']}, unfinished are {ended.get('unfinished')}")
    if ended.get("reserved"):
        told.broken(f"{ended['reserved']} reserved for ever")


def _judge_account(account: Account, place: Path, clock: Time, last_kill: int, bug: str | None, told: Told) -> None:
    """Look what is reserved for calls under way, of which there are none, and make a call on the next day."""
    counted = _counted(place)
    if counted["reserved"] > _CLOSE and counted["day"] != last_kill:
        told.broken(f"{counted['reserved']} of the account reserved for ever")
    clock.leap_to((clock.day + 1) * _DAY_S)
    last = Run.of(9, Story((Task("t0", "prompt", backend="paid", retry=Retry(attempts=1)),), 2 * MOST, 1), place)
    day = clock.day
    ended(begin(partial(_execute, account, last, clock, None, 0, bug), last.folder), last.folder)
    if {each for _, _, each in last.bill} != {day}:
        told.broken("no call was made at once on the next day")


def _counted(place: Path) -> dict[str, float]:
    """Return the money of the last day of the account."""
    with closing(sqlite3.connect(place / "runs.db")) as database:
        rows = database.execute("SELECT state FROM accounts").fetchall()
    usd: dict[str, float] = {"day": 0, "total": 0.0, "reserved": 0.0}  # without a call that was paid for
    return json.loads(rows[0][0]).get("usd", usd) if rows else usd


def _execute(account: Account, run: Run, of_all: Time, kill: int | None, seed: int, bug: str | None) -> dict[str, Any]:
    """Begin the run, or go on with it, until it ends or waits, or until the boundary number `kill`."""
    reached = 0

    def count(name: str) -> None:
        nonlocal reached
        reached += 1
        if reached == kill:
            (run.folder / "boundary").write_text(name)
            os.kill(os.getpid(), signal.SIGKILL)

    rng = random.Random(seed)
    provider = Provider(run.folder / "bill", rng, None if account.usd_per_day is None else of_all)
    failpoints.on_reach = count
    plant = nullcontext if bug is None else BUGS[bug]
    with (
        plant(),
        mock.patch.object(resume, "longest_delay", return_value=0.0),
        _in_leaps(account, run.folder.parent, of_all, provider),
    ):
        return anyio.run(_go_on, account, run, of_all, provider)


@contextmanager
def _in_leaps(account: Account, place: Path, of_all: Time, provider: Provider) -> Generator[None]:
    """Let the store tell the time of all processes, whoever waits for the account leap, and `provider` know the days of
    its grants. After each change the account has to have counted what the calls of its day have cost.
    """
    change, reserve = stored_ledger.change, RunRates.reserve
    clock = LeapingClock(of_all, random.Random(provider.rng.random()), park=account.park)

    def changed(name: str, function: stored_ledger.Change[Any]) -> Reading[Any]:
        def at_that_time(row: account_ledger.Row, _now: float) -> Any:
            now = of_all.now()
            result = function(row, now)
            if isinstance(result, Grant) and result.units.usd:
                provider.granted = int(now // _DAY_S)
            counted = row.get("usd", {"day": 0, "total": 0.0})
            bills = (bill_of(folder) for folder in place.glob("r*/"))
            spent = sum(cost for bill in bills for _, cost, day in bill if day == counted["day"])
            # A call that may cost more than the whole limit counts as the limit while it is under way.
            if spent > counted["total"] + _CLOSE and counted["total"] < (account.usd_per_day or 0.0) - _CLOSE:
                (place / "uncounted").write_text(f"{spent:.4f} spent, and {counted['total']:.4f} counted")
            return result

        return change(name, at_that_time)

    def reserved(rates: RunRates, gate: RateGate, position: int) -> None:
        reserve(rates, gate, position)
        provider.days[f"t{position}"] = provider.granted

    def leaping(store: TransactingStore, name: str, _clock: Clock) -> StoredLedger:
        return StoredLedger(store, name, clock)

    with (
        mock.patch.object(stored_ledger, "change", changed),
        mock.patch.object(run_options, "StoredLedger", leaping),
        mock.patch.object(RunRates, "reserve", reserved),
    ):
        yield


async def _go_on(account: Account, run: Run, of_all: Time, provider: Provider) -> dict[str, Any]:
    async def free(prompt: str) -> str:
        return prompt

    clock = Clock()
    clock.wall = of_all.now
    async with SQLiteStore(run.folder.parent / "runs.db") as store:
        options: dict[str, Any] = {
            "backends": {"paid": provider, "free": free},
            "default": "paid",
            "concurrency": run.story.concurrency,
            "store": store,
        }
        if account.usd_per_day is not None:
            options |= {"rates": {"paid": RateLimits(usd_per_day=account.usd_per_day)}, "park": account.park}
            options |= {"clock": clock}
        if await store.get_run(run.run_id) is None:
            result = await ParallelRunner(**options, budget=run.story.budget).run(DAG(run.story.tasks), run.run_id)
        else:
            runner = ParallelRunner(**options)
            least = {(one, way): usd for one, way, usd in _asks(await store.list_tasks(run.run_id))}
            # After a kill the task may have asked once more: for more than it was given, or for the other limit.
            fitting = {one: usd for (one, way), usd in run.answers.items() if usd > least.get((one, way), inf)}
            result = await runner.resume(run.run_id, answers=fitting)
        failpoints.on_reach = None
        record = await store.get_run(run.run_id)
        assert record is not None
        left = await money.stored_budget(store, run.run_id, json.loads(record.settings), run.story.tasks)
        tasks = await store.list_tasks(run.run_id)
    assert left is not None
    return {
        "status": result.status.value,
        "asks": _asks(tasks),
        "unfinished": [one.task_id for one in tasks if one.status in {TaskStatus.PENDING, TaskStatus.RUNNING}],
        "reserved": {task_id: usd for task_id, usd in left.reserved.items() if usd},
        "due": None if result.due_at is None else parse_time(result.due_at),
    }


def _asks(tasks: Sequence[TaskRecord]) -> list[tuple[str, str, float]]:
    """Return the questions for money: the task, the limit that it asks about, and what an answer has to exceed."""
    asked = {one.task_id: json.loads(one.asked or "{}") for one in tasks if one.status == TaskStatus.WAITING_INPUT}
    return [(name, form["way"], form["schema"]["exclusiveMinimum"]) for name, form in asked.items()]


def _checked_then_added() -> AbstractContextManager[object]:
    return mock.patch.object(Budget, "room", property(lambda budget: budget.usd - budget.spent))


def _settlements_lost() -> AbstractContextManager[object]:
    async def forgetful(*args: Any, **more: Any) -> Budget | None:
        found = await money.stored_budget(*args, **more)
        return None if found is None else replace(found, spent=0.0, spent_by={}, reserved={})

    return mock.patch.object(resume, "stored_budget", forgetful)


def _never_released() -> AbstractContextManager[object]:
    settle = Budget.settle

    def keep(self: Budget, task_id: str, *args: Any, **more: Any) -> None:
        held = self.reserved.get(task_id, 0.0)
        settle(self, task_id, *args, **more)
        self.reserved[task_id] = held

    return mock.patch.object(Budget, "settle", keep)


def _not_stored() -> AbstractContextManager[object]:
    start = RunState.start

    def unmarked(self: RunState, *args: Any, reserved_usd: float | None = None, **more: Any) -> Any:
        return start(self, *args, **more)

    return mock.patch.object(RunState, "start", unmarked)


def _day_settled_elsewhere() -> AbstractContextManager[object]:
    settle = account_ledger.settle

    def on_the_day_of_its_end(reservation: Reservation, usd: float, row: account_ledger.Row, now: float) -> None:
        settle(replace(reservation, day=account_ledger.money_of_day(row, now)["day"]), usd, row, now)

    return mock.patch.object(stored_ledger, "settle", on_the_day_of_its_end)


def _day_never_settled() -> AbstractContextManager[object]:
    return mock.patch.object(stored_ledger, "settle")


def _day_reserved_in_the_process() -> AbstractContextManager[object]:
    def book(demand: Demand, row: account_ledger.Row, now: float) -> Grant:
        before = json.loads(json.dumps(account_ledger.money_of_day(row, now)))
        grant = account_ledger.book(demand, row, now)
        row["usd"] = before
        return grant

    return mock.patch.object(stored_ledger, "book", book)


OF_A_DAY: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "a call settled on the day on which it ends": _day_settled_elsewhere,
    "a call of a day never settled": _day_never_settled,
    "a day checked, and not reserved": _day_reserved_in_the_process,
}
BUGS: Mapping[str, Callable[[], AbstractContextManager[object]]] = {
    "checked, then added": _checked_then_added,
    "settlements lost at resume": _settlements_lost,
    "a reservation never released": _never_released,
    "a reservation not stored with its start": _not_stored,
    **OF_A_DAY,
}
"""What plants each bug in a process."""
CAMPAIGN = Campaign(
    method="money",
    unit="runs within a budget",
    runs=RUNS,
    tell=tell,
    bugs=BUGS,
    tried=40,
    figures=lambda told: {
        "calls": sum(one.calls for one in told),
        "raises": sum(one.raises for one in told),
        "accounts with a limit of a day": sum(bool(one.days) for one in told),
        "days": sum(one.days for one in told),
        "runs that spent beyond their budget": sum(bool(one.violations) for one in told),
    },
)
run = CAMPAIGN.run


if __name__ == "__main__":
    sys.exit(CAMPAIGN.main(sys.argv[1:]))
