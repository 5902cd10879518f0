"""`plait serve`: what it needs, and what it says when that is not there."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from plait.backends import extras
from plait.backends.extras import install_command
from tests.support.agents.logs import wait_for
from tests.support.processes.command import plait_here
from tests.support.processes.served import BACKENDS, heard, served


def refused(folder: Path, *words: str) -> str:
    done = plait_here(folder, "serve", "--port", "0", *words)
    assert (done.code, done.out) == (2, "")
    assert not (folder / ".plait").exists()
    return done.err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tasks: []", "names no backends; put them under `backends:`"),
        ("backends: {w: {kind: tape}}", "backends.w"),
        ("backends: [", "backends.yaml"),
        (f"{BACKENDS}defaults: {{backend: v}}", "defaults.backend: there is no backend 'v'"),
        ('backends: {w: {kind: function, call: "nowhere.py:f"}}', "there is no file"),
    ],
)
def test_a_file_without_backends_that_can_be_had(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "backends.yaml").write_text(text)
    assert said in refused(tmp_path, "--backends", "backends.yaml")


def test_what_else_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot be read (No such file or directory)" in refused(tmp_path, "--backends", "nowhere.yaml")
    assert "no backend is configured" in refused(tmp_path)
    (tmp_path / "backends.yaml").write_text(BACKENDS)
    assert "names the backends; leave --backend" in refused(tmp_path, "--backends", "backends.yaml", "--model", "m")
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "uvicorn" else find_spec(name))
    lack = f"the extra `server` (uvicorn); run: {install_command('server')}\n"
    assert lack in refused(tmp_path, "--base-url", "http://h")


def test_the_other_loopback(tmp_path: Path) -> None:
    with served(tmp_path, "--host", "::1") as server, server.client() as client:
        assert server.url.startswith("http://[::1]:")
        assert client.get("/api/runs").json() == {"runs": []}


def test_the_runs_of_the_backend_that_is_asked_for(tmp_path: Path) -> None:
    with served(tmp_path, "--store", "kept/elsewhere.db") as server, server.client() as client:
        answer = client.post("/api/runs", json={"plan": {"tasks": [{"id": "a", "prompt": "a", "backend": "v"}]}})
        assert (answer.status_code, answer.json()["error"]["kind"]) == (422, "plan_invalid")
        assert "unknown backend 'v'" in answer.json()["error"]["message"]
        assert server.token_file.parent == tmp_path / "kept"


def test_all_runs_together_have_as_many_places_as_it_is_given(tmp_path: Path) -> None:
    with served(tmp_path, "-j", "1") as server, server.client() as client:
        made = [
            client.post("/api/runs", json={"plan": {"tasks": [{"id": "a", "prompt": f"held {name}"}]}}).json()["run_id"]
            for name in "xy"
        ]
        wait_for((tmp_path / "held x").exists)
        statuses = [client.get(f"/api/runs/{run_id}").json()["tasks"][0]["status"] for run_id in made]
        assert statuses == ["running", "pending"]
        (tmp_path / "go").touch()
        for run_id in made:
            with client.stream("GET", f"/api/runs/{run_id}/events") as response:
                assert list(heard(response))[-1].event == "run_completed"
        assert (tmp_path / "held y").exists()
