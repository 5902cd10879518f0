"""`plait check` finds functions that are not there, and runs no code of the user's to find out."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from plait.errors import PlanError
from plait.runner.plan import Plan
from plait.runner.plan.plan_file import missing_functions
from tests.support.processes.command import plait_here

MARK = "from pathlib import Path\nPath('ran').touch()\n"


def problems(folder: Path, call: str, **modules: str) -> list[str]:
    """What is said about `call`, with `modules` beside the plan, each of which would leave a mark if it ran."""
    return problems_with(folder, call, {f"{name}.py": code for name, code in modules.items()})


def problems_with(folder: Path, call: str, files: dict[str, str]) -> list[str]:
    for name, code in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(MARK + code)
    plan = folder / "plan.yaml"
    plan.write_text(f'backends:\n  f: {{kind: function, call: "{call}"}}\ntasks: [{{id: a, prompt: x}}]\n')
    found = [message for _, message in missing_functions(Plan.load(plan).backends, folder)]
    assert not (folder / "ran").exists()
    return found


DEFINING = [
    "def answer(prompt): ...",
    "async def answer(prompt): ...",
    "class answer: ...",
    "from elsewhere import answer",
    "from elsewhere import other as answer",
    "import answer.more",
    "answer = print",
    "other = answer = print",
    "answer: object = print",
    "(answer, other), rest = [print, print], 0",
    "if True:\n    try:\n        pass\n    except ImportError:\n        def answer(prompt): ...",
    "with open('x') as answer: ...",
    "for answer in (): ...",
    "match 1:\n    case answer: ...",
    "print(answer := 1)",
    "def make():\n    global answer\n    answer = print\nmake()",
]
UNCLEAR = [
    "from elsewhere import *",
    "globals()['answer'] = print",
    "def __getattr__(name): return print",
    "import sys\nsetattr(sys.modules[__name__], 'answer', print)",
    "exec('answer = print')",
    "def f():\n    answer = 1",
    "class C:\n    def answer(self): ...",
]
MISSING = ["", "def other(): ...", "print(answers)", "def my_answer(): ..."]


@pytest.mark.parametrize("code", DEFINING + UNCLEAR)
def test_nothing_is_said_of_what_is_there_or_may_be(tmp_path: Path, code: str) -> None:
    assert problems(tmp_path, "tools.py:answer", tools=code) == []


@pytest.mark.parametrize("code", MISSING)
def test_a_name_that_is_nowhere_is_a_mistake(tmp_path: Path, code: str) -> None:
    (said,) = problems(tmp_path, "tools.py:answer", tools=code)
    assert said.startswith("tools.py has no 'answer'")


def test_the_nearest_name_is_offered(tmp_path: Path) -> None:
    assert problems(tmp_path, "tools.py:anwser", tools="def answer(): ...") == [
        "tools.py has no 'anwser'; did you mean 'answer'?"
    ]
    assert problems(tmp_path, "tools.py:answer.more") == []


def test_a_file_that_is_missing_or_no_python(tmp_path: Path) -> None:
    assert problems(tmp_path, "tols.py:f") == [
        f"there is no file {tmp_path / 'tols.py'}; write `call` relative to the plan file's folder"
    ]
    [said] = problems(tmp_path, "tools.py:f", tools="def f(:\n")
    assert said == "tools.py is not Python: invalid syntax in line 3"
    assert problems(tmp_path, "tools.py:f", tools="x = '\\d'\n") == ["tools.py has no 'f'"]


def test_modules_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    files = {"pack/__init__.py": "def inner(): ...", "pack/tools.py": "def answer(): ..."}
    assert problems_with(tmp_path, "pack.tools:answer", files) == []
    assert problems(tmp_path, "pack.tools:anser") == ["pack.tools has no 'anser'; did you mean 'answer'?"]
    assert problems(tmp_path, "pack.tols:answer") == ["pack has no module 'tols'; did you mean 'tools'?"]
    assert problems(tmp_path, "pak.tools:answer") == [
        "there is no module 'pak' here; check its spelling, or install it"
    ]
    assert problems(tmp_path, "pack:inner") == []
    assert problems(tmp_path, "pack:tools.answer") == []
    assert problems(tmp_path, "pack:innr") == ["pack has no 'innr'; did you mean 'inner'?"]
    assert {"pack", "pack.tools"}.isdisjoint(sys.modules)


@pytest.mark.parametrize("call", ["os.path:join", "math:sqrt", "json:dumps", "json.decoder:JSONDecoder", "sys:exit"])
def test_modules_of_python_itself(tmp_path: Path, call: str) -> None:
    assert problems(tmp_path, call) == []


def test_check_says_it_with_its_place(tmp_path: Path) -> None:
    problems(tmp_path, "tools.py:anser", tools="def answer(prompt): ...")
    done = plait_here(tmp_path, "check", "plan.yaml")
    said = "backends.f.call: tools.py has no 'anser'; did you mean 'answer'?"
    assert (done.code, done.out, done.err) == (2, "", f"plan.yaml:2:29: {said}\n")
    value = plait_here(tmp_path, "check", "plan.yaml", "--json").value
    assert (value["ok"], value["problems"][0]["line"], value["problems"][0]["where"]) == (False, 2, "backends.f.call")
    plan = {"backends": {"f": {"kind": "function", "call": "tools.py:anser"}}, "tasks": [{"id": "a", "prompt": "x"}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    assert said in plait_here(tmp_path, "check", "plan.json").err
    (tmp_path / "plan.toml").write_text(
        '[backends.f]\nkind = "function"\ncall = "tools.py:anser"\n[[tasks]]\nid = "a"\nprompt = "x"\n'
    )
    assert said in plait_here(tmp_path, "check", "plan.toml").err
    assert not (tmp_path / "ran").exists()


def test_missing_functions_are_said_with_all_other_mistakes(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text("def answer(prompt): ...")
    lines = [
        "backends:",
        '  f: {kind: function, call: "tools.py:anser"}',
        '  ok: {kind: function, call: "tools.py:answer"}',
        "  wrong: {kind: function, cal: x}",
        'tasks: [{id: a, backend: f, prompt: "{{ b }}"}]',
    ]
    (tmp_path / "plan.yaml").write_text("\n".join(lines))
    done = plait_here(tmp_path, "check", "plan.yaml")
    said = [line.split(": ")[:2] for line in done.err.splitlines()]
    assert said == [
        ["plan.yaml:2:29", "backends.f.call"],
        ["plan.yaml:4:27", "backends.wrong.cal"],
        ["plan.yaml:5:37", "tasks[0].prompt"],
    ]


ARGUMENTS = """\
inputs: {rows: [{text: a}, {text: b}], limit: 2}
backends:
  count: {kind: function, call: "functions.py:count"}
  total: {kind: function, call: "functions.py:total"}
tasks:
  - {id: read, backend: count, for_each: rows}
  - {id: sum, backend: total, depends_on: read}
"""


def load_with(tmp_path: Path, functions: str, plan: str = ARGUMENTS) -> Plan:
    (tmp_path / "functions.py").write_text(functions)
    (tmp_path / "plan.yaml").write_text(plan)
    return Plan.load(tmp_path / "plan.yaml")


def test_functions_need_no_prompt_and_their_parameters_name_values(tmp_path: Path) -> None:
    functions = "def count(item): pass\nasync def total(*, read, limit, start=0): pass\n"
    dag = load_with(tmp_path, functions).dag
    assert {task.id: task.arguments for task in dag} == {
        "read.1": ("item",),
        "read.2": ("item",),
        "sum": ("read", "limit"),
    }


def test_a_command_and_a_call_take_nothing_from_the_default_function(tmp_path: Path) -> None:
    (tmp_path / "called.yaml").write_text("tasks: [{id: a, run: [echo, hi]}]\n")
    plan = (
        ARGUMENTS.replace("tasks:", "defaults: {backend: total}\ntasks:")
        + "  - {id: list, run: [ls]}\n  - {id: called, plan: called.yaml}\n"
    )
    dag = load_with(tmp_path, "def count(item): pass\ndef total(read): pass\n", plan).dag
    assert [dag[name].arguments for name in ("sum", "list", "called")] == [("read",), (), ()]


@pytest.mark.parametrize(
    ("functions", "line", "says"),
    [
        (
            "def count(item, rwos): pass",
            6,
            "parameter 'rwos', which is neither a task nor an input; did you mean 'row",
        ),
        ("def total(raed): pass", 7, "parameter 'raed', which is neither a task nor an input; did you mean 'read'"),
        ("def total(prompt, item): pass", 7, "parameter 'item', which has a value only in a task with for_each"),
    ],
)
def test_a_parameter_that_names_nothing_is_told_at_the_task(
    tmp_path: Path, functions: str, line: int, says: str
) -> None:
    with pytest.raises(PlanError) as raised:
        load_with(tmp_path, functions)
    (problem,) = raised.value.problems
    assert (problem.line, problem.column) == (line, 25 if line == 6 else 24)
    assert says in problem.message


def test_a_family_that_is_no_dependency_is_told_by_its_name(tmp_path: Path) -> None:
    plan = ARGUMENTS.replace(", depends_on: read", "")
    with pytest.raises(PlanError, match="parameter 'read', but 'read' is not upstream; add it to depends_on"):
        load_with(tmp_path, "def total(read): pass", plan)


def test_a_task_of_a_model_needs_a_prompt(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="there is no prompt"):
        load_with(tmp_path, "", "backends: {b: {kind: person}}\ntasks: [{id: a, backend: b}]")
