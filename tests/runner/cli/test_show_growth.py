"""The command over runs that grow: their graph, their counts, and what is seen while they grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait import DAG, ParallelRunner, RunStatus, Task, TaskStatus, events
from plait.dialogue import Question
from plait.runner.cli.run_report import Progress
from plait.runner.domain.asked_question import Asking, Way
from plait.runner.engine.live_run import state_of
from plait.runner.state.run_state import RunState
from plait.runner.views.event_sentences import event_line
from tests.support.fakes import Talker
from tests.support.growth import listed, plan, spec, talker
from tests.support.processes.command import plait_here

PLAN = """
name: grows
backends: {main: {kind: function, call: "work.py:answer"}}
tasks:
  - {id: plan, prompt: plan, output: tasks}
  - {id: list, prompt: list}
  - {id: each, prompt: "each {{ item }}", for_each: list}
"""
WORK = """
async def answer(prompt):
    if prompt == "plan":
        return {"tasks": [{"id": "a", "prompt": "a"}, {"id": "b", "prompt": "b {{ a }}", "depends_on": ["a", "plan"]}]}
    return ["x", "y"] if prompt == "list" else prompt.upper()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grown")
    (folder / "plan.yaml").write_text(PLAN)
    (folder / "work.py").write_text(WORK)
    return folder


def test_a_plan_grows_and_its_last_tasks_are_what_it_comes_to(folder: Path) -> None:
    done = plait_here(folder, "run", "plan.yaml")
    assert done.code == 0, done.err
    assert done.out == '== each ==\n["EACH X","EACH Y"]\n== b ==\nB A\n'
    assert "2 tasks added by plan: a, b\n" in done.err
    assert "list completed" in done.err
    assert "2 tasks added by each: each.1, each.2\n" in done.err
    assert "7 of 7 tasks completed" in done.err
    named = [line.partition(": ")[2] for line in done.err.splitlines() if " added by " in line]
    logged = [
        line.partition(" added: ")[2] for line in plait_here(folder, "log", "last").out.splitlines() if " added" in line
    ]
    assert named and logged == named


def test_a_plan_that_a_task_made_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(PLAN)
    (tmp_path / "work.py").write_text(WORK.replace('["a", "plan"]', '["a"]'))
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert (done.code, done.out) == (0, '== each ==\n["EACH X","EACH Y"]\n== b ==\nB A\n')
    assert plait_here(tmp_path, "resume", "last", "-q").out == done.out


def test_runs_and_show_count_what_was_added(folder: Path) -> None:
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    (run, *_) = plait_here(folder, "runs", "--json").value
    assert (run["done"], run["total"]) == (7, 7)
    shown = plait_here(folder, "show", "last").out
    assert "7 of 7 tasks completed\n" in shown
    table = shown.partition("TASK")[2].splitlines()
    by = {line.split()[0]: line.split()[-1] for line in table[1:] if line}
    assert table[0].endswith("  ADDED BY")
    assert (by["a"], by["each.1"]) == ("plan", "each")
    assert not {"plan", "each"} & {by["list"], by["plan"], by["each"]}
    assert "added by  plan\n" in plait_here(folder, "show", "last", "a").out
    assert "added by" not in plait_here(folder, "show", "last", "plan").out


def test_the_graph_of_a_run_shows_what_was_added_by_whom(folder: Path) -> None:
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 0
    drawn = plait_here(folder, "graph", "last").out
    assert "a<br/>completed" in drawn
    assert drawn.count("added by plan") == 2
    assert drawn.count("added by each") == 2
    assert "class t3,t4,t5,t6 added\n" in drawn.replace("added", "added", 1)
    value = plait_here(folder, "graph", "last", "--json").value
    by = {task["task_id"]: task["added_by"] for task in value["tasks"]}
    assert by == {
        "plan": None,
        "list": None,
        "each": None,
        "a": "plan",
        "b": "plan",
        "each.1": "each",
        "each.2": "each",
    }
    assert plait_here(folder, "graph", "last", "-o", "run.html").code == 0
    page = (folder / "run.html").read_text()
    assert page.count('stroke-dasharray="2 2"') == 4
    assert "a: completed, 1 attempt, added by plan</title>" in page
    assert "class" not in plait_here(folder, "graph", "plan.yaml").out


async def shown(dag: DAG, backend: Talker) -> tuple[Progress, list[str], list[int]]:
    """A run's progress, its lines, and how many tasks there were at each event."""
    progress = Progress(RunState(dag.copy()), lambda: 0.0)
    lines: list[str] = []
    sizes: list[int] = []
    async with ParallelRunner(backend, concurrency=1).start(dag) as run:
        async for event in run.events():
            progress.state = state_of(run) or progress.state
            progress.handle(event)
            lines.append(event_line(event))
            sizes.append(len(progress.dag))
        assert (await run.result()).status is RunStatus.COMPLETED
    return progress, lines, sizes


async def test_progress_follows_a_run_that_grows() -> None:
    dag = DAG([Task("l", "l"), Task("m", "m", for_each="l"), Task("p", "p", ["m"], adds_tasks=True)])
    backend = talker({"l": listed([1, 2]), "p": plan(*(spec(f"x{n}") for n in range(7)))})
    progress, lines, sizes = await shown(dag, backend)
    assert (progress.counts, len(progress.dag), len(dag)) == ({TaskStatus.COMPLETED: 12}, 12, 3)
    assert progress.counts[TaskStatus.PENDING] == 0
    assert sizes == sorted(sizes)
    assert "7 tasks added by p: x0, x1, x2, x3, x4, x5, x6" in lines
    assert progress.dag.dependencies[1] == (0, 3, 4)


def test_a_question_is_shown_until_it_is_answered() -> None:
    at, state = "2026-01-01T00:00:00.000Z", RunState(DAG([Task("a", "a")]))
    progress = Progress(state, lambda: 0.0)
    progress.handle(state.start(0, at, "x"))
    progress.handle(state.wait_for_answer(0, at, Asking(Question("how?"), Way.CALL), 0.0))
    assert (progress.questions, progress.counts[TaskStatus.WAITING_INPUT]) == ({"a": "how?"}, 1)
    progress.handle(state.answer(0, at, "so", "person"))
    assert (progress.questions, progress.counts[TaskStatus.PENDING]) == ({}, 1)
    assert event_line(events.TaskAnswered(at, "a", 1)) == "a is to run again"
    assert event_line(events.TasksAdded("2026-01-01T00:00:00.000Z", (events.NewTask("n", "n"),))) == "1 task added: n"
    assert not event_line(events.PolicyDecided("2026-01-01T00:00:00.000Z", "{}"))
