"""A limit of a week at a real server: the command says so, may be killed, and calls again when the time has come."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import anyio
import pytest

from plait import ParallelRunner, RunResult, RunStatus
from plait.backends import OpenAIBackend
from plait.clock_and_ids import Clock, parse_time
from plait.persistence import SQLiteStore
from tests.support.processes.command import Terminal, plait_here

DAY = 86_400.0
PLAN = """
backends: {{api: {{kind: openai, model: m, base_url: "{url}/v1", concurrency: 2}}}}
tasks:
  - {{id: a, prompt: one}}
  - {{id: b, prompt: two, depends_on: a}}
  - {{id: c, prompt: three, depends_on: a}}
  - {{id: d, prompt: four, depends_on: a}}
"""


class Limited(ThreadingHTTPServer):
    """A server that answers its first call, and refuses the calls of the next eight days."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.calls: list[str] = []
        self.is_open = False
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Limited

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.calls.append(body["messages"][-1]["content"])
        whole = {"choices": [{"index": 0, "message": {"content": "fine"}, "finish_reason": "stop"}]}
        if self.server.is_open or len(self.server.calls) == 1:
            self._send(200, whole)
        else:
            self._send(429, {"error": {"message": "weekly limit"}}, ("retry-after", str(int(8 * DAY))))

    def _send(self, status: int, body: object, *headers: tuple[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        for name, value in (("content-type", "application/json"), ("content-length", str(len(data))), *headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def limited() -> Generator[Limited]:
    with Limited() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class Later(Clock):
    """The clock of a machine on which so many seconds have passed."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wall(self) -> float:
        return time.time() + self._seconds


def resume(folder: Path, server: Limited, run_id: str) -> RunResult:
    async def later() -> RunResult:
        async with SQLiteStore(folder / ".plait" / "plait.db", mode="existing") as store:
            api = OpenAIBackend("m", base_url=f"{server.url}/v1")
            runner = ParallelRunner(backends={"api": api}, store=store, clock=Later(8 * DAY + 5))
            with anyio.fail_after(60):
                return await runner.resume(run_id)

    return anyio.run(later)


def test_a_limit_of_a_week_outlives_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with limited() as server:
        (tmp_path / "plan.yaml").write_text(PLAN.format(url=server.url))
        with Terminal(tmp_path, "run", "plan.yaml") as run:
            run.until("api paused 8d00h after 429, until ")
        # The terminal has killed the process.
        before = list(server.calls)
        assert len(before) <= 3, "one, and those under way when the backend closed"
        with Terminal(tmp_path, "resume", "last") as run:
            run.until("h after 429, until ")
            shown = plait_here(tmp_path, "show", "last").out
            value = plait_here(tmp_path, "show", "last", "--json").value
            log = plait_here(tmp_path, "log", "last").out
            run.press_ctrl_c()
            assert run.wait() != 0
        assert re.search(r"\nthrottled api paused (7d23h|8d00h) after 429, until ", shown)
        assert re.search(r" api paused 8d00h after 429, until ", log)
        (throttled,) = value["throttled"]
        assert (throttled["backend"], throttled["cause"], throttled["total"]) == ("api", "429", 2)
        assert value["counts"] == {"completed": 1, "pending": 3}
        tries = [parse_time(task["next_try_at"]) for task in value["tasks"] if task["next_try_at"]]
        assert pytest.approx(parse_time(throttled["until"]), abs=0.0011) in tries
        assert server.calls == before, "no call before the time"
        assert plait_here(tmp_path, "show", "last", "--json").value["throttled"] == [], "no process waits now"
        server.is_open = True
        result = resume(tmp_path, server, value["run_id"])
        assert (result.status, result.failed) == (RunStatus.COMPLETED, ())
        assert len(server.calls) == len(before) + 3
