"""`plait run --like`: the preview before the run, fresh tasks, and tasks with effects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from plait.results import ReusePreview
from plait.runner.views.view_models import json_schema
from tests.support.processes.command import Terminal, environment, plait, plait_here

FUNCTIONS = """
def work(prompt):
    with open("calls", "a") as file:
        file.write(prompt + "\\n")
    return f"<{prompt}>"
"""
PLAN = """
backends:
  work: {{kind: function, call: "functions.py:work"}}
tasks:
  - {{id: a, prompt: "{a}"}}
  - {{id: b, prompt: "b {{{{ a }}}}", depends_on: a}}
  - {{id: c, prompt: c}}
{more}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    write(tmp_path)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    (tmp_path / "calls").unlink()
    return tmp_path


def write(folder: Path, a: str = "a", more: str = "") -> None:
    (folder / "plan.yaml").write_text(PLAN.format(a=a, more=more))


def calls(folder: Path) -> list[str]:
    return (folder / "calls").read_text().splitlines() if (folder / "calls").exists() else []


def test_a_dry_run_names_each_task_and_calls_and_stores_nothing(folder: Path) -> None:
    write(folder, a="A")
    done = plait_here(folder, "run", "plan.yaml", "--like", "last", "--dry-run")
    lines = done.out.splitlines()
    assert done.code == 0
    assert "run      a: prompt changed: line 1" in lines
    assert "depends  b: runs unless a gives the same answer" in lines
    assert next(line for line in lines if line.startswith("reuse")).startswith("reuse    c: reused from 2")
    assert ": 1 reused, 1 run, 1 run unless the tasks before give the same answers" in lines[-1]
    assert calls(folder) == []
    assert len(plait_here(folder, "runs", "--json").value) == 1


def test_the_dry_run_as_json(folder: Path) -> None:
    value = plait_here(folder, "run", "plan.yaml", "--like", "last", "--fresh", "c", "--dry-run", "--json").value
    assert (value["reuse"], value["run"], value["depends"]) == (2, 1, 0)
    schema = json_schema(ReusePreview)
    assert schema["properties"].keys() == value.keys()
    assert schema["$defs"]["ReuseStep"]["properties"].keys() == value["tasks"][0].keys()
    assert {task["task_id"]: task["action"] for task in value["tasks"]} == {"a": "reuse", "b": "reuse", "c": "run"}


def test_a_line_before_the_run_says_how_many_tasks_run(folder: Path) -> None:
    write(folder, a="A")
    done = plait_here(folder, "run", "plan.yaml", "--like", "last")
    assert done.err.splitlines()[0].endswith(": 1 reused, 1 run, 1 run unless the tasks before give the same answers")
    assert sorted(calls(folder)) == ["A", "b <A>"]


def test_a_run_that_no_process_began_is_not_the_last(folder: Path) -> None:
    assert plait_here(folder, "run", "plan.yaml", "--queue").code == 0
    done = plait_here(folder, "run", "plan.yaml", "--like", "last", "-q")
    assert (done.code, done.err, calls(folder)) == (0, "", [])


def test_an_interrupted_run_is_not_the_last_whole_run(folder: Path) -> None:
    whole = plait_here(folder, "runs", "--json").value[0]["run_id"]
    dies = FUNCTIONS.replace("    with", "    if prompt == 'c':\n        import os\n        os._exit(9)\n    with")
    (folder / "functions.py").write_text(dies)
    assert plait(folder, "run", "plan.yaml", "-q").code == 9
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "calls").unlink(missing_ok=True)
    assert [run["status"] for run in plait_here(folder, "runs", "--json").value] == ["interrupted", "completed"]
    done = plait_here(folder, "run", "plan.yaml", "--like", "last")
    assert (done.code, calls(folder)) == (0, [])
    assert f"like {whole} of " in done.err


def test_fresh_runs_an_unchanged_task(folder: Path) -> None:
    done = plait_here(folder, "run", "plan.yaml", "--like", "last", "--fresh", "c", "-q")
    assert (done.code, done.err) == (0, "")
    assert calls(folder) == ["c"]


def test_a_quiet_run_says_that_completed_tasks_run_again(folder: Path) -> None:
    write(folder, a="A")
    done = plait_here(folder, "run", "plan.yaml", "--like", "last", "-q")
    assert done.err.startswith("a completed in 2")
    assert done.err.endswith(" and runs again: prompt changed: line 1\n")
    assert plait_here(folder, "run", "plan.yaml", "--like", "last", "-q").err == ""
    (folder / "lower.py").write_text(FUNCTIONS)
    (folder / "plan.yaml").write_text((folder / "plan.yaml").read_text().replace("functions.py", "lower.py"))
    done = plait_here(folder, "run", "plan.yaml", "--like", "last", "-q")
    assert "3 tasks completed in 2" in done.err
    assert " and run again, first a: " in done.err


def test_a_task_with_effects_runs_again_only_with_again(folder: Path) -> None:
    write(folder, more="  - {id: mail, prompt: mail, at_most_once: true}")
    assert plait_here(folder, "run", "plan.yaml", "--like", "last", "-q").code == 0
    assert calls(folder) == ["mail"]
    done = plait_here(folder, "run", "plan.yaml", "--like", "last")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "mail completed in 2" in done.err
    out = plait_here(folder, "run", "plan.yaml", "--like", "last", "--dry-run").out
    assert "run      mail: has effects: run again only with --again" in out
    assert calls(folder) == ["mail"]
    assert plait_here(folder, "run", "plan.yaml", "--like", "last", "--again", "-q").code == 0
    assert calls(folder) == ["mail", "mail"]


@pytest.mark.parametrize("option", [["--fresh", "a"], ["--again"], ["--keep-answers"], ["--ask-again"]])
def test_the_options_go_with_like(folder: Path, option: list[str]) -> None:
    done = plait_here(folder, "run", "plan.yaml", *option)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "--like RUN" in done.err


def test_an_unknown_fresh_task_is_one_line(folder: Path) -> None:
    done = plait_here(folder, "run", "plan.yaml", "--like", "last", "--fresh", "d")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "no task 'd'" in done.err


def test_a_submitted_run_can_be_taken_from(folder: Path) -> None:
    submitted = plait_here(folder, "run", "plan.yaml", "--queue")
    assert plait_here(folder, "resume", submitted.out.strip(), "-q").code == 0
    assert len(calls(folder)) == 3
    assert plait_here(folder, "run", "plan.yaml", "--like", submitted.out.strip(), "-q").code == 0
    assert len(calls(folder)) == 3


def test_last_is_the_last_whole_run_of_that_plan(folder: Path) -> None:
    (folder / "other.yaml").write_text(
        (folder / "plan.yaml").read_text().replace("id: c, prompt: c", "id: c, prompt: d")
    )
    whole = plait_here(folder, "runs", "--json").value[0]["run_id"]
    assert plait_here(folder, "try", "last", "a", "-q").out == "<a>\n"
    assert plait_here(folder, "run", "other.yaml", "-q").code == 0
    assert plait_here(folder, "try", "last", "a", "-q").out == "<a>\n"
    (folder / "calls").unlink()
    done = plait_here(folder, "run", "plan.yaml", "--like", "last")
    assert (done.code, calls(folder)) == (0, [])
    assert f"like {whole} of " in done.err
    (folder / "plan.yaml").rename(folder / "third.yaml")
    done = plait_here(folder, "run", "third.yaml", "--like", "last")
    assert (done.code, done.err.count("\n"), calls(folder)) == (2, 1, [])
    assert "no run of third.yaml yet; name the run by its id" in done.err


def test_last_finds_the_runs_of_a_plan_that_moved_by_its_name(folder: Path) -> None:
    text = "name: mine\n" + (folder / "plan.yaml").read_text()
    (folder / "plan.yaml").write_text(text)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    (folder / "moved.yaml").write_text(text)
    (folder / "plan.yaml").write_text(text.replace("mine", "other"))
    assert plait_here(folder, "run", "plan.yaml", "--fresh", "a", "--like", "last", "-q").code == 0
    (folder / "calls").unlink()
    assert plait_here(folder, "run", "moved.yaml", "--like", "last", "-q").code == 0
    assert calls(folder) == []
    assert plait(folder, "run", "-", "--like", "last", "-q", stdin=folder / "moved.yaml").code == 0
    assert calls(folder) == []


PERSONS = """
backends:
  work: {kind: function, call: "functions.py:work"}
  person: {kind: person, default: yes, deadline: 0}
tasks:
  - {id: a, prompt: a, backend: work}
  - {id: sign, prompt: "Sign {{ a }}?", depends_on: a, backend: person}
"""


@pytest.fixture
def signed(folder: Path) -> Path:
    (folder / "plan.yaml").write_text(PERSONS)
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    (folder / "calls").unlink()
    return folder


def test_a_person_is_asked_again_without_a_terminal_unless_told_otherwise(signed: Path) -> None:
    preview = plait_here(signed, "run", "plan.yaml", "--like", "last", "--dry-run").out
    assert "run      sign: a person answered in 2" in preview
    preview = plait_here(signed, "run", "plan.yaml", "--like", "last", "--keep-answers", "--dry-run").out
    assert "reuse    sign: answer of a person, kept from 2" in preview
    assert plait_here(signed, "run", "plan.yaml", "--like", "last", "--keep-answers").code == 0
    assert "kept      the answer of a person in 2" in plait_here(signed, "show", "last", "sign").out
    done = plait_here(signed, "run", "plan.yaml", "--like", "last")
    assert ": 1 reused, 1 run" in done.err
    assert calls(signed) == []


@pytest.mark.parametrize(("typed", "expected"), [("what\nkeep\n", "2 reused"), ("ask\n", "1 reused, 1 run")])
def test_at_a_terminal_the_command_asks_once(signed: Path, typed: str, expected: str) -> None:
    with Terminal(signed, "run", "plan.yaml", "--like", "last") as terminal:
        terminal.until("1 answer of a person in 2")
        terminal.until("sign")
        for line in typed.splitlines():
            terminal.until("keep, or ask again? [keep/ask]")
            terminal.seen = b""
            terminal.type(line + "\n")
        terminal.until(expected)
        assert terminal.wait() == 0


def test_ctrl_c_at_the_question_stores_nothing(signed: Path) -> None:
    with Terminal(signed, "run", "plan.yaml", "--like", "last") as terminal:
        terminal.until("keep, or ask again? [keep/ask]")
        terminal.press_ctrl_c()
        assert terminal.wait() == 6
        assert b"Traceback" not in terminal.seen
    assert len(plait_here(signed, "runs", "--json").value) == 2


def reads(folder: Path, *words: str) -> int:
    """The number of times that the command reads the tasks of a run from the store."""
    code = (
        "from plait.persistence import SQLiteStore\n"
        "from plait.runner.cli.command_line import cli, run_cli\n"
        "read, made = SQLiteStore.list_tasks, []\n"
        "SQLiteStore.list_tasks = lambda *words: (made.append(words), read(*words))[1]\n"
        f"assert run_cli(cli, {list(words)!r}) == 0\n"
        "print(len(made))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=environment(), stdout=subprocess.PIPE, check=True
    )
    return int(done.stdout.splitlines()[-1])
