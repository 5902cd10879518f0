"""`plait show` of a run with many parts: grouped, filtered, and within the columns of a terminal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.processes.command import Terminal, plait_here

FUNCTIONS = """
from plait.errors import BackendError, ErrorKind

async def work(prompt):
    if prompt.endswith(("7", "11")):
        raise BackendError(ErrorKind.REFUSED, "no word about seven, nor eleven, nor about anything that follows either")
    return "=" + prompt
"""
PLAN = """
name: many
inputs:
  numbers: [%s]
  two: [1, 2]
backends:
  work: {kind: function, call: "functions.py:work"}
tasks:
  - {id: start, prompt: go}
  - {id: part, prompt: "{{ item }}", for_each: numbers, failure_mode: soft}
  - {id: few, prompt: "few {{ item }}", for_each: two}
  - {id: talk, prompt: more, continues: start}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("many")
    (folder / "functions.py").write_text(FUNCTIONS)
    (folder / "plan.yaml").write_text(PLAN % ", ".join(map(str, range(1, 31))))
    assert plait_here(folder, "run", "plan.yaml", "-q").code == 1
    return folder


def names(out: str) -> list[str]:
    """The first column of the table."""
    lines = out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("TASK"))
    return [line.split()[0] for line in lines[head + 1 :] if line.strip()]


def test_parts_are_a_line_and_the_failed_ones_are_named(folder: Path) -> None:
    out = plait_here(folder, "show", "last").out
    assert names(out) == ["start", "part.*", "part.7", "part.11", "part.17", "part.27", "few.1", "few.2", "talk"]
    assert re.search(r"^part\.\* +30 parts .* 26 completed, 4 failed$", out, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--status", "failed"], ["part.7", "part.11", "part.17", "part.27"]),
        (["--task", "part.1?", "--status", "failed"], ["part.11", "part.17"]),
        (["--task", "few.*"], ["few.1", "few.2"]),
        (["--task", "[st]ta*", "--status", "completed", "--status", "failed"], ["start"]),
    ],
)
def test_tasks_are_chosen_by_status_and_pattern(folder: Path, words: list[str], expected: list[str]) -> None:
    assert names(plait_here(folder, "show", "last", *words).out) == expected
    value = plait_here(folder, "show", "last", *words, "--json").value
    assert [task["task_id"] for task in value["tasks"]] == expected


def test_a_choice_of_nothing_says_so_and_one_for_a_task_is_refused(folder: Path) -> None:
    assert "no task matches\n" in plait_here(folder, "show", "last", "--task", "nobody").out
    done = plait_here(folder, "show", "last", "start", "--status", "failed")
    assert (done.code, done.err.count("\n")) == (2, 1)


def test_a_task_that_continues_another_names_the_conversation(folder: Path) -> None:
    assert "continues the conversation of start\n" in plait_here(folder, "show", "last", "talk").out
    assert "\ncontinues" not in plait_here(folder, "show", "last", "start").out


def test_lines_on_a_terminal_are_coloured_and_do_not_wrap(folder: Path) -> None:
    for words in (["show", "last"], ["runs"]):
        with Terminal(folder, *words, COLUMNS="80") as terminal:
            assert terminal.wait() == 0
        lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.seen.decode()).replace("\r", "").splitlines()
        assert max(map(len, lines)) <= 80, words
        assert b"\x1b[31mfailed" in terminal.seen
    assert "…" in "".join(lines) or len(lines) == 2


def test_prose_on_a_terminal_breaks_between_words_and_is_whole_elsewhere(folder: Path, tmp_path: Path) -> None:
    prompt = "  - " + " ".join(f"word{n}" for n in range(40))
    (tmp_path / "work.py").write_text("async def work(prompt):\n    return prompt\n")
    task = {"id": "a", "prompt": f"{prompt}\nshort"}
    backends = {"w": {"kind": "function", "call": "work.py:work"}}
    (tmp_path / "plan.json").write_text(json.dumps({"backends": backends, "tasks": [task]}))
    assert plait_here(tmp_path, "run", "plan.json", "-q").code == 0
    with Terminal(tmp_path, "show", "last", "a", COLUMNS="80") as terminal:
        assert terminal.wait() == 0
    lines = terminal.seen.decode().replace("\r", "").splitlines()
    assert max(map(len, lines)) <= 80
    start = lines.index("-- prompt --") + 1
    end = lines.index("short", start)
    assert " ".join(" ".join(lines[start:end]).split()) == prompt.strip()
    assert all(line.startswith("  ") for line in lines[start:end])
    assert f"{prompt}\n" in plait_here(tmp_path, "show", "last", "a").out
