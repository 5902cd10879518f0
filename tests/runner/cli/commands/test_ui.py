"""`plait ui`: the address, the sign-in, and a server that runs already."""

from __future__ import annotations

import json
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from tests.support.processes.browser import Ui, ui
from tests.support.processes.command import plait, plait_here
from tests.support.processes.served import served

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


@contextmanager
def signed_in(server: Ui) -> Generator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers={"origin": server.url}, timeout=30, trust_env=False) as client:
        assert client.post("/page/sign-in", json={"code": code_of(server.page)}).status_code == 200
        yield client


def code_of(address: str) -> str:
    return urlsplit(address).fragment


def test_the_code_becomes_a_cookie_once(tmp_path: Path) -> None:
    made_run(tmp_path)
    with ui(tmp_path) as server:
        assert urlsplit(server.page)._replace(fragment="").geturl() == f"{server.url}/"
        with signed_in(server) as client:
            assert [run["name"] for run in client.get("/api/runs").json()["runs"]] == ["plan"]
        again = httpx.post(f"{server.url}/page/sign-in", json={"code": code_of(server.page)}, trust_env=False)
        assert (again.status_code, again.headers.get("set-cookie")) == (401, None)
        assert "run `plait ui` again" in again.json()["error"]["message"]
        assert httpx.get(f"{server.url}/api/runs", trust_env=False).status_code == 401


def test_a_cookie_changes_nothing_without_the_origin(tmp_path: Path) -> None:
    run_id = made_run(tmp_path)
    with ui(tmp_path) as server, signed_in(server) as client:
        del client.headers["origin"]
        assert client.get("/api/runs").status_code == 200
        assert client.post(f"/api/runs/{run_id}/cancel", json={}).status_code == 401
        for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "same-site"}, {"host": "evil.example"}):
            assert client.get("/api/runs", headers=headers).status_code == 403
        other = client.cookies.jar
        assert [cookie.name for cookie in other] == [f"plait-{urlsplit(server.url).port}"]


def test_the_files_of_the_page_need_no_sign_in_and_have_its_policy(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        page = httpx.get(server.url, headers={"accept": "text/html"}, trust_env=False)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "require-trusted-types-for 'script'; trusted-types 'none'" in policy
        assert "unsafe" not in policy
        script = httpx.get(f"{server.url}/page/main.js", trust_env=False)
        assert (script.status_code, script.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
        for path in ("/page/runs/x/live", "/page/nothing.js", "/page/../routes.py", "/page/"):
            assert httpx.get(server.url + path, trust_env=False).status_code == 401


def test_a_second_page_signs_in_to_the_server_that_runs(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        port = str(urlsplit(server.url).port)
        done = plait(tmp_path, "ui", "--port", port, "--no-browser", "--json")
        assert done.code == 0
        told = json.loads(done.out)
        assert told["url"] == server.url
        answer = httpx.post(f"{server.url}/page/sign-in", json={"code": code_of(told["page"])}, trust_env=False)
        assert answer.status_code == 200
        (tmp_path / "other").mkdir()
        refused = plait(tmp_path, "ui", "--port", port, "--no-browser", "--store", "other/plait.db")
        assert (refused.code, len(refused.err.splitlines())) == (2, 1)
        assert "choose another one with --port" in refused.err


def test_the_key_is_private_and_kept(tmp_path: Path) -> None:
    with ui(tmp_path) as server:
        key = (tmp_path / ".plait" / "page.key").read_text()
        assert stat.S_IMODE((tmp_path / ".plait" / "page.key").stat().st_mode) == 0o600
        assert server.stop()[0] == 0
    with ui(tmp_path):
        assert (tmp_path / ".plait" / "page.key").read_text() == key


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
