"""Several servers as one backend: who gets a request, broken servers, conversations, and a list of URLs in a plan."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack, suppress
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task
from plait.backends import ConversationRequest, LoadBalancedBackend, OpenAIBackend, Output
from plait.errors import BackendError, ErrorKind
from plait.events import BackendThrottled
from plait.persistence import MemoryStore
from tests.support.processes.command import plait, plait_here
from tests.support.wire import Answer, ChatCompletions, Exchange, Script, events, hang_up, plain, serve

WIRE = ChatCompletions()
SO = events(WIRE.parts("so"))


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def closed_url() -> str:
    """The URL of a port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def balanced(*urls: str, clock: Clock | None = None) -> LoadBalancedBackend:
    servers = [OpenAIBackend("m", base_url=f"{url}/v1", request_timeout=10.0) for url in urls]
    return LoadBalancedBackend(servers, clock or Clock())


async def say(backend: LoadBalancedBackend, request: ConversationRequest | None = None) -> str:
    async with backend.open(request or ConversationRequest()) as conversation:
        return (await conversation.send("Hello.")).text


def counts(*servers: Script) -> list[int]:
    return [len(server.requests) for server in servers]


class Gate:
    """An answer that waits until it may go on."""

    def __init__(self, waiting: int, answer: Answer = SO) -> None:
        self._left, self._answer = waiting, answer
        self.all_here, self.open = anyio.Event(), anyio.Event()

    async def answer(self, exchange: Exchange) -> None:
        self._left -= 1
        if not self._left:
            self.all_here.set()
        await self.open.wait()
        await self._answer(exchange)


async def test_requests_at_once_are_spread_evenly() -> None:
    gate = Gate(9)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serve(gate.answer)) for _ in range(3)]
        backend = await stack.enter_async_context(balanced(*(server.url for server in servers)))
        async with anyio.create_task_group() as group:
            for _ in range(9):
                group.start_soon(say, backend)
            await gate.all_here.wait()
            assert counts(*servers) == [3, 3, 3]
            gate.open.set()


async def test_requests_one_after_another_are_spread_as_well() -> None:
    async with serve(SO) as one, serve(SO) as two, balanced(one.url, two.url) as backend:
        for _ in range(4):
            await say(backend)
        assert counts(one, two) == [2, 2]


async def test_a_slow_server_gets_fewer_requests() -> None:
    gate = Gate(1)
    async with (
        serve(gate.answer) as slow,
        serve(SO) as fast,
        balanced(slow.url, fast.url) as backend,
        anyio.create_task_group() as group,
    ):
        group.start_soon(say, backend)
        await gate.all_here.wait()
        for _ in range(5):
            await say(backend)
        assert counts(slow, fast) == [1, 5]
        gate.open.set()


async def test_a_server_that_is_down_costs_no_attempt() -> None:
    async with serve(SO) as up, balanced(closed_url(), up.url) as backend:
        told: list[Output] = []
        for _ in range(4):
            assert await say(backend, ConversationRequest(on_output=told.append)) == "so"
        assert len(up.requests) == 4
    notices = [one.text for one in told if one.kind == "notice"]
    assert len(notices) == 1
    assert "connection refused" in notices[0] and "asking another server" in notices[0]


async def test_with_all_servers_down_the_attempt_fails_and_says_why() -> None:
    async with balanced(closed_url(), closed_url()) as backend:
        with pytest.raises(BackendError, match="nothing listens at") as caught:
            await say(backend)
        assert caught.value.kind.value == "transient"


@pytest.mark.parametrize("status", [429, 503, 529])
async def test_a_request_that_a_server_refuses_goes_to_another_server(status: int) -> None:
    refuses = plain(status, {"error": {"message": "loading"}})
    async with serve(refuses) as first, serve(SO) as second, balanced(first.url, second.url) as backend:
        told: list[Output] = []
        for _ in range(4):
            assert await say(backend, ConversationRequest(on_output=told.append)) == "so"
        assert counts(first, second) == [1, 4]
    assert len([one for one in told if one.kind == "notice" and "loading; asking another server" in one.text]) == 1


async def test_if_all_servers_refuse_the_shortest_wait_counts() -> None:
    answers = [plain(503, {"error": {"message": "full"}}, retry_after=wait) for wait in ("40", "2", "9")]
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(serve(answer)) for answer in answers]
        backend = await stack.enter_async_context(balanced(*(server.url for server in servers), closed_url()))
        with pytest.raises(BackendError) as caught:
            await say(backend)
        assert counts(*servers) == [1, 1, 1]
    assert (caught.value.kind, caught.value.retry_after) == (ErrorKind.OVERLOADED, 2.0)


async def test_one_full_server_does_not_slow_down_the_run() -> None:
    dag = DAG([Task(f"t{number}", "Hello.", retry=Retry(1)) for number in range(8)])
    full = plain(503, {"error": {"message": "full"}}, retry_after="600")
    async with serve(full) as one, serve(SO) as two, balanced(one.url, two.url) as backend:
        async with ParallelRunner(backend, store=MemoryStore(), concurrency=2).start(dag) as run:
            told = [event async for event in run.events()]
        assert (await run.result()).status is RunStatus.COMPLETED
    assert not [event for event in told if isinstance(event, BackendThrottled)]


@pytest.mark.parametrize("broken", [hang_up, plain(500, {"error": {"message": "no idea"}})])
async def test_a_request_that_may_have_been_processed_is_not_sent_to_another_server(broken: Answer) -> None:
    async with serve(broken) as first, serve(SO) as second, balanced(first.url, second.url) as backend:
        with pytest.raises(BackendError):
            await say(backend)
        assert counts(first, second) == [1, 0]
        for _ in range(3):
            assert await say(backend) == "so"
        assert counts(first, second) == [1, 3]


async def test_a_broken_server_is_tried_again_after_a_growing_time() -> None:
    clock = Clock()
    async with (
        serve(hang_up, hang_up, SO) as first,
        serve(SO) as second,
        balanced(first.url, second.url, clock=clock) as backend,
    ):

        async def tries() -> int:
            """How many of two requests reach the first server now."""
            before = len(first.requests)
            for _ in range(2):
                with suppress(BackendError):
                    await say(backend)
            return len(first.requests) - before

        assert await tries() == 1  # fails
        clock.now += 0.9
        assert await tries() == 0
        clock.now += 0.1
        assert await tries() == 1  # fails again
        clock.now += 1.9
        assert await tries() == 0
        clock.now += 0.1
        assert await tries() == 2  # works again, and has had fewer requests


async def test_requests_that_fail_together_are_one_failure() -> None:
    clock, dies, lives = Clock(), Gate(8, hang_up), Gate(8)
    async with (
        serve(*[dies.answer] * 8, SO) as first,
        serve(lives.answer) as second,
        balanced(first.url, second.url, clock=clock) as backend,
    ):

        async def try_once() -> None:
            with suppress(BackendError):
                await say(backend)

        async with anyio.create_task_group() as group:
            for _ in range(16):
                group.start_soon(try_once)
            for gate in (dies, lives):
                await gate.all_here.wait()
                gate.open.set()
        clock.now += 1.0
        for _ in range(2):
            await say(backend)
        assert counts(first, second) == [9, 9]


async def test_a_refused_request_is_no_broken_server() -> None:
    refused = plain(400, {"error": {"message": "no such option"}})
    async with serve(refused, SO) as first, serve(SO) as second, balanced(first.url, second.url) as backend:
        with pytest.raises(BackendError, match="no such option"):
            await say(backend)
        for _ in range(3):
            await say(backend)
        assert counts(first, second) == [2, 2]


async def test_a_conversation_goes_on_at_its_server_and_a_fork_begins_there() -> None:
    async with serve(SO) as one, serve(SO) as two, balanced(one.url, two.url) as backend:
        await say(backend, ConversationRequest(session_id="a"))
        for _ in range(3):
            await say(backend, ConversationRequest(session_id="a", resume=True))
        await say(backend, ConversationRequest(session_id="b", fork_of="a"))
        assert counts(one, two) == [5, 0]
        await say(backend, ConversationRequest(session_id="c"))
        assert counts(one, two) == [5, 1]


async def test_a_conversation_leaves_a_server_with_far_more_requests() -> None:
    gate = Gate(3)
    async with serve(SO, gate.answer) as one, serve(SO) as two, balanced(one.url, two.url) as backend:
        await say(backend, ConversationRequest(session_id="a"))
        async with anyio.create_task_group() as group:
            for name in "bcd":
                group.start_soon(say, backend, ConversationRequest(session_id=name, fork_of="a"))
            await gate.all_here.wait()
            await say(backend, ConversationRequest(session_id="e", fork_of="a"))
            assert counts(one, two) == [4, 1]
            gate.open.set()


async def test_a_run_outlives_a_server() -> None:
    dag = DAG([Task(f"t{number}", "Hello.", retry=Retry(2, base_delay=0.0)) for number in range(8)])
    async with serve(SO, SO, hang_up) as dies, serve(SO) as lives, balanced(dies.url, lives.url) as backend:
        result = await ParallelRunner(backend, store=MemoryStore(), concurrency=1).run(dag)
    assert result.status is RunStatus.COMPLETED
    assert sum(task.attempts for task in result.tasks.values()) == 9


async def test_no_servers_are_a_mistake() -> None:
    with pytest.raises(ValueError, match="needs a server"):
        LoadBalancedBackend([])


def test_a_plan_names_several_servers(tmp_path: Path) -> None:
    async def go() -> None:
        async with serve(SO) as one, serve(SO) as two:
            urls = f"[{one.url}/v1, {two.url}/v1]"
            (tmp_path / "plan.yaml").write_text(
                f"backends:\n  m: {{kind: openai, model: m, base_url: {urls}}}\n"
                "tasks:\n" + "".join(f"  - {{id: t{number}, prompt: Hello.}}\n" for number in range(4))
            )
            done = await anyio.to_thread.run_sync(plait, tmp_path, "run", "plan.yaml", "-q")
            assert done.code == 0, done.err
            assert counts(one, two) == [2, 2]

    anyio.run(go)


def test_the_wrong_url_of_a_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "backends:\n  m: {kind: openai, model: m, base_url: ['http://a/v1', 'b:8000']}\n"
        "tasks:\n  - {id: a, prompt: b}\n"
    )
    done = plait_here(tmp_path, "check", "plan.yaml")
    assert done.code == 2
    assert "backends.m.base_url[1]: 'b:8000' does not fit" in done.err
