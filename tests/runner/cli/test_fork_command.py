"""`plait fork` and `plait try`: from a stored run, with edits from files, in a run of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes.command import plait_here

FUNCTIONS = """
from pathlib import Path

def work(prompt):
    if Path("broken").exists() and prompt.startswith("c"):
        raise ValueError("broken")
    with open("calls", "a") as file:
        file.write(prompt + "\\n")
    return f"<{prompt}>"

def loud(prompt):
    return prompt.upper()
"""
PLAN = """
inputs:
  topic: rivers
  rows: [1, 2]
backends:
  work: {kind: function, call: "functions.py:work"}
  loud: {kind: function, call: "functions.py:loud"}
defaults: {backend: work}
tasks:
  - {id: a, prompt: "a {{ topic }}"}
  - {id: b, prompt: "b {{ a }}", depends_on: a}
  - {id: c, prompt: "c {{ b }}", depends_on: b}
  - {id: mail, prompt: "mail {{ c }}", depends_on: c, at_most_once: true}
  - {id: part, prompt: "do {{ item }}", for_each: rows}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "plan.yaml").write_text(PLAN)
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    (tmp_path / "calls").unlink()
    return tmp_path


def calls(folder: Path) -> list[str]:
    path = folder / "calls"
    made = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return made


def first(folder: Path) -> str:
    return str(plait_here(folder, "runs", "--json").value[-1]["run_id"])


def test_a_fork_takes_edits_from_files_and_names_its_parent(folder: Path) -> None:
    (folder / "b.txt").write_text("B {{ a }}\n")
    done = plait_here(folder, "fork", "last", "--from", "b", "--prompt", "b=b.txt", "--again")
    assert done.code == 0, done.err
    assert calls(folder) == ["B <a rivers>", "c <B <a rivers>>", "mail <c <B <a rivers>>>"]
    assert f"like {first(folder)} of 2" in done.err
    shown = plait_here(folder, "show", "last").out
    assert f"parent    {first(folder)} (fork from b)" in shown
    assert "reused    3 results of the parent, at no cost" in shown
    assert f"reused    from {first(folder)}, at no cost" in plait_here(folder, "show", "last", "a").out


def test_a_fork_with_inputs_and_results(folder: Path) -> None:
    (folder / "c.txt").write_text("mine")
    run = first(folder)
    assert plait_here(folder, "fork", run, "--from", "a", "--set", "topic=lakes", "--again", "-q").code == 0
    assert calls(folder)[0] == "a lakes"
    assert plait_here(folder, "fork", run, "--from", "mail", "--result", "c=c.txt", "--again", "-q").code == 0
    assert calls(folder) == ["mail mine"]


def test_a_dry_run_of_a_fork_and_tasks_with_effects(folder: Path) -> None:
    out = plait_here(folder, "fork", "last", "--from", "b", "--dry-run").out.splitlines()
    assert "run      b: asked to run again (fresh)" in out
    assert "depends  c: runs unless b gives the same answer" in out
    assert "run      mail: has effects: run again only with --again" in out
    assert out[-1].endswith(": 3 reused, 2 run, 1 run unless the tasks before give the same answers")
    done = plait_here(folder, "fork", "last", "--from", "b")
    assert (done.code, done.err.count("\n"), calls(folder)) == (2, 1, [])
    assert "mail completed in 2" in done.err


def test_a_fork_is_resumed_like_any_run(folder: Path) -> None:
    (folder / "broken").touch()
    assert plait_here(folder, "fork", "last", "--from", "c", "--again", "-q").code == 1
    assert calls(folder) == []
    (folder / "broken").unlink()
    assert plait_here(folder, "resume", "last", "--retry-failed", "-q").code == 0
    assert calls(folder) == ["c <b <a rivers>>", "mail <c <b <a rivers>>>"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "bb"], "no task 'bb'; did you mean 'b'"),
        (["--from", "b", "--prompt", "b"], "is not TASK=FILE"),
        (["--from", "b", "--prompt", "b=gone.txt"], "gone.txt cannot be read"),
        (["--from", "b", "--set", "topics=x"], "no input 'topics'; did you mean 'topic'"),
        (["--from", "part", "--set", "rows=[1]"], "a task for each element of input 'rows'"),
        (["--from", "part", "--set", "rows=x"], "must be like the default"),
    ],
)
def test_edits_that_do_not_fit_are_one_line(folder: Path, words: list[str], message: str) -> None:
    done = plait_here(folder, "fork", "last", *words)
    assert (done.code, done.err.count("\n"), calls(folder)) == (2, 1, [])
    assert message in done.err


def test_a_task_is_tried_and_its_result_printed(folder: Path) -> None:
    run = first(folder)
    before = plait_here(folder, "show", run, "--json").out
    (folder / "p.txt").write_text("shorter {{ b }}\n")
    done = plait_here(folder, "try", run, "c", "--prompt-file", "p.txt", "-q")
    assert (done.code, done.out) == (0, "<shorter <b <a rivers>>>\n")
    assert calls(folder) == ["shorter <b <a rivers>>"]
    assert plait_here(folder, "show", run, "--json").out == before
    tried = plait_here(folder, "runs", "--json").value[0]["run_id"]
    assert f"parent    {run} (tries c)" in plait_here(folder, "show", tried).out


def test_a_try_is_never_last(folder: Path) -> None:
    run = first(folder)
    for _ in range(2):
        assert plait_here(folder, "try", "last", "a", "-q").out == "<a rivers>\n"
    assert calls(folder) == ["a rivers", "a rivers"]
    assert plait_here(folder, "show", "last", "--json").value["run_id"] == run
    assert plait_here(folder, "export", "last", "--to", "all.csv", "--json").value["run_id"] == run
    assert plait_here(folder, "fork", "last", "--from", "c", "--again", "-q").code == 0
    assert calls(folder) == ["c <b <a rivers>>", "mail <c <b <a rivers>>>"]


def test_with_a_plan_last_is_the_last_run_of_that_plan(folder: Path) -> None:
    (folder / "other.yaml").write_text((folder / "plan.yaml").read_text())
    assert plait_here(folder, "run", "other.yaml", "--set", "topic=lakes", "-q").code == 0
    calls(folder)
    assert plait_here(folder, "fork", "last", "--plan", "plan.yaml", "--from", "c", "--again", "-q").code == 0
    assert calls(folder)[0] == "c <b <a rivers>>"
    assert plait_here(folder, "fork", "last", "--plan", "other.yaml", "--from", "c", "--again", "-q").code == 0
    assert calls(folder)[0] == "c <b <a lakes>>"


def test_a_task_is_tried_on_another_backend(folder: Path) -> None:
    done = plait_here(folder, "try", "last", "part.2", "--backend", "loud", "-q")
    assert (done.code, done.out, calls(folder)) == (0, "DO 2\n", [])
    tried = plait_here(folder, "runs", "--json").value[0]["run_id"]
    assert plait_here(folder, "show", tried, "part.2").out.count("loud") == 2
    done = plait_here(folder, "try", "last", "part.2", "--backend", "louder")
    assert (done.code, "Traceback" in done.err) == (2, False)


def test_a_task_with_effects_is_tried_only_with_again(folder: Path) -> None:
    done = plait_here(folder, "try", "last", "mail")
    assert (done.code, done.err.count("\n"), calls(folder)) == (2, 1, [])
    assert plait_here(folder, "try", "last", "mail", "--again", "-q").code == 0
    assert calls(folder) == ["mail <c <b <a rivers>>>"]


def test_tasks_behind_commands_conditions_joins_and_loops_are_tried(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("""
tasks:
  - {id: a, run: [echo, a]}
  - {id: skips, run: [echo, no], when: "{{ a.stdout }} == 'b'", depends_on: a}
  - {id: bad, run: [sh, -c, exit 3]}
  - {id: any, run: [cat], prompt: "{{ a.stdout }}{{ bad.stdout }}", depends_on: [a, bad], join: done}
  - {id: blocked, run: [cat], prompt: "{{ bad.stdout }}", depends_on: bad}
  - {id: loop, loop: {tasks: [{id: b, run: [echo, b]}], until: "{{ b.stdout }} != ''"}, depends_on: skips}
  - {id: end, run: [cat], prompt: "{{ loop.b.stdout }}{{ skips.stdout }}", depends_on: loop}
""")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
    for task, word in (("any", "a"), ("end", "b")):
        done = plait_here(tmp_path, "try", "last", task, "--again", "-q")
        assert (done.code, done.out) == (0, f'{{"code":0,"stdout":"{word}\\n","stderr":""}}\n'), done.err
    done = plait_here(tmp_path, "try", "last", "blocked")
    assert (done.code, "task 'bad' of run" in done.err) == (2, True)


def test_who_tries_a_task_that_stands_for_others_is_told_one_of_them(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text("""
inputs: {rows: [1]}
tasks:
  - {id: stop, run: [sh, -c, exit 3]}
  - id: fix
    for_each: rows
    loop: {tasks: [{id: test, run: [echo, done], codes: any}], until: "{{ test.code }} == 0"}
  - {id: late, loop: {tasks: [{id: test, run: [echo, done]}], until: "{{ test.stdout }} != ''"}, depends_on: stop}
""")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
    for task, remedy in (("fix", "try one of them: fix.1"), ("fix.1", "try one of them: fix.1.1.test")):
        assert plait_here(tmp_path, "try", "last", task).err.endswith(f"{remedy}\n")
    assert plait_here(tmp_path, "try", "last", "late").err.endswith("try one of them, once it has begun\n")
