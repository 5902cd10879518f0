"""`plait run --limit`: the first rows of each list as a run of its own, whose answers the whole run takes over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.processes.command import plait_here

FUNCTIONS = """
def work(prompt):
    with open("calls", "a") as file:
        file.write(prompt + "\\n")
    return f"<{prompt}>"

def listed(prompt):
    return ["x", "y", "z"]
"""
PLAN = """
inputs:
  rows: {rows: rows.csv}
  words: [one, two, three]
backends:
  work: {kind: function, call: "functions.py:work"}
  listed: {kind: function, call: "functions.py:listed"}
defaults: {backend: work}
tasks:
  - {id: read, for_each: rows, prompt: "{{ item.text }}"}
  - {id: all, depends_on: read, prompt: "{{ read }} {{ rows }} {{ words }}"}
  - {id: find, backend: listed}
  - {id: part, for_each: find, prompt: "part {{ item }}"}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "plan.yaml").write_text(PLAN.replace("backend: listed", 'backend: listed, prompt: ""'))
    (tmp_path / "rows.csv").write_text("text\na\nb\nc\nd\n")
    return tmp_path


def calls(folder: Path) -> list[str]:
    made = (folder / "calls").read_text().splitlines()
    (folder / "calls").unlink()
    return sorted(made)


def test_a_pilot_goes_over_the_first_rows_and_the_whole_run_takes_its_answers_over(folder: Path) -> None:
    done = plait_here(folder, "run", "plan.yaml", "--limit", "2")
    assert done.code == 0, done.err
    said = "pilot: 2 of the 4 rows of rows, the first 2 elements of each list that a task answers; then "
    assert said in done.err
    assert "run plan.yaml --like last takes these answers over into the whole run" in done.err
    summary = """['<a>', '<b>'] [{'text': 'a'}, {'text': 'b'}] ['one', 'two', 'three']"""
    assert calls(folder) == sorted([_as_prompt(summary), "a", "b", "part x", "part y"])

    whole = plait_here(folder, "run", "plan.yaml", "--like", "last")
    assert whole.code == 0, whole.err
    assert [call for call in calls(folder) if len(call) < 10] == ["c", "d", "part z"]


def _as_prompt(values: str) -> str:
    return values.replace("'", '"')


def test_a_stopped_pilot_is_resumed_as_a_pilot(folder: Path) -> None:
    queued = plait_here(folder, "run", "plan.yaml", "--limit", "1", "--queue")
    assert queued.code == 0, queued.err
    (folder / "rows.csv").unlink()  # the store alone is needed
    assert plait_here(folder, "resume", queued.out.strip()).code == 0
    assert [call for call in calls(folder) if len(call) < 10] == ["a", "part x"]


def test_the_plan_of_a_pilot_has_changed_if_it_was_edited_alone(folder: Path) -> None:
    note = "the plan file has changed since this run was stored; a resume runs the stored plan"
    same, edited = (plait_here(folder, "run", "plan.yaml", "--limit", "1", "--queue").out.strip() for _ in range(2))
    assert note not in plait_here(folder, "resume", same).err
    (folder / "plan.yaml").write_text((folder / "plan.yaml").read_text().replace("part {{", "piece {{"))
    done = plait_here(folder, "resume", edited)
    assert done.code == 0
    assert note in done.err


def test_every_row_is_checked_although_the_pilot_takes_the_first(folder: Path) -> None:
    lines = [json.dumps({"text": "a"}), json.dumps({"text": "b", "more": "c"})]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    plan = 'inputs: {rows: {rows: rows.jsonl}}\nbackends: {f: {kind: function, call: "functions.py:work"}}\n'
    (folder / "plan.yaml").write_text(plan + 'tasks: [{id: a, for_each: rows, prompt: "{{ item.text }}"}]')
    assert plait_here(folder, "run", "plan.yaml", "--limit", "1").code == 0
    (folder / "rows.jsonl").write_text("\n".join([*lines, "{"]))
    wrong = plait_here(folder, "run", "plan.yaml", "--limit", "1")
    assert wrong.code == 2
    assert "rows.jsonl:3" in wrong.err


def test_a_plan_without_longer_lists_is_told_to_be_whole(folder: Path) -> None:
    plan = '{backends: {f: {kind: function, call: "functions.py:work"}}, tasks: [{id: a, prompt: a}]}'
    (folder / "plan.yaml").write_text(plan)
    done = plait_here(folder, "run", "plan.yaml", "--limit", "5")
    assert "pilot: no list of the plan has more than 5 rows, so this is the whole run" in done.err
    assert plait_here(folder, "run", "--goal", "g", "--limit", "5").code == 2
    assert plait_here(folder, "run", "plan.yaml", "--limit", "0").code == 2
