"""`plait runs`, and the other commands, beside a run whose row is damaged."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.plans.logged import make
from tests.support.processes.command import plait_here
from tests.support.stores.database import edit

STORE = Path(".plait") / "plait.db"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three ended runs."""
    folder = tmp_path_factory.mktemp("made")
    make(folder, "  - {id: a, prompt: one}\n  - {id: x, prompt: knock, backend: fail}\n", fail="fail")
    for _ in range(3):
        assert plait_here(folder, "run", "plan.yaml", "-q").code == 1
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def ids(folder: Path) -> list[str]:
    return [run["run_id"] for run in plait_here(folder, "runs", "--json").value]


def damage(folder: Path, run_id: str, change: str = "claims = '[['") -> None:
    edit(folder / STORE, f"UPDATE runs SET {change} WHERE run_id = '{run_id}'")


CHANGES = ["created_at = '2026-13-77'", "claims = '[['"]


@pytest.mark.parametrize("change", CHANGES)
def test_the_other_runs_are_listed_beside_a_damaged_one(folder: Path, change: str) -> None:
    _, broken, _ = whole = ids(folder)
    damage(folder, broken, change)
    for words in ((), ("--long",)):
        done = plait_here(folder, "runs", *words)
        assert (done.code, done.err) == (0, "")
        rows = {line.split()[0]: line.split()[1:] for line in done.out.splitlines()[1:]}
        assert {name: row[1] for name, row in rows.items() if name != broken} == dict.fromkeys(
            set(whole) - {broken}, "failed"
        )
        assert rows[broken][0] == "damaged"
    listed = {run["run_id"]: run for run in plait_here(folder, "runs", "--json").value}
    assert listed.keys() == set(whole)
    assert listed[broken]["error"].startswith(f"run '{broken}' is damaged: its row does not fit its checksum")


@pytest.mark.parametrize("words", [["show"], ["log"], ["graph"], ["resume"], ["show", "--json"]])
def test_a_damaged_run_is_one_clear_line(folder: Path, words: list[str]) -> None:
    newest, broken, _ = ids(folder)
    damage(folder, broken)
    done = plait_here(folder, words[0], broken, *words[1:])
    assert (done.code, len(done.err.splitlines())) == (3, 1)
    assert f"run '{broken}' is damaged: its row does not fit its checksum; restore a copy of the store" in done.err
    if "--json" in words:
        assert done.value["error"]["kind"] == "store_failed"
    else:
        assert not done.out
    if words != ["resume"]:
        assert plait_here(folder, words[0], newest, *words[1:]).code == 0


@pytest.mark.parametrize("change", ["prompt = 'two'", "spec = '{'"])
def test_damage_of_a_task_is_one_clear_line_and_the_run_is_listed(folder: Path, change: str) -> None:
    newest, *_ = whole = ids(folder)
    edit(folder / STORE, f"UPDATE tasks SET {change} WHERE task_id = 'a' AND run_id = '{newest}'")
    done = plait_here(folder, "show", newest)
    assert (done.code, done.out, len(done.err.splitlines())) == (3, "", 1)
    assert f"run '{newest}' is damaged: task 'a'" in done.err
    assert ids(folder) == whole


def test_a_damaged_run_is_neither_deleted_nor_resumed_unasked(folder: Path) -> None:
    broken, middle, _ = ids(folder)
    damage(folder, broken)
    assert f"run {middle}" in plait_here(folder, "resume", "--retry-failed", "--dry-run").out
    assert plait_here(folder, "gc", "--keep", "1").code == 0
    assert ids(folder) == [broken, middle]


def test_questions_of_a_damaged_run_are_not_missed_in_silence(folder: Path) -> None:
    broken, *_ = ids(folder)
    damage(folder, broken)
    done = plait_here(folder, "answer")
    assert (done.code, done.out) == (0, "nothing waits for a person\n")
    assert f"run '{broken}' is damaged" in done.err


def test_an_answered_run_is_to_be_resumed(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(
        "backends: {human: {kind: person}}\ntasks: [{id: who, prompt: Who?}, {id: when, prompt: When?}]\n"
    )
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 4
    assert plait_here(tmp_path, "answer", "last", "who", "Ada").code == 0
    assert " waiting_input " in plait_here(tmp_path, "runs").out, "one question is open"
    assert plait_here(tmp_path, "answer", "last", "when", "now").code == 0
    assert "  answered, to be resumed  0 of 2" in plait_here(tmp_path, "runs").out
    shown = plait_here(tmp_path, "show", "last").out
    assert "\nstatus    answered, to be resumed, 0 of 2 tasks completed\n" in shown
    assert "\nresume    " in shown
    run = plait_here(tmp_path, "runs", "--json").value[0]
    assert (run["status"], run["reason"]) == ("waiting_input", "answered, to be resumed")
    assert plait_here(tmp_path, "runs", "--status", "waiting_input", "--json").value == [run]
    assert plait_here(tmp_path, "resume", "last", "-q").code == 0
    assert "answered" not in plait_here(tmp_path, "runs").out


def test_a_run_begun_by_a_key_is_listed_with_it(tmp_path: Path) -> None:
    make(tmp_path, "  - {id: a, prompt: one}\n")
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 0
    assert "KEY" not in plait_here(tmp_path, "runs").out
    assert plait_here(tmp_path, "run", "plan.yaml", "--queue", "--key", "order 4711").code == 0
    for words in ((), ("--long",)):
        head, keyed, plain = plait_here(tmp_path, "runs", *words).out.splitlines()
        assert head.endswith("  KEY")
        assert (keyed.endswith("  order 4711"), "4711" in plain) == (True, False)
    assert "\nkey       order 4711\n" in plait_here(tmp_path, "show", "last").out
