"""Questions of tasks, answered over HTTP and through `Runs`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import pytest

from plait import DAG, ParallelRunner, PlaitError, RunStatus, Task
from plait.backends import ask
from plait.clock_and_ids import Clock
from plait.errors import AnswerConflict
from plait.persistence import MemoryStore, Store
from plait.runner.serving import http_routes
from plait.runner.serving.http_guard import SignIn
from plait.runner.serving.http_routes import ServedRuns
from plait.runner.serving.http_server import make_app
from plait.runner.views import read_views
from tests.runner.serving.test_lifecycle import created, events, post
from tests.support.processes.command import plait
from tests.support.processes.served import served
from tests.support.quick_runs import quick_runs
from tests.support.served_backends import set_of

PLAN = {"tasks": [{"id": "asks", "prompt": "ask"}, {"id": "uses", "prompt": "got {{ asks }}", "depends_on": ["asks"]}]}
BESIDE = {"tasks": [*PLAN["tasks"], {"id": "held", "prompt": "held"}]}


def refused(answer: httpx.Response, code: int, kind: str) -> None:
    assert (answer.status_code, answer.json()["error"]["kind"]) == (code, kind), answer.text


def answer(client: httpx.Client, run_id: str, value: Any, task: str = "asks") -> httpx.Response:
    return post(client, f"/api/runs/{run_id}/tasks/{task}/answer", {"value": value})


def test_a_question_is_answered_after_the_server_is_another(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, PLAN)
        events(client, run_id, until_="run_waiting_input")
        run = client.get(f"/api/runs/{run_id}").json()
        assert run["status"] == "waiting_input"
        assert run["tasks"][0]["question"] == "Which one?"
        assert run["tasks"][0]["asks"] == {"schema": {"type": "integer"}, "default": 0, "deadline_at": None}
        assert server.stop()[0] == 0  # nothing was under way
    with served(tmp_path) as server, server.client() as client:
        refused(answer(client, run_id, "many"), 422, "refused")
        json_ = {"content-type": "application/json"}
        for value in (b"NaN", b"[" * 102 + b"]" * 102, b"[" * 5000 + b"]" * 5000):
            odd = client.post(f"/api/runs/{run_id}/tasks/asks/answer", content=b'{"value": %b}' % value, headers=json_)
            refused(odd, 422, "invalid_request")
        refused(answer(client, run_id, 1, "nobody"), 404, "not_found")
        refused(answer(client, "nothing", 1), 404, "run_not_found")
        to_another = {"value": 3, "attempt": run["tasks"][0]["attempts"] + 1}
        refused(post(client, f"/api/runs/{run_id}/tasks/asks/answer", to_another), 409, "answer_conflict")
        assert answer(client, run_id, 3).json() == {"run_id": run_id, "status": "waiting_input", "taken": True}
        refused(answer(client, run_id, 4), 409, "answer_conflict")
        assert post(client, f"/api/runs/{run_id}/resume").status_code == 200
        assert events(client, run_id)[-1].event == "run_completed"
        assert client.get(f"/api/runs/{run_id}").json()["tasks"][1]["text"] == "GOT 3"
        refused(answer(client, run_id, 5), 409, "answer_conflict")


def test_answers_come_with_resume(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, PLAN)
        events(client, run_id, until_="run_waiting_input")
        refused(post(client, f"/api/runs/{run_id}/resume", {"answers": {"asks": "many"}}), 422, "refused")
        refused(post(client, f"/api/runs/{run_id}/resume", {"answers": {"nobody": 1}}), 404, "not_found")
        for odd in ("yes", 1):
            refused(post(client, f"/api/runs/{run_id}/resume", {"retry_failed": odd}), 422, "invalid_request")
        assert post(client, f"/api/runs/{run_id}/resume", {"answers": {"asks": 3}}).status_code == 200
        assert events(client, run_id)[-1].event == "run_completed"
        refused(post(client, f"/api/runs/{run_id}/resume", {"answers": {"asks": 3}}), 409, "answer_conflict")


@pytest.mark.parametrize("how", ["answer", "resume"])
def test_a_run_that_goes_on_is_answered_as_well(tmp_path: Path, how: str) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, BESIDE)
        events(client, run_id, until_="task_waiting_input asks")
        if how == "answer":
            assert answer(client, run_id, 3).json() == {"run_id": run_id, "status": "running", "taken": True}
        else:
            assert post(client, f"/api/runs/{run_id}/resume", {"answers": {"asks": 3}}).json()["status"] == "running"
        events(client, run_id, until_="task_completed uses")
        (tmp_path / "go").touch()
        assert events(client, run_id)[-1].event == "run_completed"


async def test_the_service_answers(store: Store) -> None:
    async def body(prompt: str) -> str:
        return str(await ask("Who?")) if prompt == "ask" else prompt

    async with quick_runs(ParallelRunner(body, store=store)) as runs:
        run_id = await runs.create(DAG([Task("a", prompt="ask"), Task("b", prompt="{{ a }}", depends_on=["a"])]))
        await runs.start(run_id)
        with anyio.fail_after(60):
            async for event in runs.events(run_id):
                if event.kind == "run_waiting_input":
                    break
        asks = (await runs.get(run_id)).tasks["a"].asks
        assert asks is not None
        assert (asks.schema, asks.default, asks.deadline_at) == (None, None, None)
        with pytest.raises(PlaitError, match="must be text"):
            await runs.start(run_id, {"a": 1})
        await runs.start(run_id, {"a": "Ada"})
        with anyio.fail_after(60):
            last = [event async for event in runs.events(run_id)][-1]
        done = await runs.get(run_id)
        assert (last.kind, done.status, done.tasks["b"].text) == ("run_completed", RunStatus.COMPLETED, "Ada")
        with pytest.raises(AnswerConflict):
            await runs.answer(run_id, "a", "Bob")


async def test_others_are_answered_while_a_run_is_made_ready_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    let_on = threading.Event()  # a run of thousands of tasks takes seconds for both of these

    def slow(usual: Callable[..., Any]) -> Callable[..., Any]:
        def slowly(*given: Any) -> Any:
            assert let_on.wait(60), "nobody else had a turn"
            let_on.clear()
            return usual(*given)

        return slowly

    async def asks(_prompt: str) -> str:
        return str(await ask("Which one?"))

    monkeypatch.setattr(read_views, "asking_of", slow(read_views.asking_of))
    monkeypatch.setattr(http_routes, "json_text", slow(http_routes.json_text))
    runner = ParallelRunner(asks, store=MemoryStore())
    run = await runner.run(DAG([Task("a", "x")]))
    async with runner.runs as service, anyio.create_task_group() as group:
        app = make_app(ServedRuns(service, set_of("default")), SignIn("token", "127.0.0.1:8377", Clock()))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://here") as client:
            shown: list[httpx.Response] = []

            async def show() -> None:
                shown.append(await client.get(f"/api/runs/{run.run_id}"))

            group.start_soon(show)
            while not shown:
                assert (await client.get("/api/runs")).status_code == 200
                let_on.set()
                await anyio.lowlevel.checkpoint()
    assert shown[0].json()["tasks"][0]["question"] == "Which one?"


def test_an_answered_run_continues_on_the_server_that_ran_it(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, PLAN)
        events(client, run_id, until_="run_waiting_input")
        assert answer(client, run_id, 3).json()["taken"]
        assert events(client, run_id)[-1].event == "run_completed"
        other = created(client, PLAN)
        events(client, other, until_="run_waiting_input")
        assert plait(tmp_path, "answer", other, "asks", "4").code == 0
        assert events(client, other)[-1].event == "run_completed"
        assert client.get(f"/api/runs/{other}").json()["tasks"][1]["text"] == "GOT 4"
