"""Large graphs are folded by groups of parts; plans of a workflow show all their steps."""

from __future__ import annotations

import re
from pathlib import Path

from plait import DAG, Task, TaskStatus
from plait.runner.drawing.dag_picture import MOST_DRAWN, Look, fold, svg
from tests.support.processes.command import plait_here

MANY = 300


def wide(parts: int) -> DAG:
    """A start, two chained groups, and an end."""
    return DAG(
        [
            Task("start", "start"),
            *(Task(f"a.{n}", "x", depends_on=["start"], item=n) for n in range(1, parts + 1)),
            *(Task(f"b.{n}", "x", depends_on=[f"a.{n}"], item=n, continues=f"a.{n}") for n in range(1, parts + 1)),
            Task("end", "end", depends_on=[f"b.{n}" for n in range(1, parts + 1)]),
        ]
    )


def test_a_small_graph_is_drawn_as_it_is() -> None:
    dag = wide(MOST_DRAWN // 2 - 1)
    assert len(dag) == MOST_DRAWN
    assert fold(dag, {})[0] is dag


def test_the_parts_of_a_group_are_one_task_with_counts() -> None:
    looks = {f"a.{n}": Look(TaskStatus.COMPLETED) for n in range(1, MANY)} | {f"a.{MANY}": Look(TaskStatus.FAILED)}
    looks["start"] = Look(TaskStatus.COMPLETED, "1.0s")
    dag, folded = fold(wide(MANY), looks)
    assert {task.id: tuple(task.upstream) for task in dag} == {
        "start": (),
        "a": ("start",),
        "b": ("a",),
        "end": ("b",),
    }
    assert (folded["a"].status, folded["a"].note) == (TaskStatus.FAILED, "300 parts · 299 completed, 1 failed")
    assert folded["start"] == looks["start"]
    height = re.search(r'height="(\d+)"', svg(dag, folded))
    assert height is not None
    assert int(height[1]) < 400


def test_a_group_is_folded_with_its_whole() -> None:
    parts = [Task(f"m.{n}", "x", depends_on=["l"], item=n) for n in range(1, MANY)]
    dag = DAG(
        [Task("l", "l"), Task("m", "m", for_each="l"), *parts, Task("z", "z", depends_on=["m"])],
        gathered={"m": [part.id for part in parts]},
    )
    smaller, _ = fold(dag, {})
    assert [(task.id, tuple(task.upstream)) for task in smaller] == [("l", ()), ("m", ("l",)), ("z", ("m",))]


def test_the_command_folds_and_json_still_names_each_task(tmp_path: Path) -> None:
    tasks = "".join(f"  - {{id: t{n}, prompt: x}}\n" for n in range(3))
    numbers = ", ".join(map(str, range(MANY)))
    plan = "tasks:\n" + tasks + '  - {id: part, prompt: "{{ item }}", for_each: numbers, depends_on: t0}\n'
    (tmp_path / "plan.yaml").write_text(f"inputs: {{numbers: [{numbers}]}}\n" + plan)
    drawn = plait_here(tmp_path, "graph", "plan.yaml").out
    assert drawn.count("[") == 4
    assert "300 parts" in drawn
    value = plait_here(tmp_path, "graph", "plan.yaml", "--json").value
    assert len(value["tasks"]) == MANY + 3
    assert value["mermaid"].removesuffix("\n") == drawn.removesuffix("\n")


def test_a_plan_of_a_workflow_shows_all_its_steps(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "workflow:\n"
        "  - {name: draft, prompt: A limerick.}\n"
        '  - {name: better, prompt: "Better: {{ draft }}", continues: true}\n'
        '  - {name: title, prompt: "{{ draft }} {{ better }}"}\n'
    )
    value = plait_here(tmp_path, "graph", "plan.yaml", "--json").value
    assert [(task["task_id"], task["depends_on"]) for task in value["tasks"]] == [
        ("draft", []),
        ("better", ["draft"]),
        ("title", ["better"]),
    ]
    assert "t0 -.-> t1" in value["mermaid"]
