"""`plait check --run RUN`: the commands that checked the answers of a run, played again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.runner.cli.command_line import EXIT_CODES
from tests.support.processes.command import plait_here

PLAN = """
backends: {me: {kind: function, call: "me.py:say"}}
defaults: {backend: me}
tasks:
  - {id: there, prompt: hi, check: {run: [test, -e, there.txt]}}
  - {id: says, prompt: hi, check: {run: [grep, hi]}}
  - {id: bare, prompt: hi, check: {passes: "{{ answer }} == 'hi'"}}
"""


@pytest.fixture(autouse=True)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("me.py").write_text("def say(prompt): return prompt")
    Path("plan.yaml").write_text(PLAN)
    Path("there.txt").touch()
    assert plait_here(Path(), "run", "plan.yaml", "-q").code == 0


def test_what_no_longer_passes_is_said() -> None:
    both = plait_here(Path(), "check", "--run", "last")
    assert (both.code, both.out.splitlines()[-1]) == (0, "2 checks pass")
    Path("there.txt").unlink()
    one = plait_here(Path(), "check", "--run", "last")
    assert (one.code, one.out.splitlines()) == (
        1,
        [
            "fails   there  test -e there.txt: test ended with exit code 1",
            "passes  says  grep hi",
            "1 of 2 checks no longer passes",
        ],
    )
    told = json.loads(plait_here(Path(), "check", "--run", "last", "--json").out)
    assert (told["failed"], [each["passes"] for each in told["checks"]]) == (1, [False, True])
    assert told["checks"][1]["output"] == "hi"
    assert "(`check --run`)" in EXIT_CODES[one.code]


def test_a_command_that_the_plan_file_no_longer_has_is_not_run() -> None:
    Path("plan.yaml").write_text(PLAN.replace("grep, hi", "grep, ho"))
    refused = plait_here(Path(), "check", "--run", "last")
    assert refused.code == 2
    assert "is taken from a plan file, not from the store alone" in refused.err


def test_a_run_without_such_checks() -> None:
    Path("bare.yaml").write_text("tasks: [{id: a, run: [echo, a]}]")
    assert plait_here(Path(), "run", "bare.yaml", "-q").code == 0
    told = plait_here(Path(), "check", "--run", "last")
    assert (told.code, told.out.split()[:3]) == (0, ["no", "completed", "task"])
