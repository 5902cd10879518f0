from __future__ import annotations

import json
from collections.abc import AsyncGenerator

import anyio
import pytest

from backends import AnthropicBackend, FunctionBackend, OpenAIBackend
from backends.contract import BackendContract, Subject
from tests.support.wire import Answer, ChatCompletions, Dialect, Exchange, Messages, events, serve, silence


class TestFunction(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        async def answer(prompt: str) -> str:
            return '{"mood": "good"}' if "mood" in prompt else f"You said {prompt}"

        async def hang(prompt: str) -> str:
            await anyio.sleep(60)
            return prompt

        async def fail(prompt: str) -> str:
            raise RuntimeError("no luck\ntoday")

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
            yield Subject(*(self.backend("m", base_url=url) for url in urls))
            # No connection outlives its request.
            with anyio.fail_after(2):
                for server in (polite, silent, broken):
                    if server.connections:
                        await server.idle.wait()


class TestOpenAI(_OverTheWire):
    backend = OpenAIBackend
    dialect = ChatCompletions()


class TestAnthropic(_OverTheWire):
    backend = AnthropicBackend
    dialect = Messages()
