"""Two runs of one process on one account: what one is refused holds for both, and for nobody else."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, Run, RunStatus, Task, events
from plait.backends import OpenAIBackend
from plait.runner.engine.run_options import RunOptions
from plait.runner.scheduling.slots import MANY, Account, Pause, ReadyQueue, SlotPool
from tests.support.agents.homes import make_home
from tests.support.remotes import make
from tests.support.sharing import wide
from tests.support.wire import Answer, ChatCompletions, Exchange, Script, serve

PAUSE_S = 1.0
CHAT = ChatCompletions()
FINE = CHAT.whole("fine")
TOO_FAST = CHAT.error(429, "rate_limit_exceeded", "Rate limit reached", retry_after=f"{PAUSE_S:g}")
NO_QUOTA = CHAT.error(429, "rate_limit_exceeded", "You exceeded your current quota", retry_after=f"{PAUSE_S:g}")
NO_QUOTA_TODAY = CHAT.error(429, "rate_limit_exceeded", "You exceeded your daily limit", retry_after="86400")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-one")
    monkeypatch.setenv("OTHER_API_KEY", "sk-other")


@dataclass
class Provider:
    """A server whose requests wait until the test answers them, or are answered at once if `is_open`."""

    is_open: bool = False
    arrived: list[float] = field(default_factory=list[float])
    """When each request came."""
    held: list[tuple[str, asyncio.Future[Answer]]] = field(default_factory=list[tuple[str, "asyncio.Future[Answer]"]])

    async def __call__(self, exchange: Exchange) -> None:
        self.arrived.append(time.monotonic())
        if self.is_open:
            await FINE(exchange)
            return
        prompt = exchange.request.body["messages"][-1]["content"]
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.held.append((prompt, answer))
        await (await answer)(exchange)

    async def holds(self, number: int) -> None:
        """Wait until the server holds this many requests."""
        await until(lambda: len(self.held) >= number)

    def answer(self, answer: Answer, run: str = "") -> None:
        """Answer the oldest request of `run`, or of any."""
        found = next(one for one in self.held if one[0].startswith(run))
        self.held.remove(found)
        found[1].set_result(answer)

    def open(self) -> None:
        """Answer all requests from now on."""
        self.is_open = True
        while self.held:
            self.answer(FINE)

    def arrived_after(self, at: float) -> list[float]:
        return [one - at for one in self.arrived if one > at]


class Watched:
    """The events of a run so far."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.told: list[events.Event] = []

    async def read(self) -> None:
        async for event in self.run.events():
            self.told.append(event)

    async def tells(self, kind: type[events.Event], times: int = 1) -> None:
        """Wait until the run has told events of this kind so many times."""
        await until(lambda: self.count(kind) >= times)

    def count(self, kind: type[events.Event]) -> int:
        return sum(isinstance(one, kind) for one in self.told)

    @property
    def under_way(self) -> int:
        """How many attempts have been started and have not ended."""
        return self.count(events.TaskStarted) - self.count(events.TaskCompleted) - self.count(events.TaskRetried)

    async def completes(self) -> None:
        with anyio.fail_after(60):
            assert (await self.run.result()).status is RunStatus.COMPLETED


def runner(server: Script, concurrency: int, name: str = "api", **options: object) -> ParallelRunner:
    return ParallelRunner(
        backends={name: make(CHAT, server.url, **options)},  # type: ignore[arg-type]
        concurrency=concurrency,
    )


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():  # noqa: ASYNC110 - waits for a request, or an event of a run
            await anyio.sleep(0.005)


@asynccontextmanager
async def two_runs(first: ParallelRunner, second: ParallelRunner, size: int) -> AsyncGenerator[tuple[Watched, Watched]]:
    """The runs a and b, of `size` tasks each."""
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(anyio.create_task_group())
        found: list[Watched] = []
        for name, one in (("a", first), ("b", second)):
            watched = Watched(await stack.enter_async_context(one.start(wide(name, size), name)))
            group.start_soon(watched.read)
            found.append(watched)
        yield found[0], found[1]
        for watched in found:
            watched.run.stop()


async def test_a_quota_that_one_run_has_used_up_pauses_the_other_as_well() -> None:
    provider = Provider()
    async with serve(provider) as server, two_runs(runner(server, 1), runner(server, 1), 3) as (first, second):
        await provider.holds(2)
        refused = time.monotonic()
        provider.answer(NO_QUOTA, "a")
        await first.tells(events.TaskRetried)
        provider.open()
        await first.completes()
        await second.completes()
        assert len(provider.arrived) == 7
        assert min(provider.arrived_after(refused)) >= PAUSE_S
        assert second.count(events.BackendThrottled), "the other run says why it waits"


async def test_the_refusals_of_two_runs_add_up_and_they_share_half_of_their_slots() -> None:
    provider = Provider()
    async with serve(provider) as server, two_runs(runner(server, 4), runner(server, 4), 12) as (first, second):
        await provider.holds(8)
        refused = time.monotonic()
        for name, run, retried in (("a", first, 1), ("b", second, 1), ("a", first, 2)):
            await provider.holds(8)
            provider.answer(TOO_FAST, name)
            await run.tells(events.TaskRetried, retried)
        assert first.under_way + second.under_way == 7, "paused"
        while provider.held:
            provider.answer(FINE)
        await provider.holds(4)
        assert first.under_way + second.under_way == 4, "half of the eight, of both runs"
        assert {prompt[0] for prompt, _ in provider.held} == {"a", "b"}, "and none keeps the other out"
        assert len(provider.arrived) == 8 + (MANY - 1) + 4
        assert min(provider.arrived_after(refused)[MANY - 1 :]) >= PAUSE_S
        (told,) = [one for one in second.told if isinstance(one, events.BackendThrottled)][:1]
        assert (told.slots, told.total) == (4, 8)
        provider.open()
        await first.completes()
        await second.completes()


async def test_a_usage_limit_that_an_agent_has_met_in_one_run_holds_in_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, until_then = make_home(tmp_path, monkeypatch), int(time.time()) + 5
    first = ParallelRunner(backends={"claude": home.claude()}, concurrency=1)
    second = ParallelRunner(backends={"claude": home.claude()}, concurrency=1)
    limited = DAG([Task("limited", f"[[limit {until_then}]]")])
    gate = tmp_path / "gate"
    others = DAG([Task("under-way", f"[[until {gate}]]"), Task("after", "Go on.")])
    async with first.start(limited) as one, second.start(others) as other, anyio.create_task_group() as group:
        refused, told = Watched(one), Watched(other)
        group.start_soon(refused.read)
        group.start_soon(told.read)
        await told.tells(events.BackendThrottled)
        gate.touch()
        await told.completes()
        assert time.time() >= until_then
        await refused.completes()


OTHERS: dict[str, dict[str, object]] = {"key": {"api_key_env": "OTHER_API_KEY"}, "name": {"name": "large"}, "url": {}}


@pytest.mark.parametrize("differs", OTHERS)
async def test_other_accounts_go_on(differs: str) -> None:
    provider, elsewhere = Provider(), Provider()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(serve(provider))
        other = await stack.enter_async_context(serve(elsewhere)) if differs == "url" else server
        second_runner = runner(other, 1, **OTHERS[differs])  # type: ignore[arg-type]
        first, second = await stack.enter_async_context(two_runs(runner(server, 1), second_runner, 3))
        await provider.holds(1 if differs == "url" else 2)
        provider.answer(NO_QUOTA_TODAY, "a")
        await first.tells(events.TaskRetried)
        provider.open()
        elsewhere.open()
        await second.completes()
        assert not second.count(events.BackendThrottled)


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_run_that_ends_takes_its_refusals_along(how: str) -> None:
    provider = Provider()
    async with serve(provider) as server, two_runs(runner(server, 1), runner(server, 1), 3) as (first, second):
        await provider.holds(2)
        provider.answer(NO_QUOTA_TODAY, "a")
        await second.tells(events.BackendThrottled)
        provider.answer(FINE, "b")
        await second.tells(events.TaskCompleted)
        assert second.under_way == 0
        getattr(first.run, how)()
        provider.open()
        await second.completes()


def joined(options: RunOptions, name: str = "api") -> Account:
    """Return the account after a run has joined it."""
    account = options.account(name)
    pool = SlotPool(4)
    ReadyQueue(object(), name, pool, pool.slots(name), account, lambda *_: None)
    return account


def options_of(server: str = "http://localhost:9/v1") -> RunOptions:
    return RunOptions(backends={"api": OpenAIBackend("m", base_url=server), "own": answer})


async def answer(prompt: str) -> str:
    return prompt


async def test_what_was_refused_is_forgotten_once_no_run_uses_the_account() -> None:
    first, second = options_of(), options_of()
    account = joined(first)
    account.throttle((None, 0), Pause(9.0, at_once=True))
    assert joined(second) is account
    for run in tuple(account.runs):
        assert first.account("api") is account
        account.leave(run, 0)
    assert first.account("api") is not account
    assert first.account("api").is_open


async def test_runners_share_no_backend_without_an_account() -> None:
    first, second = options_of(), options_of()
    own = joined(first, "own")
    assert first.account("own") is own, "two runs of one runner"
    assert second.account("own") is not own


def test_another_event_loop_has_accounts_of_its_own() -> None:
    options, found = options_of(), list[Account]()

    async def find() -> None:
        found.append(joined(options))

    for _ in range(2):
        anyio.run(find)
    assert found[0] is not found[1]
