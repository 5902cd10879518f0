"""`plait run -`: the plan on standard input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.support.plans.logged import CHAIN, calls, make
from tests.support.processes.command import Done, plait


def piped(folder: Path, text: str, *words: str) -> Done:
    """Run `plait WORDS -` in `folder`, with `text` on standard input."""
    (folder / "typed").write_text(text)
    return plait(folder, *words, "-", stdin=folder / "typed")


def as_yaml(text: str) -> str:
    return text


def as_json(text: str) -> str:
    return json.dumps(yaml.safe_load(text), indent=1)


@pytest.mark.parametrize("written", [as_yaml, as_json])
def test_a_plan_on_standard_input_runs_with_paths_from_the_working_folder(
    tmp_path: Path, written: Callable[[str], str]
) -> None:
    plan = make(tmp_path, CHAIN.replace("one", "'{{ word }}'"))
    text = written(plan.read_text() + "inputs: {word: two}\n")
    plan.unlink()
    done = piped(tmp_path, text, "run", "--set", "word=one")
    assert (done.code, done.out) == (0, "re: two re: one\n")
    assert piped(tmp_path, text, "check").out.startswith("trial: 2 tasks in 2 levels, no mistakes\n")


def test_a_resume_of_a_piped_plan_takes_its_functions_from_the_file_that_is_named(tmp_path: Path) -> None:
    plan = make(tmp_path, "  - {id: a, prompt: one}\n")
    submitted = piped(tmp_path, plan.read_text(), "run", "--queue")
    run_id = submitted.out.strip()
    refused = plait(tmp_path, "resume", run_id)
    assert (refused.code, calls(tmp_path)) == (2, [])
    assert "name the file with --plan PATH" in refused.err
    assert plait(tmp_path, "resume", run_id, "--plan", "plan.yaml").out == "re: one\n"


def test_mistakes_have_their_places_on_standard_input(tmp_path: Path) -> None:
    done = piped(tmp_path, "tasks:\n  - {id: a, prompt: x, depends_on: b}\n", "run")
    assert (done.code, done.err) == (
        2,
        "standard input:2:36: tasks[0].depends_on: unknown task 'b'\n",
    )
    assert piped(tmp_path, "", "run").code == 2


def test_a_backend_cannot_be_given_for_a_piped_plan_that_names_its_own(tmp_path: Path) -> None:
    plan = make(tmp_path, CHAIN)
    done = piped(tmp_path, plan.read_text(), "run", "--backend", "openai")
    assert (done.code, done.err) == (
        2,
        "plait: the plan names its backends itself; leave --backend, --model and --base-url out\n",
    )
