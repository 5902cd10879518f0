"""The timeline tells the kinds of waits apart: in the rows of the stream, in words, and by patterns on the canvas."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.runner.cli.test_cancel_command import until
from tests.runner.web.test_page import open_run
from tests.support.processes.browser import LIMIT, launch, needs_chromium, ui, watched
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
KINDS = {
    "second": "slot",
    "after": "upstream",
    "call": "throttled",
    "later": "throttled",
    "weak": "retry",
    "asks": "question",
}
"""The long wait of each task that has one."""
WORDS = {
    "second": "no free slot",
    "call": "throttled until ",
    "later": "throttled until ",
    "weak": "retry at ",
    "asks": "asks a person",
}
ATTEMPTS = {"completed", "retried", "asked", "running", "failed"}
NAMES = ["first", "second", "after", "call", "later", "weak", "asks", "quick"]
DRAWN = """
([n, left, right]) => {
  const canvas = document.querySelector("canvas");
  const pixels = (y) => {
    const { data } = canvas.getContext("2d").getImageData(left, y, right - left, 1);
    return Array.from({ length: right - left }, (_, x) => data.slice(4 * x, 4 * x + 3));
  };
  const middle = 24 + 22 * n + 11;
  const empty = pixels(middle - 9);
  const differs = (one, other) => one.some((value, at) => Math.abs(value - other[at]) > 25);
  return [middle, middle - 3].map((y) => pixels(y).map((one, x) => differs(one, empty[x])));
}
"""
"""Whether something is drawn in a line, pixel by pixel: in its middle, and three pixels above. The axis crosses the
whole line, and does not count, nor does the faint edge of a dash that does not begin at a whole pixel.
"""
PERIODS = {"slot": None, "upstream": 5, "throttled": 5, "retry": 11, "question": 7}
"""The pixels of a dash and the gap behind it. A throttled backend has the dashes of a dependency, but high ones."""
GUTTER, EDGE = 180, 16
"""The pixels of the names, and beside the last moment."""
WIDTH = 1280


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    with sync_playwright() as driver:
        browser = launch(driver)
        yield browser
        browser.close()


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
    with client.stream("GET", f"/page/runs/{head['run_id']}/live?attempts=true") as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        for line in lines:
            rows |= {row["id"]: row for row in json.loads(line[6:]).get("rows", ())}
            # The reasons of pending tasks, and the waits with them, are sent behind the rows of the first screen.
            if len(rows) == head["total"] and (rows["after"]["status"] != "pending" or "wait" in rows["after"]):
                return rows
    raise AssertionError(rows)


def open_waits(rows: dict[str, Any]) -> dict[str, str]:
    return {
        name: bar[0] for name, row in rows.items() for bar in row["bars"] if bar[0] not in ATTEMPTS and bar[2] is None
    }


def told(page: Page) -> dict[str, list[str]]:
    """What the keyboard tells of each line: its bars in words."""
    lines: dict[str, list[str]] = {}
    tip, scroller = page.locator(".tip"), page.locator(".scroller")
    scroller.press("ArrowDown")
    for _ in range(1000):
        if "\n" in tip.inner_text():
            break
        scroller.press("ArrowDown")  # the bars of a stored run arrive after its lines
        scroller.press("ArrowUp")
    for line in range(8):
        if line:
            scroller.press("ArrowDown")
        name, *bars = tip.inner_text().split("\n")
        lines[name.partition(":")[0]] = bars
    page.get_by_label("Close the task").click()
    return lines


def period(line: Sequence[bool]) -> int | None:
    """The pixels from one dash to the next; None without dashes. The browser may draw a dash a pixel wider, and the gap
    behind it a pixel shorter.
    """
    runs = [(one, len(list(same))) for one, same in groupby(line)]
    found = Counter(dash + gap for (drawn, dash), (_, gap) in pairwise(runs[1:-1]) if drawn)
    (most, count), *_ = found.most_common(1) or [(None, 0)]
    assert count >= 0.8 * found.total(), found
    return most


def assert_pattern(page: Page, name: str, left: int, right: int) -> None:
    """The line of the task has the pattern of its wait between two places."""
    kind = KINDS[name]
    middle, above = page.evaluate(DRAWN, [NAMES.index(name), left, right])
    assert period(middle) == PERIODS[kind], name
    assert any(middle), name
    assert any(above) == (kind == "throttled"), name
    assert all(middle) == (kind == "slot"), name


def answer(client: httpx.Client) -> None:
    """Answer the question of the run, once the throttled task is done."""
    until(lambda: client.get("/api/questions").json()["questions"])
    (asked,) = client.get("/api/questions").json()["questions"]
    until(lambda: rows_of(client)["later"]["status"] == "completed")
    client.post(f"/api/runs/{asked['run_id']}/tasks/asks/answer", json={"value": "5"}).raise_for_status()


def test_the_rows_have_the_waits_of_a_run_under_way_and_of_a_dead_one(tmp_path: Path) -> None:
    with waiting(tmp_path, 600) as process, ui(tmp_path) as server, server.client() as client:
        until(lambda: client.get("/api/runs").json()["runs"])
        until(lambda: open_waits(rows_of(client)) == KINDS)
        rows = rows_of(client)
        assert rows["after"]["wait"] == "waits for first, second"
        assert rows["later"]["bars"][-1][3].startswith("throttled until ")
        assert rows["weak"]["bars"][-1][3].startswith("retry at ")
        process.kill()
        process.wait(LIMIT)
        assert open_waits(rows_of(client)) == KINDS


def test_the_rows_have_the_waits_of_an_ended_run(tmp_path: Path) -> None:
    with waiting(tmp_path, 0.5) as process, ui(tmp_path) as server, server.client() as client:
        answer(client)
        (tmp_path / "go").touch()
        assert process.wait(LIMIT) == 0
        rows = rows_of(client)
    kinds = {name: [bar[0] for bar in row["bars"] if bar[2] - bar[1] > 1] for name, row in rows.items()}
    assert kinds["after"][0] == "upstream"
    assert "slot" in kinds["second"]
    assert "throttled" in kinds["call"]
    assert "retry" not in kinds["call"]
    assert kinds["later"][:2] == ["upstream", "throttled"]
    assert "retry" in kinds["weak"]
    assert "throttled" not in kinds["weak"]
    assert "question" in kinds["asks"]
    assert "retry" not in kinds["asks"]
    for name, row in rows.items():
        ends = [start for _, start, *_ in row["bars"][1:]]
        assert [bar[2] for bar in row["bars"][:-1]] == ends, f"{name} is seen at every moment"
    words = {bar[0]: bar[3] for bar in rows["after"]["bars"] if len(bar) > 3}
    assert words["upstream"] == "waits for second, first"


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_wait_is_told_in_words_and_drawn_in_its_pattern(tmp_path: Path, browser: Browser, scheme: str) -> None:
    with waiting(tmp_path, 600), ui(tmp_path) as server, watched(browser, color_scheme=scheme) as seen:
        page = seen.page
        with server.client() as client:
            until(lambda: client.get("/api/runs").json()["runs"])
            until(lambda: open_waits(rows_of(client)) == KINDS)
        open_run(seen, server.page)
        page.get_by_role("tab", name="Timeline").click()
        legend = page.locator(".legend span")
        expect(legend).to_have_text(["waits for tasks", "no free slot", "throttled", "retry", "asks a person"])
        lines = told(page)
        assert lines["after"][-1].startswith("waits for first, second · ")
        for name, words in WORDS.items():
            assert any(one.startswith(words) for one in lines[name]), (name, lines[name])
        for name in KINDS:
            assert_pattern(page, name, WIDTH - EDGE - 150, WIDTH - EDGE - 20)
        page.locator(".scroller").hover(position={"x": WIDTH - EDGE - 50, "y": 24 + 22 * NAMES.index("weak") + 11})
        expect(page.locator(".tip")).to_contain_text("weak: pendingretry at ")


@needs_chromium
def test_a_stored_run_shows_the_same_waits(tmp_path: Path, browser: Browser) -> None:
    with waiting(tmp_path, 2) as process, ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        with server.client() as client:
            answer(client)
            (tmp_path / "go").touch()
            assert process.wait(LIMIT) == 0
            rows = rows_of(client)
        open_run(seen, server.page)
        page.get_by_role("tab", name="Timeline").click()
        expect(page.locator(".head .status")).to_have_text("completed")
        lines = told(page)
        assert any(one.startswith("waits for second, first · ") for one in lines["after"])
        for name, words in WORDS.items():
            assert any(one.startswith(words) for one in lines[name]), (name, lines[name])
        ends = max(row["bars"][-1][2] for row in rows.values())
        begins = rows["first"]["bars"][0][1]
        scale = (WIDTH - GUTTER - EDGE) / (ends - begins)
        for name, kind in KINDS.items():
            start, end = max(
                (bar[1:3] for bar in rows[name]["bars"] if bar[0] == kind), key=lambda one: one[1] - one[0]
            )
            left, right = (round(GUTTER + (at - begins) * scale) for at in (start, end))
            assert_pattern(page, name, left + 4, right - 4)
