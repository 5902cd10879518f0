"""A refused call delays its own task, many pause the backend. After a long pause one task shows whether it is over."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, Run, RunStatus, Task
from plait.backends import Conversation, ConversationRequest, Output, Reply
from plait.backends.backend_protocol import Allowance
from plait.errors import BackendError, ErrorKind
from plait.events import BackendThrottled
from plait.persistence import Store
from plait.runner.scheduling.slots import MANY
from tests.support.fakes import QuickClock
from tests.support.remotes import dialect, make
from tests.support.wire import ChatCompletions, Dialect, Exchange, plain, serve
from tests.support.wire import events as stream

__all__ = ["dialect"]


class Still(QuickClock):
    """A clock that the test sets. Every sleep waits for `advance`."""

    def __init__(self) -> None:
        super().__init__()
        self._sleeping: list[tuple[float, anyio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        if seconds == 10.0:  # the lease
            await anyio.sleep_forever()
        woken = anyio.Event()
        self._sleeping.append((self.now + seconds, woken))
        await woken.wait()

    async def advance(self, seconds: float) -> None:
        self.now += seconds
        for until, woken in self._sleeping:
            if until <= self.now + 1e-9:
                woken.set()
        self._sleeping = [one for one in self._sleeping if not one[1].is_set()]
        await anyio.wait_all_tasks_blocked()


def too_many(hint: float = 30.0, message: str = "slow down") -> BackendError:
    error = BackendError(ErrorKind.RATE_LIMITED, message, retry_after=hint)
    error.status = 429
    return error


@dataclass(eq=False)
class Call:
    """A call under way, which the test ends."""

    prompt: str
    request: ConversationRequest
    outcome: Exception | str = ""
    _ended: anyio.Event = field(default_factory=anyio.Event)

    async def end(self, outcome: Exception | str) -> None:
        self.outcome = outcome
        self._ended.set()
        await anyio.wait_all_tasks_blocked()

    async def result(self) -> Reply:
        await self._ended.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return Reply(self.outcome)


class Decided:
    """A backend whose calls the test answers."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def new_session_id(self) -> str | None:
        return None

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        backend = self

        class Talk:
            session_id = None

            async def send(self, prompt: str) -> Reply:
                call = Call(prompt, request)
                backend.calls.append(call)
                try:
                    return await call.result()
                finally:
                    backend.calls.remove(call)

        yield Talk()

    @property
    def prompts(self) -> list[str]:
        return [call.prompt for call in self.calls]


def wide(count: int = 30, name: str = "t") -> DAG:
    """Return a graph of equal tasks, called in order of their numbers."""
    return DAG(Task(f"{name}{number:02}", prompt=f"{name}{number:02}") for number in range(count))


@dataclass
class Scene:
    """A run of eight tasks at once, whose first task was refused for long, and the probe that went ahead."""

    run: Run
    clock: Still
    server: Decided

    @property
    def probe(self) -> Call:
        return self.server.calls[-1]

    def is_open(self) -> bool:
        """Return whether the run uses the half of its slots that the pause has left."""
        return len(self.server.calls) == 4


@asynccontextmanager
async def held() -> AsyncGenerator[Scene]:
    """A run with a probe under way, and two free slots that wait for what becomes of it."""
    clock, server = Still(), Decided()
    async with ParallelRunner(server, clock=clock, concurrency=8).start(wide(), "r") as run:
        await anyio.wait_all_tasks_blocked()
        assert server.prompts == [f"t{number:02}" for number in range(8)]
        await server.calls[0].end(too_many(90.0))
        for _ in range(6):
            await server.calls[0].end("done")
        assert server.prompts == ["t07"], "paused"
        for _ in range(2):
            await clock.advance(60.0)
        assert server.prompts == ["t07", "t00"], "the others hold"
        yield Scene(run, clock, server)
        run.stop()


def head(call: Call) -> None:
    assert call.request.on_allowance is not None
    call.request.on_allowance(Allowance())


def says(kind: str, text: str = "x") -> Callable[[Call], None]:
    return lambda call: call.request.on_output(Output(kind, text))  # type: ignore[arg-type]


@pytest.mark.parametrize("sign", [head, says("text"), says("tool")], ids=["head", "text", "tool"])
async def test_the_first_sign_of_an_answer_opens_the_backend(sign: Callable[[Call], None]) -> None:
    async with held() as scene:
        sign(scene.probe)
        await anyio.wait_all_tasks_blocked()
        assert scene.is_open()
        sign(scene.server.calls[0])
        await anyio.wait_all_tasks_blocked()
        assert scene.is_open(), "once"


async def test_other_signs_do_not_open_it() -> None:
    async with held() as scene:
        for sign in (says("notice"), says("waiting"), says("node"), says("text", "")):
            sign(scene.probe)
        assert scene.probe.request.on_allowance is not None
        scene.probe.request.on_allowance(Allowance(accepted=False))
        head(scene.server.calls[0])  # a call that began before
        await anyio.wait_all_tasks_blocked()
        await scene.clock.advance(60.0)
        assert len(scene.server.calls) == 2


@pytest.mark.parametrize(
    "outcome", ["done", BackendError(ErrorKind.TRANSIENT, "reset"), BackendError(ErrorKind.REFUSED, "no")], ids=str
)
async def test_an_answer_or_another_error_opens_it(outcome: Exception | str) -> None:
    async with held() as scene:
        await scene.probe.end(outcome)
        assert scene.is_open()


@pytest.mark.parametrize("refused", range(1, MANY + 1))
async def test_many_refusals_pause_the_backend(refused: int, store: Store) -> None:
    clock, server = Still(), Decided()
    async with ParallelRunner(server, store=store, clock=clock, concurrency=8).start(wide(), "r") as run:
        await anyio.wait_all_tasks_blocked()
        for number in range(refused):
            await server.calls[0].end(too_many(30.0 + number))
        throttled = [json.loads(event.detail) for event in await store.list_events("r", kind=BackendThrottled.kind)]
        if refused < MANY:
            assert throttled == [], "the backend is not said to be throttled"
            assert len(server.calls) == 8
        else:
            assert [(one["slots"], one["total"]) for one in throttled] == [(4, 8)]
            assert len(server.calls) == 7
            await clock.advance(30.0)
            for _ in range(3):
                await server.calls[0].end("done")
            assert len(server.calls) == 4
            await clock.advance(4.0)  # the two seconds, and the jitter
            assert len(server.calls) == 4, "half of the width"
            await server.calls[0].end("done")
            assert len(server.calls) == 4
        run.stop()


@pytest.mark.parametrize("how", ["a used-up quota", "an empty limit in the headers", "an hour"])
async def test_a_limit_that_holds_for_all_pauses_at_once(how: str) -> None:
    clock, server = Still(), Decided()
    async with ParallelRunner(server, clock=clock, concurrency=4).start(wide(), "r") as run:
        await anyio.wait_all_tasks_blocked()
        call = server.calls[0]
        assert call.request.on_allowance is not None
        empty = 0.0 if how == "an empty limit in the headers" else 5.0
        call.request.on_allowance(Allowance(60.0, empty, accepted=False))
        said = "You exceeded your current quota" if how == "a used-up quota" else "slow down"
        await call.end(too_many(3600.0 if how == "an hour" else 30.0, said))
        assert len(server.calls) == 3
        await clock.advance(29.0)
        assert len(server.calls) == 3
        run.stop()


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_when_the_run_of_the_probe_ends_a_task_of_another_run_goes_ahead(how: str) -> None:
    clock, server = Still(), Decided()
    runner = ParallelRunner(server, clock=clock, concurrency=4, shared_limits=True, cancel_grace=5.0)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(runner.start(wide(4, "a"), "a"))
        await anyio.wait_all_tasks_blocked()
        other = await stack.enter_async_context(runner.start(wide(9, "b"), "b"))
        await anyio.wait_all_tasks_blocked()
        await server.calls[0].end(too_many(90.0))
        for _ in range(3):
            await server.calls[0].end("done")
        assert server.prompts == [], "paused"
        for _ in range(2):
            await clock.advance(60.0)
        assert len(server.calls) == 1, "one alone"
        probe, rest = (first, other) if server.prompts == ["a00"] else (other, first)
        getattr(probe, how)()
        if how == "cancel":
            await anyio.wait_all_tasks_blocked()
            await server.calls[0].end(BackendError(ErrorKind.CRASHED, "ended, as asked"))
        with anyio.fail_after(60):
            await probe.result()
        await anyio.wait_all_tasks_blocked()
        assert len(server.calls) == 1, "the next probe, and one alone"
        await server.calls[0].end("done")
        rest.stop()


async def test_the_only_task_of_a_run_is_its_own_probe() -> None:
    clock, server = QuickClock(), Refusing(5)
    task = Task("a", prompt="x", retry=Retry(attempts=2))
    result = await ParallelRunner(server, clock=clock).run(DAG([task]))
    assert (result.status, result["a"].attempts, server.calls) == (RunStatus.COMPLETED, 6, 6)


class Refusing:
    """A function that raises a rate limit so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.calls = 0

    async def __call__(self, prompt: str) -> str:
        self.calls += 1
        if self.calls <= self.times:
            raise too_many(2.0)
        return prompt


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_one_refusal_of_a_server_holds_nobody_for_long(
    dialect: Dialect, streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The calls end only once all slots are in use again."""
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-none")
    refused, running, all_there = False, 0, anyio.Event()
    answer = stream(dialect.parts("ok")) if streams else dialect.whole("ok")

    async def serves(exchange: Exchange) -> None:
        nonlocal refused, running
        if not refused:
            refused = True
            await dialect.error(429, "rate_limit_exceeded", "Rate limit reached", retry_after="1")(exchange)
            return
        running += 1
        if running == 4:
            all_there.set()
        with anyio.fail_after(60):
            await all_there.wait()
        await answer(exchange)

    async with serve(serves) as server:
        backend = make(dialect, server.url, stream=streams)
        result = await ParallelRunner(backend, concurrency=4).run(wide(8))
    assert result.status is RunStatus.COMPLETED
    assert sorted(task.attempts for task in result.tasks.values()) == [1] * 7 + [2]


async def test_an_empty_limit_in_a_refusals_headers_pauses_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-none")
    body = {"error": {"message": "Rate limit reached", "code": "rate_limit_exceeded"}}
    headers = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "0", "retry-after": "20"}
    refused = plain(429, body, **headers)
    async with serve(refused) as server:
        runner = ParallelRunner(make(ChatCompletions(), server.url), concurrency=1, clock=(clock := Still()))
        async with runner.start(wide(5)) as run:
            async for event in run.events():
                if event.kind == "backend_throttled":
                    break
            await clock.advance(1.0)
            assert len(server.requests) == 1, "no probe"
            run.stop()
