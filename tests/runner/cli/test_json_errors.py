"""A failure under --json is one JSON object on standard output, in the shape of HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from tests.support.processes.command import plait, plait_here
from tests.support.processes.served import served

PLAN = "backends: {w: {kind: function, call: 'work.py:work'}}\ntasks: [{id: a, prompt: hello}]\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    (folder / "work.py").write_text("async def work(prompt):\n    return prompt\n")
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "wrong.yaml").write_text("tasks: [{id: a, prompt: '{{ b }}'}, {id: a}]\n")
    (folder / "broken.db").write_text("no database\n" * 100)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    return folder


@pytest.mark.parametrize(
    ("words", "code", "kind"),
    [
        ("show nobody", 2, "run_not_found"),
        ("show last nobody", 2, "not_found"),
        ("show last --nothing", 2, "invalid_request"),
        ("run wrong.yaml", 2, "plan_invalid"),
        ("runs --store broken.db", 3, "store_failed"),
        ("answer last a x", 2, None),
        ("cancel nobody", 2, "run_not_found"),
        ("nope", 2, "invalid_request"),
    ],
)
def test_each_failure_is_an_object_with_its_kind(folder: Path, words: str, code: int, kind: str | None) -> None:
    plain, told = plait_here(folder, *words.split()), plait_here(folder, *words.split(), "--json")
    assert (plain.code, plain.out, told.code, told.err) == (code, "", code, plain.err)
    assert told.out.count("\n") == 1
    error = told.value["error"]
    assert told.value.keys() == {"error"}
    assert error.keys() == {"kind", "message"}
    assert kind is None or error["kind"] == kind
    assert error["message"] in plain.err


def test_a_word_after_two_dashes_is_no_option(folder: Path) -> None:
    done = plait_here(folder, "continue", "nobody", "a", "--", "--json")
    assert (done.code, done.out) == (2, "")


def test_the_process_writes_one_object_too(folder: Path) -> None:
    done = plait(folder, "show", "nobody", "--json")
    assert json.loads(done.out)["error"]["kind"] == "run_not_found"


def test_http_has_the_same_shape_and_kind(tmp_path: Path) -> None:
    with served(tmp_path) as server, server.client() as client:
        response: httpx.Response = client.get("/api/runs/nobody")
    told = plait_here(tmp_path, "show", "nobody", "--json").value
    assert response.json().keys() == told.keys()
    assert response.json()["error"]["kind"] == told["error"]["kind"]
