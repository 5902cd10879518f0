from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait.backends import (
    AnthropicBackend,
    Conversation,
    ConversationRequest,
    Files,
    FunctionBackend,
    OpenAIBackend,
    PydanticAIBackend,
    Reply,
)
from plait.errors import BackendError, ErrorKind
from tests.contracts.backend import BackendContract, Subject
from tests.support.pydantic_agents import wired_agent
from tests.support.tool_calls import CHAT, polite
from tests.support.wire import Answer, ChatCompletions, Dialect, Exchange, Messages, events, serve, silence


async def answer(prompt: str) -> str:
    return '{"mood": "good"}' if "mood" in prompt else f"You said {prompt}"


async def hang(prompt: str) -> str:
    await anyio.sleep(60)
    return prompt


async def fail(prompt: str) -> str:
    raise RuntimeError("no luck\ntoday")


class TestFunction(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(FunctionBackend(answer), FunctionBackend(hang), FunctionBackend(fail))


class TestPlainFunction(BackendContract):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        import threading

        release = threading.Event()

        def answer(prompt: str) -> str:
            return '{"mood": "good"}' if "mood" in prompt else f"You said {prompt}"

        def hang(prompt: str) -> str:
            release.wait(60)
            return prompt

        def fail(prompt: str) -> str:
            raise RuntimeError("no luck\ntoday")

        yield Subject(FunctionBackend(answer), FunctionBackend(hang), FunctionBackend(fail))
        release.set()


def _polite(dialect: Dialect) -> Answer:
    async def answer(exchange: Exchange) -> None:
        wants_json = "json_schema" in json.dumps(exchange.request.body)
        texts = ['{"mood": ', '"good"}'] if wants_json else ["Hello", " there."]
        await events(dialect.parts(*texts))(exchange)

    return answer


class _OverTheWire(BackendContract):
    backend: type[OpenAIBackend] | type[AnthropicBackend]
    dialect: Dialect

    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        failure = self.dialect.error(500, "server_error", "something broke")
        prefix = self.dialect.prefix
        async with serve(_polite(self.dialect)) as polite, serve(silence) as silent, serve(failure) as broken:
            urls = [f"{server.url}{prefix}" for server in (polite, silent, broken)]
            backends = [self.backend("m", base_url=url) for url in urls]
            yield Subject(*backends)
            # No connection outlives its client.
            for backend in backends:
                await backend.aclose()
            with anyio.fail_after(60):
                for server in (polite, silent, broken):
                    if server.connections:
                        await server.idle.wait()


class TestOpenAI(_OverTheWire):
    backend = OpenAIBackend
    dialect = ChatCompletions()


class TestAnthropic(_OverTheWire):
    backend = AnthropicBackend
    dialect = Messages()


class TestPydanticAI(BackendContract):
    @pytest.fixture
    async def subject(self) -> AsyncGenerator[Subject]:
        failure = CHAT.error(500, "server_error", "something broke")
        async with serve(polite) as working, serve(silence) as silent, serve(failure) as broken:
            yield Subject(*(PydanticAIBackend(wired_agent(server.url)) for server in (working, silent, broken)))


class TestPydanticAIWithFiles(BackendContract):
    """As in a run on a store with files."""

    @pytest.fixture
    async def subject(self, tmp_path: Path) -> AsyncGenerator[Subject]:
        files = Files(tmp_path / "turn", tmp_path / "sessions")
        failure = CHAT.error(500, "server_error", "something broke")
        async with serve(polite) as working, serve(silence) as silent, serve(failure) as broken:
            backends = [PydanticAIBackend(wired_agent(server.url)) for server in (working, silent, broken)]
            yield Subject(*(WithFiles(backend, files) for backend in backends))


class WithFiles:
    """Gives each conversation the same files."""

    can_fork = True

    def __init__(self, backend: PydanticAIBackend, files: Files) -> None:
        self._backend, self._files = backend, files
        self.new_session_id = backend.new_session_id

    def open(self, request: ConversationRequest) -> AbstractAsyncContextManager[Conversation]:
        return self._backend.open(replace(request, files=self._files))


class Keeper:
    """Keeps its sessions itself, under the ids that it was given, and has nothing to go on from but them."""

    def __init__(
        self, answer: FunctionBackend, *, tells: bool = True, lost: ErrorKind = ErrorKind.SESSION_LOST
    ) -> None:
        self.answer, self.tells, self.lost = answer, tells, lost
        self.known: list[str] = []
        self.given = 0

    def new_session_id(self) -> str:
        self.given += 1
        return f"session-{self.given}"

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:
        async with self.answer.open(request) as conversation:
            yield _Kept(self, request, conversation)


class _Kept:
    def __init__(self, keeper: Keeper, request: ConversationRequest, inner: Conversation) -> None:
        assert request.session_id is not None
        self.session_id = request.session_id
        self._keeper, self._opening, self._inner = keeper, request, inner

    async def send(self, prompt: str) -> Reply:
        if self._opening.resume and self.session_id not in self._keeper.known:
            raise BackendError(self._keeper.lost, f"there is no session {self.session_id}")
        reply = await self._inner.send(prompt)
        self._keeper.known.append(self.session_id)
        if self._keeper.tells:
            self._opening.on_session(self.session_id)
        return Reply(reply.text, reply.data, self.session_id)


class TestKeeperOfSessions(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        return Subject(*(Keeper(FunctionBackend(one)) for one in (answer, hang, fail)))


@pytest.mark.parametrize("wrong", [{"tells": False}, {"lost": ErrorKind.TRANSIENT}], ids=str)
async def test_who_keeps_nothing_cannot_lose_it_and_what_is_lost_is_said_to_be(wrong: dict[str, object]) -> None:
    keeper = Keeper(FunctionBackend(answer), **wrong)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="there is no session"):
        await BackendContract().test_a_history_is_continued(Subject(keeper, keeper, keeper))
