"""A failure under --json is one JSON object on standard output, in the shape of HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import click
import httpx
import pytest

from plait.runner.cli.command_line import BESIDE, COMMANDS, cli
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


def options(name: str) -> set[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return {option for parameter in command.params for option in parameter.opts}


WITH_JSON = sorted(name for name in (*COMMANDS, *BESIDE) if "--json" in options(name))
WITH_STORE = {
    "answer": "last a x",
    "budget": "",
    "cancel": "last",
    "check": "--run last",
    "continue": "last a x",
    "diff": "last last",
    "export": "last --to out.csv",
    "fork": "last --from a",
    "gc": "--keep 1",
    "graph": "last",
    "log": "last",
    "pause": "last",
    "resume": "last",
    "retry": "last a",
    "run": "plan.yaml",
    "runs": "",
    "serve": "--backend openai --model m --port 0",
    "show": "last",
    "try": "last a",
    "tune": "last -j 3",
    "ui": "--no-browser --port 0",
    "wake": "",
}
"""The words with which each command reaches the store."""
NO_STORE_NEEDED = {"doctor"}
"""`doctor` reports a bad store."""


@pytest.mark.parametrize("name", WITH_JSON)
def test_every_command_refuses_an_unknown_option_with_an_object(folder: Path, name: str) -> None:
    told = plait_here(folder, name, "--nothing", "--json")
    assert (told.code, told.out.count("\n"), told.value["error"]["kind"]) == (2, 1, "invalid_request")


def test_every_command_with_a_store_is_known() -> None:
    assert {name for name in WITH_JSON if "--store" in options(name)} - NO_STORE_NEEDED == WITH_STORE.keys()


@pytest.mark.parametrize("name", WITH_STORE)
def test_every_command_tells_of_a_store_that_is_none_with_an_object(folder: Path, name: str) -> None:
    told = plait_here(folder, name, *WITH_STORE[name].split(), "--store", "broken.db", "--json", OPENAI_API_KEY="k")
    assert (told.code, told.out.count("\n"), told.value["error"]["kind"]) == (3, 1, "store_failed")
    assert "broken.db is not a database or is damaged" in told.value["error"]["message"]


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
