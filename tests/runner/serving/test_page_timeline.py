"""The timeline: attempts are bars and waits are lines, in the rows of the stream, in words and on the page."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect

from plait.clock_and_ids import parse_time
from tests.runner.cli.test_cancel_command import until
from tests.runner.serving.test_page import choose_view, open_run
from tests.support.processes.browser import LIMIT, expect_value, needs_chromium, ui, watched
from tests.support.processes.command import PLAIT, environment
from tests.support.processes.warm import Warm

pytestmark = pytest.mark.slow

FUNCTIONS = """
from pathlib import Path
import anyio
from plait.backends import ask
from plait.errors import BackendError, ErrorKind

seen = set()

def refused_once(prompt, error):
    if prompt not in seen:
        seen.add(prompt)
        raise error
    return prompt

async def hold(prompt):
    while not Path("go").exists():
        await anyio.sleep(0.01)
    return prompt

async def quick(prompt):
    while not Path("paused").exists():
        await anyio.sleep(0.01)
    return prompt

async def refuse(prompt):
    error = BackendError(ErrorKind.RATE_LIMITED, "daily limit reached", retry_after=DELAY)
    error.status = 429
    Path("paused").touch()
    return refused_once("call", error)

async def fail(prompt):
    return refused_once(prompt, BackendError(ErrorKind.TRANSIENT, "try later", retry_after=DELAY))

async def asking(prompt):
    return await ask("how many?")
"""
PLAN = """
name: waits
concurrency: 8
backends:
  hold: {kind: function, call: "functions.py:hold", concurrency: 1}
  api: {kind: function, call: "functions.py:refuse", concurrency: 1}
  weak: {kind: function, call: "functions.py:fail"}
  quick: {kind: function, call: "functions.py:quick"}
  asking: {kind: function, call: "functions.py:asking"}
defaults: {backend: hold}
tasks:
  - {id: first, prompt: first}
  - {id: second, prompt: second}
  - {id: after, prompt: "{{ first }} {{ second }}", depends_on: [first, second]}
  - {id: call, prompt: call, backend: api}
  - {id: later, prompt: later, backend: api, depends_on: quick}
  - {id: weak, prompt: weak, backend: weak}
  - {id: asks, prompt: asks, backend: asking}
  - {id: quick, prompt: quick, backend: quick}
"""
NAMES = ["first", "second", "after", "call", "later", "weak", "asks", "quick"]
TRIED_TWICE = {"call": "retried", "weak": "retried", "asks": "asked"}
"""The status of the first attempt of each task with two."""
GUTTER, EDGE = 180, 16
"""The pixels of the names, and beside the last moment."""
WIDTH = 1280


@contextmanager
def waiting(folder: Path, delay: float) -> Generator[Warm]:
    """A run with each kind of wait; `delay` is the time that the refused tasks have to wait for."""
    (folder / "functions.py").write_text(f"DELAY = {delay}\n{FUNCTIONS}")
    (folder / "plan.yaml").write_text(PLAN)
    words = [*PLAIT, "run", "plan.yaml", "-q"]
    with Warm(words, cwd=folder, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def rows_of(client: httpx.Client) -> dict[str, Any]:
    """The rows of the newest run, as the stream first sends them all."""
    (head,) = client.get("/api/runs").json()["runs"]
    rows: dict[str, Any] = {}
    with client.stream("GET", f"/page/runs/{head['run_id']}/live") as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        for line in lines:
            rows |= {row["id"]: row for row in json.loads(line[6:]).get("rows", ())}
            # The reasons of pending tasks, and the waits with them, are sent behind the rows of the first screen.
            if len(rows) == head["total"] and (rows["after"]["status"] != "pending" or "wait" in rows["after"]):
                return rows
    raise AssertionError(rows)


def answer(client: httpx.Client) -> None:
    """Answer the question of the run, once the throttled task is done."""
    until(lambda: client.get("/api/questions").json()["questions"])
    (asked,) = client.get("/api/questions").json()["questions"]
    until(lambda: rows_of(client)["later"]["status"] == "completed")
    client.post(f"/api/runs/{asked['run_id']}/tasks/asks/answer", json={"value": "5"}).raise_for_status()


def test_the_rows_have_the_attempts_and_the_present_waits(tmp_path: Path) -> None:
    with waiting(tmp_path, 600) as process, ui(tmp_path) as server, server.client() as client:
        until(lambda: client.get("/api/runs").json()["runs"])
        until(lambda: "retry at" in rows_of(client)["weak"].get("wait", "") and "bars" in rows_of(client)["asks"])
        rows = rows_of(client)
        assert rows["after"]["wait"] == "waits for first, second"
        assert rows["second"]["wait"] == "no free slot of hold (1 of 1)"
        assert "limit 1 of 1" in rows["later"]["wait"]
        assert [bar[0] for bar in rows["weak"]["bars"]] == ["retried"]
        assert "bars" not in rows["first"], "its own times tell its only attempt"
        process.kill()
        process.wait(LIMIT)
        until(lambda: "owner dead" in rows_of(client)["first"].get("wait", ""))


@needs_chromium
def test_attempts_are_bars_and_waits_are_lines(tmp_path: Path, browser: Browser) -> None:
    with waiting(tmp_path, 2) as process, ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        with server.client() as client:
            answer(client)
            (tmp_path / "go").touch()
            assert process.wait(LIMIT) == 0
            rows = rows_of(client)
            (head,) = client.get("/api/runs").json()["runs"]
        for name, status in TRIED_TWICE.items():
            assert [bar[0] for bar in rows[name]["bars"]] == [status, "completed"], name
        open_run(seen, server.page)
        choose_view(page, "Timeline")
        expect(page.locator(".head .status")).to_have_text("completed")
        for name in NAMES:
            track = page.locator(f"#line-{name} .track")
            told = rf"^{name}: completed\nattempt 1 {TRIED_TWICE.get(name, 'completed')} · "
            expect(track).to_have_attribute("title", re.compile(told))
        begins = 1000 * (parse_time(head["started_at"]) - parse_time(head["created_at"]))
        ends = max(row["start"] + row["took"] for row in rows.values())
        scale = (WIDTH - GUTTER - EDGE) / (ends - begins)

        def assert_drawn(name: str, kind: str, since: float, until: float) -> None:
            bar = page.locator(f"#line-{name} .{kind}")
            edges = "bar => [bar.getBoundingClientRect().left, bar.getBoundingClientRect().right]"
            wanted = [GUTTER + (at - begins) * scale for at in (since, until)]
            expect_value(page, lambda: bar.evaluate(edges), pytest.approx(wanted, abs=2))

        held = max(rows["first"], rows["second"], key=lambda row: row["took"])
        assert_drawn(held["id"], "attempt.completed", held["start"], held["start"] + held["took"])
        (_, first_starts, first_ends), (_, second_starts, second_ends) = rows["weak"]["bars"]
        assert_drawn("weak", "attempt.retried", first_starts, first_ends)
        assert_drawn("weak", "attempt.completed", second_starts, second_ends)
        assert_drawn("weak", "wait", begins, second_starts)
