"""`make crashtest`: real kills at every boundary, and a command that can say no."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from plait.failpoints import FAILPOINTS
from tests.faults.crashtest.certificate import as_lines, as_value
from tests.faults.crashtest.fork_server import get_ready
from tests.faults.crashtest.mutants import MUTANTS
from tests.faults.crashtest.tally import Tally
from tests.support.processes import warm
from tests.support.processes.command import Done, environment
from tests.support.processes.warm import Warm

pytestmark = pytest.mark.slow
CRASHTEST = (sys.executable, "-W", "error", "-m", "tests.faults.crashtest")

KILLS = 40
"""As on the pages. `python -m tests.faults.campaigns` lands many more."""
PLAN = """
name: yours
concurrency: 3
inputs: {topic: tea, chapters: [leaf, cup]}
tasks:
  - {id: list, prompt: "Names of {{ topic }}"}
  - {id: one, prompt: "About {{ list }}", depends_on: [list], failure_mode: soft}
  - {id: two, prompt: "More about {{ list }}", depends_on: [list], retry: {attempts: 2, base_delay: 30}}
  - {id: each-part, prompt: "{{ item }} of {{ list }}", for_each: chapters, depends_on: [list]}
  - id: book
    prompt: "{{ inputs.topic }} {{ two }} {{ results['each-part'] | tojson }}"
    depends_on: [one, two, each-part]
    at_most_once: true
  - {id: end, prompt: "Shorter.", continues: book}
"""


def crashtest(folder: Path, *words: str) -> Done:
    """The command in a process of its own, given more time than others."""
    done = warm.run([*CRASHTEST, *words], cwd=folder, env=environment(), timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


def program(folder: Path, code: str, *words: str) -> Done:
    """The command, in a program that changes plait first."""
    done = warm.run([sys.executable, "-c", code, *words], cwd=folder, env=environment(), timeout=120)
    return Done(done.returncode, done.stdout, done.stderr)


def test_kills_at_every_boundary_lose_nothing(tmp_path: Path) -> None:
    done = program(tmp_path, TWO_BUGS, "--kills", str(KILLS), "--json")
    assert done.code == 0, done.out + done.err
    value = done.value
    assert value["ok"] is True
    assert KILLS <= value["kills_landed"] <= value["kills_scheduled"]
    assert value["kills_landed"] == sum(value["boundaries"].values())
    assert set(value["boundaries"]) == set(FAILPOINTS)
    assert all(value["boundaries"].values())
    assert value["never_hit"] == value["violations"] == []
    assert value["results_acknowledged"] > KILLS
    assert value["acknowledged_results_lost"] == value["completed_tasks_executed_again"] == 0
    assert value["extra_attempts_per_task_in_flight"] == 1
    assert value["failure_rate_below"] == pytest.approx(3 / value["kills_landed"])
    assert value["planted_bugs"] == {bug.name: True for bug in MUTANTS[:2]}
    assert list(tmp_path.iterdir()) == [], "the folder is left as it was"


TWO_BUGS = """
import sys
from tests.faults.crashtest.command import main
from tests.faults.crashtest import campaign
campaign.MUTANTS = campaign.MUTANTS[:2]
main()
"""
"""`make crashtest` has all of the planted bugs caught, which takes as long as fifty kills."""


def test_a_few_kills_at_every_boundary_certify_a_plan_without_its_backends_and_its_store(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    done = program(tmp_path, TWO_BUGS, "plan.yaml", "--kills", "5", "--set", "topic=rice")
    assert done.code == 0, done.out + done.err
    lines = done.out.splitlines()
    assert lines[0].startswith("passed in ")
    assert f"boundaries            {len(FAILPOINTS)} of {len(FAILPOINTS)} covered" in done.out
    assert "planted bugs          2 of 2 caught" in done.out
    assert re.search(r"all held; failure rate below [5-9]\.", done.out), "so few kills show little, and it says so"
    assert ", of which 0 lost" in done.out
    assert "0 executed again" in done.out
    assert done.err == f"plait: landing 5 kills at {len(FAILPOINTS)} boundaries, in {tmp_path}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_who_is_told_to_leave_leaves_nothing_behind(tmp_path: Path, signum: signal.Signals) -> None:
    with Warm([*CRASHTEST, "--kills", "100000"], cwd=tmp_path, env=environment()) as running:
        while len(list(tmp_path.glob(".plait-crashtest-*/worker-*"))) < (os.cpu_count() or 1):
            assert running.poll() is None
            time.sleep(0.01)
        running.send_signal(signum)
        assert running.wait(timeout=60) == 6
    assert list(tmp_path.iterdir()) == []


INTERRUPTED_IN_A_FORK = """
import os, signal, sys
from tests.faults.crashtest.command import main
signum = int(sys.argv.pop())
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signum))
main()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_arrives_during_a_fork_ends_the_command(tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IN_A_FORK, "--kills", "100000", str(int(signum))]
    done = warm.run(command, cwd=tmp_path, env=environment(), timeout=60)
    assert done.returncode == 6, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_was_left_out_is_no_success() -> None:
    tally = Tally(landed=Counter(dict.fromkeys(FAILPOINTS, 1)), planted={"a bug": True})
    assert tally.ok
    assert tally.bound == pytest.approx(3 / len(FAILPOINTS))
    for failed in (
        replace(tally, landed=tally.landed - Counter(["events.published"])),
        replace(tally, planted={"a bug": False}),
        replace(tally, violations=["I1: lost"]),
    ):
        assert not failed.ok
        assert as_value(failed)["ok"] is False
    lines = as_lines(replace(tally, landed=tally.landed - Counter(["events.published"]), planted={"a bug": False}))
    assert any(line.endswith("14 of 15 covered; never hit: events.published") for line in lines)
    assert any(line.endswith("0 of 1 caught; missed: a bug") for line in lines)


BROKEN = """
import sys
from tests.faults.crashtest.command import main
from tests.faults.crashtest import campaign
next(bug for bug in campaign.MUTANTS if bug.name == "completed tasks queued again").plant()
campaign.MUTANTS = ()
main()
"""
"""The command of a plait that queues completed tasks again. The store refuses their starts, and no run ends."""


def test_a_violation_comes_with_the_command_that_shows_it_again(tmp_path: Path) -> None:
    found = program(tmp_path, BROKEN, "--kills", "10")
    assert found.code == 1
    violations = [line for line in found.err.splitlines() if line.startswith("I5: the run is told")]
    # Which moment a kill meets depends on timing, so that a command may need more tries than it makes.
    for violation in violations[:10]:
        what, _, command = violation.partition("; again: ")
        assert "stored as running, not completed" in what
        assert command.startswith("python -m tests.faults.crashtest --store ")
        again = command.split()[-2:]
        assert again[0] == "--case"
        repeated = program(tmp_path, BROKEN, *again)
        if repeated.code == 1:
            break
    assert repeated.code == 1
    assert repeated.out.endswith(" kills landed\n")
    assert "FAILED" in repeated.out
    assert "I5: " in repeated.err
    as_json = next(
        (done for _ in range(10) if (done := program(tmp_path, BROKEN, *again, "--json")).code == 1), repeated
    )
    assert as_json.value["ok"] is False
    assert as_json.value["violations"]
    fine = crashtest(tmp_path, *again)
    assert (fine.code, fine.err) == (0, "")
    assert "all invariants held" in fine.out


NO_CASES = """
import sys
from tests.faults.crashtest.command import main
from tests.faults.crashtest import cases as case
case.use_of = lambda task_id, part: "{{ " + task_id + " }}"
main()
"""


def test_a_case_that_cannot_be_made_is_no_broken_invariant(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    for words in ([], ["--case", "kills-0"]):
        done = program(tmp_path, NO_CASES, "plan.yaml", *words)
        assert (done.code, done.out) == (2, "")
        assert "task 'book': {{ each-part }} is read as a subtraction" in done.err
        assert "Traceback" not in done.err
        assert [path.name for path in tmp_path.iterdir()] == ["plan.yaml"]


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["nowhere.yaml"], 2, "nowhere.yaml: cannot read the plan: No such file or directory; check the path"),
        (["--case", "kills-1-lunch:3"], 2, "'lunch:3' is no failpoint with a number, as in"),
        (["--case", "kisses-1"], 2, "'kisses-1' names no case: a case is kills, crasher, unsure, rival, rot"),
        (["--set", "a=b"], 2, "--set is for plans; random cases have no inputs"),
        (["--kills", "0"], 2, "'--kills'"),
        (["--store", "postgresql://localhost/x"], 2, "make SQLite files"),
        (["--store", "/proc/none/x.db"], 3, "No such file or directory; name another place with --store"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path: Path, words: list[str], code: int, message: str) -> None:
    done = crashtest(tmp_path, *words)
    assert done.code == code
    assert message in done.err
    assert done.out == ""


MODEL = "backends: {team: {kind: openai, model: m}}\ndefaults: {backend: team}\n"
GOAL = f"{MODEL}orchestrate: {{goal: Know a and b}}\n"
STEPS = f"{MODEL}workflow:\n  - {{name: first, prompt: Go.}}\n"


@pytest.mark.parametrize("plan", [GOAL, STEPS])
def test_a_crash_test_needs_tasks(tmp_path: Path, plan: str) -> None:
    (tmp_path / "plan.yaml").write_text(plan)
    done = crashtest(tmp_path, "plan.yaml", "--kills", "1")
    assert (done.code, done.out) == (2, "")
    assert "crash tests are for plans with `tasks`" in done.err


def test_a_process_with_threads_is_not_forked() -> None:
    from threading import Event, Thread

    over = Event()
    thread = Thread(target=over.wait)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match="has threads already; run them in a process of their own"):
            get_ready()
    finally:
        over.set()
        thread.join()
