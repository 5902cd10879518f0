"""`plait resume --dry-run`, its receipt, `plait answer`, and the exit codes of what waits or was taken over."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.agents.logs import wait_for
from tests.support.plans.logged import make
from tests.support.processes import warm
from tests.support.processes.command import PLAIT, environment, plait, plait_here
from tests.support.processes.warm import Warm

WORK = """
import os, signal
from pathlib import Path

async def pay(prompt):
    if not Path("paid").exists():
        Path("paid").write_text(prompt)
        os.kill(os.getpid(), signal.SIGKILL)
    return "paid again"

async def note(prompt):
    return prompt

async def bad(prompt):
    os.kill(os.getpid(), signal.SIGKILL)
"""

PLAN = """
backends:
  pay: {kind: function, call: "work.py:pay"}
  note: {kind: function, call: "work.py:note"}
tasks:
  - {id: before, prompt: twelve, backend: note}
  - {id: pay, prompt: "pay {{ before }}", backend: pay, at_most_once: true, depends_on: before}
  - {id: after, prompt: "done: {{ pay }}", backend: note, depends_on: pay}
"""


def killed(folder: Path, plan: str = PLAN, work: str = WORK) -> None:
    """A run whose process was killed by its own task."""
    (folder / "work.py").write_text(work)
    (folder / "plan.yaml").write_text(plan)
    assert plait(folder, "run", "plan.yaml").code == -signal.SIGKILL


def test_a_killed_task_that_must_not_happen_twice_is_among_the_questions_before_any_resume(tmp_path: Path) -> None:
    killed(tmp_path)
    for words in ((), ("last",)):
        (one,) = plait_here(tmp_path, "answer", *words, "--json").value
        assert (one["task_id"], one["kind"], one["attempt"]) == ("pay", "at_most_once", 1)
        assert "did the attempt take effect?" in one["question"]
    asked = plait_here(tmp_path, "answer").out
    answered = plait_here(tmp_path, *one["command"].replace("TEXT", "receipt").split()[1:])
    assert (answered.code, f"answer    {one['command']}\n" in asked) == (0, True)
    assert plait_here(tmp_path, "answer").out == "nothing waits for a person\n"


def test_a_task_that_must_not_happen_twice_is_asked_about(tmp_path: Path) -> None:
    killed(tmp_path)
    dry = plait_here(tmp_path, "resume", "last", "--dry-run")
    assert (dry.code, [line.split(":")[0] for line in dry.out.splitlines()[:3]]) == (
        0,
        ["keep        before", "ask         pay", "blocked     after"],
    )
    resumed = plait(tmp_path, "resume")
    assert resumed.code == 4
    assert "1 waiting for a person" in resumed.err
    assert "plait answer" in resumed.err
    assert plait_here(tmp_path, "runs", "--json").value[0]["status"] == "waiting_input"
    for words in ((), ("--again", "--done", "x")):
        wrong = plait_here(tmp_path, "answer", "last", "pay", *words)
        assert (wrong.code, "give one of VALUE, --done TEXT, --again and --fail REASON" in wrong.err) == (2, True)
    answered = plait_here(tmp_path, "answer", "last", "pay", "--done", "receipt 7")
    assert (answered.code, "is answered: done" in answered.err) == (0, True)
    again = plait_here(tmp_path, "answer", "last", "pay", "--again")
    assert (again.code, "does not wait for an answer" in again.err) == (2, True)
    assert plait(tmp_path, "resume").out == "done: receipt 7\n"
    assert (tmp_path / "paid").read_text() == "pay twelve"


def test_the_receipt_says_what_may_be_billed_twice(tmp_path: Path) -> None:
    killed(tmp_path, PLAN.replace(", at_most_once: true", ""))
    dry = plait_here(tmp_path, "resume", "--dry-run", "--json").value
    assert [(task_id, task["action"]) for task_id, task in dry["tasks"].items()] == [
        ("before", "keep"),
        ("pay", "start over"),
        ("after", "start"),
    ]
    assert (dry["runs"], dry["possibly_billed_twice"], dry["repeated_input_tokens"]) == (2, 1, 3)
    resumed = plait(tmp_path, "resume")
    assert (resumed.code, "reused 1, ran 2, possibly billed twice 1" in resumed.err) == (0, True)
    over = plait_here(tmp_path, "resume", "last", "--dry-run")
    assert (over.code, "is completed; nothing is left to do" in over.out) == (0, True)


def test_a_person_is_asked_about_a_task_that_kills_its_process_each_time(tmp_path: Path) -> None:
    plan = """
backends:
  bad: {kind: function, call: "work.py:bad"}
  note: {kind: function, call: "work.py:note"}
tasks:
  - {id: bad, prompt: x, backend: bad}
  - {id: good, prompt: fine, backend: note, depends_on: [hold]}
  - {id: hold, prompt: y, backend: note}
"""
    soon = "from plait.runner.recovery import resume\nresume.longest_delay = lambda deaths: 0.3"
    killed(tmp_path, plan, f"{WORK}\n{soon}\n")
    assert [plait(tmp_path, "resume").code for _ in range(9)] == [-signal.SIGKILL] * 9
    (one,) = plait_here(tmp_path, "answer", "--json").value
    assert (one["task_id"], "died 10 times" in one["question"]) == ("bad", True)
    assert plait(tmp_path, "resume").code == 4
    tasks = {task["task_id"]: task for task in plait(tmp_path, "show", "last", "--json").value["tasks"]}
    assert (tasks["bad"]["status"], tasks["good"]["status"]) == ("waiting_input", "completed")
    assert plait(tmp_path, "answer", "last", "bad", "--fail", "it kills").code == 0
    assert plait(tmp_path, "resume").code == 1


def test_an_owner_that_slept_past_its_take_over_leaves_with_its_own_exit_code(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        'backends: {w: {kind: function, call: "slow.py:work"}}\ntasks: [{id: a, prompt: x, backend: w}]\n'
    )
    (tmp_path / "slow.py").write_text(
        "import anyio\nfrom pathlib import Path\n"
        "async def work(prompt):\n    Path('called').touch()\n"
        "    while not Path('go').exists(): await anyio.sleep(0.01)\n    return 'mine'\n"
    )
    owner = Warm([*PLAIT, "run", "plan.yaml"], cwd=tmp_path, env=environment(), stderr=subprocess.PIPE)
    with owner:
        wait_for((tmp_path / "called").exists)
        owner.send_signal(signal.SIGSTOP)
        # As if it had been stopped for longer than its lease: whoever comes then, takes the run over.
        code = (
            "import asyncio, dataclasses, random\n"
            "from plait.events import RunClaimed, RunReleased\n"
            "from plait.persistence import Batch, SQLiteStore\n"
            "async def main():\n"
            "    async with SQLiteStore('.plait/plait.db', mode='existing') as store:\n"
            "        run = (await store.list_runs())[0]\n"
            "        other = dataclasses.replace(run.owner, owner_id='another')\n"
            "        claim = RunClaimed('2026-01-01T00:00:00.000Z', other, 1.0)\n"
            "        await store.write(Batch(run.run_id, run.epoch, run.last_seq + 1, (claim,)))\n"
            "asyncio.run(main())\n"
        )
        warm.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), timeout=60).check_returncode()
        (tmp_path / "go").touch()
        owner.send_signal(signal.SIGCONT)
        said = owner.communicate()[1]
    assert (owner.returncode, "was taken over by another process" in said) == (5, True)
    shown = json.loads(plait_here(tmp_path, "show", "last", "--json").out)
    assert shown["tasks"][0]["status"] == "running"


@pytest.mark.parametrize(("count", "lines"), [(20, 22), (21, 3)])
def test_many_completed_tasks_do_not_hide_what_a_resume_would_do(tmp_path: Path, count: int, lines: int) -> None:
    tasks = "".join(f"  - {{id: t{number}, prompt: x}}\n" for number in range(count))
    make(tmp_path, f"{tasks}  - {{id: last, prompt: knock, backend: shut, retry: {{attempts: 1}}}}\n", shut="fail")
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    dry = plait_here(tmp_path, "resume", "last", "--retry-failed", "--dry-run").out.splitlines()
    assert (len(dry), dry[-2].startswith("start over  last: ")) == (lines, True), dry
    assert dry[0].endswith(f" {count} tasks: completed (--json names them)" if count > 20 else "  t0: completed")
    assert f"{count} keep, 1 start over" in dry[-1]


def test_an_answer_to_a_completed_task_names_the_command_that_goes_on(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text("async def note(prompt):\n    return prompt\n")
    (tmp_path / "plan.yaml").write_text(
        'backends: {note: {kind: function, call: "work.py:note"}}\ntasks: [{id: a, prompt: hello}]\n'
    )
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    refused = plait_here(tmp_path, "answer", "last", "a", "yes")
    (run,) = plait_here(tmp_path, "runs", "--json").value
    assert refused.code == 2
    assert refused.err.endswith(f"to continue its conversation: plait continue {run['run_id']} a MESSAGE\n")
