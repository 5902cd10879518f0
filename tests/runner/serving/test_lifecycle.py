"""The life of runs over HTTP: a real server in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx
import pytest

from tests.runner.cli.test_cancel_command import until
from tests.support.processes.command import PLAIT, environment, plait
from tests.support.processes.served import BACKENDS, Heard, heard, served
from tests.support.processes.warm import Warm
from tests.support.stores.postgres import empty, worker_dsn

pytestmark = pytest.mark.slow

PLAN = {
    "name": "greeting",
    "inputs": {"who": {"required": True}},
    "tasks": [
        {"id": "name", "prompt": "{{ who }}"},
        {"id": "hello", "prompt": "hello {{ name }}", "depends_on": "name"},
    ],
}
HELD = {
    "tasks": [
        {"id": "first", "prompt": "first"},
        {"id": "held", "prompt": "held", "depends_on": "first"},
        {"id": "last", "prompt": "last", "depends_on": "held"},
    ]
}


def post(client: httpx.Client, path: str, value: Any = None) -> httpx.Response:
    return client.post(path, json={} if value is None else value)


def created(client: httpx.Client, plan: Any, **more: Any) -> str:
    answer = post(client, "/api/runs", {"plan": plan, **more})
    assert answer.status_code == 201, answer.text
    assert answer.headers["location"] == f"/api/runs/{answer.json()['run_id']}"
    return answer.json()["run_id"]


def events(client: httpx.Client, run_id: str, after: int | None = None, until_: str = "") -> list[Heard]:
    """The events behind `after`, up to the one called `until_` or to the end of the stream."""
    headers = {} if after is None else {"last-event-id": str(after)}
    seen: list[Heard] = []
    with client.stream("GET", f"/api/runs/{run_id}/events", headers=headers) as response:
        assert (response.status_code, response.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        for one in heard(response):
            seen.append(one)
            if f"{one.event} {one.data['task_id'] or ''}".strip() == until_:
                break
    return seen


def test_a_run_from_its_plan_to_its_results(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, PLAN, inputs={"who": "Ada"})
        seen = events(client, run_id)
        assert [one.event for one in seen][:2] == ["run_created", "run_started"]
        assert (seen[-1].event, seen[-1].data["kind"]) == ("run_completed", "run_completed")
        assert [one.id for one in seen] == [one.data["seq"] for one in seen] == sorted({one.id for one in seen})
        run = client.get(f"/api/runs/{run_id}").json()
        assert (run["status"], run["name"], run["done"], run["total"]) == ("completed", "greeting", 2, 2)
        assert {task["task_id"]: task["text"] for task in run["tasks"]} == {"name": "ADA", "hello": "HELLO ADA"}
        listed = client.get("/api/runs").json()["runs"]
        assert listed == [
            {name: value for name, value in run.items() if name not in {"tasks", "throttled", "budget", "tuned"}}
        ]
        assert client.get(f"/api/runs/{run_id}/events", headers={"last-event-id": str(seen[-1].id)}).status_code == 204
        assert events(client, run_id, seen[2].id) == seen[3:]
        assert post(client, f"/api/runs/{run_id}/cancel").json() == {"run_id": run_id, "status": "completed"}
        assert server.stop()[0] == 0
    shown = plait(tmp_path, "show", run_id)
    assert (shown.code, "\nbackends  " in shown.out, "\nplan " in shown.out) == (0, True, False)


def test_what_follows_by_role_follows_here_too(tmp_path: Path) -> None:
    plan = {
        "tasks": [{"id": "code", "prompt": "code", "role": "coder"}],
        "follow_ups": [{"after": "coder", "steps": [{"role": "reviewer", "prompt": "review {{ work }}"}]}],
    }
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, plan, key="k")
        assert events(client, run_id)[-1].event == "run_completed"
        texts = {task["text"] for task in client.get(f"/api/runs/{run_id}").json()["tasks"]}
        assert texts == {"CODE", "REVIEW CODE"}


def test_the_same_key_is_the_same_run(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        wanted = {"plan": PLAN, "inputs": {"who": "Ada"}, "key": "order 17"}
        first = post(client, "/api/runs", wanted)
        again = post(client, "/api/runs", wanted)
        assert (first.status_code, again.status_code) == (201, 200)
        assert first.json()["run_id"] == again.json()["run_id"]
        other = post(client, "/api/runs", {**wanted, "inputs": {"who": "Bob"}})
        assert (other.status_code, other.json()["error"]["kind"]) == (409, "key_conflict")
        assert "give a new run a new key" in other.json()["error"]["message"]
        assert len(client.get("/api/runs").json()["runs"]) == 1


@pytest.mark.parametrize("on", ["SQLite", "PostgreSQL"])
def test_of_six_posts_of_one_key_at_once_one_makes_the_run(tmp_path: Path, on: str) -> None:
    words: list[str] = []
    if on == "PostgreSQL":
        asyncio.run(empty(dsn := worker_dsn()))
        words = ["--store", dsn]
    with served(tmp_path, *words) as server, ThreadPoolExecutor(6) as threads:
        for number in range(5):
            together = Barrier(6)

            def send(wanted: dict[str, Any], together: Barrier = together) -> httpx.Response:
                with server.client() as client:
                    client.get("/api/runs")  # connects
                    together.wait(60)
                    return post(client, "/api/runs", wanted)

            wanted = {"plan": PLAN, "inputs": {"who": "Ada"}, "key": f"order {number}"}
            answers = list(threads.map(send, [wanted] * 6))
            assert sorted(one.status_code for one in answers) == [200] * 5 + [201]
            assert len({one.json()["run_id"] for one in answers}) == 1
        with server.client() as client:
            assert len(client.get("/api/runs").json()["runs"]) == 5


def test_a_run_is_cancelled_and_stays_so(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, HELD)
        events(client, run_id, until_="task_started held")
        assert post(client, f"/api/runs/{run_id}/cancel").json()["status"] == "cancelling"
        seen = events(client, run_id, until_="run_cancelling")
        (tmp_path / "go").touch()
        rest = [one.event for one in events(client, run_id, seen[-1].id)]
        assert rest == ["task_completed", "task_cancelled", "run_cancelled"]
        assert post(client, f"/api/runs/{run_id}/cancel").json()["status"] == "cancelled"
        refused = post(client, f"/api/runs/{run_id}/resume")
        assert (refused.status_code, refused.json()["error"]["kind"]) == (409, "run_not_resumable")


def test_a_run_is_paused_and_tuned(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, HELD)
        seen = events(client, run_id, until_="task_started held")
        told = post(client, f"/api/runs/{run_id}/pause", {})
        assert told.json() == {"run_id": run_id, "status": "running", "is_live": True}
        seen = events(client, run_id, seen[-1].id, until_="run_tuned")
        (tmp_path / "go").touch()
        seen = events(client, run_id, seen[-1].id, until_="task_completed held")
        run = client.get(f"/api/runs/{run_id}").json()
        assert [(one["paused"], one["backend"]) for one in run["tuned"]] == [(True, None)]
        assert [one["waits"]["kind"] for one in run["tasks"] if one["status"] == "pending"] == ["paused"]
        for path, body, why in (
            ("tune", {}, "say how many tasks run at once"),
            ("tune", {"concurrency": 0}, "must be 1 to 10,000, not 0"),
            ("tune", {"limits": {"nobody": 3}}, "has no backend 'nobody'"),
            ("pause", {"backend": "nobody"}, "has no backend 'nobody'"),
        ):
            refused = post(client, f"/api/runs/{run_id}/{path}", body)
            assert (refused.status_code, why in refused.json()["error"]["message"]) == (422, True)
        assert post(client, f"/api/runs/{run_id}/tune", {"concurrency": 3}).status_code == 200
        assert post(client, f"/api/runs/{run_id}/pause", {"off": True}).status_code == 200
        rest = [one.event for one in events(client, run_id, seen[-1].id)]
        assert rest.count("run_tuned") == 2
        assert rest[-1] == "run_completed"


@pytest.mark.parametrize("seconds", ["0", "0.05"])
def test_the_server_has_a_grace_time_of_its_own(tmp_path: Path, seconds: str) -> None:
    with served(tmp_path, "--cancel-grace", seconds) as server, server.client() as client:
        run_id = created(client, HELD)
        events(client, run_id, until_="task_started held")
        post(client, f"/api/runs/{run_id}/cancel")
        assert [one.event for one in events(client, run_id)][-2:] == ["task_cancelled", "run_cancelled"]
    assert not (tmp_path / "go").exists()


def test_a_failed_run_is_tried_again_when_asked(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, {"tasks": [{"id": "a", "prompt": "fail", "retry": {"attempts": 1}}]})
        seen = events(client, run_id)
        assert seen[-1].event == "run_failed"
        failed = client.get(f"/api/runs/{run_id}").json()
        assert (failed["status"], "not today" in failed["error"]) == ("failed", True)
        assert post(client, f"/api/runs/{run_id}/resume").json()["status"] == "failed"
        (tmp_path / "go").touch()
        assert post(client, f"/api/runs/{run_id}/resume", {"retry_failed": True}).status_code == 200
        assert [one.event for one in events(client, run_id, seen[-1].id)][-1] == "run_completed"


@pytest.mark.parametrize("asked_again", ["resume", "key"])
def test_a_killed_server_loses_no_event_and_tells_none_twice(tmp_path: Path, asked_again: str) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, HELD, key="k")
        seen = events(client, run_id, until_="task_started held")
        server.kill()
    assert server.token_file.exists()  # nobody was left to remove it
    with served(tmp_path) as again, again.client() as client:
        assert client.get(f"/api/runs/{run_id}").json()["status"] == "interrupted"
        if asked_again == "resume":
            goes_on = post(client, f"/api/runs/{run_id}/resume")
        else:
            goes_on = post(client, "/api/runs", {"plan": HELD, "key": "k"})
        assert (goes_on.status_code, goes_on.json()) == (200, {"run_id": run_id, "status": "running"})
        (tmp_path / "go").touch()
        seen += events(client, run_id, seen[-1].id, until_="task_completed held")
        seen += events(client, run_id, seen[-1].id)  # another cut, by the client
        assert seen == events(client, run_id)
        told = [f"{one.event} {one.data['task_id'] or ''}".strip() for one in seen]
        assert told[-1] == "run_completed"
        assert [told.count(f"task_completed {task}") for task in ("first", "held", "last")] == [1, 1, 1]
        assert again.token != server.token
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as connection:
        stored = connection.execute("SELECT seq FROM events WHERE run_id = ? ORDER BY seq", (run_id,)).fetchall()
    assert [one.id for one in seen] == [seq for (seq,) in stored]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_leaves_runs_to_be_resumed(tmp_path: Path, number: int) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, HELD)
        with client.stream("GET", f"/api/runs/{run_id}/events") as stream:
            told = heard(stream)
            while next(told).data["task_id"] != "held":
                pass
            code, said = server.stop(number)  # an open stream is no reason to stay
            assert list(told) == []
    assert (code, "Traceback" in said) == (6, False)
    assert not server.token_file.exists()
    (tmp_path / "go").touch()
    resumed = plait(tmp_path, "resume", run_id)
    assert (resumed.code, resumed.out) == (0, "LAST\n")


def test_a_run_of_the_command_is_followed_and_cancelled_from_the_server(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        (tmp_path / "plan.yaml").write_text(BACKENDS + "tasks: [{id: held, prompt: held}]\n")
        with Warm([*PLAIT, "run", "plan.yaml", "-q"], cwd=tmp_path, env=environment()) as owner:
            until((tmp_path / "held").exists)
            (run,) = client.get("/api/runs").json()["runs"]
            assert run["status"] == "running"
            refused = post(client, f"/api/runs/{run['run_id']}/resume")
            assert (refused.status_code, refused.json()["error"]["kind"]) == (409, "run_owned")
            assert post(client, f"/api/runs/{run['run_id']}/cancel").json()["status"] == "cancelling"
            events(client, run["run_id"], until_="run_cancelling")
            (tmp_path / "go").touch()
            assert events(client, run["run_id"])[-1].event == "run_cancelled"
            assert owner.wait(60) == 6


@pytest.mark.parametrize("path", ["", "/events"])
def test_an_unknown_run(tmp_path: Path, path: str) -> None:
    with served(tmp_path) as server, server.client() as client:
        answer = client.get(f"/api/runs/nothing{path}")
        assert (answer.status_code, answer.json()["error"]["kind"]) == (404, "run_not_found")
