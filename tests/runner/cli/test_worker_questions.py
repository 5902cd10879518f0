"""Workers continue the runs that wait for a person once a person has answered, and at the deadline of a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.command import plait_here
from tests.support.processes.fleet import STORES, empty_store, until, worker

pytestmark = pytest.mark.slow

PLAN = """
backends:
  w: {kind: function, call: "work.py:work"}
  person: {kind: person}
  soon: {kind: person, deadline: 0.5, default: "by itself"}
defaults: {backend: w}
tasks:
  - {id: first, prompt: "Which one?", backend: person}
  - {id: second, prompt: "And which one?", backend: %s}
  - {id: uses, prompt: "{{ first }} and {{ second }}", depends_on: [first, second]}
"""
WORK = "async def work(prompt):\n    return f'got {prompt}'\n"


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return empty_store(request.param, tmp_path)


def submit(folder: Path, store: str, second: str = "person") -> str:
    (folder / "plan.yaml").write_text(PLAN % second)
    (folder / "work.py").write_text(WORK)
    done = plait_here(folder, "run", "plan.yaml", "--queue", "--store", store)
    assert done.code == 0, done.err
    return done.out.strip()


def run_of(folder: Path, store: str, run_id: str) -> dict[str, Any]:
    value: dict[str, Any] = plait_here(folder, "show", run_id, "--json", "--store", store).value
    return value


def reaches(folder: Path, store: str, run_id: str, status: str) -> None:
    until(lambda: run_of(folder, store, run_id)["status"] == status)


def answer(folder: Path, store: str, run_id: str, *words: str) -> None:
    done = plait_here(folder, "answer", run_id, *words, "--store", store)
    assert done.code == 0, done.err


def test_a_worker_continues_a_run_that_was_answered(tmp_path: Path, store: str) -> None:
    run_id, other = submit(tmp_path, store), submit(tmp_path, store)
    with worker(tmp_path, store):
        reaches(tmp_path, store, run_id, "waiting_input")
        reaches(tmp_path, store, other, "waiting_input")
        answer(tmp_path, store, run_id, "first", "this")
        until(lambda: "first" not in plait_here(tmp_path, "answer", run_id, "--store", store).out)
        answer(tmp_path, store, run_id, "second", "--done", "that")
        reaches(tmp_path, store, run_id, "completed")
    assert plait_here(tmp_path, "show", run_id, "uses", "--store", store).out.count("got this and that") == 1
    assert run_of(tmp_path, store, other)["status"] == "waiting_input", "no answer, so nothing goes on"


def test_a_worker_takes_a_run_that_was_answered_before_the_worker_began(tmp_path: Path, store: str) -> None:
    run_id = submit(tmp_path, store)
    assert plait_here(tmp_path, "resume", run_id, "-q", "--store", store).code == 4
    answer(tmp_path, store, run_id, "first", "this")
    answer(tmp_path, store, run_id, "second", "that")
    assert run_of(tmp_path, store, run_id)["status"] == "waiting_input"
    with worker(tmp_path, store):
        reaches(tmp_path, store, run_id, "completed")


def test_a_worker_continues_a_run_at_the_deadline_of_its_question(tmp_path: Path, store: str) -> None:
    run_id = submit(tmp_path, store, second="soon")
    assert plait_here(tmp_path, "resume", run_id, "-q", "--store", store).code == 4
    with worker(tmp_path, store):
        until(lambda: run_of(tmp_path, store, run_id)["counts"].get("completed") == 1)
        answer(tmp_path, store, run_id, "first", "this")
        reaches(tmp_path, store, run_id, "completed")
    assert "got this and by itself" in plait_here(tmp_path, "show", run_id, "uses", "--store", store).out
