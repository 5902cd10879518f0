"""axe-core finds no violation on any page, view or dialog, in both colour schemes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.runner.cli.test_continue_command import TALKER
from tests.runner.serving.test_page import choose_view, open_run, opened, run
from tests.support.processes.browser import expect_value, needs_chromium, ui, watched

pytest.importorskip("axe_playwright_python", reason="needs axe-core: pip install axe-playwright-python")
pytestmark = [pytest.mark.slow, needs_chromium]
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text(encoding="utf-8")
RUN = """
async (rules) => (await axe.run(document, { preload: false, resultTypes: ["violations"], ...rules })).violations
  .flatMap((one) => one.nodes.map((node) => `${one.id}: ${node.html.slice(0, 200)} ${node.failureSummary}`))
"""
TASKS = """
- {id: said, prompt: hello}
- {id: parts, for_each: items, prompt: 'x {{ item }}'}
- {id: bad, prompt: fail, retry: 1}
- {id: after, prompt: '{{ bad }}', depends_on: bad}
- {id: asks, prompt: ask}
"""


def expect_accessible(page: Page) -> None:
    """No rule is violated in the light scheme, and no rule of colours in the dark scheme."""
    expect_value(page, lambda: violations(page), [])


def violations(page: Page) -> list[str]:
    if page.evaluate("!window.axe"):
        page.evaluate(AXE)
    found: list[str] = page.evaluate(RUN, {})
    page.emulate_media(color_scheme="dark")
    found += page.evaluate(RUN, {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}})
    page.emulate_media(color_scheme="light")
    return found


def test_no_page_and_no_dialog_has_a_violation(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, TASKS, more="inputs: {items: [a, b]}\n")
    with ui(tmp_path) as server, watched(browser, color_scheme="light") as seen:
        page = seen.page
        opened(seen, server.page)
        expect(page.locator(".c-run a")).to_have_count(1)
        expect_accessible(page)
        page.goto(f"{server.url}/#/questions")
        expect(page.locator(".card")).to_have_count(1)
        expect_accessible(page)
        page.goto(f"{server.url}/#/")
        page.locator(".c-run a").click()
        for view, part in (("Timeline", ".attempt"), ("Graph", ".box"), ("Table", ".line")):
            choose_view(page, view)
            expect(page.locator(part).first).to_be_visible()
            expect_accessible(page)
        for task in ("said", "bad", "after", "asks"):
            page.locator(".line", has=page.locator(f".name:text-is('{task}')")).click()
            expect(page.locator(".panel h2")).to_have_text(task)
            expect_accessible(page)
        page.locator(".line").first.click()
        for name, leave in (
            ("Resume…", "Not now"),
            ("Retry failed…", "Not now"),
            ("Cancel…", "Keep it"),
        ):
            page.get_by_role("button", name=name).click()
            expect(page.get_by_role("button", name=leave)).to_be_visible()
            expect_accessible(page)
            page.get_by_role("button", name=leave).click()


def test_the_dialog_of_a_conversation_has_no_violation(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: a, prompt: hello}\n", work=TALKER.replace("talker = ", "work = "))
    with ui(tmp_path) as server, watched(browser, color_scheme="light") as seen:
        open_run(seen, server.page)
        seen.page.locator(".line").click()
        seen.page.get_by_role("button", name="Continue the conversation").click()
        expect(seen.page.get_by_role("button", name="Not now")).to_be_visible()
        expect_accessible(seen.page)


def test_the_pages_without_a_run_have_no_violation(tmp_path: Path, browser: Browser) -> None:
    with ui(tmp_path) as server, watched(browser, color_scheme="light") as seen:
        page = seen.page
        opened(seen, server.url)
        expect(page.locator("main h1")).to_have_text("Not signed in")
        expect_accessible(page)
        opened(seen, server.page)
        expect(page.locator(".empty")).to_be_visible()
        expect_accessible(page)
        page.goto(f"{server.url}/#/questions")
        expect(page.locator(".empty")).to_be_visible()
        expect_accessible(page)
        page.route("**/*", lambda route: "/live" in route.request.url or route.continue_())
        page.goto(f"{server.url}/#/run/slow")  # of which nothing has come so far
        expect(page.get_by_role("tab", name="Timeline")).to_be_visible()
        expect_accessible(page)
        page.unroute_all()
        page.goto(f"{server.url}/#/run/none")
        expect(page.locator("main h1")).to_have_text("No such run")
        expect_accessible(page)
