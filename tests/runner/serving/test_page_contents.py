"""Hostile text, large runs, the keyboard, and small screens, on the page in a real Chromium."""

from __future__ import annotations

import itertools
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import httpx
import pytest
from playwright.sync_api import Browser, expect

from plait import DAG, ParallelRunner, Task
from plait.persistence import SQLiteStore
from plait.runner.serving.http_routes import page_files
from tests.runner.serving.test_page import choose_view, open_run, opened, run, started
from tests.support.agents.logs import make_log_home, running
from tests.support.agents.logs import plan as agent_plan
from tests.support.processes.browser import LIMIT, address_of, expect_value, needs_chromium, ui, watched
from tests.support.processes.served import served

pytestmark = pytest.mark.slow

HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    "\x1b]0;owned\x07\x1b[31mred\x1b[0m \u202eevil\u202c javascript:alert(1) https://example.org/?q=<b>"
)
MOST_BYTES = 80_000
"""Bytes of all scripts and style sheets, before compression."""


def store_run(folder: Path, *dags: DAG) -> None:
    """Runs of this process, with an answer in capitals and failures for prompts that say so."""

    async def work(prompt: str) -> str:
        if prompt.startswith("fail"):
            raise ValueError(prompt)
        return prompt.upper()

    async def main() -> None:
        async with SQLiteStore(folder / ".plait" / "plait.db") as store:
            runner = ParallelRunner(work, store=store, concurrency=32)
            for dag in dags:
                await runner.run(dag)

    with ThreadPoolExecutor(1) as pool:  # the driver of the browser has an event loop in this thread
        pool.submit(anyio.run, main).result()


def many(count: int) -> DAG:
    parts = [
        Task(f"part.{n}", prompt="fail" if n % 1000 == 7 else f"one {n}", item=f"row {n}", retry=1)  # type: ignore[arg-type]
        for n in range(1, count)
    ]
    return DAG([Task("load", prompt="all"), *parts], name=f"many {count}")


HOSTILE_WORK = f"""
from plait.backends import ask
HOSTILE = {json.dumps(HOSTILE)}
async def work(prompt):
    if prompt.startswith("fail"):
        raise ValueError(HOSTILE)
    if prompt.startswith("ask"):
        schema = {{"type": "string", "enum": [HOSTILE, "b"], "description": HOSTILE}}
        return await ask(HOSTILE, schema=schema, default="b")
    if prompt.startswith("data"):
        return {{HOSTILE: [HOSTILE], "rows": HOSTILE}}
    return HOSTILE
"""


@needs_chromium
def test_hostile_text_stays_text(tmp_path: Path, browser: Browser) -> None:
    spelled = json.dumps(HOSTILE)
    tasks = (
        f"- {{id: said, prompt: {spelled}}}\n- {{id: data, prompt: data, output_schema: {{type: object}}}}\n"
        f"- {{id: bad, prompt: fail, retry: 1}}\n- {{id: asks, prompt: ask}}\n"
        f"- {{id: parts, for_each: items, prompt: 'x {{{{ item }}}}'}}\n"
    )
    run(tmp_path, tasks, more=f"inputs: {{items: [{spelled}, b]}}\n", work=HOSTILE_WORK)
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        for task, part in (
            ("said", "talk"),
            ("data", "result"),
            ("bad", "error"),
            ("asks", "ask"),
            ("parts.1", "talk"),
        ):
            page.locator(".line", has=page.locator(f".name:text-is('{task}')")).click()
            expect(page.locator(".panel h2")).to_have_text(task)
            expect(page.locator(f".part-{part}")).to_contain_text("<script>document.title='owned'</script>")
            expect(page.locator(f".part-{part}")).to_contain_text("red \\u202eevil\\u202c")
        for view in ("Timeline", "Graph", "Table"):
            choose_view(page, view)
        page.locator(".c-state").first.wait_for()
        page.goto(f"{server.url}/#/questions")
        expect(page.locator(".card")).to_contain_text("<img src=x")
        expect(page.locator("main img, main script, main iframe")).to_have_count(0)
        links = page.locator("main a[target]")
        told = "all => [...new Set(all.map(one => `${one.href} ${one.rel}`))]"
        expect_value(page, lambda: links.evaluate_all(told), ["https://example.org/?q= noopener noreferrer"])
        assert "owned" not in page.title()


LONG = " ".join(f"word{n}" for n in range(150))
FITS = "one => one.scrollHeight <= one.clientHeight + 1 && one.scrollWidth <= one.clientWidth"
"""Whether nothing of an element is clipped."""


@needs_chromium
def test_an_address_names_what_is_not_there(tmp_path: Path, browser: Browser) -> None:
    names = ["<img src=x onerror=alert(1)>", "%E0%A4%A", "__proto__", "..%2F..", "%22%3E%3Cscript%3E"]
    wanted = {"run/{0}": "No such run", "run/{0}/task/{0}": "No such run", "{0}?search={0}": "No run fits."}
    with ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        for name, (address, told) in itertools.product(names, wanted.items()):
            seen.page.goto(f"{server.url}/#/{address.format(name)}")
            expect(seen.page.locator("main")).to_contain_text(told)
            expect(seen.page.locator("main img, main script")).to_have_count(0)


@needs_chromium
def test_an_answer_that_comes_while_the_reader_leaves_does_not_take_him_back(tmp_path: Path, browser: Browser) -> None:
    leaves = """
        const ask = window.fetch;
        window.fetch = async (...given) => {
            const answer = await ask(...given);
            if (answer.status !== 404) return answer;
            const value = await answer.json();
            answer.json = async () => ((location.hash = "#/?search=none"), value);
            window.fetch = ask;
            return answer;
        };
    """
    with ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        seen.page.evaluate(leaves)
        seen.page.goto(f"{server.url}/#/run/none/task/none")
        expect(seen.page.locator("main")).to_contain_text("No run fits.")
        assert seen.page.evaluate("location.hash") == "#/?search=none"


@needs_chromium
def test_the_failed_parts_of_a_folded_group_are_counted_and_chosen(tmp_path: Path, browser: Browser) -> None:
    parts = [Task(f"part.{n}", prompt=f"fail {LONG}" if n < 25 else "x", item=n, retry=1) for n in range(1, 41)]
    store_run(tmp_path, DAG(parts, name="parts"))
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        opened(seen, server.page)
        why = page.locator(".why")
        expect(why).to_contain_text("24 failed (part.1")
        expect_value(page, lambda: why.evaluate(FITS), True)
        page.locator(".c-run a").click()
        expect(page.locator(".results .facts")).to_contain_text("40 parts: 24 failed, 16 completed")
        page.get_by_role("button", name="failed 24").click()
        expect(page.locator("plait-tasks")).to_have_attribute("aria-rowcount", "25")
        expect(page.locator(".line .c-note").first).to_have_attribute(
            "title", re.compile("^unexpected: ValueError: fail")
        )
        choose_view(page, "Timeline")
        choose_view(page, "Table")
        page.locator("[id='line-part.7']").click()
        error = page.locator(".part-error")
        expect(error).to_contain_text("word149")
        fits = "one => one.scrollHeight <= one.clientHeight && one.scrollWidth <= one.clientWidth"
        expect_value(page, lambda: error.locator(".callout").evaluate(fits), True)


TIMES = """
async (units) => {
  const { clean, linked } = await import("/page/dom.js");
  const took = (unit) => {
    const text = unit.repeat(100_000 / unit.length);
    const before = performance.now();
    clean(text);
    linked(text);
    return performance.now() - before;
  };
  return units.filter((unit) => [1, 2, 3].every(() => took(unit) > 3000)); // once, it may have been another process
}
"""


@needs_chromium
def test_the_time_to_clean_a_text_grows_with_the_text_alone(tmp_path: Path, browser: Browser) -> None:
    """A quadratic pattern takes 21 s for 100,000 characters, a linear one milliseconds."""
    characters = [chr(code) for code in [*range(0x21), *range(0x7F, 0xA0), 0x202E, 0x2028, 0xFEFF]]
    pieces = [
        "\x1b[",
        "\x1b]",
        "\x1b[0;",
        "\x1b]\x9d",
        "\x1bP\x1b",
        "\x9da",
        "http://",
        "https://a.",
        "a)",
        "\x1b ",
        "\r\n",
    ]
    with ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        assert seen.page.evaluate(TIMES, [*characters, *pieces]) == []
        assert (
            seen.page.evaluate(
                "async () => (await import('/page/dom.js')).clean('a\\u009d0;b\\u0007c\\u001b]x\\u009cd')"
            )
            == "acd"
        )


@needs_chromium
def test_ten_thousand_tasks_scroll_and_are_filtered(tmp_path: Path, browser: Browser) -> None:
    store_run(tmp_path, many(10_000))
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        expect(page.locator(".results .facts")).to_contain_text("9,999 parts: 9,989 completed, 10 failed")
        expect(page.locator("plait-tasks")).to_have_attribute("aria-rowcount", "10000")
        page.get_by_label("Table", exact=True).select_option("all tasks")
        expect(page.locator("plait-tasks")).to_have_attribute("aria-rowcount", "10001")
        expect_value(page, lambda: page.locator(".line").count() < 100, True)
        page.locator("plait-tasks").press("End")
        expect(page.locator(".line", has_text="part.9999")).to_be_visible()
        page.get_by_label("Find tasks by id").fill("part.77")
        expect(page.locator("plait-tasks")).to_have_attribute("aria-rowcount", "112")
        choose_view(page, "Timeline")
        choose_view(page, "Graph")
        expect(page.locator(".box")).to_have_count(2)
        expect(page.locator(".box.group")).to_contain_text("part")
        page.locator(".box.group").click()
        expect(page.get_by_role("tab", name="Table")).to_have_attribute("aria-selected", "true")
        expect(page.get_by_label("Table", exact=True)).to_have_value("part")


def test_the_first_screen_of_rows_is_sent_before_the_rest(tmp_path: Path) -> None:
    store_run(tmp_path, many(1000))
    with ui(tmp_path) as server, server.client() as client:
        run_id = client.get("/api/runs").json()["runs"][0]["run_id"]
        parts: list[list[int]] = []
        with client.stream("GET", f"/page/runs/{run_id}/live") as stream:
            for line in stream.iter_lines():
                if line.startswith("data: ") and "rows" in (change := json.loads(line[6:])):
                    parts.append([row["position"] for row in change["rows"]])
                    if sum(map(len, parts)) == 1000:
                        break
    assert parts[0] == list(range(100))
    assert [position for part in parts for position in part] == list(range(1000))


def test_the_stream_of_an_unknown_run_or_task_is_refused(tmp_path: Path) -> None:
    store_run(tmp_path, many(2))
    with ui(tmp_path) as server, server.client() as client:
        run_id = client.get("/api/runs").json()["runs"][0]["run_id"]
        for place in ("nothing/live", f"{run_id}/live?task=nothing"):
            answer = client.get(f"/page/runs/{place}")
            assert answer.status_code == 404
            assert "nothing" in answer.json()["error"]["message"]


@needs_chromium
def test_a_failed_attempt_is_seen_on_the_timeline_however_short(tmp_path: Path, browser: Browser) -> None:
    store_run(tmp_path, many(4_000))
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        choose_view(page, "Timeline")
        failed = page.locator(".line.group .attempt.failed")
        # One bar of 4,000 takes a quarter of a pixel.
        seen_well = "bars => bars.length > 0 && bars.every(bar => bar.getBoundingClientRect().width >= 3)"
        expect_value(page, lambda: failed.evaluate_all(seen_well), True)
        page.locator("#line-load .track").click()
        expect(page.locator(".panel h2")).to_have_text("load")
        page.locator(".line.group .c-id").click()
        expect(page.locator(".line.group")).to_have_attribute("aria-expanded", "true")


@needs_chromium
def test_an_interrupted_task_is_settled(tmp_path: Path, browser: Browser) -> None:
    tasks = "- {id: once, prompt: held, at_most_once: true}\n"
    with started(tmp_path, tasks) as process, ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        expect(page.locator(".line")).to_contain_text("running")
        process.kill()
        expect(page.locator(".head .status")).to_have_text("interrupted")
        page.get_by_role("button", name="Resume…").click()
        expect(page.locator("dialog")).to_contain_text("ask")
        page.get_by_role("button", name="Resume", exact=True).click()
        expect(page.locator(".head .status")).to_have_text("waiting input")
        page.locator(".line").click()
        page.get_by_label("Result or reason").fill("it was sent")
        page.get_by_role("button", name="It did: complete with this result").click()
        page.get_by_role("button", name="Resume the run").click()
        expect(page.locator(".head .status")).to_have_text("completed")
        expect(page.locator(".part-result")).to_contain_text("it was sent")


@needs_chromium
def test_many_runs_are_paged_and_searched(tmp_path: Path, browser: Browser) -> None:
    dags = [DAG([Task("a", prompt="fail" if n % 50 == 0 else "x", retry=1)], name=f"run {n}") for n in range(150)]  # type: ignore[arg-type]
    store_run(tmp_path, *dags)
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        opened(seen, server.page)
        expect(page.locator(".c-run a")).to_have_count(50)
        expect(page.locator(".c-run a").first).to_have_text("run 149")
        page.get_by_role("button", name="Older").click()
        expect(page.locator(".c-run a").first).to_have_text("run 99")
        page.get_by_label("Search runs by name or id").fill("RUN 10")
        expect(page.locator(".c-run a")).to_have_count(11)
        page.get_by_label("Search runs by name or id").fill("")
        expect(page.locator(".c-run a")).to_have_count(50)
        page.get_by_role("button", name="failed").click()
        expect(page.locator(".c-run a")).to_have_text(["run 100", "run 50", "run 0"])
        with server.client() as client:
            chosen = {"status": ["failed", "queued"], "search": "run", "limit": 1, "offset": 1}
            (found,) = client.get("/api/runs", params=chosen).json()["runs"]
            assert found["name"] == "run 50"
            assert client.get("/api/runs", params={"name": "run 1"}).json()["runs"][0]["status"] == "completed"
            assert client.get("/api/runs", params={"status": "odd"}).status_code == 422


@needs_chromium
def test_the_keyboard_reaches_everything(tmp_path: Path, browser: Browser) -> None:
    store_run(tmp_path, many(30))
    with ui(tmp_path) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        choose_view(page, "Timeline")
        tasks = page.locator("plait-tasks")
        tasks.focus()
        tasks.press("ArrowDown")
        expect(page.locator(".line.cursor")).to_have_class("line level-0 cursor group")
        tasks.press("ArrowRight")
        expect(tasks).to_have_attribute("aria-rowcount", "32")
        tasks.press("ArrowDown")
        tasks.press("Enter")
        expect(page.locator(".panel h2")).to_have_text("part.1")
        expect(tasks).to_have_attribute("aria-activedescendant", "line-part.1")
        page.locator(".panel").get_by_role("button", name="Close the task").focus()
        page.keyboard.press("Escape")
        expect(page.locator(".panel")).to_have_count(0)
        page.get_by_role("tab", name="Timeline").focus()
        page.keyboard.press("ArrowLeft")
        expect(page.get_by_role("tab", name="Table")).to_be_focused()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name="Timeline")).to_be_focused()
        tasks.press("Home")
        tasks.press("Enter")
        expect(page.locator(".panel h2")).to_have_text("load")
        page.get_by_role("tab", name="Timeline").focus()
        page.keyboard.press("ArrowRight")
        page.locator(".box").nth(3).focus()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator(".panel h2")).to_have_text("part.4")


@needs_chromium
def test_a_narrow_screen_is_never_wider_than_it_is(tmp_path: Path, browser: Browser) -> None:
    store_run(tmp_path, many(30))
    with ui(tmp_path) as server, watched(browser, viewport={"width": 400, "height": 800}) as seen:
        page = seen.page

        def assert_fits() -> None:
            widths = "Math.max(document.documentElement.scrollWidth, document.querySelector('main').scrollWidth)"
            expect_value(page, lambda: page.evaluate(widths) <= 400, True)

        opened(seen, server.page)
        expect(page.locator(".c-run a")).to_have_count(1)
        assert_fits()
        page.locator(".c-run a").click()
        for view in ("Timeline", "Graph", "Table"):
            choose_view(page, view)
            assert_fits()
        page.locator(".line:not(.group)").last.click()
        expect(page.locator(".panel h2")).to_be_visible()
        assert_fits()
        page.goto(f"{server.url}/#/questions")
        expect(page.locator(".empty")).to_be_visible()
        assert_fits()


@needs_chromium
def test_an_agent_is_watched_at_work_also_after_the_death_of_its_runner(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_log_home(tmp_path, monkeypatch)
    folder = agent_plan(home, '  - {id: a, prompt: "A. [[tool]] [[until go]] [[say done now]]"}\n')
    with running(folder) as process, ui(folder) as server, watched(browser) as seen:
        page = seen.page
        open_run(seen, server.page)
        page.locator(".line").click()
        expect(page.locator(".part-sent")).to_contain_text("A. [[tool]]")  # as rendered, before any turn has ended
        expect(page.locator("[aria-busy] .step.tool")).to_have_text("tool Bash: make test")
        process.kill()
        process.wait()
        expect(page.locator(".part-why")).to_contain_text("owner dead")
        (folder / "go").touch()
        page.get_by_role("button", name="Resume…").click()
        page.get_by_role("button", name="Resume", exact=True).click()
        expect(page.locator(".head .status")).to_have_text("completed")
        expect(page.locator(".message.assistant")).to_contain_text("done now")
        page.get_by_text("steps of the agent").click()
        expect(page.locator("details .step.tool").first).to_have_text("tool Bash: make test")


@needs_chromium
def test_plait_serve_serves_the_page(tmp_path: Path, browser: Browser) -> None:
    with served(tmp_path) as server, watched(browser) as seen:
        with server.client() as client:
            plan = {"name": "posted", "tasks": [{"id": "a", "prompt": "hello"}]}
            assert client.post("/api/runs", json={"plan": plan}).status_code == 201
        open_run(seen, address_of(server.url, server.token))
        expect(seen.page.locator(".run h1")).to_have_text("posted")
        expect(seen.page.locator(".head .status")).to_have_text("completed", timeout=LIMIT * 1000)


def test_the_page_is_small(tmp_path: Path) -> None:
    names = [path for path, (_, kind) in page_files().items() if "javascript" in kind or "css" in kind]
    with ui(tmp_path) as server, httpx.Client(base_url=server.url, trust_env=False, verify=False) as client:
        for name in names:
            answer = client.get(name)
            assert answer.headers["content-encoding"] == "gzip"
            assert answer.content == page_files()[name][0]
    assert sum(len(page_files()[name][0]) for name in names) < MOST_BYTES
    assert len(names) == 9
