"""Resumes that would build on a damaged result: refused before anything runs, in a line with task and remedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Task
from plait.errors import RunNotResumable
from plait.persistence import SQLiteStore
from plait.runner.orchestrator import Orchestrator
from tests.support.crashed import Dying, die
from tests.support.fakes import Talker
from tests.support.stores.database import attempts_of, edit
from tests.support.team import ANSWER, GOAL, Team


async def left_over(path: Path, tasks: Sequence[Task], damaged: str) -> None:
    """Leave run "r" crashed at prompts that begin with "last", with the result of the task `damaged` changed."""
    async with SQLiteStore(path) as store:
        await die(store, Dying(lambda prompt: prompt.startswith("last")), DAG(tasks))
    edit(path, attempts_of(damaged, "text = 'tampered'"))


async def refusal(path: Path, *, retry_failed: bool = False) -> str:
    """The error of a resume, which has to be that of its preview, and to run nothing."""
    backend, told = Talker(), list[str]()
    async with SQLiteStore(path, mode="existing") as store:
        runner = ParallelRunner(backend, store=store)
        for call in (runner.runs.preview, runner.resume):
            with pytest.raises(RunNotResumable) as refused:
                await call("r", retry_failed=retry_failed)
            told.append(str(refused.value))
    assert (backend.prompts, told[0]) == ([], told[1])
    return told[0]


def pair(mode: str, *, at_most_once: bool = False) -> list[Task]:
    return [
        Task("a", "A", failure_mode=mode, at_most_once=at_most_once),  # type: ignore[arg-type]
        Task("b", "last [{{ a }}]", depends_on=["a"]),
    ]


@pytest.mark.parametrize("mode", ["soft", "skip"])
async def test_a_dependent_does_not_run_without_a_damaged_result(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "p.db"
    await left_over(path, pair(mode), "a")
    assert await refusal(path) == (
        "run r: the stored result of task 'a' does not fit its checksum, and other tasks would run without the result; "
        "resume with retry_failed (plait resume --retry-failed) to run the task again"
    )
    backend = Talker()
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["A", "last [re: A]"])


async def test_a_prompt_further_down_that_names_the_task_does_not_run_either(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    end = Task("c", "last [{{ a }}]", depends_on=["b"])
    await left_over(path, [Task("a", "A", failure_mode="soft"), Task("b", "B", depends_on=["a"]), end], "a")
    assert "task 'a'" in await refusal(path)


async def test_a_task_that_must_not_take_effect_twice_is_not_offered_again(tmp_path: Path) -> None:
    path = tmp_path / "p.db"
    await left_over(path, pair("soft", at_most_once=True), "a")
    told = await refusal(path, retry_failed=True)
    assert told.endswith("the task must not take effect twice, so restore a copy of the store, or start a new run")


@pytest.mark.parametrize("mode", ["hard", "soft", "skip"])
async def test_damage_on_which_nothing_builds_stops_nothing_else(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "p.db"
    done = [Task("a", "A", failure_mode=mode), Task("b", "B {{ a }}", depends_on=["a"])]  # type: ignore[arg-type]
    await left_over(path, [*done, Task("z", "last", depends_on=["b"])], "a")
    backend = Talker()
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(backend, store=store).resume("r")
    assert (backend.prompts, result.status, result["a"].error_kind) == (["last"], RunStatus.FAILED, "damaged")


@pytest.mark.parametrize("task_id", ["do.a", "do.c", "plan.1"])
async def test_a_policy_does_not_decide_on_a_damaged_result(tmp_path: Path, task_id: str) -> None:
    path = tmp_path / "p.db"
    async with SQLiteStore(path) as store:
        with anyio.CancelScope() as scope:
            team = Team(lambda call: scope.cancel() if call == "find d" else None)
            await Orchestrator(GOAL, backends=team.backends, store=store, run_id="r").run()
    edit(path, attempts_of(task_id, "text = 'tampered'"))
    calls = list[str]()
    async with SQLiteStore(path, mode="existing") as store:
        runner = ParallelRunner(backends=Team(calls.append).backends, default="executor", store=store)
        for call in (runner.runs.preview, runner.resume):
            with pytest.raises(RunNotResumable, match=f"task '{task_id}' .*policy would decide without the result"):
                await call("r")
        assert calls == []
        result = await runner.resume("r", retry_failed=True)
    assert (result.status, result["answer"].text) == (RunStatus.COMPLETED, ANSWER)
