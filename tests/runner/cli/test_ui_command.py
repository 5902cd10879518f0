"""`plait ui`: the files of the page, the address, and the runs that the page resumes."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.processes.browser import ui
from tests.support.processes.command import plait_here

pytestmark = pytest.mark.slow

PLAN = (
    'backends: {w: {kind: function, call: "work.py:work"}}\n'
    "tasks: [{id: a, prompt: hello}, {id: bad, prompt: fail, retry: 1}, {id: asks, prompt: ask}]\n"
)
WORK = """
from pathlib import Path
from plait.backends import ask

async def work(prompt):
    if prompt == "fail" and not Path("go").exists():
        raise ValueError("not today")
    return await ask("Who?") if prompt == "ask" else prompt.upper()
"""


def made_run(folder: Path) -> str:
    (folder / "work.py").write_text(WORK)
    (folder / "plan.yaml").write_text(PLAN)
    return str(plait_here(folder, "run", "plan.yaml", "-q", "--json").value["run_id"])


def test_the_files_of_the_page_need_no_sign_in_and_have_its_policy(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        page = httpx.get(server.url, headers={"accept": "text/html"}, trust_env=False, verify=False)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert "unsafe" not in policy
        script = httpx.get(f"{server.url}/page/page_main.js", trust_env=False, verify=False)
        assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        for path in ("/page/runs/x/live", "/page/nothing.js", "/page/../routes.py", "/page/"):
            assert httpx.get(server.url + path, trust_env=False, verify=False).status_code == 401


def test_an_address_that_other_machines_reach_is_said_to_be_unencrypted(tmp_path: Path) -> None:
    with ui(tmp_path, "--host", "127.0.0.2") as server:
        assert "connections to 127.0.0.2 are not encrypted" in server.stop()[1]
    with ui(tmp_path) as server:
        assert "encrypted" not in server.stop()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_refused(tmp_path: Path, host: str) -> None:
    done = plait_here(tmp_path, "ui", "--host", host)
    assert (done.code, len(done.err.splitlines())) == (2, 1)
    assert "name the one address" in done.err


def test_a_run_is_previewed_resumed_and_settled_on_its_stored_backends(tmp_path: Path) -> None:
    run_id = made_run(tmp_path)
    with ui(tmp_path) as server, server.client() as client:
        path = f"/api/runs/{run_id}"
        (question,) = client.get("/api/questions").json()["questions"]
        assert (question["task_id"], question["question"], question["run_name"]) == ("asks", "Who?", "plan")
        preview = client.get(f"{path}/preview", params={"retry_failed": True}).json()
        assert preview == plait_here(tmp_path, "resume", run_id, "--retry-failed", "--dry-run", "--json").value
        assert client.post(f"{path}/tasks/asks/settle", json={"how": "done", "text": "Ada"}).status_code == 200
        assert client.get("/api/questions").json() == {"questions": []}
        (tmp_path / "go").touch()
        assert client.post(f"{path}/resume", json={"retry_failed": True}).status_code == 200
        with client.stream("GET", f"{path}/events") as stream:
            list(stream.iter_lines())
        shown = client.get(path).json()
        assert (shown["status"], [task["text"] for task in shown["tasks"]]) == ("completed", ["HELLO", "FAIL", "Ada"])
        one = client.get(f"{path}/tasks/bad").json()
        assert one == plait_here(tmp_path, "show", run_id, "bad", "--json").value
        assert "ValueError: not today" in one["history"][0]["traceback"]
        assert client.post("/api/runs", json={"plan": {}}).status_code == 405  # runs are made by the command


def test_a_run_whose_plan_is_gone_is_refused_in_one_line(tmp_path: Path) -> None:
    run_id = made_run(tmp_path)
    (tmp_path / "plan.yaml").unlink()
    with ui(tmp_path) as server, server.client() as client:
        answer = client.post(f"/api/runs/{run_id}/resume", json={"retry_failed": True})
        assert answer.status_code == 422
        assert "plan.yaml cannot be read" in answer.json()["error"]["message"]
        assert client.get(f"/api/runs/{run_id}").json()["status"] == "waiting_input"
