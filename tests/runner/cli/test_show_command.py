"""`plait check`, `runs`, `show`, `graph`, `--version` and `--help`."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import anyio
import click
import pytest

from plait import ParallelRunner, Task
from plait.backends.backend_specs import KINDS
from plait.persistence.store_records import TaskRecord
from plait.runner.cli.command_line import BESIDE, COMMANDS, cli
from plait.runner.cli.show_commands import _node_style
from plait.usage import Usage
from tests.support.plans.logged import calls, make
from tests.support.processes.command import environment, plait_here

TASKS = """
  - {id: a, prompt: one}
  - {id: b, prompt: "two {{ a }}", depends_on: a, backend: data}
  - {id: x, prompt: knock, backend: fail}
  - {id: y, prompt: "{{ x }}", depends_on: x}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("look")
    make(folder, TASKS, fail="fail", data="classify")
    for _ in range(2):
        assert plait_here(folder, "run", "plan.yaml", "-q").code == 1
    return folder


def ids(folder: Path) -> list[str]:
    return [run["run_id"] for run in plait_here(folder, "runs", "--json").value]


def test_nothing_is_imported_that_is_not_needed(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one}\n")
    script = (
        "import sys\n"
        "from plait.runner.cli.command_line import cli\n"
        "from plait.runner.cli.command_line import run_cli\n"
        "for words in (['--help'], ['--version']):\n"
        "    assert run_cli(cli, words) == 0\n"
        "heavy = 'pydantic aiohttp networkx rich jinja2 anyio asyncio sqlite3 structlog yaml'.split()\n"
        "loaded = [name for name in heavy if name in sys.modules]\n"
        "assert run_cli(cli, ['run', 'plan.yaml', '--quiet']) == 0\n"
        "heavy = 'aiohttp networkx rich structlog langgraph pydantic_ai distributed genai_prices fastapi mcp'.split()\n"
        "sys.exit(', '.join([*loaded, *(name for name in heavy if name in sys.modules)]) or 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "Exit codes: 0 success: the run is completed, or the command did its work 1 tasks failed" in said


def test_every_line_of_the_help_stands_for_the_command_of_that_name() -> None:
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in cli.list_commands(context)}
    assert {name: command and command.name for name, command in commands.items()} == {name: name for name in COMMANDS}
    said = cli.get_help(context)
    assert all(f"  {name:<8}  {line}" in said for name, line in COMMANDS.items())
    assert len(COMMANDS) <= 20
    for name, home in BESIDE.items():
        command = cli.get_command(context, name)
        assert (command and command.name, f"`{name}`" in COMMANDS[home]) == (name, True)


def test_help_names_every_backend(tmp_path: Path) -> None:
    for words in ("run", "serve"):
        said = " ".join(plait_here(tmp_path, words, "--help").out.split()).replace("- ", "-")
        assert re.search(rf"--backend KIND Use this backend [^:]*: {', '.join(KINDS[:-1])} or {KINDS[-1]}\.", said)


def test_version(folder: Path) -> None:
    assert plait_here(folder, "--version").out == f"plait {version('plait')}\n"


def test_schema_is_json_schema(folder: Path) -> None:
    assert "tasks" in plait_here(folder, "check", "--schema").value["properties"]


def test_check_says_what_would_run_and_runs_nothing(tmp_path: Path) -> None:
    make(tmp_path, TASKS, fail="fail", data="classify")
    done = plait_here(tmp_path, "check", "plan.yaml")
    assert (done.code, done.err) == (0, "")
    assert "trial: 4 tasks in 2 levels" in done.out
    assert "longest path  a -> b" in done.out
    value = plait_here(tmp_path, "check", "plan.yaml", "--json").value
    assert (value["ok"], value["backends"]["say"]) == (True, {"kind": "function", "tasks": 2})
    assert calls(tmp_path) == []


def test_check_lists_mistakes(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: x, depends_on: [zz]}\n")
    done = plait_here(tmp_path, "check", "plan.yaml")
    assert (done.code, done.out) == (2, "")
    assert "zz" in done.err
    told = plait_here(tmp_path, "check", "plan.yaml", "--json")
    assert (told.code, told.value["ok"], told.value["problems"][0]["line"]) == (2, False, 6)


def test_check_plays_branches_and_loops(tmp_path: Path) -> None:
    kinds = "output_schema: {type: object, properties: {kind: {enum: [bug, idea, other]}}}"
    tasks = f"""
  - {{id: sort, prompt: x, backend: data, {kinds}}}
  - {{id: fix, prompt: x, depends_on: sort, when: "{{{{ sort.kind }}}} == 'bug'"}}
  - {{id: note, prompt: x, depends_on: sort, when: "{{{{ sort.kind }}}} == 'idea'"}}
  - {{id: ask, prompt: x, depends_on: fix, when: "{{{{ fix }}}} != 'done'"}}
  - id: work
    loop: {{tasks: [{{id: test, run: [ls], codes: any}}], until: "{{{{ test.code }}}} == 0", max: 4}}
"""
    make(tmp_path, tasks, data="classify")
    done = plait_here(tmp_path, "check", "plan.yaml")
    assert done.out.splitlines()[2:7] == [
        "  loop          work: test, 4 rounds at most, until {{ test.code }} == 0",
        "  branch        sort.kind is 'bug': fix",
        "  branch        sort.kind is 'idea': note",
        "  branch        sort.kind is 'other': no branch",
        "  branch        {{ fix }} != 'done': ask",
    ]
    value = plait_here(tmp_path, "check", "plan.yaml", "--json").value
    assert value["branches"][2:] == [
        {"if": {"sort.kind": "other"}, "tasks": []},
        {"if": "{{ fix }} != 'done'", "tasks": ["ask"]},
    ]
    assert value["calls"] == {"work": {"tasks": ["test"], "rounds": 4, "until": "{{ test.code }} == 0"}}
    assert calls(tmp_path) == []

    make(tmp_path, tasks.replace("'idea'", "'ideas'"), data="classify")
    done = plait_here(tmp_path, "check", "plan.yaml")
    message = "this condition is never true: sort.kind is 'bug', 'idea' or 'other'; did you mean 'idea'?"
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("plan.yaml:10:51: tasks[2].when: " + message)


def test_runs_are_listed_newest_first(folder: Path) -> None:
    runs = plait_here(folder, "runs", "--json").value
    assert [run["run_id"] for run in runs] == sorted((run["run_id"] for run in runs), reverse=True)
    assert [(run["status"], run["name"], run["done"], run["total"]) for run in runs] == [("failed", "trial", 3, 4)] * 2
    lines = plait_here(folder, "runs").out.splitlines()
    assert lines[0].split() == ["RUN", "NAME", "STATUS", "TASKS", "COST", "AGE"]
    assert [line.split()[:4] for line in lines[1:]] == [[run["run_id"], "trial", "failed", "2"] for run in runs]
    assert len(plait_here(folder, "runs", "--limit", "1", "--json").value) == 1
    for words, more in ((["1"], True), (["1", "--long"], True), (["2"], False)):
        listed = plait_here(folder, "runs", "--limit", *words)
        assert ("these are the newest 1; there are more: --limit N" in listed.err) is more


def test_a_run_without_a_name_has_no_line_for_it(tmp_path: Path) -> None:
    (tmp_path / ".plait").mkdir(mode=0o700)
    anyio.run(ParallelRunner(str.upper, store=tmp_path / ".plait/plait.db").run, [Task("a", "one")])
    shown = plait_here(tmp_path, "show", "last")
    assert [line.split()[0] for line in shown.out.splitlines()[:2]] == ["run", "status"]


def test_a_run_is_named_by_id_by_prefix_or_as_last(folder: Path) -> None:
    newest, older = ids(folder)
    for word, run_id in (("last", newest), (older, older), (newest[:-1], newest)):
        assert plait_here(folder, "show", word, "--json").value["run_id"] == run_id
    ambiguous = plait_here(folder, "show", newest[:4])
    assert ambiguous.code == 2
    assert newest in ambiguous.err
    assert older in ambiguous.err


@pytest.mark.parametrize(
    "words", [["show", "nope"], ["show", ""], ["show", "last", "nope"], ["show", "\udcff"], ["graph", "nope"]]
)
def test_what_is_not_there_is_one_clear_line(folder: Path, words: list[str]) -> None:
    done = plait_here(folder, *words)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)


def test_a_run_is_shown_with_its_tasks(folder: Path) -> None:
    out = plait_here(folder, "show", "last").out
    assert "status    failed, 2 of 4 tasks completed, 1 failed\n" in out
    rows = {line.split()[0]: line for line in out.splitlines() if line[:2] in {"a ", "x ", "y "}}
    assert "completed" in rows["a"]
    assert rows["x"].endswith("auth: the door is shut")
    assert rows["y"].endswith("blocked by x")
    value = plait_here(folder, "show", "last", "--json").value
    assert value["tasks"][1]["data"] == {"kind": "good", "words": 3}


def test_a_task_is_shown_with_its_conversation(folder: Path) -> None:
    out = plait_here(folder, "show", "last", "b").out
    assert "-- prompt --\ntwo {{ a }}\n" in out
    assert "-- user --\ntwo re: one\n" in out
    assert '-- assistant --\n{"kind": "good", "words": 3}\n' in out
    assert "-- attempts --\n1  completed  data" in out
    value = plait_here(folder, "show", "last", "x", "--json").value
    assert [attempt["error"] for attempt in value["history"]] == ["the door is shut"]
    usage = {"input_tokens", "output_tokens", "cost_usd", "model"}
    assert usage < value["history"][0].keys() and "usage" not in value["history"][0]


def test_graph_of_a_plan_and_of_a_run(folder: Path) -> None:
    plain = plait_here(folder, "graph", "plan.yaml").out
    assert plain.startswith("flowchart LR\n")
    assert "classDef" not in plain
    run = plait_here(folder, "graph", "last").out
    assert 't2["x<br/>failed' in run
    assert "classDef failed" in run


def test_the_label_of_a_task_names_its_tokens() -> None:
    task = TaskRecord("a", 0, "p", (), None, "{}", "completed", 1, usage=Usage(53, 22), duration_s=0.6)
    assert _node_style(task).note == "completed · 0.6s · 53+22 tokens"
    assert _node_style(replace(task, usage=Usage())).note == "completed · 0.6s"


def test_runs_are_found_by_their_status_behind_any_number_of_others(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: x, prompt: knock, backend: fail}\n", fail="fail")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
    make(tmp_path, "  - {id: a, prompt: one}\n")
    for _ in range(7):
        assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    shown = ids(tmp_path)
    (failed,) = plait_here(tmp_path, "runs", "-n", "1", "--status", "failed", "--json").value
    assert (failed["run_id"], failed["status"]) == (shown[-1], "failed")
    both = plait_here(tmp_path, "runs", "-n", "2", "--status", "failed", "--status", "completed", "--long")
    assert [line.split()[0] for line in both.out.splitlines()[1:]] == shown[:2]
    assert "the newest 2; there are more" in both.err
    every = plait_here(tmp_path, "runs", "-n", str(10**20))
    assert (every.code, [line.split()[0] for line in every.out.splitlines()[1:]]) == (0, shown)
    none = plait_here(tmp_path, "runs", "--status", "interrupted")
    assert (none.code, none.out) == (0, "no run is interrupted; `plait runs` shows all\n")
    assert plait_here(tmp_path, "runs", "--status", "interrupted", "--json").value == []
    assert plait_here(tmp_path, "runs", "--status", "broken").code == 2


def test_pictures_are_written_and_those_of_runs_are_private(folder: Path) -> None:
    (folder / "run.html").write_text("old")
    for words in (["last", "-o", "run.html"], ["last", "-o", "run.svg"], ["plan.yaml", "-o", "plan.svg"]):
        done = plait_here(folder, "graph", *words)
        assert (done.code, done.out, done.err) == (0, "", "")
    assert (folder / "run.html").stat().st_mode & 0o777 == 0o600
    assert (folder / "run.svg").stat().st_mode & 0o777 == 0o600
    assert "the door is shut" in (folder / "run.svg").read_text()
    for words in (["last", "-o", "run.png"], ["last", "-o", "no/where.svg"], ["last", "--set", "a=1"]):
        done = plait_here(folder, "graph", *words)
        assert done.code == 2
        assert "Traceback" not in done.err


def test_without_a_store_it_says_what_makes_one(tmp_path: Path) -> None:
    for words in (["runs"], ["show", "last"], ["resume"], ["continue", "last", "a", "hi"], ["graph", "last"]):
        done = plait_here(tmp_path, *words)
        assert (done.code, done.out, len(done.err.splitlines())) == (3, "", 1)
        assert "plait run PLAN" in done.err
    assert list(tmp_path.iterdir()) == []


def test_show_tells_what_was_said_in_an_attempt_that_failed_from_what_counts(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: x, prompt: knock, backend: other}\n", other="fail")
    make(tmp_path / "good", "  - {id: x, prompt: knock, backend: other}\n", other="say")
    assert plait_here(tmp_path, "run", "plan.yaml").code == 1
    assert "\n-- user --\nknock\n" in plait_here(tmp_path, "show", "last", "x").out
    assert plait_here(tmp_path, "resume", "--retry-failed", "--backends", "good/plan.yaml").code == 0
    shown = plait_here(tmp_path, "show", "last", "x").out
    assert "\n-- user (attempt 1, failed) --\nknock\n\n-- user --\nknock\n\n-- assistant --\nre: knock\n" in shown
