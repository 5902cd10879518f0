"""One limit for all processes on a store: its row is changed whole, its store may be away, others ask for nothing."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, PostgresStore, RateLimits, Retry, RunStatus, SQLiteStore, Task, TaskStatus
from plait.backends import ConversationRequest, Message, Reply
from plait.backends.backend_protocol import Allowance
from plait.backends.models.model_api import ReplayConversation
from plait.backends.prices import Billing, Price
from plait.clock_and_ids import Clock, parse_time
from plait.errors import BackendError, ErrorKind, InvalidRequest, StoreError
from plait.events import OWN_LIMITS, BackendThrottled
from plait.persistence import MemoryStore
from plait.persistence.tables import Reading
from plait.runner.engine.stored_ledger import StoredLedger, change, list_accounts
from plait.runner.scheduling.account_ledger import SETTLES_S, Row
from plait.runner.scheduling.own_limits import CallSize, Grant, RateLimiter, Reservation, Units
from plait.usage import Usage
from tests.support.stores.postgres import worker_dsn


class Recorded(Clock):
    """A clock that passes as fast as it is asked to."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return sum(self.slept)

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await anyio.lowlevel.checkpoint()


class Asked:
    """A backend with an account. Each call answers, or raises the next of `errors`."""

    account = "a server and a key"

    def __init__(self, *errors: BackendError) -> None:
        self.errors = list(errors)
        self.calls = 0

    def new_session_id(self) -> None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[ReplayConversation]:
        yield ReplayConversation(self.answer, request)

    async def answer(self, messages: Sequence[Message]) -> Message:
        self.calls += 1
        if self.errors:
            raise self.errors.pop()
        return Message("assistant", messages[-1].content)


async def answer(prompt: str) -> str:
    return prompt


def never(until: float, why: str) -> None:
    assert not why, f"{why} until {until}"


def count(row: Row, now: float) -> float:
    row["count"] = row.get("count", 0) + 1
    return now


@pytest.fixture(params=["file", "server"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], SQLiteStore | PostgresStore]:
    """Return a function that returns another store at the same place."""
    if request.param == "file":
        return lambda: SQLiteStore(tmp_path / "runs.db")
    dsn = worker_dsn()
    return lambda: PostgresStore(dsn)


async def test_no_change_of_several_processes_is_lost(opened: Callable[[], SQLiteStore]) -> None:
    async def add(store: SQLiteStore) -> None:
        for _ in range(20):
            await store.transact(change("shared", count))

    async with opened() as first, opened() as second:
        before = (await first.transact(list_accounts())).get("shared", {"count": 0})
        async with anyio.create_task_group() as group:
            group.start_soon(add, first)
            group.start_soon(add, second)
        after = await second.transact(list_accounts())
        assert after["shared"]["count"] == before["count"] + 40


async def test_the_processes_of_a_store_book_one_after_the_other(opened: Callable[[], SQLiteStore]) -> None:
    clock, limiters = Recorded(), [RateLimiter(RateLimits(1), 0.0, is_granted=True) for _ in range(3)]
    async with opened() as store:
        ledgers = [StoredLedger(store, f"in line {id(clock)}", clock) for _ in limiters]
        for ledger, limiter in zip(ledgers, limiters, strict=True):
            await ledger.fill(limiter, CallSize(0), 8, never)
            assert limiter.wait(CallSize(0), clock.monotonic()) == 0
    assert clock.slept == pytest.approx([60.0, 120.0], abs=25.0)


async def test_a_process_of_a_lower_priority_books_nothing_while_another_waits(
    opened: Callable[[], SQLiteStore],
) -> None:
    clock, patient = Recorded(), Recorded()
    first, urgent, other, next_one = (RateLimiter(RateLimits(1), 0.0, is_granted=True) for _ in range(4))
    async with opened() as store:
        name = f"ahead {id(clock)}"
        ledger = StoredLedger(store, name, clock)
        await ledger.fill(first, CallSize(0), 1, never)
        await ledger.fill(urgent, CallSize(0), 1, never, 5)
        with anyio.move_on_after(0.3):  # its clock passes: it looks again and again
            await StoredLedger(store, name, patient).fill(other, CallSize(0), 1, never)
        await ledger.fill(next_one, CallSize(0), 1, never, 5)
    assert other.wait(CallSize(0), patient.monotonic()) > 0
    assert len(patient.slept) > 1
    assert min(patient.slept) > 50.0
    assert clock.slept == pytest.approx([60.0, 120.0], abs=9.0), "the next of the higher priority is not behind it"


async def test_a_run_leaves_its_priority_where_it_waits(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        backend = Blocked()
        backend.may_answer.set()
        rates = {"api": RateLimits(600)}
        await ParallelRunner(backends={"api": backend}, rates=rates, store=store, priority=3, concurrency=8).run(
            DAG([Task(f"t{n}", "p") for n in range(8)])
        )
        [row] = (await store.transact(list_accounts())).values()
    assert row["ahead"][0] == 3


class Watched(SQLiteStore):
    """A store that counts how often its accounts are asked."""

    asked = 0

    async def transact(self, writing: Reading[Any]) -> Any:
        self.asked += 1
        return await super().transact(writing)


class Blocked(Asked):
    """A backend that answers once it may, or refuses its first call then."""

    def __init__(self, *errors: BackendError) -> None:
        super().__init__(*errors)
        self.account = f"a server and key {id(self)}"
        self.begun, self.may_answer = 0, anyio.Event()

    async def answer(self, messages: Sequence[Message]) -> Message:
        self.begun += 1
        await self.may_answer.wait()
        return await super().answer(messages)


@pytest.mark.parametrize("errors", [[], [BackendError(ErrorKind.TRANSIENT, "cut")]], ids=["accepted", "cut"])
async def test_one_probe_is_sent_for_all_processes_on_a_store(tmp_path: Path, errors: list[BackendError]) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    backend, rates = Blocked(*errors), {"api": RateLimits(60_000)}
    results: list[Any] = []

    async def run(store: SQLiteStore, name: str) -> None:
        runner = ParallelRunner(backends={"api": backend}, rates=rates, store=store)
        tasks = [Task(f"{name}{n}", "p", retry=Retry(attempts=3, base_delay=0.01)) for n in range(4)]
        results.append(await runner.run(DAG(tasks)))

    async with Watched(tmp_path / "real" / "runs.db") as one, Watched(tmp_path / "link" / "runs.db") as other:
        digest = sha256(backend.account.encode()).hexdigest()[:16]
        await StoredLedger(one, f"api {digest}", Clock()).close(Clock().wall() - 1, probe=True)
        async with anyio.create_task_group() as group:
            with anyio.fail_after(60):
                group.start_soon(run, one, "a")
                while not backend.begun:  # noqa: ASYNC110 - no event announces it
                    await anyio.sleep(0.01)
                group.start_soon(run, other, "b")
                while other.asked < 2 and backend.begun == 1:  # noqa: ASYNC110 - it waits, and has looked again
                    await anyio.sleep(0.01)
                assert backend.begun == 1
                backend.may_answer.set()
        [row] = (await one.transact(list_accounts())).values()
    assert [result.status for result in results] == [RunStatus.COMPLETED] * 2
    assert "held" not in row


class Paid(Asked):
    """A backend of which each call costs `usd`, and at most MOST."""

    MOST = 4.0

    def __init__(self, usd: float = 1.0) -> None:
        super().__init__()
        self.usd = usd
        self.account = f"a server and key {id(self)}"  # the limits of a process outlive a run

    @property
    def billing(self) -> Billing:
        return Billing(None, "m", price=Price(input=0.0, output=1_000_000.0), max_output_tokens=int(self.MOST))

    async def answer(self, messages: Sequence[Message]) -> Reply:  # type: ignore[override]
        self.calls += 1
        await anyio.lowlevel.checkpoint()
        return Reply(messages[-1].content, usage=Usage(1, 1, self.usd))

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Any]:
        yield self

    session_id = None

    async def send(self, prompt: str) -> Reply:
        return await self.answer([Message("user", prompt)])


def paying(store: Any, backend: Any, usd: float, **options: Any) -> ParallelRunner:
    rates = {"api": RateLimits(usd_per_day=usd)}
    return ParallelRunner(backends={"api": backend}, rates=rates, store=store, park=True, **options)


async def test_a_run_parks_until_midnight_once_the_money_of_its_account_is_spent(tmp_path: Path) -> None:
    backend, tasks = Paid(), DAG([Task(f"t{n}", "p") for n in range(12)])
    midnight = (int(Clock().wall() // 86_400) + 1) * 86_400
    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await paying(store, backend, 10.0).run(tasks, "r")
        assert result.status is RunStatus.PARKED
        assert parse_time(result.due_at or "") == pytest.approx(midnight, abs=1)
        assert backend.calls == 7, "the eighth might cost four dollars of three"
        [row] = (await store.transact(list_accounts())).values()
        assert (row["usd"]["total"], row["usd"]["reserved"]) == (7.0, 0.0)
        shown = await paying(store, backend, 10.0).runs.get("r")
        waits = {(task.waits.kind.value, task.waits.backend) for task in shown.tasks.values() if task.waits}
        assert waits == {("budget", "api")}
        assert [one.cause for one in shown.throttled] == ["usd_per_day"]
        other = await paying(store, backend, 10.0).run(DAG([Task("t", "p")]))
        assert (other.status, backend.calls) == (RunStatus.PARKED, 7)
        result = await paying(store, backend, 100.0).resume("r")
        assert (result.status, backend.calls) == (RunStatus.COMPLETED, 12)


@pytest.mark.parametrize("how", ["stop", "native"])
async def test_a_run_that_is_ended_leaves_no_money_reserved(tmp_path: Path, how: str) -> None:
    under_way = anyio.Event()

    class Hanging(Paid):
        async def send(self, prompt: str) -> Reply:
            if self.calls == 2:
                under_way.set()
                await anyio.sleep_forever()
            return await super().send(prompt)

    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = paying(store, Hanging(), 20.0, concurrency=2)
        async with anyio.create_task_group() as group, runner.start(DAG([Task(f"t{n}", "p") for n in range(8)])) as run:

            async def end() -> None:
                await under_way.wait()
                if how == "stop":
                    run.stop()
                else:
                    group.cancel_scope.cancel()

            group.start_soon(end)
            await run.result()
        [row] = (await store.transact(list_accounts())).values()
        assert row["usd"]["reserved"] == 0.0
        assert row["usd"]["total"] >= 2.0


async def test_what_a_run_is_granted_as_it_stops_goes_back(tmp_path: Path) -> None:
    class Stopping(SQLiteStore):
        stop: Callable[[], object]

        async def transact(self, writing: Reading[Any]) -> Any:
            result = await super().transact(writing)
            if isinstance(result, Grant):
                self.stop()
            return result

    backend = Paid()
    async with Stopping(tmp_path / "runs.db") as store:
        async with paying(store, backend, 20.0).start(DAG([Task("t", "p")])) as run:
            store.stop = run.stop
            await run.result()
        [row] = (await store.transact(list_accounts())).values()
    assert (backend.calls, row["usd"]["total"], row["usd"]["reserved"]) == (0, 0.0, 0.0)


async def test_money_that_is_granted_to_a_cancelled_call_is_known(tmp_path: Path) -> None:
    class Late:
        done = anyio.Event()

        async def transact(self, writing: Reading[Any]) -> Any:
            result = await store.transact(writing)
            self.done.set()
            await anyio.lowlevel.checkpoint()
            return result

    limiter, late = RateLimiter(RateLimits(usd_per_day=5.0), 0.0, is_granted=True), Late()
    async with SQLiteStore(tmp_path / "runs.db") as store, anyio.create_task_group() as group:
        group.start_soon(StoredLedger(late, "a", Clock()).fill, limiter, CallSize(0, 2.0), 1, never)
        await late.done.wait()
        group.cancel_scope.cancel()
    assert limiter.take_unused_money().usd == 2.0


async def test_what_nobody_can_price_is_refused_under_a_limit_of_money(tmp_path: Path) -> None:
    tasks = DAG([Task("t", "p")])
    async with SQLiteStore(tmp_path / "runs.db") as store:
        with pytest.raises(InvalidRequest, match=r"the account has a usd_per_day, and .*--unpriced"):
            await paying(store, Asked(), 10.0).run(tasks)
        assert (await paying(store, Asked(), 10.0, unpriced=True).run(tasks)).status is RunStatus.COMPLETED
        with pytest.raises(InvalidRequest, match="a server and a key"):
            await paying(store, answer, 10.0).run(tasks)
    with pytest.raises(InvalidRequest, match="kept in a store"):
        await paying(MemoryStore(), Paid(), 10.0).run(tasks)


async def test_a_call_above_the_whole_limit_is_made_on_a_day_without_another(tmp_path: Path) -> None:
    backend = Paid()
    async with SQLiteStore(tmp_path / "runs.db") as store:
        result = await paying(store, backend, 3.0).run(DAG([Task(f"t{n}", "p") for n in range(3)]))
        assert (result.status, backend.calls) == (RunStatus.PARKED, 1)


async def test_nothing_is_spent_while_the_store_is_away() -> None:
    clock, limiter = Recorded(), RateLimiter(RateLimits(usd_per_day=5.0), 0.0, is_granted=True)
    await StoredLedger(Away(), "a", clock).fill(limiter, CallSize(0, 1.0), 1, never)
    assert limiter.wait(CallSize(0, 1.0), clock.monotonic()) > 0
    assert clock.slept == [SETTLES_S]


async def test_an_account_learns_later_what_it_missed_while_the_store_was_away(tmp_path: Path) -> None:
    clock, limiter = Clock(), RateLimiter(RateLimits(600), 0.0, is_granted=True)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        flaky = Flaky(store)
        ledger = StoredLedger(flaky, "a", clock)
        limiter.lower(Allowance(requests_per_minute=60), clock.monotonic())
        await ledger.fill(limiter, CallSize(0), 1, never)
        await ledger.close(clock.wall() + 3_600)
        reservation = Reservation(0, 0.0, 1.0, int(clock.wall() // 86_400))
        await ledger.settle(reservation, 3.0)
        flaky.is_away = False
        await ledger.settle(Reservation(0, 0.0), 0.0)
        [row] = (await store.transact(list_accounts())).values()
    assert row["requests"][0] == 60
    assert row["closed_until"] - clock.wall() > 3_500
    assert row["usd"]["total"] == 2.0, "what was reserved is counted already"


class Flaky:
    """A store that does not answer at first."""

    def __init__(self, store: SQLiteStore) -> None:
        self._store = store
        self.is_away = True

    async def transact(self, writing: Reading[Any]) -> Any:
        if self.is_away:
            raise StoreError("away")
        return await self._store.transact(writing)


class Away:
    """A store that cannot be reached."""

    async def transact(self, writing: Reading[Any]) -> Any:
        raise StoreError("away")


async def test_without_its_store_a_process_keeps_the_limit_alone() -> None:
    clock, limiter = Recorded(), RateLimiter(RateLimits(600), 0.0, is_granted=True)
    ledger = StoredLedger(Away(), "a", clock)
    for _ in range(3):
        await ledger.fill(limiter, CallSize(0), 8, never)
        limiter.reserve(CallSize(0), clock.monotonic())
    assert clock.slept == pytest.approx([0.1] * 3)
    await ledger.close(5.0)


async def test_a_grant_that_nobody_waits_for_any_more_goes_back(tmp_path: Path) -> None:
    limiter = RateLimiter(RateLimits(1), 0.0, is_granted=True)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        ledger = StoredLedger(store, "a", Clock())
        await ledger.fill(limiter, CallSize(0), 1, never)
        limiter.reserve(CallSize(0), Clock().monotonic())
        with anyio.move_on_after(0.2):  # the next may begin in a minute
            await ledger.fill(limiter, CallSize(0), 1, never)
    demand = limiter.demand(CallSize(0), 1, Clock().monotonic())
    assert demand.unused == Units(1.0)
    assert demand.first == Units(1.0)


async def test_a_run_keeps_its_account_in_the_store(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(backends={"api": Asked()}, rates={"api": RateLimits(6_000)}, store=store)
        result = await runner.run(DAG([Task(f"t{n}", "p") for n in range(12)]))
        assert all(one.status is TaskStatus.COMPLETED for one in result.tasks.values())
        [(name, row)] = (await store.transact(list_accounts())).items()
    assert name.startswith("api ")
    assert Asked.account not in name
    assert set(row) == {"requests", "seen", "limits", "users"}
    assert [round(requests) for requests, _, _ in row["users"].values()] == [12]


async def test_a_refusal_closes_the_account_for_all_processes(tmp_path: Path) -> None:
    refused = BackendError(ErrorKind.RATE_LIMITED, "limit", retry_after=900.0)
    async with SQLiteStore(tmp_path / "runs.db") as store:
        backend = Asked(refused)
        runner = ParallelRunner(backends={"api": backend}, rates={"api": RateLimits(6_000)}, store=store)

        async def closed() -> float:
            rows = await store.transact(list_accounts())
            return max((row.get("closed_until", 0.0) for row in rows.values()), default=0.0) - Clock().wall()

        async with anyio.create_task_group() as group:
            group.start_soon(partial(runner.run, DAG([Task("t", "p")])))
            with anyio.fail_after(60):
                while await closed() < 800:  # noqa: ASYNC110 - no event announces it
                    await anyio.sleep(0.02)
            group.cancel_scope.cancel()
        [(name, _)] = (await store.transact(list_accounts())).items()
        clock, limiter, told = Recorded(), RateLimiter(RateLimits(6_000), 0.0, is_granted=True), list[float]()
        with anyio.move_on_after(0.5):
            await StoredLedger(store, name, clock).fill(limiter, CallSize(0), 1, lambda until, _why: told.append(until))
        assert clock.slept[0] > 800, "another process waits as well"
        assert told[0] - Clock().wall() > 800


async def test_a_run_parks_while_another_process_has_closed_its_account(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        backend = Asked()
        runner = ParallelRunner(backends={"api": backend}, rates={"api": RateLimits(6_000)}, store=store, park=True)
        await runner.run(DAG([Task("t", "p")]))
        [(name, _)] = (await store.transact(list_accounts())).items()
        await StoredLedger(store, name, Clock()).close(Clock().wall() + 3_600)
        before = backend.calls
        result = await runner.run(DAG([Task(f"t{n}", "p") for n in range(3)]))
        assert result.status is RunStatus.PARKED
        assert parse_time(result.due_at or "") - Clock().wall() > 3_500
        assert backend.calls == before, "nothing else is sent there"


@pytest.mark.parametrize("rates", [{}, {"api": RateLimits(6_000)}])
async def test_nothing_is_asked_without_a_limit_or_without_an_account(tmp_path: Path, rates: dict[str, Any]) -> None:
    async with Watched(tmp_path / "runs.db") as store:
        backend = answer if rates else Asked()
        result = await ParallelRunner(backends={"api": backend}, rates=rates, store=store).run(DAG([Task("t", "p")]))
        assert result.tasks["t"].status is TaskStatus.COMPLETED
        assert store.asked == 0
    runner = ParallelRunner(backends={"api": Asked()}, rates={"api": RateLimits(6_000)}, store=MemoryStore())
    assert (await runner.run(DAG([Task("t", "p")]))).tasks["t"].status is TaskStatus.COMPLETED


@pytest.mark.parametrize(("per_minute", "causes"), [(6_000, []), (60, [OWN_LIMITS])])
async def test_a_run_says_that_a_limit_is_reached_only_if_it_has_to_wait(
    tmp_path: Path, per_minute: float, causes: list[str]
) -> None:
    """To ask the store, which takes a moment, is no wait."""
    rates = {"api": RateLimits(per_minute)}
    async with SQLiteStore(tmp_path / "runs.db") as store:
        runner = ParallelRunner(backends={"api": Asked()}, rates=rates, store=store)
        async with runner.start(DAG([Task("a", "p"), Task("b", "p"), Task("c", "p")])) as run:
            events = [event async for event in run.events() if isinstance(event, BackendThrottled)]
        assert (await run.result()).status is RunStatus.COMPLETED
    assert [event.cause for event in events] == causes
