"""`plait answer`, with and without a task, and what `run`, `resume` and `show` say of tasks that ask."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.runner.cli.test_terminal_output import ATTACKS, CORPUS
from tests.support.processes.command import PLAIT, Done, Terminal, environment, plait, plait_here
from tests.support.processes.warm import Warm

WORK = f"""
from pathlib import Path
import anyio
from plait.backends import ask

CORPUS = {CORPUS!r}

async def where(prompt):
    return "to " + await ask("Where to?\\nAnd why?")

async def many(prompt):
    count = await ask("How many?", schema={{"type": "integer"}}, default=2, deadline=3600)
    return f"{{count}} of them"

async def evil(prompt):
    return await ask(CORPUS, default=CORPUS, deadline=3600)

async def hold(prompt):
    while not Path("go").exists():
        await anyio.sleep(0.01)
    return "held"
"""
PLAN = """
name: journey
backends:
  where: {kind: function, call: "work.py:where"}
  many: {kind: function, call: "work.py:many"}
  evil: {kind: function, call: "work.py:evil"}
  hold: {kind: function, call: "work.py:hold"}
tasks:
"""
JOURNEY = """
  - {id: where, prompt: x, backend: where}
  - {id: many, prompt: x, backend: many}
  - {id: end, prompt: "{{ where }} {{ many }}", backend: hold, depends_on: [where, many]}
"""


def make(folder: Path, tasks: str = JOURNEY) -> None:
    (folder / "work.py").write_text(WORK)
    (folder / "plan.yaml").write_text(PLAN + tasks)


@pytest.fixture
def waiting(tmp_path: Path) -> Path:
    make(tmp_path)
    done = plait_here(tmp_path, "run", "plan.yaml", "-q")
    assert done.code == 4
    assert re.fullmatch(r"plait: run (\S+) is waiting_input; next: plait answer \1\n", done.err)
    return tmp_path


def refused(done: Done, why: str) -> None:
    assert (done.code, done.out, done.err.count("\n"), why in done.err) == (2, "", 1, True), done


def test_a_run_that_waits_says_what_for_and_how_to_answer(tmp_path: Path) -> None:
    make(tmp_path)
    (tmp_path / "go").touch()
    first = plait_here(tmp_path, "run", "plan.yaml")
    assert first.code == 4
    assert "waiting_input" in first.err
    assert "  waiting   where: Where to? And why?\n" in first.err
    lines = re.findall(r"^  (?:answer|resume) +(plait .*)$", first.err, re.MULTILINE)
    assert [shlex.split(line)[1] for line in lines] == ["answer", "answer", "resume"]
    for line, value in zip(lines[:2], ("Rome", "3"), strict=True):
        words = shlex.split(line)[1:]
        answered = plait_here(tmp_path, *words[:-1], value)
        assert (answered.code, f"is answered: {value}" in answered.err) == (0, True), answered.err
    assert plait_here(tmp_path, *shlex.split(lines[2])[1:]).out == "held\n"
    shown = plait_here(tmp_path, "show", "last", "many")
    assert "-- answered by person --\nHow many?\n3\n" in shown.out
    value = plait_here(tmp_path, "show", "last", "many", "--json").value
    assert [(one["value"], one["by"]) for one in value["answers"]] == [(3, "person")]


def test_questions_are_listed_with_all_there_is_to_know(waiting: Path) -> None:
    listed = plait_here(waiting, "answer")
    assert listed.code == 0
    assert "  where: Where to?\n    And why?\n" in listed.out
    assert re.search(
        r"many: How many\?\n    wants     integer\n    default   2\n    deadline  20.*Z, in (59|60)m\n", listed.out
    )
    run_id = plait_here(waiting, "runs", "--json").value[0]["run_id"]
    assert f"    answer    plait answer {run_id} many JSON\n" in listed.out
    value = plait_here(waiting, "answer", "last", "--json").value
    assert [(one["task_id"], one["kind"], one["schema"], one["default"]) for one in value] == [
        ("where", "question", None, None),
        ("many", "question", {"type": "integer"}, 2),
    ]
    assert value[1]["command"] == f"plait answer {run_id} many JSON"
    assert "-- question --\nHow many?\nwants     integer\n" in plait_here(waiting, "show", "last", "many").out
    assert "asks: Where to? And why?" in plait_here(waiting, "show", "last").out
    plait_here(waiting, "answer", "last", "where", "Rome")
    assert "where" not in plait_here(waiting, "answer").out
    plait_here(waiting, "cancel", "last")
    assert plait_here(waiting, "answer").out == "nothing waits for a person\n"
    assert plait_here(waiting, "answer", "last", "--json").value == []
    refused(plait_here(waiting, "answer", "nowhere"), "no run 'nowhere'")


def test_every_wrong_answer_is_one_line(waiting: Path) -> None:
    refused(
        plait_here(waiting, "answer", "last", "many", "three"), '\'How many?\': at $: "three" is not of type "integer"'
    )
    refused(plait_here(waiting, "answer", "last", "many", "[" * 100_000), "nested too deeply")
    refused(plait_here(waiting, "answer", "last", "wher", "x"), "did you mean 'where'?")
    refused(plait_here(waiting, "answer", "last", "end", "x"), "is pending and has no open question")
    refused(
        plait_here(waiting, "answer", "last", "where", "--again"), "would ask again after --again; answer the question"
    )
    refused(plait_here(waiting, "answer", "last", "end", "--done", "x"), "is pending and does not wait for an answer")
    assert plait_here(waiting, "answer", "last", "where", "x", "--again").code == 2
    assert plait_here(waiting, "answer", "last", "where", "").code == 0
    refused(plait_here(waiting, "answer", "last", "where", "x"), "the last question was answered by person")


@pytest.mark.parametrize(
    ("words", "code", "status"), [(("--done", "5"), 0, "completed"), (("--fail", "no"), 1, "failed")]
)
def test_a_task_that_asks_may_be_settled_instead(waiting: Path, words: tuple[str, ...], code: int, status: str) -> None:
    (waiting / "go").touch()
    settled = plait_here(waiting, "answer", "last", "many", *words)
    assert (settled.code, "is answered" in settled.err) == (0, True)
    plait_here(waiting, "answer", "last", "where", "Rome")
    resumed = plait_here(waiting, "resume", "--json")
    assert (resumed.code, {one["task_id"]: one["status"] for one in resumed.value["tasks"]}["many"]) == (code, status)


def test_text_goes_where_json_is_wanted_if_it_fits(tmp_path: Path) -> None:
    """A person need not quote a word that is one of several."""
    (tmp_path / "work.py").write_text(
        "from plait import ask\nasync def f(p):\n    return await ask('Red?', schema={'enum': ['yes', 'no']})\n"
    )
    (tmp_path / "plan.yaml").write_text(
        'backends: {f: {kind: function, call: "work.py:f"}}\ntasks: [{id: a, prompt: x, backend: f}]\n'
    )
    assert 'one of "yes", "no"' in plait_here(tmp_path, "run", "plan.yaml").err
    refused(plait_here(tmp_path, "answer", "last", "a", "maybe"), "does not fit")
    assert plait_here(tmp_path, "answer", "last", "a", "yes").code == 0
    assert plait_here(tmp_path, "resume", "-q").out == "yes\n"


def test_a_run_in_another_process_is_answered(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: where, prompt: x, backend: where}\n  - {id: end, prompt: x, backend: hold}\n")
    with Warm(
        [*PLAIT, "run", "plan.yaml"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as owner:
        assert owner.stderr is not None
        while "waits for a person" not in owner.stderr.readline():
            assert owner.poll() is None
        refused(plait_here(tmp_path, "answer", "last", "where", "--done", "x"), "is being run by process")
        answered = plait_here(tmp_path, "answer", "last", "where", "Rome")
        assert (answered.code, f"process {owner.pid} on" in answered.err) == (0, True)
        assert "continues the task" in answered.err
        refused(plait_here(tmp_path, "answer", "last", "where", "Oslo"), "has no open question")
        (tmp_path / "go").touch()
        out, err = owner.communicate(timeout=60)
    assert (owner.returncode, "== where ==\nto Rome\n" in out) == (0, True)
    assert "where answered by person: Rome" in err


def test_what_is_asked_never_acts_on_a_terminal(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: x, backend: evil}\n")
    seen = b""
    for words in (
        ("run", "plan.yaml"),
        ("answer",),
        ("show", "last"),
        ("show", "last", "a"),
        ("log", "last"),
    ):
        with Terminal(tmp_path, *words) as terminal:
            assert terminal.wait() == (4 if words[0] == "run" else 0)
            seen += terminal.seen
    assert b"REPORT" in seen
    for name, attack in ATTACKS.items():
        assert attack.encode() not in seen, name
    answered = plait(tmp_path, "answer", "last", "a", "\x1b[31mred")
    assert (answered.code, "\x1b" in answered.err) == (0, False)


def test_the_log_tells_what_was_asked_and_answered_as_the_terminal_does(waiting: Path) -> None:
    assert "waits for a person: Where to? And why?" in plait_here(waiting, "log", "last").out
    plait_here(waiting, "answer", "last", "where", "Rome")
    (waiting / "go").touch()
    plait_here(waiting, "resume", "last", "-q")
    told = plait_here(waiting, "log", "last").out
    assert "waits for a person: Where to? And why?" in told
    assert "answered by person: Rome" in told
