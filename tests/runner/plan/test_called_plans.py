"""Plans that call plans, and loops, as written: what is refused, with its place; whose backends they use."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from plait import DAG, Task
from plait.backends.backend_specs import FunctionSpec
from plait.errors import DAGError, PlanError
from plait.runner.client.offered_plans import posted_plan
from plait.runner.plan.plan_file import Plan
from plait.runner.plan.plan_tasks import AddedTasks
from plait.task import Call
from tests.support.processes.command import plait, plait_here
from tests.support.served_backends import specs_of

INNER = "inputs: {need: {required: true}, other: 1}\ntasks:\n  - {id: x, prompt: '{{ need }} {{ other }}'}\n"


def write(folder: Path, **files: str) -> Path:
    """Write the plans, and return the path of the first."""
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder / f"{next(iter(files))}.yaml"


def mistakes(folder: Path, **files: str) -> list[str]:
    with pytest.raises(PlanError) as caught:
        Plan.load(write(folder, **files))
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("plan: missing.yaml", "1:23: tasks[0].plan: there is no plan 'missing.yaml' in "),
        ("plan: 3", "1:23: tasks[0].plan: must be the name of a plan file, not 3"),
        ("plan: {tasks: []}", "1:23: tasks[0].plan: must be the name of a plan file, not {'tasks': []}"),
        ("plan: b.yaml", "1:23: tasks[0].plan: input 'need' of b.yaml has no default; give it under `with`"),
        (
            "plan: b.yaml, with: {need: 1, neeed: 2}",
            "1:47: tasks[0].with.neeed: there is no input 'neeed'; did you mean 'need'?",
        ),
        ("plan: b.yaml, with: {need: '{{ x }}'}", "1:37: tasks[0].with: the value uses {{ x }}, which is neither"),
        ("plan: b.yaml, with: {need: '{{ previous }}'}", "1:37: tasks[0].with: the value uses {{ previous }}, which"),
        ("plan: b.yaml, with: {need: 1}, prompt: hi", "1:48: tasks[0].prompt: a task with `plan` does its work by"),
        ("loop: {until: 'true'}", "1:23: tasks[0].loop: a loop has either `plan`, the file of a plan, or `tasks`"),
        (
            "loop: {plan: b.yaml, with: {need: 1}, until: '{{ y }}'}",
            "1:62: tasks[0].loop.until: `until` uses {{ y }}, which is neither",
        ),
        ("loop: {plan: b.yaml, with: {need: 1}}", "1:23: tasks[0].loop.until: 'until' is missing; add it"),
        ("loop: {plan: b.yaml, with: {need: 1}, until: 'true', max: 0}", "1:75: tasks[0].loop.max: must be at least 1"),
        (
            "loop: {tasks: [{id: x, prompt: '{{ y }}'}], until: 'true'}",
            "1:48: tasks[0].loop.tasks[0].prompt: the prompt uses {{ y }}",
        ),
        (
            "loop: {tasks: [{id: x, run: [pytest]}], until: '{{ x.code }} == 0'}",
            "1:45: tasks[0].loop.tasks[0].run: `until` asks for the exit code of 'x', but a code other than 0 fails",
        ),
        ("run: [a], codes: 256", "1:34: tasks[0].codes: must be `any`, a number from 0 to 255, or a list of such"),
        ("prompt: a, codes: any", "1:35: tasks[0].codes: only a command has exit codes; leave `codes` out"),
        (
            f"loop: {{tasks: [{{id: {'x' * 60}, prompt: a}}], until: 'true', max: 100}}",
            "1:14: tasks[0].id: its tasks get",
        ),
    ],
)
def test_a_mistake_is_told_with_its_place(tmp_path: Path, task: str, said: str) -> None:
    found = mistakes(tmp_path, a=f"tasks: [{{id: a, {task}}}]", b=INNER)
    assert len(found) == 1
    assert said in found[0]


def test_a_mistake_in_a_called_plan_has_its_place_there(tmp_path: Path) -> None:
    inner = INNER + "  - {id: y, prompt: '{{ z }}'}\nreturns: {a: ['{{ q }}']}\n"
    assert mistakes(tmp_path, a="tasks: [{id: a, plan: b.yaml, with: {need: 1}}]", b=inner) == [
        "b.yaml:4:21: tasks[1].prompt: the prompt uses {{ z }}, which is neither a task nor an input",
        "b.yaml:5:10: returns: `returns` uses {{ q }}, which is neither a task nor an input of the called plan; "
        "there are x, y, need, other",
    ]


def test_no_plan_calls_itself_and_at_most_five_call_each_other(tmp_path: Path) -> None:
    call = "tasks: [{{id: t, plan: {0}.yaml}}]"
    circle = mistakes(tmp_path, a=call.format("b"), b=call.format("c"), c=call.format("b"))
    assert circle == [
        "c.yaml:1:23: tasks[0].plan: this plan calls itself: a.yaml -> b.yaml -> c.yaml -> b.yaml; "
        "remove one of these calls"
    ]
    chain = {f"p{n}": call.format(f"p{n + 1}") for n in range(6)} | {"p6": "tasks: [{id: t, prompt: hi}]"}
    (found,) = mistakes(tmp_path, **chain)
    assert found.startswith(
        "p5.yaml:1:23: tasks[0].plan: at most 5 plans may call each other in a row: p0.yaml -> p1.yaml"
    )
    assert Plan.load(tmp_path / "p1.yaml").dag["t"].call is not None


def test_ids_below_a_call_are_kept_for_its_tasks() -> None:
    call = Task("c", call=Call([Task("x", "x")]))
    with pytest.raises(DAGError, match=r"id 'c\.y' is reserved for a task of the plan that 'c' calls"):
        DAG([call, Task("c.y", "y")])


def test_a_call_begins_with_all_its_values() -> None:
    call = Task("c", depends_on=["a", "b"], join="any", call=Call([Task("x", "x")]))
    with pytest.raises(DAGError, match="a called plan begins with all its values; leave `join` out"):
        DAG([Task("a", "a"), Task("b", "b"), call])


def test_backends_are_those_of_the_calling_plan_and_further_ones_of_the_called(tmp_path: Path) -> None:
    function = "{{kind: function, call: 'code.py:{0}'}}"
    inner = (
        f"backends: {{f: {function.format('inner')}, g: {function.format('more')}}}\ndefaults: {{backend: g}}\n{INNER}"
    )
    outer = f"backends: {{f: {function.format('outer')}}}\ntasks: [{{id: a, plan: b.yaml, with: {{need: 1}}}}]"
    plan = Plan.load(write(tmp_path, a=outer, b=inner))
    specs = {name: spec.call for name, spec in plan.backends.items() if isinstance(spec, FunctionSpec)}
    assert specs == {"f": "code.py:outer", "g": "code.py:more"}
    assert plan.dag["a"].call is not None
    assert plan.dag["a"].call.backends == ("g",)
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "b.yaml").write_text(inner)
    found = mistakes(tmp_path, a=outer.replace("b.yaml", "below/b.yaml"))
    assert found == [
        "below/b.yaml:1:59: backends.g: its files are relative to the folder of a plan; "
        "name 'g' in the calling plan as well"
    ]


def test_a_posted_plan_calls_no_file_and_its_loops_run_no_command(tmp_path: Path) -> None:
    plan = {"tasks": [{"id": "a", "plan": str(write(tmp_path, b="tasks: [{id: x, prompt: hi}]"))},
                      {"id": "b", "loop": {"plan": "b.yaml", "until": "true"}},
                      {"id": "c", "loop": {"tasks": [{"id": "x", "run": ["ls"]}], "until": "true"}},
                      {"id": "d", "loop": {"plan": {"tasks": [{"id": "x", "run": ["ls"]}]}, "until": "true"}},
                      ]}  # fmt: skip
    with pytest.raises(PlanError) as caught:
        posted_plan(plan, {}, specs_of("m"))
    assert [problem.where for problem in caught.value.problems] == [
        "tasks[0].plan", "tasks[1].loop.plan", "tasks[2].loop.tasks[0].run",
        "tasks[3].loop.plan",
    ]  # fmt: skip
    loop = {"tasks": [{"id": "x", "prompt": "hi"}], "until": "{{ x }} != ''"}
    assert posted_plan({"tasks": [{"id": "c", "loop": loop}]}, {}, specs_of("m")).dag["c"].call is not None


def test_tasks_that_a_model_adds_call_no_plan() -> None:
    loop = {"tasks": [{"id": "x", "prompt": "hi"}], "until": "true"}
    added = AddedTasks([{"id": "a", "plan": "b.yaml"}, {"id": "b", "loop": loop}])
    assert [problem.field for problem in added.mistakes] == ["plan", "loop"]


def test_commands_and_codes_of_a_stored_call_are_taken_from_the_plan_files_alone(tmp_path: Path) -> None:
    write(
        tmp_path,
        plan="tasks: [{id: a, run: [sh, -c, 'test -e go']}, {id: c, plan: b.yaml, depends_on: a}]",
        b="tasks: [{id: x, run: [sh, -c, 'exit 3'], codes: [0, 3]}]\nreturns: '{{ x.code }}'",
    )
    assert plait(tmp_path, "run", "plan.yaml", "-q").code == 1
    (store,) = tmp_path.rglob("*.db")
    (tmp_path / "go").touch()
    good = (tmp_path / "b.yaml").read_text()
    (tmp_path / "b.yaml").write_text(good.replace("exit 3", "exit 4"))
    refused = plait(tmp_path, "resume", "last", "--retry-failed")
    assert refused.code == 2
    assert "the command of task 'c'" in refused.err
    (tmp_path / "b.yaml").write_text(good)
    done = plait(tmp_path, "resume", "last", "--retry-failed", "-q")
    assert (done.code, done.out) == (0, "3\n")
    with sqlite3.connect(store) as connection:
        assert connection.execute("SELECT count(*) FROM tasks").fetchone() == (3,)
    checked = plait_here(tmp_path, "check", "plan.yaml").out
    assert "plan          c: x" in checked
