"""What a resume says of a plan file that was edited since its run was stored."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.plans.logged import make
from tests.support.processes.command import plait_here

PLAN = """
backends: {say: {kind: function, call: "functions.py:say"}}
tasks: [{id: code, prompt: one, role: coder}, {id: other, prompt: "{{ code.x }}", depends_on: code}]
follow_ups: [{after: coder, steps: [{role: reviewer, prompt: "{{ work }}"}]}]
"""


def test_a_resume_says_that_an_edited_plan_goes_unheeded(tmp_path: Path) -> None:
    plan = make(tmp_path, "")
    plan.write_text(PLAN)
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    said = "the plan file has changed since this run was stored; a resume runs the stored plan (--backends FILE"
    for text in (PLAN, PLAN.replace("prompt: one", "prompt: two"), PLAN.replace("tasks:", "tsks:")):
        plan.write_text(text)
        for words in (["--dry-run"], ["-q"]):
            done = plait_here(tmp_path, "resume", "last", "--retry-failed", *words)
            lines = [line for line in done.err.splitlines() if "the plan file" in line]
            assert [line.startswith(said) for line in lines] == ([] if text == PLAN else [True])


def test_the_only_backend_beside_commands_is_the_default(tmp_path: Path) -> None:
    plan = make(tmp_path, "")
    plan.write_text("""
backends: {tell: {kind: function, call: "functions.py:say"}, command: {kind: command}}
tasks: [{id: a, prompt: a}, {id: b, run: ["false"]}]
""")
    shown = json.loads(plait_here(tmp_path, "check", "plan.yaml", "--json").out)["backends"]
    assert {name: backend["tasks"] for name, backend in shown.items()} == {"tell": 1, "command": 1}
