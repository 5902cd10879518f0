"""Commands in plans (`run`): how they are written, what is refused, and who may have one run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from plait import DAG, Check, ParallelRunner, RunStatus, Task
from plait.backends import CommandBackend
from plait.backends.backend_specs import BackendSpec
from plait.errors import DAGError, PlanError
from plait.persistence import MemoryStore
from plait.runner.client.offered_plans import posted_plan
from plait.runner.client.run_backends import BackendOptions, backend_set_of_plan
from plait.runner.plan.plan_file import parse_plan
from plait.task import COMMAND_BACKEND
from tests.support.growth import talker
from tests.support.processes.command import plait_here
from tests.support.served_backends import specs_of


def test_a_check_says_what_an_answer_has_to_pass() -> None:
    keys = "passes: '{{ answer }} == 1', judge: 'Fine? {{ answer }}', backend: b, tries: 2"
    plan = parse_plan(f"backends: {{b: {{kind: claude-code}}}}\ntasks: [{{id: t, prompt: p, check: {{{keys}}}}}]")
    assert plan.dag["t"].check == Check(passes="{{ answer }} == 1", judge="Fine? {{ answer }}", backend="b", tries=2)
    assert set(plan.backends) == {"b"}, "nothing runs a command"
    for check, message in (
        ("{tries: 2}", "t.check: a check has a command, an output_schema, a condition (passes) or a judge; name one"),
        ("{judge: ok, backend: c}", "check.backend: unknown backend 'c'"),
        ("{passes: '{{ anser }}'}", "the check uses {{ anser }}, which is neither a task nor an input"),
        ("{run: [a], backend: b}", "the backend of a check is that of its judge"),
    ):
        assert message.removeprefix("t.") in problems(f"prompt: p, check: {check}")


def problems(task: str, head: str = "") -> str:
    with pytest.raises(PlanError) as caught:
        parse_plan(f"{head}\ntasks: [{{id: a, run: [echo]}}, {{id: t, depends_on: a, {task}}}]")
    return str(caught.value)


def test_a_command_needs_neither_a_prompt_nor_a_backend() -> None:
    tasks = "tasks: [{id: a, run: [ruff, check]}, {id: b, prompt: p}]"
    plan = parse_plan(f"backends: {{coder: {{kind: claude-code}}}}\n{tasks}")
    assert (plan.dag["a"].run, plan.dag["a"].backend) == (("ruff", "check"), COMMAND_BACKEND)
    backend_set = backend_set_of_plan(plan, BackendOptions())
    assert backend_set.default == "coder", "a backend of commands is nobody's default"
    assert backend_set.specs[COMMAND_BACKEND].kind == "command"


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("run: ruff check", "run"),
        ('run: ["{{ a.stdout }}"]', "the program cannot come from a name"),
        ('run: [sh, -c, "echo {{ a.stdout }}"]', "a value could be read as an option, or as code"),
        ('run: [cat, "{{ a.stdout }}"]', "put the word behind the word '--'"),
        ('run: [cat, --, "{{ b.stdout }}"]', "the command uses {{ b }}, which is neither a task nor an input"),
        ("run: [cat], files: notes.txt", "a command opens its files itself"),
        ("run: [cat], continues: a", "a command has no conversation to continue"),
        ("run: [cat], model: big", "takes no model from a task"),
        ("run: [cat], backend: m", "backend 'm' runs no commands"),
        ("prompt: hi, backend: c", "backend 'c' runs commands alone"),
        ("depends_on: []", "prompt"),
    ],
)
def test_what_is_refused_is_said(task: str, said: str) -> None:
    assert said in problems(task.replace("depends_on: [], ", ""), "backends: {m: {kind: openai}, c: {kind: command}}")


def test_a_command_that_is_no_list_is_the_only_mistake_of_its_task() -> None:
    assert problems("run: ruff check").splitlines() == [
        "plan:2:59: tasks[1].run: must be a list, not 'ruff check'; write it as [...] or as lines that start with '- '"
    ]


@pytest.mark.parametrize("word", ["--file={{ a.stdout }}", "plain"])
def test_a_value_may_stand_behind_the_name_of_an_option(word: str) -> None:
    parse_plan(f'tasks: [{{id: a, run: [echo]}}, {{id: t, depends_on: a, run: [cat, "{word}"]}}]')


async def test_values_reach_the_words_and_the_input_and_results_are_fields() -> None:
    words = ["sh", "-c", 'cat; echo "$1"', "--", "{{ a.code }} {{ item }}"]
    tasks = [
        Task("a", run=["echo", "-n", "x y"]),
        Task("b", '{{ a["stdout"] }}!', run=words, depends_on=["a"], item="{{ z }}"),
    ]
    result = await ParallelRunner(backends={"command": CommandBackend()}, store=MemoryStore()).run(DAG(tasks))
    assert result.text == {"a": "x y", "b": "x y!0 {{ z }}\n"}
    assert result["b"].data == {"code": 0, "stdout": "x y!0 {{ z }}\n", "stderr": ""}


async def test_one_command_for_each_line_of_another(tmp_path: Path) -> None:
    listing = Task("list", run=["printf", '["a", "b"]'], output_schema={"type": "array"})
    each = Task("each", run=["printf", "%s%s", "--", "{{ item }}"], for_each="list")
    result = await ParallelRunner(backends={"command": CommandBackend(cwd=tmp_path)}).run(DAG([listing, each]))
    assert [result.text[f"each.{n}"] for n in (1, 2)] == ["--a", "--b"]


async def test_a_task_of_a_model_may_run_what_the_backend_allows_and_nothing_else() -> None:
    async def added(run: list[str]) -> Any:
        async def model(_prompt: str) -> list[Any]:
            return [{"id": "b", "run": run}]

        runner = ParallelRunner(model, backends={"command": CommandBackend(allows=[["echo", "yes"]])})
        return await runner.run(DAG([Task("a", "a", adds_tasks=True)]))

    assert (await added(["echo", "yes", "indeed"])).text["b"] == "yes indeed\n"
    for run in (["echo", "no"], ["echo"], ["rm", "-r", "/"]):
        result = await added(run)
        assert result.status is RunStatus.FAILED
        assert "is not allowed for tasks from outside of the plan file" in (result["a"].error or "")


def test_a_posted_plan_may_run_what_the_server_allows_and_nothing_else() -> None:
    backends = "backends: {command: {kind: command, allows: [[echo, yes]]}}"
    served = parse_plan(f"{backends}\ntasks: [{{id: a, run: [x]}}]").backends
    assert posted_plan({"tasks": [{"id": "a", "run": ["echo", "yes"]}]}, {}, served).dag["a"].run
    nothing: Mapping[str, BackendSpec] = {}
    for specs, run in ((served, ["echo", "no"]), (nothing, ["echo", "yes"])):
        with pytest.raises(PlanError, match=r"tasks\[0\]\.run: the command 'echo \w+' is not allowed"):
            posted_plan({"tasks": [{"id": "a", "run": run}]}, {}, specs)
        with pytest.raises(PlanError, match=r"tasks\[0\]\.check\.run: the command 'echo \w+' is not allowed"):
            posted_plan({"tasks": [{"id": "a", "prompt": "p", "check": {"run": run}}]}, {}, specs)


async def test_a_backend_for_models_is_given_no_command() -> None:
    with pytest.raises(DAGError, match="backend 'default' runs no commands"):
        await ParallelRunner(talker({})).run(DAG([Task("a", run=["echo"], backend="default")]))


def test_a_command_runs_in_the_folder_of_the_plan_and_like_runs_it_again(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("tasks: [{id: a, run: [sh, -c, 'echo x >> ran; pwd']}]")
    done = plait_here(tmp_path, "run", "p.yaml", "--json")
    assert done.value["tasks"][0]["data"]["stdout"] == f"{tmp_path}\n"
    again = plait_here(tmp_path, "run", "p.yaml", "--like", "last", "--again")
    assert (again.code, (tmp_path / "ran").read_text()) == (0, "x\nx\n")


def test_a_folder_and_variables_are_keys_of_a_command_or_an_agent(tmp_path: Path) -> None:
    keys = "run: [pwd], cwd: 'repos/{{ a.stdout }}', env: {CI: '1'}"
    plan = parse_plan(f"tasks: [{{id: a, run: [echo]}}, {{id: t, depends_on: a, {keys}}}]")
    assert (plan.dag["t"].cwd, plan.dag["t"].env) == ("repos/{{ a.stdout }}", {"CI": "1"})
    for task, said in (
        ("run: [pwd], cwd: 'repos/{{ b }}'", "t.cwd: the cwd uses {{ b }}, which is neither a task nor an input"),
        ("run: [pwd], env: {CI: 1}", "env.CI: must be text"),
        ("prompt: p, backend: m, cwd: here", "backend 'm' takes no cwd from a task"),
        ("prompt: p, backend: m, env: {A: b}", "backend 'm' takes no env from a task"),
        ("plan: p.yaml, cwd: here", "a task with `plan` does its work by the tasks of the plan; leave `cwd` out"),
    ):
        assert said.removeprefix("t.") in problems(task, "backends: {m: {kind: openai}, command: {kind: command}}")


FOLDERS = """
inputs: {rows: [{repo: a}, {repo: b}]}
backends: {command: {kind: command, cwd: work}, far: {kind: command, on: h}}
hosts: {h: {kind: ssh, hosts: [one]}}
tasks:
  - {id: each, run: [pwd], cwd: "repos/{{ item.repo }}", for_each: rows}
  - {id: clone, run: [pwd], cwd: made}
  - {id: after, run: [pwd], cwd: made-by-clone, depends_on: clone}
  - {id: there, run: [pwd], cwd: elsewhere, backend: far}
"""


def test_a_folder_that_is_missing_is_told_by_plait_check(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(FOLDERS)
    (tmp_path / "work/repos/a").mkdir(parents=True)
    told = plait_here(tmp_path, "check", "plan.yaml")
    assert (told.code, [line.partition("; make it")[0] for line in told.err.splitlines()]) == (
        2,
        [
            f"plan.yaml:6:33: tasks[0].cwd: there is no folder {tmp_path}/work/repos/b",
            f"plan.yaml:7:34: tasks[1].cwd: there is no folder {tmp_path}/work/made",
        ],
    ), "an earlier task may make the third, and the fourth lies on another machine"
    (tmp_path / "plan.yaml").write_text(FOLDERS.replace("item.repo", "item.rep"))
    told = plait_here(tmp_path, "check", "plan.yaml")
    assert [line.partition(": ")[0] for line in told.err.splitlines()] == ["plan.yaml:6:33", "plan.yaml:7:34"]
    (tmp_path / "plan.yaml").write_text(FOLDERS)
    for name in ("repos/b", "made"):
        (tmp_path / "work" / name).mkdir()
    assert plait_here(tmp_path, "check", "plan.yaml").code == 0


def test_a_posted_plan_names_no_folder_and_no_variables_of_the_server() -> None:
    loop = {"tasks": [{"id": "b", "prompt": "p", "env": {"A": "1"}}], "until": "true"}
    with pytest.raises(PlanError) as caught:
        posted_plan({"tasks": [{"id": "a", "prompt": "p", "cwd": "/"}, {"id": "l", "loop": loop}]}, {}, specs_of("m"))
    assert [problem.where for problem in caught.value.problems] == ["tasks[0].cwd", "tasks[1].loop.tasks[0].env"]
