"""What a resume says of a plan file that was edited since its run was stored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.plans.logged import make
from tests.support.processes.command import plait_here

EDITED = """
name: trial
inputs: {names: [x, y]}
backends:
  say: {kind: function, call: "functions.py:say"}
  far: {kind: openai, model: m, base_url: "http://127.0.0.1:9/v1"}
defaults: {backend: say}
tasks:
  - {id: a, prompt: one}
  - {id: b, prompt: knock, backend: far, depends_on: a, retry: {attempts: 1}}
  - {id: c, prompt: "{{ item }}", for_each: names}
"""
EDITS = {
    "nothing that counts": (
        {'call: "functions.py:say': 'call: "functions.py:hold', "name: trial": "name: other"},
        None,
    ),
    "a backend": ({"127.0.0.1:9": "127.0.0.1:8", "model: m": "model: n"}, "backends.far.model, backends.far.base_url"),
    "tasks": (
        {"prompt: one": "prompt: two", "depends_on: a, ": "timeout: 5, ", "id: c": "id: d"},
        "tasks.a.prompt, tasks.b.depends_on, tasks.b.timeout, tasks.d.1, tasks.d.2, 2 more",
    ),
    "the default": ({"defaults: {backend: say}": "defaults: {backend: far}"}, "defaults.backend"),
    "follow-ups": ({"tasks:": "follow_ups: [{after: coder}]\ntasks:"}, "follow_ups"),
    "a mistake": ({"tasks:": "tsks:"}, "the plan file has mistakes by now (`plait check` lists them); a resume runs"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_resume_says_what_of_an_edited_plan_goes_unheeded(tmp_path: Path, edit: str) -> None:
    edits, said = EDITS[edit]
    plan = make(tmp_path, "")
    plan.write_text(EDITED)
    assert plait_here(tmp_path, "run", "plan.yaml", "--set", "names=[p, q]", OPENAI_API_KEY="k").code == 1
    for words in (["--dry-run"], ["-q"]):
        plan.write_text(EDITED)
        before = plait_here(tmp_path, "resume", "last", "--retry-failed", *words)
        text = EDITED
        for old, new in edits.items():
            assert old in text
            text = text.replace(old, new)
        plan.write_text(text)
        after = plait_here(tmp_path, "resume", "last", "--retry-failed", *words)
        assert (before.code, "the plan file" in before.err) == (after.code, False)
        lines = [line for line in after.err.splitlines() if "the plan file" in line]
        if edit == "a mistake":
            assert (len(lines), said is not None and said in lines[0]) == (1, True)
        else:
            whole = f"the plan file has changed since this run was stored ({said}); a resume runs the stored plan"
            if edit == "a backend":
                whole += "; --backends FILE takes backends from a file"
            assert lines == ([] if said is None else [whole])


def test_the_only_backend_beside_commands_is_the_default(tmp_path: Path) -> None:
    text = """
backends: {say: {kind: function, call: "functions.py:say"}, command: {kind: command}}
tasks: [{id: a, prompt: a}, {id: b, run: ["false"]}]
"""
    plan = make(tmp_path, "")
    plan.write_text(text)
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    plan.write_text(text.replace("say: {", "tell: {"))
    shown = json.loads(plait_here(tmp_path, "check", "plan.yaml", "--json").out)["backends"]
    assert {name: backend["tasks"] for name, backend in shown.items()} == {"tell": 1, "command": 1}
    again = plait_here(tmp_path, "resume", "last", "--retry-failed", "--dry-run")
    assert "(defaults.backend)" in again.err


def test_follow_ups_that_a_run_added_are_no_change_of_the_file(tmp_path: Path) -> None:
    plan = make(tmp_path, "")
    plan.write_text("""
backends: {say: {kind: function, call: "functions.py:say"}}
tasks: [{id: code, prompt: one, role: coder}, {id: other, prompt: "{{ code.x }}", depends_on: code}]
follow_ups: [{after: coder, steps: [{role: reviewer, prompt: "{{ work }}"}]}]
""")
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    done = plait_here(tmp_path, "resume", "last", "--retry-failed", "--dry-run")
    assert ("code.reviewer" in done.out, "the plan file" in done.err) == (True, False), done.err
