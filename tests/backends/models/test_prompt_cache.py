"""The provider's cache: one request ahead of those with the same beginning, and what Anthropic is told to keep.

The servers here count the characters that a provider would read from its cache: a beginning is stored with the first
event of an answer. OpenAI stores and finds at every 512 characters; Anthropic stores at the marks, and finds at the
ends of the blocks before a mark.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Task
from plait.backends import AnthropicBackend, ConversationRequest, OpenAIBackend
from plait.backends.models import model_api
from plait.backends.models.prompt_cache import PromptCache, SharedBeginning
from plait.errors import BackendError
from plait.events import TaskCompleted, TaskFailed, TaskOutput
from plait.persistence import MemoryStore
from tests.support.seeded_loop import run_seeded
from tests.support.wire import ChatCompletions, Dialect, Exchange, Messages, Script, events, plain, serve, silence

DIALECTS: list[Dialect] = [ChatCompletions(), Messages()]
PREAMBLE = "You compare offers by price alone. " * 150
DOCUMENT = "Line of the report, with some words.\n" * 700


class CachingServer:
    """Counts what comes from the cache. Answers once `together` requests have arrived."""

    def __init__(self, dialect: Dialect, together: int = 1) -> None:
        self.dialect = dialect
        self.asked = self.read = 0
        """Characters of all prompts, and those of them that were read from the cache."""
        self.ahead: list[int] = []
        """For each request, how many answers had begun when it arrived."""
        self._begun = 0
        self._stored: set[str] = set()
        self._all_here = asyncio.Event()
        self._together = together

    async def answer(self, exchange: Exchange) -> None:
        text, found, marked = _prompt(exchange.request.body)
        if isinstance(self.dialect, ChatCompletions):
            found = marked = range(4096, len(text) + 1, 512)
        self.asked += len(text)
        self.read += max((end for end in found if text[:end] in self._stored), default=0)
        self.ahead.append(self._begun)
        if len(self.ahead) >= self._together:
            self._all_here.set()
        await self._all_here.wait()
        self._begun += 1
        self._stored |= {text[:end] for end in marked}
        await events(self.dialect.parts("so"))(exchange)


def _prompt(body: dict[str, Any]) -> tuple[str, Sequence[int], Sequence[int]]:
    """The whole prompt, the ends of its blocks up to the last mark, and the ends of the marked blocks."""
    text, ends, marked = "", list[int](), list[int]()
    for content in [body.get("system", ""), *(message["content"] for message in body["messages"])]:
        for block in [{"text": content}] if isinstance(content, str) else content:
            text += block["text"]
            ends.append(len(text))
            if "cache_control" in block:
                marked.append(len(text))
    return text, [end for end in ends if marked and end <= marked[-1]], marked


def backend(dialect: Dialect, server: Script, **options: Any) -> OpenAIBackend | AnthropicBackend:
    kind = OpenAIBackend if isinstance(dialect, ChatCompletions) else AnthropicBackend
    return kind("m", base_url=server.url + dialect.prefix, api_key_env="NO_KEY", **options)


async def connect(one: OpenAIBackend | AnthropicBackend) -> None:
    """Make the client, in a thread: tasks that start together then send their requests in one step of the loop."""
    async with one.open(ConversationRequest()):
        pass


async def run(dag: DAG, one: OpenAIBackend | AnthropicBackend) -> None:
    await connect(one)
    result = await ParallelRunner(one, store=MemoryStore(), concurrency=len(dag)).run(dag)
    assert result.status is RunStatus.COMPLETED, result.error


def questions(beginning: str, number: int, start: int = 0) -> list[Task]:
    return [Task(f"q.{one}", f"{beginning}\nQuestion {one}: how much?") for one in range(start, start + number)]


@pytest.fixture(params=DIALECTS, ids=lambda dialect: dialect.name)
def dialect(request: pytest.FixtureRequest) -> Dialect:
    one: Dialect = request.param
    return one


async def test_one_request_goes_ahead_and_the_others_read_from_the_cache(dialect: Dialect) -> None:
    caching = CachingServer(dialect)
    async with serve(caching.answer) as server, backend(dialect, server, prompt_cache=True) as one:
        await run(DAG(questions(DOCUMENT, 8)), one)
    assert caching.ahead[0] == 0
    assert min(caching.ahead[1:]) == 1, "the others wait for the first event"
    assert caching.read / caching.asked > 0.7, "seven of eight prompts, each to at least 80 %"


async def test_the_longest_path_goes_ahead(dialect: Dialect) -> None:
    """The critical path thus waits for no other request."""
    caching = CachingServer(dialect)
    longest = [Task("first", f"{DOCUMENT}\nfirst"), Task("next", "next", depends_on=["first"])]
    async with serve(caching.answer) as server, backend(dialect, server, prompt_cache=True) as one:
        await run(DAG([*questions(DOCUMENT, 4), *longest]), one)
        prompts = [_prompt(body)[0] for body in server.bodies]
    assert prompts[0].endswith("first")
    assert caching.ahead[0] == 0
    assert min(caching.ahead[1:]) == 1


async def test_a_task_that_waits_for_the_cache_says_so(dialect: Dialect) -> None:
    caching, said = CachingServer(dialect), list[str]()
    async with serve(caching.answer) as server, backend(dialect, server, prompt_cache=True) as one:
        await connect(one)
        runner = ParallelRunner(one, store=MemoryStore(), concurrency=3)
        async with runner.start(DAG(questions(DOCUMENT, 3))) as run:
            async for event in run.events():
                if isinstance(event, TaskOutput) and event.output == "waiting":
                    said.append(event.text)
    assert said == ["another task with the same beginning fills the server's cache"] * 2


async def test_without_the_option_all_pay_for_the_same_beginning(dialect: Dialect) -> None:
    caching = CachingServer(dialect, together=8)
    async with serve(caching.answer) as server, backend(dialect, server) as one:
        await run(DAG(questions(DOCUMENT, 8)), one)
        assert "cache_control" not in str(server.bodies)
    assert (caching.ahead, caching.read) == ([0] * 8, 0)


async def test_the_vendors_own_server_caches_unless_switched_off(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, ahead in (({}, 1), ({"prompt_cache": False}, 8), ({"stream": False}, 8)):
        caching = CachingServer(dialect, together=ahead)
        async with serve(caching.answer) as server, backend(dialect, server, **options) as one:
            monkeypatch.setenv("NO_KEY", "k")
            monkeypatch.setattr(type(one), "default_url", one.base_url)
            await run(DAG(questions(DOCUMENT, 8)), one)
        assert caching.ahead.count(0) == ahead


async def test_short_prompts_and_different_beginnings_do_not_wait(dialect: Dialect) -> None:
    tasks = [*questions("short", 4), *(Task(f"d.{one}", f"{one} {DOCUMENT}") for one in range(4))]
    caching = CachingServer(dialect, together=8)
    async with serve(caching.answer) as server, backend(dialect, server, prompt_cache=True) as one:
        await run(DAG(tasks), one)
    assert caching.ahead == [0] * 8


async def test_documents_behind_a_common_preamble_have_one_request_ahead_each(dialect: Dialect) -> None:
    caching = CachingServer(dialect)
    tasks = [task for doc in range(3) for task in questions(f"{PREAMBLE}\nReport {doc}\n{DOCUMENT}", 4, 4 * doc)]
    async with serve(caching.answer) as server, backend(dialect, server, prompt_cache=True) as one:
        await run(DAG(tasks), one)
    assert caching.ahead.count(0) == 1
    assert caching.read / caching.asked > 0.6, "nine of twelve prompts"


@pytest.mark.parametrize("first", ["error", "cancelled"])
async def test_the_end_of_the_first_request_lets_the_others_go(dialect: Dialect, first: str) -> None:
    good = events(dialect.parts("so"))
    answer = plain(400, {"error": {"message": "no"}}) if first == "error" else silence
    async with serve(answer, good) as server, backend(dialect, server, prompt_cache=True) as one:
        texts: list[str] = []

        async def ask(task: Task, scope: anyio.CancelScope) -> None:
            with scope:
                async with one.open(ConversationRequest()) as conversation:
                    try:
                        texts.append((await conversation.send(task.prompt)).text)
                    except BackendError as error:
                        texts.append(error.kind)

        scopes = [anyio.CancelScope() for _ in range(4)]
        async with anyio.create_task_group() as group:
            for task, scope in zip(questions(DOCUMENT, 4), scopes, strict=True):
                group.start_soon(ask, task, scope)
            if first == "cancelled":
                await server.streaming.wait()
                ahead = next(one for one in range(4) if f"Question {one}:" in str(server.bodies[0]))
                scopes[ahead].cancel()
        assert sorted(texts) == (["invalid_request"] if first == "error" else []) + ["so"] * 3


async def test_a_conversation_that_goes_on_is_read_from_the_cache() -> None:
    caching = CachingServer(Messages())
    tasks = [Task("a", DOCUMENT), Task("b", "And?", continues="a"), Task("c", "So?", continues="b")]
    async with serve(caching.answer) as server, backend(Messages(), server, prompt_cache=True) as one:
        await run(DAG(tasks), one)
        first, second, third = (_prompt(body)[2] for body in server.bodies)
    size = len(DOCUMENT)
    assert (first, second, third) == ([size], [size + 2, size + 6], [size + 8])
    assert caching.read == size + (size + 6)


async def test_a_common_beginning_behind_a_short_history_is_marked() -> None:
    caching = CachingServer(Messages())
    asked = [Task(task.id, task.prompt, continues="a") for task in questions(DOCUMENT, 3)]
    async with serve(caching.answer) as server, backend(Messages(), server, prompt_cache=True) as one:
        await run(DAG([Task("a", "Hello."), *asked]), one)
    assert caching.ahead[1] == 1
    assert min(caching.ahead[2:]) == 2
    assert caching.read / caching.asked > 0.5, "two of three prompts"


async def test_a_single_turn_is_not_marked() -> None:
    caching = CachingServer(Messages())
    async with serve(caching.answer) as server, backend(Messages(), server, prompt_cache=True) as one:
        await run(DAG([Task("a", DOCUMENT, retry=Retry(attempts=1))]), one)
        assert server.bodies[0]["messages"] == [{"role": "user", "content": DOCUMENT}]


async def test_a_common_system_prompt_is_marked() -> None:
    caching = CachingServer(Messages())
    async with serve(caching.answer) as server, backend(Messages(), server, prompt_cache=True, system=DOCUMENT) as one:
        await run(DAG(questions("", 3)), one)
        blocks = server.bodies[1]["system"]
    assert "".join(block["text"] for block in blocks) == DOCUMENT
    assert ["cache_control" in block for block in blocks] == [True, False]
    assert blocks[0]["text"][-1] in "\n ", "cut between words"
    assert caching.read / caching.asked > 0.5, "two of three prompts"


async def test_of_requests_one_after_the_other_the_second_stores_and_the_third_reads(dialect: Dialect) -> None:
    caching = CachingServer(dialect)
    tasks = questions(DOCUMENT, 3)
    chain = [tasks[0], *(replace(task, depends_on=[before.id]) for before, task in pairwise(tasks))]
    async with serve(caching.answer) as server, backend(dialect, server, prompt_cache=True) as one:
        await run(DAG(chain), one)
    assert caching.read > 0.8 * len(DOCUMENT) * (1 if isinstance(dialect, Messages) else 2)


def test_a_beginning_is_forgotten_after_some_time() -> None:
    now = 0.0
    cache = PromptCache(needs_marks=False, monotonic=lambda: now)
    (first,) = cache.register([1])
    now = 239.0
    assert cache.register([1]) == [first]
    now = 239.0 + 240.0
    assert cache.register([1]) != [first]
    assert cache.register([2, 1])[1].requests == 2


async def test_a_cancelled_run_sends_nothing_that_waited(dialect: Dialect) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def late(exchange: Exchange) -> None:
        asked.set()
        await go.wait()
        await events(dialect.parts("so"))(exchange)

    async with serve(late) as server, backend(dialect, server, prompt_cache=True) as one:
        await connect(one)
        async with ParallelRunner(one, concurrency=4).start(DAG(questions(DOCUMENT, 4))) as started:
            await asked.wait()
            started.cancel()
            go.set()
            result = await started.result()
    assert result.status is RunStatus.CANCELLED
    assert len(server.requests) == 1


async def test_a_task_waits_for_a_tenth_of_its_time_limit(dialect: Dialect) -> None:
    tasks = [replace(task, timeout=8.0, retry=Retry(attempts=1)) for task in questions(DOCUMENT, 4)]
    async with (
        serve(silence, events(dialect.parts("so"))) as server,
        backend(dialect, server, prompt_cache=True) as one,
    ):
        await connect(one)
        ended: list[str] = []
        async with ParallelRunner(one, concurrency=4).start(DAG(tasks)) as started:
            async for event in started.events():
                if isinstance(event, (TaskCompleted, TaskFailed)):
                    ended.append(event.kind)
                if len(ended) == 3:
                    started.stop()
    assert ended == ["task_completed"] * 3, "beside the first, whose request has no answer"


async def test_an_answer_lets_all_go_that_wait_for_a_request_without_answer(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request never ends, and no later task has to wait for it once another was answered."""
    monkeypatch.setattr(model_api, "PATIENCE_S", 600.0)
    tasks = questions(DOCUMENT, 4)
    stuck, soon, late = replace(tasks[0], weight=9.0), replace(tasks[1], timeout=10.0), tasks[2:]
    chain = [stuck, soon, *(replace(task, depends_on=[soon.id]) for task in late)]
    async with (
        serve(silence, events(dialect.parts("so"))) as server,
        backend(dialect, server, prompt_cache=True) as one,
    ):
        await connect(one)
        async with ParallelRunner(one, concurrency=4).start(DAG(chain)) as started:
            with anyio.fail_after(60):
                async for event in started.events():
                    if isinstance(event, TaskCompleted) and event.task_id == late[-1].id:
                        break
            started.stop()


def test_the_patience_with_the_requests_ahead_is_one_for_all_of_them() -> None:
    """One request after the other goes ahead, and none of them is answered."""
    cache = PromptCache(needs_marks=False)
    waited: list[float] = []

    async def ahead() -> None:
        async with SharedBeginning(cache, DOCUMENT, on_wait=lambda: None):
            await anyio.sleep(0.1)

    async def impatient() -> None:
        began = anyio.current_time()
        async with SharedBeginning(cache, DOCUMENT, patience=0.3, on_wait=lambda: None):
            waited.append(anyio.current_time() - began)

    async def main() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(ahead)
            group.start_soon(impatient)
            while not waited:  # noqa: ASYNC110 - as long as it takes
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()

    run_seeded(main, 0)
    assert waited == [pytest.approx(0.3, abs=0.01)]


@pytest.mark.parametrize("text", ["\n" + "\u6587" * 9000, " \n" * 9000, "\u6587" * 9000, "a b " + "\u6587" * 9000])
async def test_no_block_is_blank_and_text_without_spaces_is_kept(text: str) -> None:
    caching = CachingServer(Messages())
    async with serve(caching.answer) as server, backend(Messages(), server, prompt_cache=True) as one:
        await run(DAG([Task(f"q.{index}", f"{text}{index}") for index in range(3)]), one)
        contents = [body["messages"][0]["content"] for body in server.bodies]
    assert all(block["text"].strip() for blocks in contents if isinstance(blocks, list) for block in blocks)
    if text.strip():
        assert caching.read / caching.asked > 0.5


async def test_a_repair_reads_the_prompt_from_the_cache() -> None:
    caching = CachingServer(Messages())
    async with serve(caching.answer) as server, backend(Messages(), server, prompt_cache=True) as one:
        tasks = [
            replace(task, output_schema={"type": "object"}, retry=Retry(attempts=1)) for task in questions(DOCUMENT, 2)
        ]
        await connect(one)
        result = await ParallelRunner(one, concurrency=2).run(DAG(tasks))
    assert result.status is RunStatus.FAILED
    assert len(server.requests) == 4
    assert caching.read > 3 * 0.8 * len(DOCUMENT), "the second prompt, and both repairs"
