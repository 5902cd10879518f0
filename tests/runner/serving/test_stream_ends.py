"""A stream whose client goes away ends without an error, whatever was being sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
import pytest

from plait import DAG, Task
from plait.backends import FunctionBackend
from plait.clock_and_ids import Clock
from plait.persistence import MemoryStore
from plait.runner.parallel_runner import ParallelRunner
from plait.runner.serving.http_guard import Guard, Message, SignIn
from plait.runner.serving.http_routes import ServedRuns
from plait.runner.serving.http_server import make_app
from tests.runner.serving.test_guard import HOST


class Client:
    """A client that takes `taken` messages, reads no more, and then goes away."""

    def __init__(self, taken: int) -> None:
        self.left = taken
        self.sent: list[Message] = []
        self.is_stuck = anyio.Event()
        self._has_asked = False

    async def send(self, message: Message) -> None:
        self.sent.append(message)
        if len(self.sent) > self.left:
            self.is_stuck.set()
            await anyio.sleep_forever()

    async def receive(self) -> Message:
        if not self._has_asked:
            self._has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.is_stuck.wait()
        await anyio.wait_all_tasks_blocked()  # all buffers are full
        return {"type": "http.disconnect"}


async def in_service(ask: Callable[[Guard, str], Any]) -> None:
    async def work(prompt: str) -> str:
        return prompt

    runner = ParallelRunner(FunctionBackend(work), store=MemoryStore())
    async with runner.runs as service:
        result = await runner.run(DAG([Task(f"t{n}", prompt="x") for n in range(30)]))
        served = ServedRuns(service)
        app = make_app(served, SignIn("t0ken", HOST, Clock()))
        await ask(Guard(app, "t0ken", frozenset({HOST})), result.run_id)


@pytest.mark.parametrize(("path", "messages"), [("/api/runs/{}/events", 8), ("/page/runs/{}/live", 3)])
async def test_a_client_that_goes_away_is_no_error(path: str, messages: int) -> None:
    async def ask(guard: Guard, run_id: str) -> None:
        for taken in range(messages):
            client = Client(taken)
            headers = [(b"host", HOST.encode()), (b"authorization", b"Bearer t0ken")]
            scope = {
                "type": "http",
                "method": "GET",
                "path": path.format(run_id),
                "query_string": b"",
                "scheme": "http",
            }
            await guard({**scope, "headers": headers}, client.receive, client.send)
            assert client.sent[0]["status"] == 200

    await in_service(ask)
