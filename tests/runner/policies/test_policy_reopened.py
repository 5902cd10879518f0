"""Runs that their policy has ended, reopened by a person, and interrupted before they came to their end again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from plait import DAG, ParallelRunner, RunStatus, Step, Task, Workflow
from plait.persistence import SQLiteStore, Store
from plait.results import ResumeAction
from plait.workflows import Decision
from tests.support.growth import Scripted, by_end
from tests.support.stores.database import attempts_of

FLOW = Workflow([Step("build", "Build."), Step("check", "Check {{ build }}.")])


class Model:
    """Fails at, or holds, the prompts that begin with a word, and answers "ok" to the others."""

    def __init__(self, *, fails: str = "nothing", holds: str = "nothing") -> None:
        self.fails, self.holds = fails, holds
        self.prompts: list[str] = []
        self.held = anyio.Event()

    async def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if prompt.startswith(self.fails):
            raise RuntimeError("not today")
        if prompt.startswith(self.holds):
            self.held.set()
            await anyio.sleep_forever()
        return "ok"


async def interrupted(store: SQLiteStore) -> None:
    """Resume run "r" with retry_failed, and stop it while the second step is under way."""
    model = Model(holds="Check")
    async with ParallelRunner(model, store=store).start_resume("r", retry_failed=True) as run:
        await model.held.wait()
        run.stop()


def tamper(path: Path, task_id: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(attempts_of(task_id, "text = 'tampered'"))
        connection.commit()


@pytest.mark.parametrize("retry_failed", [False, True])
@pytest.mark.parametrize("completed", [False, True])
async def test_it_comes_to_its_end_all_the_same(completed: bool, retry_failed: bool, tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SQLiteStore(path) as store:
        first = Model() if completed else Model(fails="Check")
        await ParallelRunner(first, store=store).run(FLOW.dag(), "r", policy=FLOW)
    if completed:
        tamper(path, "check.1")
    async with SQLiteStore(path) as store:
        await interrupted(store)
        model = Model()
        runner = ParallelRunner(model, store=store)
        foretold = await runner.runs.preview("r", retry_failed=retry_failed)
        assert foretold.tasks["check.1"].action is ResumeAction.START_OVER
        result = await runner.resume("r", retry_failed=retry_failed)
        assert (result.status, result.error, model.prompts) == (RunStatus.COMPLETED, None, ["Check ok."])
        again = await runner.resume("r")
        assert (again.status, again.text["check.1"], len(model.prompts)) == (RunStatus.COMPLETED, "ok", 1)


async def test_a_planner_that_was_corrected_long_ago_gets_its_prompt(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    prompts: list[str] = []
    held = anyio.Event()

    async def planner(prompt: str) -> list[dict[str, object]]:
        prompts.append(prompt)
        if len(prompts) == 3:
            held.set()
            await anyio.sleep_forever()
        return [{"id": "a", "prompt": "Hello.", "depends_on": ["nobody"] if len(prompts) == 1 else []}]

    async with SQLiteStore(path) as store:
        runner = ParallelRunner(Model(), backends={"planner": planner}, store=store)
        result = await runner.run(DAG([Task("plan", prompt="Plan.", adds_tasks=True, backend="planner")]), "r")
        assert (result.status, len(prompts)) == (RunStatus.COMPLETED, 2)
    tamper(path, "plan")
    async with SQLiteStore(path) as store:
        runner = ParallelRunner(Model(), backends={"planner": planner}, store=store)
        async with runner.start_resume("r", retry_failed=True) as run:
            await held.wait()
            run.stop()
        await runner.resume("r", retry_failed=True)
    assert [prompt.startswith("These tasks cannot be added") for prompt in prompts] == [False, True, False, False]


async def test_the_state_of_the_policy_outlasts_a_crash_after_the_reopening(store: Store) -> None:
    ends = Scripted(by_end({"a": Decision(end=RunStatus.FAILED, state=["a has ended"])}))
    dag, model = DAG([Task("a", "a"), Task("b", "b", ["a"])]), Model(holds="b")
    assert (await ParallelRunner(Model(), store=store).run(dag, "r", policy=ends)).status is RunStatus.FAILED
    async with ParallelRunner(model, store=store).start_resume("r", retry_failed=True, policy=Scripted()) as run:
        await model.held.wait()
        run.stop()
    states: list[object] = []
    policy = Scripted(lambda run: states.append(run.state))
    result = await ParallelRunner(Model(), store=store).resume("r", policy=policy)
    assert (result.status, policy.asked, states[0]) == (RunStatus.COMPLETED, ["b", None], ["a has ended"])
