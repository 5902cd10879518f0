"""`plait serve --queue` stores posted runs for the workers of the store, which execute them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.serving.test_lifecycle import HELD, created, events, post
from tests.runner.serving.test_questions import PLAN, answer, refused
from tests.support.processes.command import plait_here
from tests.support.processes.fleet import STORES, empty_store, stop, until, worker
from tests.support.processes.served import BACKENDS, served

pytestmark = pytest.mark.slow

KEYLESS = f"{BACKENDS}defaults: {{backend: w}}\n".replace("{w:", "{m: {kind: openai, model: x}, w:")
FAILS = {"tasks": [{"id": "a", "prompt": "fail"}]}


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return empty_store(request.param, tmp_path)


def test_workers_execute_the_runs_of_the_server(tmp_path: Path, store: str) -> None:
    with (
        served(tmp_path, "--queue", "--store", store, "-j", "3", backends=KEYLESS) as server,
        server.client() as client,
    ):
        ids = held, asks, fails = created(client, HELD, key="k"), created(client, PLAN), created(client, FAILS)
        unstarted = created(client, PLAN)
        assert post(client, f"/api/runs/{unstarted}/cancel").json()["status"] == "cancelled"
        assert [client.get(f"/api/runs/{one}").json()["status"] for one in ids] == ["queued"] * 3
        assert post(client, "/api/runs", {"plan": HELD, "key": "k"}).json() == {"run_id": held, "status": "queued"}
        refused(post(client, "/api/runs", {"plan": PLAN, "key": "k"}), 409, "key_conflict")
        with worker(tmp_path, store, 3):
            events(client, asks, until_="run_waiting_input")
            (question,) = client.get("/api/questions").json()["questions"]
            assert (question["run_id"], question["task_id"]) == (asks, "asks")
            assert answer(client, asks, 3).json()["taken"]
            assert events(client, asks)[-1].event == "run_completed"
            assert client.get(f"/api/runs/{asks}/tasks/uses").json()["text"] == "GOT 3"
            events(client, held, until_="task_started held")
            assert post(client, f"/api/runs/{held}/cancel").json()["status"] in {"cancelling", "cancelled"}
            assert events(client, held)[-1].event == "run_cancelled"
            assert events(client, fails)[-1].event == "run_failed"
            refused(post(client, f"/api/runs/{fails}/resume", {"retry_failed": True}), 409, "run_not_resumable")
        assert server.stop()[0] == 0, "nothing was under way in the server"


def test_answers_given_with_resume_are_left_to_the_workers(tmp_path: Path, store: str) -> None:
    with served(tmp_path, "--queue", "--store", store) as server, server.client() as client:
        run_id = created(client, PLAN)
        with worker(tmp_path, store) as member:
            events(client, run_id, until_="run_waiting_input")
            until(lambda: client.get(f"/api/runs/{run_id}").json()["owner"] is None)
            stop(member)
        assert post(client, f"/api/runs/{run_id}/resume", {"answers": {"asks": 3}}).json()["status"] == "waiting_input"
        with worker(tmp_path, store):
            assert events(client, run_id)[-1].event == "run_completed"


def test_a_server_either_queues_runs_or_takes_runs_up(tmp_path: Path) -> None:
    done = plait_here(tmp_path, "serve", "--queue", "--resume", "--port", "0")
    assert done.code == 2
    assert "give --queue or --resume, not both" in done.err
