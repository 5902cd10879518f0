"""The web page in a real Chromium, on real runs."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.runner.cli.test_continue_command import TALKER
from tests.runner.serving.test_server_token import Listener, running
from tests.support.processes.browser import LIMIT, Watched, needs_chromium, ui, watched
from tests.support.processes.command import PLAIT, environment, plait
from tests.support.processes.warm import Warm

pytestmark = [pytest.mark.slow, needs_chromium]

WORK = r"""
import time
from pathlib import Path
from plait.backends import ask

async def work(prompt):
    import anyio
    if prompt.startswith("fail") and not Path("go").exists():
        raise ValueError("not today")
    while prompt.startswith("held") and not Path("go").exists():
        await anyio.sleep(0.01)
    if prompt.startswith("ask anything"):
        return repr(await ask("What now?", schema={}))
    if prompt.startswith("ask"):
        schema = {
            "type": "object",
            "properties": {
                "who": {"type": "string", "enum": ["Ada", "Bob"]},
                "copies": {"type": "integer", "minimum": 1},
                "urgent": {"type": "boolean"},
            },
            "required": ["who", "copies"],
        }
        return await ask("Who is it for?", schema=schema, default={"who": "Ada", "copies": 2}, deadline=86400)
    return prompt.upper()
"""
BACKENDS = 'backends: {w: {kind: function, call: "work.py:work"}}\n'


def plan(folder: Path, tasks: str, name: str = "reviews", more: str = "", work: str = WORK) -> Path:
    (folder / "work.py").write_text(work)
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\n{BACKENDS}{more}tasks:\n{tasks}")
    return path


def run(folder: Path, tasks: str, name: str = "reviews", more: str = "", work: str = WORK) -> None:
    plait(folder, "run", str(plan(folder, tasks, name, more, work)), "-q")


@contextmanager
def started(folder: Path, tasks: str, work: str = WORK) -> Generator[Warm]:
    """A run of another process, which is under way."""
    words = [*PLAIT, "run", str(plan(folder, tasks, work=work)), "-q"]
    nowhere = subprocess.DEVNULL
    with Warm(words, cwd=folder, env=environment(), stdout=nowhere, stderr=nowhere) as process:
        try:
            yield process
        finally:
            process.kill()


def opened(seen: Watched, address: str) -> None:
    seen.page.goto(address)
    expect(seen.page.locator("main h1").first).to_be_attached()


def open_run(seen: Watched, address: str) -> None:
    opened(seen, address)
    seen.page.locator(".c-run a").first.click()
    expect(seen.page.locator(".run h1")).not_to_be_empty()
    expect(seen.page.locator(".line").first).to_be_attached()


def choose_view(page: Page, name: str) -> None:
    """Show the tasks of a run as "Table", "Timeline" or "Graph". Until the view is there, keys go to the last one."""
    page.get_by_role("tab", name=name).click()
    expect(page.get_by_role("tab", name=name)).to_have_attribute("aria-selected", "true")


def test_a_code_signs_in_once(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: a, prompt: hello}\n")
    with ui(tmp_path) as server:
        with watched(browser) as seen:
            opened(seen, server.page)
            expect(seen.page.locator(".c-run a")).to_have_text("reviews")
            expect(seen.page).to_have_url(f"{server.url}/#/")  # the code is gone from the address
            seen.page.reload()
            expect(seen.page.locator(".c-run a")).to_have_text("reviews")
            seen.page.goto("about:blank")
            other = seen.page.context.new_page()
            for address in (server.url, server.page):  # another tab, and the address once more
                other.goto(address)
                expect(other.locator(".c-run a")).to_have_text("reviews")
        with watched(browser) as seen:
            opened(seen, server.page)
            expect(seen.page.locator("main")).to_contain_text("the code was used already")
        with watched(browser) as seen:
            opened(seen, server.url)
            expect(seen.page.locator("main h1")).to_have_text("Not signed in")
            opened(seen, server.new_address())
            expect(seen.page.locator(".c-run a")).to_have_text("reviews")
        assert server.stop()[0] == 0


def test_another_port_receives_nothing_of_the_sign_in(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: a, prompt: hello}\n")
    with ui(tmp_path) as server, running(Listener("a notebook")) as other:
        page = browser.new_context().new_page()
        page.goto(server.page)
        expect(page.locator(".c-run a")).to_have_text("reviews")
        assert page.context.cookies() == []
        page.goto(f"{other.url}/page")
        assert page.evaluate("document.cookie + localStorage.length + sessionStorage.length") == "00"
        read = "async ([url, given]) => (await fetch(url, given).catch(() => ({ status: 'refused' }))).status"
        for given in ({"credentials": "include"}, {"headers": {"authorization": f"Bearer {server.token}"}}):
            assert page.evaluate(read, [f"{server.url}/api/runs", given]) == "refused"
        page.context.close()
        assert "GET /page " in other.seen
        assert not re.search(f"cookie|authorization|{server.url}|{server.token}", other.seen, re.IGNORECASE)


def test_a_sign_in_is_for_one_life_of_the_server(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: a, prompt: hello}\n- {id: bad, prompt: fail, retry: 1}\n")
    with watched(browser) as seen:
        with ui(tmp_path) as server:
            port = urlsplit(server.url).port or 0
            open_run(seen, server.page)
            expect(seen.page.locator(".line")).to_have_count(2)
            server.process.kill()
        expect(seen.page.locator(".link")).to_have_class("link lost")
        with ui(tmp_path, port=port) as again:
            expect(seen.page.locator("main")).to_contain_text("The server was restarted")
            opened(seen, again.page)
            expect(seen.page.locator(".c-run a")).to_have_text("reviews")


def test_a_run_of_another_process_is_shown_live(tmp_path: Path, browser: Browser) -> None:
    tasks = "- {id: a, prompt: held}\n- {id: b, prompt: 'got {{ a }}', depends_on: a}\n"
    with started(tmp_path, tasks) as process, ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        expect(seen.page.locator(".c-status .status")).to_have_text("running")
        expect(seen.page.locator(".c-owner").last).to_contain_text(f"process {process.pid} on ")
        seen.page.locator(".c-run a").click()
        line = seen.page.locator(".line").nth(1)
        expect(line).to_contain_text("waits for a")
        line.click()
        expect(seen.page.locator(".panel h2")).to_have_text("b")
        expect(seen.page.locator(".part-why")).to_have_text("Why it waits: waits for a")
        (tmp_path / "go").touch()
        expect(seen.page.locator(".facts .status").first).to_have_text("completed")
        expect(seen.page.locator(".part-result")).to_contain_text("GOT HELD")
        expect(seen.page.locator(".part-sent")).to_contain_text("got HELD")
        expect(seen.page.locator(".part-why")).to_be_empty()


def test_a_runner_that_is_killed_while_one_watches_is_seen_and_resumed(tmp_path: Path, browser: Browser) -> None:
    tasks = "- {id: a, prompt: one}\n- {id: b, prompt: 'held {{ a }}', depends_on: a}\n"
    with started(tmp_path, tasks) as process, ui(tmp_path) as server, watched(browser) as seen:
        open_run(seen, server.page)
        expect(seen.page.locator(".line").nth(1)).to_contain_text("running")
        process.kill()
        expect(seen.page.locator(".facts .status")).to_have_text("interrupted")
        expect(seen.page.locator(".facts .why")).to_contain_text(f"owner dead (process {process.pid} on ")
        expect(seen.page.locator(".line").nth(1)).to_contain_text("resume the run")
        (tmp_path / "go").touch()
        seen.page.get_by_role("button", name="Resume…").click()
        expect(seen.page.locator("dialog")).to_contain_text("1 task would run; 1 task kept")
        expect(seen.page.locator("dialog")).to_contain_text("1 task may be billed twice")
        seen.page.get_by_role("button", name="Resume", exact=True).click()
        expect(seen.page.locator("dialog")).to_have_count(0)
        expect(seen.page.locator(".facts .status")).to_have_text("completed")


def test_failed_tasks_are_retried_and_the_traceback_is_shown(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: bad, prompt: fail, retry: 1}\n- {id: after, prompt: '{{ bad }}', depends_on: bad}\n")
    with ui(tmp_path) as server, watched(browser) as seen:
        open_run(seen, server.page)
        expect(seen.page.locator(".line").nth(1)).to_contain_text("blocked by bad")
        seen.page.locator(".line").first.click()
        expect(seen.page.locator(".part-error")).to_contain_text("unexpected: ValueError: not today")
        expect(seen.page.locator(".part-error")).to_contain_text("then retry the failed tasks")
        expect(seen.page.locator(".part-error pre")).to_contain_text("Traceback (most recent call last)")
        (tmp_path / "go").touch()
        seen.page.get_by_role("button", name="Retry bad…").click()  # no process works on the run
        expect(seen.page.locator("dialog h2")).to_have_text("Retry failed tasks")
        expect(seen.page.locator("dialog")).to_contain_text("2 tasks would run")
        seen.page.get_by_role("button", name="Not now").click()
        seen.page.get_by_role("button", name="Retry failed…").click()
        expect(seen.page.locator("dialog")).to_contain_text("2 tasks would run")
        seen.page.get_by_role("button", name="Run them again").click()
        expect(seen.page.locator(".head .status")).to_have_text("completed")
        expect(seen.page.locator(".part-error")).to_be_empty()


def test_a_question_is_answered_in_its_form(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: who, prompt: ask}\n- {id: b, prompt: 'for {{ who }}', depends_on: who}\n")
    with ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        expect(seen.page.locator(".badge")).to_have_text("1")
        seen.page.get_by_role("link", name=re.compile("Questions")).click()
        card = seen.page.locator(".card")
        expect(card).to_contain_text("Who is it for?")
        expect(card).to_contain_text(re.compile(r"in 23 h \d+ min; default \{"))
        card.get_by_label("Bob").check()
        card.get_by_label("copies").fill("0")
        card.get_by_role("button", name="Answer").click()
        expect(card.get_by_role("alert")).to_contain_text("copies")
        card.get_by_label("copies").fill("3")
        card.get_by_label("yes").check()
        card.get_by_role("button", name="Answer").click()
        expect(seen.page.locator(".empty")).to_be_visible()
        seen.page.get_by_role("button", name="Resume the run").click()
        expect(seen.page.locator(".told")).to_contain_text("continues")
        with server.client() as client:
            (found,) = client.get("/api/runs").json()["runs"]
        seen.page.goto(f"{server.url}/#/run/{found['run_id']}/task/b")
        expect(seen.page.locator(".head .status")).to_have_text("completed")
        expect(seen.page.locator(".part-result")).to_contain_text('FOR {"WHO": "BOB", "COPIES": 3, "URGENT": TRUE}')


@pytest.mark.parametrize(
    ("typed", "result"), [("go on", "'go on'"), ('{"decisions": [true]}', "{'decisions': [True]}")]
)
def test_a_question_for_any_value_takes_text_and_json(
    tmp_path: Path, browser: Browser, typed: str, result: str
) -> None:
    run(tmp_path, "- {id: a, prompt: ask anything}\n")
    with ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        seen.page.get_by_role("link", name=re.compile("Questions")).click()
        seen.page.locator(".card").get_by_label("Answer").fill(typed)
        seen.page.locator(".card").get_by_role("button", name="Answer").click()
        expect(seen.page.locator(".empty")).to_be_visible()
    resumed = plait(tmp_path, "resume", "last")
    assert resumed.out == f"{result}\n", resumed.err


def test_an_answered_run_says_that_it_is_to_be_resumed(tmp_path: Path, browser: Browser) -> None:
    tasks = (
        "- {id: who, prompt: Who?, backend: human}\n- {id: b, prompt: 'for {{ who }}', depends_on: who, backend: w}\n"
    )
    path = plan(tmp_path, tasks)
    path.write_text(path.read_text().replace("{w:", "{human: {kind: person}, w:"))
    plait(tmp_path, "run", str(path), "-q")
    with ui(tmp_path) as server, watched(browser) as seen:
        opened(seen, server.page)
        expect(seen.page.locator(".why")).to_have_text("1 task asks a person")
        plait(tmp_path, "answer", "last", "who", "Ada")
        expect(seen.page.locator(".why")).to_have_text("answered, to be resumed")
        seen.page.locator(".c-run a").click()
        expect(seen.page.locator(".head .why")).to_have_text("answered, to be resumed")
        expect(seen.page.get_by_role("button", name="Resume…")).to_be_visible()
        seen.page.go_back()
        seen.page.locator(".c-status").get_by_role("button", name="Resume…").click()
        seen.page.get_by_role("button", name="Resume", exact=True).click()
        expect(seen.page.locator(".c-status .status")).to_have_text("completed")
        expect(seen.page.get_by_role("button", name="Resume…")).to_have_count(0)
        seen.page.locator(".c-run a").click()
        seen.page.locator(".line", has_text="who").first.click()
        expect(seen.page.locator(".part-result")).to_contain_text("Ada")
        expect(seen.page.locator(".part-sent")).to_contain_text("Who?")
        expect(seen.page.get_by_role("button", name="Continue the conversation")).to_have_count(0)


def test_a_run_of_another_process_is_cancelled(tmp_path: Path, browser: Browser) -> None:
    with started(tmp_path, "- {id: a, prompt: held}\n") as process, ui(tmp_path) as server, watched(browser) as seen:
        open_run(seen, server.page)
        seen.page.get_by_role("button", name="Cancel…").click()
        seen.page.get_by_role("button", name="Keep it").click()
        seen.page.get_by_role("button", name="Cancel…").click()
        seen.page.get_by_role("button", name="Cancel the run").click()
        expect(seen.page.locator(".facts .status")).to_have_text("cancelled")
        assert process.wait(LIMIT) != 0


def test_a_run_of_another_process_is_paused_and_tuned(tmp_path: Path, browser: Browser) -> None:
    with started(tmp_path, "- {id: a, prompt: held}\n") as process, ui(tmp_path) as server, watched(browser) as seen:
        open_run(seen, server.page)
        facts, dialog = seen.page.locator(".head .facts"), seen.page.get_by_role("dialog")

        def change(what: str, of: str = "", number: str = "") -> None:
            seen.page.get_by_role("button", name="Pause or concurrency…").click()
            dialog.get_by_label("Backend").fill(of)
            dialog.get_by_label("Tasks at once").fill(number)
            dialog.get_by_role("button", name=what).click()

        for of, named in (("", "the run"), ("w", "w")):
            change("Pause it", of)
            expect(dialog).to_have_count(0)
            expect(facts).to_contain_text(f"{named} is paused")
            change("Lift the pause", of)
            expect(facts).not_to_contain_text("is paused")
        change("Change the concurrency", number="3")
        expect(facts).to_contain_text("at most 3 tasks at once")
        change("Change the concurrency", "w", "2")
        expect(facts).to_contain_text("at most 2 tasks at once on w")
        change("Pause it", "x")
        expect(dialog.get_by_role("alert")).to_contain_text("has no backend 'x'")
        dialog.get_by_role("button", name="Not now").click()
        seen.page.get_by_role("button", name="Cancel…").click()
        seen.page.get_by_role("button", name="Cancel the run").click()
        expect(facts.locator(".status")).to_have_text("cancelled")
        assert process.wait(LIMIT) != 0


def test_a_failed_task_is_retried_while_its_run_goes_on(tmp_path: Path, browser: Browser) -> None:
    tasks = (
        "- {id: bad, prompt: fail, retry: 1}\n- {id: after, prompt: 'got {{ bad }}', depends_on: bad}\n"
        "- {id: long, prompt: held long}\n"
    )
    work = WORK.replace('"fail") and not Path("go")', '"fail") and not Path("mended")')
    with started(tmp_path, tasks, work) as process, ui(tmp_path) as server, watched(browser) as seen:
        open_run(seen, server.page)
        seen.page.locator(".line").nth(1).click()
        expect(seen.page.locator(".part-why")).to_contain_text("blocked by bad")
        expect(seen.page.get_by_role("button", name="Retry bad…")).to_be_visible()
        seen.page.locator(".line").first.click()
        expect(seen.page.locator(".part-error")).to_contain_text("not today")
        (tmp_path / "mended").touch()
        seen.page.get_by_role("button", name="Retry bad…").click()
        expect(seen.page.get_by_role("dialog")).to_contain_text("Run bad again?")
        seen.page.get_by_role("button", name="Run it again").click()
        expect(seen.page.locator(".part-result")).to_contain_text("FAIL")
        expect(seen.page.get_by_role("button", name="Retry bad…")).to_have_count(0)
        expect(seen.page.locator(".head .status")).to_have_text("running")
        expect(seen.page.locator(".line").nth(1)).to_contain_text("GOT FAIL")
        (tmp_path / "go").touch()
        expect(seen.page.locator(".head .status")).to_have_text("completed")
        assert process.wait(LIMIT) == 0


def test_a_conversation_is_continued(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: a, prompt: hello}\n", work=TALKER.replace("talker = ", "work = "))
    with ui(tmp_path) as server, watched(browser) as seen:
        open_run(seen, server.page)
        seen.page.locator(".line").click()
        seen.page.get_by_role("button", name="Continue the conversation").click()
        seen.page.get_by_label("Message").fill("and more")
        seen.page.get_by_role("button", name="Send").click()
        expect(seen.page.locator("dialog pre")).to_have_text("re: and more")
        seen.page.get_by_role("button", name="Close", exact=True).click()
        expect(seen.page.locator(".part-talk")).to_contain_text("After the run")
        expect(seen.page.locator(".part-talk .message.user").last).to_contain_text("and more")
        expect(seen.page.locator(".part-result")).to_contain_text("re: hello")


def test_two_browsers_see_one_answer(tmp_path: Path, browser: Browser) -> None:
    run(tmp_path, "- {id: who, prompt: ask}\n")
    with ui(tmp_path) as server, watched(browser) as one, watched(browser) as other:
        for seen, address in ((one, server.page), (other, server.new_address())):
            opened(seen, address)
            seen.page.get_by_role("link", name=re.compile("Questions")).click()
            expect(seen.page.locator(".card")).to_have_count(1)
        other.page.route("**/api/questions", lambda route: route.abort())  # the form stays open
        expect(other.page.locator(".link")).to_have_class("link lost")  # and no answer to an earlier request comes
        one.page.get_by_role("button", name="Answer").click()
        expect(one.page.locator(".empty")).to_be_visible()
        other.page.get_by_role("button", name="Answer").click()
        expect(other.page.get_by_role("alert")).not_to_be_empty()
        other.page.unroute_all()
        expect(other.page.locator(".empty")).to_be_visible()
