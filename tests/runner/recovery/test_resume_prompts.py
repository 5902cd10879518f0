"""A resume with `retry_failed` takes new prompts of failed tasks, and stores the prompts before the tasks run."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait import DAG, ParallelRunner, PlaitError, RunStatus, Task
from plait.errors import DAGError, TaskNotFound
from plait.persistence import SQLiteStore, Store
from tests.support.processes.command import plait_here


class Picky:
    """A backend that refuses prompts with the word bad; records the calls."""

    def __init__(self) -> None:
        self.made: list[str] = []

    async def __call__(self, prompt: str) -> str:
        self.made.append(prompt)
        if "bad" in prompt:
            raise ValueError("refused")
        return f"<{prompt}>"


DAG_OF_THREE = DAG([Task("a", "a"), Task("b", "bad {{ a }}", ["a"]), Task("c", "c {{ b }}", ["b"])])


async def test_the_repaired_prompt_is_sent_and_stored(store: Store) -> None:
    picky = Picky()
    runner = ParallelRunner(picky, store=store)
    assert (await runner.run(DAG_OF_THREE, "r")).status is RunStatus.FAILED
    picky.made.clear()
    result = await runner.resume("r", retry_failed=True, prompts={"b": "good {{ a }}"})
    assert result.status is RunStatus.COMPLETED
    assert picky.made == ["good <a>", "c <good <a>>"]
    (task,) = await store.list_tasks("r", "b")
    assert (task.prompt, task.attempt) == ("good {{ a }}", 2)


async def test_a_second_resume_goes_on_with_the_repaired_prompt(store: Store) -> None:
    picky = Picky()
    runner = ParallelRunner(picky, store=store)
    await runner.run(DAG_OF_THREE, "r")
    await runner.resume("r", retry_failed=True, prompts={"b": "still bad {{ a }}"})
    picky.made.clear()
    await runner.resume("r", retry_failed=True)
    assert picky.made == ["still bad <a>"]


async def test_prompts_that_do_not_fit_change_nothing(store: Store) -> None:
    runner = ParallelRunner(Picky(), store=store)
    await runner.run(DAG_OF_THREE, "r")
    before = await store.list_tasks("r")
    with pytest.raises(PlaitError, match="task 'a' of run r is completed, and only a failed task"):
        await runner.resume("r", retry_failed=True, prompts={"a": "x"})
    with pytest.raises(TaskNotFound, match="no task 'bb'"):
        await runner.resume("r", retry_failed=True, prompts={"bb": "x"})
    with pytest.raises(DAGError, match="gone"):
        await runner.resume("r", retry_failed=True, prompts={"b": "{{ gone }}"})
    with pytest.raises(DAGError, match="task 'b': there is no prompt; write one"):
        await runner.resume("r", retry_failed=True, prompts={"b": ""})
    with pytest.raises(ValueError, match="retry_failed=True"):
        await runner.resume("r", prompts={"b": "x"})
    assert await store.list_tasks("r") == before


PLAN = """
backends:
  work: {kind: function, call: "functions.py:work"}
inputs:
  rows: [x, y]
tasks:
  - {id: a, prompt: a}
  - {id: b, prompt: "%s {{ a }}", depends_on: a}
  - {id: c, prompt: "%s {{ b }}", depends_on: b}
  - {id: part, prompt: "%s {{ item }}", for_each: rows, failure_mode: soft}
"""
FUNCTIONS = """
def work(prompt):
    with open("calls", "a") as file:
        file.write(prompt + "\\n")
    if "bad" in prompt:
        raise ValueError("refused")
    return f"<{prompt}>"
"""


def test_the_command_takes_the_prompts_of_failed_tasks_from_the_plan(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "plan.yaml").write_text(PLAN % ("bad", "c", "bad"))
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
    (tmp_path / "calls").unlink()
    (tmp_path / "plan.yaml").write_text(PLAN % ("good", "C", "well"))

    preview = plait_here(tmp_path, "resume", "last", "--retry-failed", "--plan", "plan.yaml", "--dry-run")
    assert "with the prompt of the plan" in next(line for line in preview.out.splitlines() if " b: " in line)
    assert not (tmp_path / "calls").exists()

    done = plait_here(tmp_path, "resume", "last", "--retry-failed", "--plan", "plan.yaml")
    assert done.code == 0, done.err
    assert "taking the prompts of b, part.1, part.2 from " in done.err
    assert "since this run was stored; a resume runs the stored plan, but for these prompts" in done.err
    made = sorted((tmp_path / "calls").read_text().splitlines())
    assert made == ["c <good <a>>", "good <a>", "well x", "well y"]


GROWING = """
backends:
  work: {kind: function, call: "functions.py:work"}
tasks:
  - {id: plan, prompt: "%s", output: tasks}
  - {id: list, prompt: list, output_schema: {type: array}}
  - {id: part, prompt: "%s {{ item }}", for_each: list, failure_mode: soft}
"""
GROWN = """
def work(prompt):
    with open("calls", "a") as file:
        file.write(prompt + "\\n")
    if "bad" in prompt:
        raise ValueError("refused")
    tasks = '[{"id": "added", "prompt": "bad idea"}]'
    return tasks if prompt.startswith("make") else '["x"]' if prompt == "list" else prompt
"""


def test_a_task_that_a_planner_added_keeps_its_prompt_and_a_part_takes_that_of_its_list(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(GROWN)
    (tmp_path / "plan.yaml").write_text(GROWING % ("make tasks", "bad"))
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
    (tmp_path / "calls").unlink()
    (tmp_path / "plan.yaml").write_text(GROWING % ("make better tasks", "good"))
    done = plait_here(tmp_path, "resume", "last", "--retry-failed", "--plan", "plan.yaml")
    assert sorted((tmp_path / "calls").read_text().splitlines()) == ["bad idea", "good x"], done.err
    assert "taking the prompts of part.1 from " in done.err
    assert "since this run was stored; a resume runs the stored plan, but for these prompts" in done.err


def test_without_the_option_the_stored_prompts_count(tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "plan.yaml").write_text(PLAN % ("bad", "c", "p"))
    assert plait_here(tmp_path, "run", "plan.yaml", "-q").code == 1
    (tmp_path / "plan.yaml").write_text(PLAN % ("good", "c", "p"))
    assert plait_here(tmp_path, "resume", "last", "--retry-failed", "-q").code == 1
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "bad <a>"


async def test_a_stored_prompt_survives_a_checked_read(tmp_path: Path) -> None:
    async with SQLiteStore(tmp_path / "plait.db") as kept:
        await ParallelRunner(Picky(), store=kept).run(DAG_OF_THREE, "r")
        await ParallelRunner(Picky(), store=kept).resume("r", retry_failed=True, prompts={"b": "good"})
    async with SQLiteStore(tmp_path / "plait.db", mode="read") as kept:
        assert [task.prompt for task in await kept.list_tasks("r")] == ["a", "good", "c {{ b }}"]
