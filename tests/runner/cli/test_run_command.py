"""`plait run`: what goes where, what it leaves behind, and how it ends."""

from __future__ import annotations

import json
import os
import re
import sqlite3
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.plans.logged import CHAIN, calls, make
from tests.support.polling import until
from tests.support.processes.command import Terminal, plait, plait_here

BROKEN = """
  - {id: a, prompt: one}
  - {id: x, prompt: knock, backend: fail}
  - {id: y, prompt: "{{ x }}", depends_on: x}
"""
LEVELS = ("debug", "info")


def test_the_result_goes_to_standard_output_and_all_else_to_standard_error(tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    done = plait(tmp_path, "run", "plan.yaml")
    assert (done.code, done.out) == (0, "re: two re: one\n")
    assert re.search(r"^\d\d:\d\d:\d\d a started \(say\)$", done.err, re.MULTILINE)
    assert re.search(r"^\d\d:\d\d:\d\d b completed [\d.]+s$", done.err, re.MULTILINE)
    assert re.search(r"^completed in [\d.]+s: 2 of 2 tasks completed$", done.err, re.MULTILINE)
    run_id = re.search(r"show +plait show (\S+)\n", done.err)
    assert run_id is not None
    assert "plait continue" not in done.err, "a function remembers nothing"
    assert "plait resume" not in done.err


def test_several_final_tasks_are_told_apart(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one}\n  - {id: b, prompt: two, backend: data}\n", data="classify")
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert (done.out, done.err) == ('== a ==\nre: one\n== b ==\n{"kind":"good","words":1}\n', "")


def test_failed_tasks_end_with_1_and_say_how_to_try_again(tmp_path: Path) -> None:
    make(tmp_path, BROKEN, fail="fail")
    done = plait(tmp_path, "run", "plan.yaml", "--store", "my runs.db")
    assert done.code == 1
    assert "1 of 3 tasks completed, 1 failed, 1 blocked" in done.err
    assert "failed    x: auth: the door is shut\n" in done.err
    again = re.search(r"resume +plait (resume \S+ --retry-failed --store 'my runs.db')\n", done.err)
    assert again is not None
    assert plait(tmp_path, "run", "plan.yaml", "--quiet").err.startswith("plait: run ")


def test_json_is_one_object_with_everything(tmp_path: Path) -> None:
    make(tmp_path, BROKEN, fail="fail")
    done = plait(tmp_path, "run", "plan.yaml", "--json")
    value = done.value
    assert (done.code, value["status"], value["ran"], value["reused"]) == (1, "failed", 2, 0)
    assert [(task["task_id"], task["status"], task["text"], task["error_kind"]) for task in value["tasks"]] == [
        ("a", "completed", "re: one", None),
        ("x", "failed", "", "auth"),
        ("y", "pending", "", None),
    ]
    assert value["degraded"] == []
    assert "a started" in done.err


PRINTS = """
import sys

print("on import")


async def waits(prompt):
    print("while it waits", file=sys.stdout)
    return prompt


def works(prompt):
    print("in a thread")
    return prompt
"""


def test_what_functions_print_is_no_output_of_the_command(tmp_path: Path) -> None:
    make(
        tmp_path, "  - {id: a, prompt: one, backend: waits}\n  - {id: b, prompt: two, backend: works, depends_on: a}\n"
    )
    plan = tmp_path / "plan.yaml"
    named = "".join(f'  {name}: {{kind: function, call: "prints.py:{name}"}}\n' for name in ("waits", "works"))
    plan.write_text(plan.read_text().replace("backends:\n", f"backends:\n{named}"))
    (tmp_path / "prints.py").write_text(PRINTS)
    printed = ("on import", "while it waits", "in a thread")
    done = plait(tmp_path, "run", "plan.yaml", "--json")
    assert done.value["status"] == "completed"
    assert [word for word in printed if word not in done.err] == []
    assert plait(tmp_path, "run", "plan.yaml", "-q").out == "two\n"
    with Terminal(tmp_path, "run", "plan.yaml", "--json", out=tmp_path / "out") as terminal:
        assert terminal.wait() == 0
    assert json.loads((tmp_path / "out").read_text())["status"] == "completed"
    assert [word for word in printed if word.encode() not in terminal.seen] == []


def test_inputs_and_concurrency_come_from_the_command_line(tmp_path: Path) -> None:
    plan = make(tmp_path, '  - {id: a, prompt: "{{ word }} {{ n }}"}\n')
    plan.write_text(plan.read_text().replace("tasks:", "inputs: {word: {required: true}, n: 1}\ntasks:"))
    done = plait_here(tmp_path, "run", "plan.yaml", "--set", "word=a=b", "--set", "n=3", "-j", "1", "-q")
    assert (done.code, done.out) == (0, "re: a=b 3\n")
    assert plait_here(tmp_path, "run", "plan.yaml").code == 2
    shown = plait_here(tmp_path, "show", "last", "--json").value
    assert shown["settings"]["inputs"] == {"word": "a=b", "n": 3}
    assert shown["settings"]["concurrency"] == 1


def test_no_store_leaves_nothing_behind(tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    done = plait_here(tmp_path, "run", "plan.yaml", "--no-store")
    assert (done.code, done.out) == (0, "re: two re: one\n")
    assert "plait show" not in done.err
    assert not (tmp_path / ".plait").exists()


def test_the_store_may_be_named_by_the_environment(tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    done = plait_here(tmp_path, "run", "plan.yaml", PLAIT_STORE="elsewhere/runs.db")
    assert done.code == 0
    assert "--store" not in done.err  # the printed commands run in the same environment
    assert (tmp_path / "elsewhere" / "runs.db").stat().st_mode & 0o777 == 0o600


def test_settings_hold_what_resume_needs_and_no_key(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text("tasks: [{id: a, prompt: hi, retry: {attempts: 1}}]")
    key = "sk-very-secret-0123456789"
    done = plait_here(
        tmp_path,
        "run",
        "plan.yaml",
        *("--backend", "openai", "--model", "m", "--base-url", "http://127.0.0.1:9/v1"),
        OPENAI_API_KEY=key,
        NO_PROXY="*",
    )
    assert done.code == 1
    assert key not in done.out + done.err
    with sqlite3.connect(tmp_path / ".plait" / "plait.db") as db:
        (stored,) = db.execute("SELECT settings FROM runs").fetchone()
    db.close()
    settings = json.loads(stored)
    assert settings["plan"] == str(plan)
    assert settings["folder"] == str(tmp_path)
    spec = settings["backends"][settings["default_backend"]]
    assert (spec["kind"], spec["model"], spec["api_key_env"]) == ("openai", "m", "OPENAI_API_KEY")
    assert key.encode() not in b"".join(path.read_bytes() for path in (tmp_path / ".plait").iterdir())


def test_git_ignores_the_folder_that_a_store_makes_and_no_other(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    make(tmp_path, CHAIN)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    assert plait_here(tmp_path, "run", "plan.yaml", "-q", "--store", "runs/plait.db").code == 0
    status = ["git", "status", "--porcelain", "-unormal"]
    seen = subprocess.run(status, cwd=tmp_path, check=True, capture_output=True, text=True).stdout.split()
    assert ".plait/" not in seen
    assert "runs/" in seen


def test_without_any_backend_the_choices_are_listed_and_no_store_is_made(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("tasks: [{id: a, prompt: hi}]")
    done = plait(tmp_path, "run", "plan.yaml")
    assert (done.code, done.out) == (2, "")
    for choice in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "--base-url", "--backend local"):
        assert choice in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / ".plait").exists()


def test_only_the_backends_that_tasks_need_are_built(tmp_path: Path) -> None:
    make(tmp_path, CHAIN, unused="there_is_no_such_function")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "absent.yaml"], "absent.yaml: cannot read the plan"),
        (["run", "plan.yaml", "--store", ":memory:"], "a store is a file, not :memory:; name one with --store"),
        (["runs", "--store", ":memory:"], "a store is a file, not :memory:; name one with --store"),
        (["run", "plan.yaml", "--set", "word"], "'word' is not name=value"),
        (["run", "plan.yaml", "--set", "nope=1"], "there is no input 'nope'; the plan has no inputs"),
        (["run", "plan.yaml", "--backend", "local"], "names its backends itself"),
        (["run", "plan.yaml", "-j", "0"], "-j"),
        (["run", "open.yaml", "--backend", "loca"], "there is no backend 'loca'; did you mean 'local'?\n"),
        (["run", "open.yaml", "--backend", "tape"], "'tape' is not an available backend; available backends:"),
        (["run", "gone.yaml"], "functions.py has no 'nowhere'"),
        (["frobnicate"], "frobnicate"),
        (["resume", "x"], "there is no store"),
    ],
)
def test_bad_input_is_one_clear_message(tmp_path: Path, words: list[str], message: str) -> None:
    plan = make(tmp_path, CHAIN)
    (tmp_path / "gone.yaml").write_text(plan.read_text().replace("functions.py:say", "functions.py:nowhere"))
    (tmp_path / "open.yaml").write_text("tasks: [{id: a, prompt: hi}]")
    done = plait_here(tmp_path, *words)
    assert (done.code, done.out) == (3 if words[0] == "resume" else 2, "")
    assert message in done.err
    assert "Traceback" not in done.err
    assert calls(tmp_path) == []


def test_every_mistake_of_a_plan_is_a_line_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("tasks:\n  - {id: a, prompt: x, depends_on: b}\n  - {id: c, promt: y}\n")
    done = plait_here(tmp_path, "run", "plan.yaml")
    assert done.code == 2
    lines = done.err.splitlines()
    assert len(lines) >= 2
    assert all(re.match(r"plan\.yaml:\d+:\d+: ", line) for line in lines), lines


@pytest.mark.parametrize("kind", ["foreign", "empty", "folder"])
def test_a_store_that_cannot_be_used_ends_with_3(tmp_path: Path, kind: str) -> None:
    make(tmp_path, CHAIN)
    store = tmp_path / "store"
    store.mkdir() if kind == "folder" else store.write_bytes(b"" if kind == "empty" else b"not a database" * 100)
    for words in (["run", "plan.yaml"], ["runs"]):
        done = plait_here(tmp_path, *words, "--store", "store")
        assert (done.code, len(done.err.splitlines())) == (3, 1), done.err
    assert calls(tmp_path) == []


def test_log_lines_go_to_standard_error_when_asked_for(tmp_path: Path) -> None:
    make(tmp_path, BROKEN, fail="fail")
    done = plait(tmp_path, "run", "plan.yaml", "--log", "json", "--log-level", "debug", "-q")
    logged = [json.loads(line) for line in done.err.splitlines() if line.startswith("{")]
    assert logged
    assert all(line["run"] for line in logged)


def test_log_lines_name_run_and_task_and_hold_neither_prompts_nor_answers(tmp_path: Path) -> None:
    tasks = "  - {id: a, prompt: Private words}\n  - {id: x, prompt: Private knock, backend: fail}\n"
    make(tmp_path, tasks, fail="fail")
    done = plait(tmp_path, "run", "plan.yaml", "--log", "json", "-q")
    lines = [line for line in done.err.splitlines() if line.startswith("{")]
    logged = [json.loads(line) for line in lines]
    assert {(line["event"], line["task"]) for line in logged} == {("task_failed", "x")}
    assert all(line["run"] for line in logged)
    assert "Private" in done.out
    assert not [line for line in lines if "Private" in line]


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path) -> None:
    make(tmp_path, CHAIN)
    with Terminal(tmp_path, "run", "plan.yaml", TERM="dumb") as terminal:
        assert terminal.wait() == 0
    assert b"\x1b" not in terminal.seen
    assert b"a started (say)" in terminal.seen


def test_a_function_that_fails_says_where_and_its_traceback_is_logged_for_debugging_alone(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: x, prompt: Private knock, backend: crash}\n", crash="crash")
    levels = {
        level: plait(tmp_path, "run", "plan.yaml", "--log", "json", "--log-level", level, "-q") for level in LEVELS
    }
    for done in levels.values():
        assert re.search(r"KeyError: 'Private knock' \(at functions\.py:\d+ in look\)$", done.err, re.MULTILINE)
    assert "look(prompt, {})" in levels["debug"].err
    assert "Traceback" not in levels["info"].err
    assert "in look" in plait(tmp_path, "show", "last").out
    assert "in look" in plait(tmp_path, "log", "last").out


def test_who_is_not_notified_is_said(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("notify: [{url_env: HOOK}]\ntasks: [{id: a, run: [echo, x]}]\n")
    done = plait_here(tmp_path, "run", "plan.yaml")
    assert (done.code, done.err.splitlines()[0]) == (0, "no value in HOOK, so this process notifies nobody at $HOOK")
    done = plait_here(tmp_path, "run", "plan.yaml", "--no-store")
    assert (done.code, done.err.splitlines()[0]) == (0, "nothing is stored, so nobody is notified")


async def test_a_detached_run_goes_on_without_its_terminal(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "from pathlib import Path\nimport anyio\nasync def work(prompt):\n    while not Path('go').exists():\n"
        "        await anyio.sleep(0.01)\n    return prompt\n"
    )
    backends = "backends: {w: {kind: function, call: 'work.py:work'}, o: {kind: openai, model: m}}\n"
    (tmp_path / "plan.yaml").write_text(f"{backends}tasks: [{{id: a, prompt: hello, backend: w}}]\n")
    done = plait(tmp_path, "run", "plan.yaml", "--detach", "--json")
    assert (done.code, done.err) == (0, "")
    (run_id,) = done.value.values()
    assert done.value == {"run_id": run_id}

    def shown() -> Any:
        return plait(tmp_path, "show", run_id, "--json").value

    try:
        pid = shown()["owner"]["pid"]
        assert os.getsid(pid) == pid, "no terminal ends it"
    finally:
        (tmp_path / "go").touch()
    await until(lambda: shown()["status"] == "completed")
    assert shown()["tasks"][0]["text"] == "hello"
    assert plait(tmp_path, "run", "plan.yaml", "--detach").out.strip() == shown_last(tmp_path)["run_id"]
    (tmp_path / "plan.yaml").write_text(f"{backends}tasks: [{{id: a, prompt: hello, backend: o}}]\n")
    done = plait(tmp_path, "run", "plan.yaml", "--detach")
    assert (done.code, done.out) == (2, "")
    assert "OPENAI_API_KEY" in done.err
    assert "is queued; resume it" in done.err
    assert shown_last(tmp_path)["status"] == "queued"


def shown_last(folder: Path) -> Any:
    return plait(folder, "show", "last", "--json").value
