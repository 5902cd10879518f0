"""`when` in a plan: a condition survives the death of its run, and every command shows why a task was skipped."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.runner.cli.test_resume_command import running
from tests.support.plans.logged import calls, make, wait_for_call
from tests.support.processes.command import plait

TASKS = """
  - {id: review, prompt: some good words, backend: data}
  - {id: fix, prompt: fix, depends_on: review, when: "{{ review.data.kind }} == 'bad'"}
  - {id: hold, prompt: wait, backend: hold, depends_on: review, when: "{{ review.data.words }} >= 3"}
  - {id: later, prompt: "later {{ hold }}", depends_on: [fix, hold], when: "{{ hold }} != ''"}
  - {id: never, prompt: never, depends_on: hold, when: "{{ hold }} == ''"}
"""


def test_a_killed_run_keeps_its_decisions_and_a_resume_makes_the_others(tmp_path: Path) -> None:
    make(tmp_path, TASKS, data="classify", hold="hold")
    with running(tmp_path) as process:
        wait_for_call(tmp_path, "wait")
        process.kill()
    (tmp_path / "go").touch()
    dry = plait(tmp_path, "resume", "last", "--dry-run")
    assert dry.code == 0
    done = plait(tmp_path, "resume", "last")
    assert done.code == 0, done.err
    assert calls(tmp_path) == ["some good words", "wait", "wait", "later held: wait"]
    assert "3 of 5 tasks completed, reused 1, ran 2, possibly billed twice 1, 2 skipped" in done.err
    with closing(sqlite3.connect(tmp_path / ".plait" / "plait.db")) as database:
        skips = database.execute("SELECT task_id FROM events WHERE kind = 'task_skipped'").fetchall()
    assert skips == [("fix",), ("never",)]


def test_the_reason_of_a_skip_is_shown(tmp_path: Path) -> None:
    make(tmp_path, TASKS, data="classify", hold="say")
    done = plait(tmp_path, "run", "plan.yaml")
    reason = "condition: {{ review.data.kind }} == 'bad' is false"
    assert done.code == 0
    assert "3 of 5 tasks completed, 2 skipped" in done.err
    assert f"fix skipped {reason}" in done.err
    assert reason in plait(tmp_path, "show", "last").out
    shown = plait(tmp_path, "show", "last", "fix").out
    assert "when      {{ review.data.kind }} == 'bad'" in shown
    assert reason in shown
    assert reason in plait(tmp_path, "log", "last").out
    (task,) = [one for one in plait(tmp_path, "show", "last", "--json").value["tasks"] if one["task_id"] == "fix"]
    assert (task["status"], task["error_kind"], task["spec"]["when"]) == (
        "skipped",
        "condition",
        "{{ review.data.kind }} == 'bad'",
    )


def test_the_settings_of_a_task_are_shown(tmp_path: Path) -> None:
    tasks = "[{id: a, prompt: x, model: big, temperature: 0.0, system: Be brief.}]"
    (tmp_path / "plan.yaml").write_text(f"backends: {{o: {{kind: openai}}}}\ntasks: {tasks}")
    run_id = plait(tmp_path, "run", "plan.yaml", "--queue").out.strip()
    shown = plait(tmp_path, "show", run_id, "a").out
    assert "settings  model big, temperature 0.0\nsystem    Be brief.\n" in shown


def test_a_changed_condition_is_reported_by_a_resume_of_the_stored_plan(tmp_path: Path) -> None:
    plan = make(tmp_path, TASKS, data="classify", hold="hold")
    with running(tmp_path) as process:
        wait_for_call(tmp_path, "wait")
        process.kill()
    (tmp_path / "go").touch()
    plan.write_text(plan.read_text().replace("!= ''", "== 'x'"))
    done = plait(tmp_path, "resume", "last")
    assert "the plan file has changed since this run was stored; a resume" in done.err
    assert calls(tmp_path)[-1] == "later held: wait"
