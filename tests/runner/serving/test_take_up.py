"""`plait serve --resume` takes up the runs of an earlier server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runner.serving.test_lifecycle import HELD, created, events
from tests.runner.serving.test_questions import PLAN, answer
from tests.support.processes.command import plait
from tests.support.processes.served import BACKENDS, served

OF_A_PERSON = f'{BACKENDS}tasks: [{{id: a, prompt: "held by a person"}}]\n'


@pytest.mark.slow
def test_the_runs_of_a_killed_server(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        held, waits = created(client, HELD), created(client, PLAN)
        events(client, held, until_="task_started held")
        events(client, waits, until_="run_waiting_input")
        server.kill()
    (tmp_path / "plan.yaml").write_text(OF_A_PERSON)
    queued = plait(tmp_path, "run", "plan.yaml", "--queue").out.strip()
    (tmp_path / "go").touch()
    with served(tmp_path, "--resume") as server, server.client() as client:
        assert events(client, held)[-1].event == "run_completed"
        tasks = client.get(f"/api/runs/{held}").json()["tasks"]
        assert [task["attempts"] for task in tasks] == [1, 2, 1]
        assert answer(client, waits, 3).json()["taken"]
        assert events(client, waits)[-1].event == "run_completed"
        assert client.get(f"/api/runs/{queued}").json()["status"] == "queued"
        assert f"took up run {held}\n" in server.stop()[1]


def test_a_run_whose_backend_is_gone_is_named(tmp_path: Path) -> None:
    other = 'backends: {v: {kind: function, call: "work.py:work"}}\n'
    named = {"tasks": [{"id": "a", "prompt": "held a", "backend": "w"}]}
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, named)
        server.kill()
    with served(tmp_path, "--resume", backends=other) as server, server.client() as client:
        fresh = created(client, {"tasks": [{"id": "a", "prompt": "a"}]})
        assert events(client, fresh)[-1].event == "run_completed"
        said = server.stop()[1]
    assert f"run {run_id} is left as it is: " in said
    assert "'w'" in said
