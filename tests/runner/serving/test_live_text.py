"""Texts of answers on the stream of a run while a model writes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.runner.serving.test_lifecycle import created, events
from tests.support.agents.logs import wait_for
from tests.support.processes.served import served

WORK = """
from contextlib import asynccontextmanager
from pathlib import Path
import anyio
from plait.backends import Output, Reply
from plait.errors import BackendError, ErrorKind

class Talk:
    session_id = None
    tries = 0
    def __init__(self, request):
        self.request = request
    async def send(self, prompt):
        Talk.tries += 1
        self.request.on_output(Output("text", f"try {Talk.tries}, "))
        Path(f"began-{Talk.tries}").touch()
        while not Path(f"go-{Talk.tries}").exists():
            await anyio.sleep(0.01)
        self.request.on_output(Output("text", "more"))
        if Talk.tries == 1:
            raise BackendError(ErrorKind.TRANSIENT, "cut")
        while not Path("end").exists():
            await anyio.sleep(0.01)
        return Reply("whole")

class Backend:
    def new_session_id(self):
        return None
    @asynccontextmanager
    async def open(self, request):
        yield Talk(request)

work = Backend()
"""
PLAN = {"tasks": [{"id": "a", "prompt": "x", "retry": {"attempts": 2, "base_delay": 0}}]}


def blocks(response: httpx.Response) -> Iterator[dict[str, Any]]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        name, _, value = line.partition(": ")
        if line:
            fields[name] = value
        else:
            if "data" in fields:
                yield {**fields, "data": json.loads(fields["data"])}
            fields = {}


def test_a_text_is_streamed_and_a_retry_begins_a_new_one(tmp_path: Path) -> None:
    with served(tmp_path, work=WORK) as server, server.client() as client:
        run_id = created(client, PLAN)
        wait_for((tmp_path / "began-1").exists)
        with client.stream("GET", f"/api/runs/{run_id}/events?text=true") as response:
            stream = blocks(response)
            texts: list[dict[str, Any]] = []
            kinds: list[str] = []
            for one in stream:
                if one["event"] == "task_text":
                    assert "id" not in one
                    texts.append(one["data"])
                    if one["data"]["text"].startswith("try"):
                        (tmp_path / f"go-{one['data']['attempt']}").touch()
                    if one["data"]["text"].endswith("more") and one["data"]["attempt"] == 2:
                        (tmp_path / "end").touch()
                else:
                    kinds.append(one["event"])
        of_second = [one for one in texts if one["attempt"] == 2]
        assert texts[0] == {"task_id": "a", "attempt": 1, "offset": 0, "text": "try 1, "}
        assert "".join(one["text"] for one in of_second) == "try 2, more"
        assert [one["offset"] for one in of_second] == [0, 7][: len(of_second)]
        assert kinds == [one.event for one in events(client, run_id)]
