"""A stored run has one shape: the command and HTTP give the same JSON of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from plait.persistence.store_records import TaskRecord
from plait.runner.views.read_views import task_view
from plait.runner.views.view_models import RunDetail, RunView, TaskView, json_schema, view_json
from tests.runner.cli.test_cancel_command import until
from tests.runner.serving.test_lifecycle import created
from tests.support.processes.command import plait_here
from tests.support.processes.served import served

PLAN = {
    "tasks": [
        {"id": "a", "prompt": "one"},
        {"id": "b", "prompt": "two {{ a }}", "depends_on": "a"},
        {"id": "x", "prompt": "fail", "retry": {"attempts": 1}},
        {"id": "y", "prompt": "{{ x }}", "depends_on": "x"},
        {"id": "q", "prompt": "ask me"},
    ]
}
OF_THE_COMMAND = {"settings"}
"""Fields that only the command shows: settings name files and servers of the machine."""


def test_the_command_and_http_give_the_same_json(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        run_id = created(client, PLAN)
        until(lambda: client.get(f"/api/runs/{run_id}").json()["status"] == "waiting_input")
        over_http: dict[str, Any] = client.get(f"/api/runs/{run_id}").json()
        listed = client.get("/api/runs").json()["runs"]
        shown: dict[str, Any] = plait_here(tmp_path, "show", run_id, "--json").value
        assert {name: value for name, value in shown.items() if name not in OF_THE_COMMAND} == over_http
        assert shown.keys() - over_http.keys() == OF_THE_COMMAND
        assert plait_here(tmp_path, "runs", "--json").value == listed
        assert over_http["tasks"][4]["asks"]["schema"] == {"type": "integer"}
        for task in over_http["tasks"]:
            one: dict[str, Any] = plait_here(tmp_path, "show", run_id, task["task_id"], "--json").value
            assert one.keys() - task.keys() == {"run_id", "messages", "history"}
            assert {name: one[name] for name in task} == task


def test_the_result_of_a_run_spells_its_tasks_the_same(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("async def work(prompt):\n    return prompt.upper()\n")
    (tmp_path / "plan.yaml").write_text(
        'backends: {w: {kind: function, call: "work.py:work"}}\ntasks: [{id: a, prompt: hello}]\n'
    )
    result = plait_here(tmp_path, "run", "plan.yaml", "--json", "-q").value
    shown = plait_here(tmp_path, "show", "last", "--json").value
    own = {"reused", "ran", "adopted", "possibly_billed_twice", "duration_s", "store", "degraded", "policy_state"}
    assert result.keys() - shown.keys() == own
    (done,), (stored,) = result["tasks"], shown["tasks"]
    assert done.keys() - stored.keys() == {"reused"}
    for name in done.keys() & stored.keys() - {"duration_s"}:
        assert done[name] == stored[name], name


def test_the_published_schema_has_the_fields_that_are_sent() -> None:
    task = view_json(task_view(TaskRecord("a", 0, "p", (), None, "{}", "pending", 0)))
    assert json_schema(TaskView)["properties"].keys() == task.keys()
    assert json_schema(RunDetail)["properties"].keys() - json_schema(RunView)["properties"].keys() == {
        "budget",
        "tasks",
        "throttled",
        "tuned",
    }
