"""The signed link of a notice: it opens one question as long as that is open, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from httpx import ASGITransport, AsyncClient
from playwright.sync_api import Browser, expect

from plait import ParallelRunner, RunStatus
from plait.clock_and_ids import Clock
from plait.persistence import MemoryStore
from plait.runner.serving.http_guard import SignIn
from plait.runner.serving.http_routes import ServedRuns
from plait.runner.serving.http_server import make_app
from tests.runner.engine.test_budget import Priced, tasks
from tests.runner.serving.test_page import plan
from tests.support.processes.browser import Ui, needs_chromium, ui, watched
from tests.support.processes.command import plait
from tests.support.receiver import Receiver, receiving

KEY = "a key of the tests, long enough"
OVER = "this link is over: the question was answered, or its run has ended"
WORK = """
from plait.backends import ask

async def work(prompt):
    first = await ask("<b>Where</b> to?", schema={"type": "string", "enum": ["Rome", "Oslo"]})
    return f"{first} {await ask('When?')}"
"""


@dataclass
class Asked:
    """A run that asks, and the server to which its notices link."""

    folder: Path
    server: Ui
    receiver: Receiver

    @property
    def links(self) -> list[str]:
        return [one["link"] for one in self.receiver.notices if "link" in one]

    def say(self, link: str, said: Any = None, **headers: str) -> httpx.Response:
        """Send what the page sends of a link: without a token."""
        body = {"link": urlsplit(link).fragment, "said": said}
        url = f"{self.server.url}/page/question"
        return httpx.post(url, json=body, headers=headers, trust_env=False, verify=False, timeout=60)

    def resume(self) -> str:
        return plait(self.folder, "resume", "last", "-q", PLAIT_LINK_KEY=KEY).out


@pytest.fixture
def asked(tmp_path: Path) -> Generator[Asked]:
    with ui(tmp_path, link_key=KEY) as server, receiving() as receiver:
        notify = f"notify: [{{url: {receiver.url}, link: '{server.url}/'}}]\n"
        path = plan(tmp_path, "- {id: 'trip.to-x', prompt: go}\n", more=notify, work=WORK)
        plait(tmp_path, "run", str(path), "-q", PLAIT_LINK_KEY=KEY)
        yield Asked(tmp_path, server, receiver)


def refused(answer: httpx.Response, code: int, why: str) -> None:
    assert answer.status_code == code, answer.text
    assert why in answer.json()["error"]["message"]


def test_a_link_shows_its_question_and_takes_one_answer(asked: Asked) -> None:
    (link,) = asked.links
    assert asked.receiver.notices[0]["text"].endswith(f"\n{link}")
    page = httpx.get(link, trust_env=False, verify=False)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    question = asked.say(link).json()
    assert (question["task_id"], question["question"]) == ("trip.to-x", "<b>Where</b> to?")
    assert question["asks"]["schema"]["enum"] == ["Rome", "Oslo"]
    refused(asked.say(link, {"value": "Paris"}), 422, "Paris")
    refused(asked.say(link, {"how": "fail", "text": "no"}), 422, "takes an answer, and no decision")
    refused(asked.say(link, host="example.org"), 403, "the host here is")
    refused(asked.say(link, {"value": "x" * 5_000}), 413, "may have 4,096 bytes")
    assert asked.say(link, {"value": "Rome"}).json() == {"status": "waiting_input"}
    for said in (None, {"value": "Oslo"}):
        refused(asked.say(link, said), 410, OVER)
    asked.resume()
    _, other = asked.links
    refused(asked.say(link), 410, OVER)  # the task asks another question
    assert asked.say(other).json()["question"] == "When?"
    asked.say(other, {"value": "May"})
    assert asked.resume() == "Rome May\n"
    stored = b"".join(one.read_bytes() for one in (asked.folder / ".plait").rglob("*") if one.is_file())
    assert KEY.encode() not in stored
    assert link.encode() not in stored


def test_a_link_opens_no_other_question(asked: Asked) -> None:
    plait(asked.folder, "run", "reviews.yaml", "-q", PLAIT_LINK_KEY=KEY)
    one, two = (link.partition("#") for link in asked.links)
    (run, task, attempt, mac), (other, *_, other_mac) = one[2].split("/"), two[2].split("/")
    assert run != other
    for wrong in (
        [other, task, attempt, mac], [run, "trip", attempt, mac], [run, task, "2", mac],
        [run, task, attempt, other_mac],
        [run, task, attempt, mac[:-1]], [run, task, attempt, ""], [run, task, attempt], [mac], ["", "", "", ""], [""],
        [run, task, attempt, "ü"],
    ):  # fmt: skip
        for said in (None, {"value": "Rome"}):
            refused(asked.say(f"#{'/'.join(wrong)}", said), 403, "the link is wrong: a part is missing or was changed")
    headers = {"authorization": f"Bearer {one[2]}"}
    for path in ("/api/runs", f"/api/runs/{run}", "/api/questions", f"/page/runs/{run}/live"):
        answer = httpx.get(f"{asked.server.url}{path}", headers=headers, trust_env=False, verify=False)
        assert answer.status_code == 401, path


def test_a_link_ends_with_its_run(asked: Asked) -> None:
    (link,) = asked.links
    plait(asked.folder, "cancel", "last")
    refused(asked.say(link), 410, OVER)


def test_who_has_no_key_neither_links_nor_takes_links(asked: Asked) -> None:
    (link,) = asked.links
    done = plait(asked.folder, "run", "reviews.yaml")
    assert done.err.splitlines()[0] == (
        "no value in PLAIT_LINK_KEY (16 characters or more, the same for the server of the link), so this process "
        "notifies nobody at 127.0.0.1"
    )
    assert len(asked.receiver.notices) == 1
    for key, why in (("", "set PLAIT_LINK_KEY as it is where the notice was sent"), (KEY[::-1], "another key")):
        with ui(asked.folder, link_key=key) as server:
            refused(Asked(asked.folder, server, asked.receiver).say(link), 403, why)


async def test_a_link_raises_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLAIT_LINK_KEY", KEY)
    store = MemoryStore()
    with receiving() as receiver:
        notify = [{"url": receiver.url, "link": "http://127.0.0.1:8377"}]
        runner = ParallelRunner(Priced(), store=store, notify=notify, budget=5, concurrency=1)
        assert (await runner.run(tasks(4), "r")).status is RunStatus.WAITING_INPUT
        (notice,) = receiver.notices
        assert notice["on"] == "budget"
        async with runner.runs as runs:
            app = make_app(ServedRuns(runs), SignIn("token", "127.0.0.1:8377", Clock()))
            async with AsyncClient(transport=ASGITransport(app), base_url="http://127.0.0.1:8377") as client:
                body = {"link": str(notice["link"]).partition("#")[2], "said": {"value": 50}}
                assert (await client.post("/page/question", json=body)).status_code == 200
        assert (await runner.resume("r")).status is RunStatus.COMPLETED


def test_a_link_takes_the_decision_about_an_interrupted_task(tmp_path: Path) -> None:
    with ui(tmp_path, link_key=KEY) as server, receiving() as receiver:
        work = "import os\nasync def work(prompt):\n    os._exit(9)\n"
        notify = f"notify: [{{url: {receiver.url}, link: '{server.url}'}}]\n"
        path = plan(tmp_path, "- {id: once, prompt: go, at_most_once: true}\n", more=notify, work=work)
        plait(tmp_path, "run", str(path), "-q", PLAIT_LINK_KEY=KEY)
        asked = Asked(tmp_path, server, receiver)
        asked.resume()
        (link,) = asked.links
        assert asked.say(link).json()["asks"] is None
        refused(asked.say(link, {"value": "done"}), 422, "has no question of its own")
        assert asked.say(link, {"how": "done", "text": "it was sent"}).status_code == 200
        refused(asked.say(link), 410, OVER)
        assert asked.resume() == "it was sent\n"


@pytest.mark.slow
@needs_chromium
def test_a_person_answers_in_a_browser_that_never_signed_in(asked: Asked, browser: Browser) -> None:
    (link,) = asked.links
    with watched(browser) as seen:
        seen.page.goto(link)
        expect(seen.page.locator("h1")).to_have_text("trip.to-x in reviews")
        expect(seen.page.locator(".ask")).to_have_text("<b>Where</b> to?")
        seen.page.get_by_role("button", name="Answer").click()
        expect(seen.page.get_by_role("alert")).to_contain_text("give a value")
        seen.page.get_by_label("Oslo").check()
        seen.page.get_by_role("button", name="Answer").click()
        expect(seen.page.get_by_role("status")).to_have_text(re.compile("is answered.*resume it to continue"))
        seen.page.reload()
        expect(seen.page.get_by_role("status")).to_have_text(OVER)
        asked.resume()
        seen.page.goto(asked.links[1])  # in the same tab, with another part behind `#`
        expect(seen.page.locator(".ask")).to_have_text("When?")
        seen.page.goto(f"{link[:-1]}x")
        expect(seen.page.get_by_role("status")).to_contain_text("the link is wrong")
        assert seen.page.evaluate("localStorage.length") == 0
