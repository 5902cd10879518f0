"""A prompt may name a task that lies further up than those its task depends on. When a resume does that one again, the
task waits for it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import anyio
import pytest

from plait import DAG, OpenQuestion, ParallelRunner, RunResult, RunStatus, Task, TaskStatus
from plait.backends import ask
from plait.persistence import SQLiteStore
from tests.support.fakes import QuickClock
from tests.support.stores.database import attempts_of

A, B = Task("a", prompt="a"), Task("b", prompt="b {{ a }}", depends_on=["a"])
END = Task("end", prompt="end {{ a }} {{ b }}", depends_on=["b"])
WHOLE = "end <a> <b <a>>"


class Kept:
    """A run in a file that is stopped, damaged and resumed, and what its tasks were asked. `fails` fails that often."""

    def __init__(self, path: Path, fails: Iterable[str] = ()) -> None:
        self.path, self.fails, self.prompts = path, list(fails), list[str]()
        self.stop_at: str | None = None

    async def answer(self, prompt: str) -> object:
        self.prompts.append(prompt)
        if prompt == self.stop_at:
            self.stop_at = None
            self.run.stop()
            await anyio.sleep_forever()
        if prompt in {"a", "write y"}:
            await anyio.wait_all_tasks_blocked()  # whoever does not wait for it is at work by now
        if prompt in self.fails:
            self.fails.remove(prompt)
            raise ValueError(prompt)
        if prompt == "plan":
            return [{"id": "more", "prompt": "more {{ a }} {{ b }}", "depends_on": ["b"]}]
        return ["x", "y"] if prompt == "source" else f"<{prompt}>"

    async def begin(self, tasks: Iterable[Task], stop_at: str | None = None) -> None:
        self.stop_at = stop_at
        async with SQLiteStore(self.path) as store:
            self.run = ParallelRunner(self.answer, store=store, concurrency=1).start(DAG(tasks), "r")
            async with self.run:
                await self.run.result()
        self.prompts.clear()

    def tamper(self, *task_ids: str) -> None:
        with closing(sqlite3.connect(self.path)) as connection, connection:
            for task_id in task_ids:
                changed = connection.execute(attempts_of(task_id, "text = 'tampered'"))
                assert changed.rowcount == 1

    async def resume(self, *, retry_failed: bool = True, stop_at: str | None = None) -> RunResult:
        self.stop_at = stop_at
        async with SQLiteStore(self.path, mode="existing") as store:
            runner = ParallelRunner(self.answer, store=store)
            async with runner.start_resume("r", retry_failed=retry_failed) as self.run:
                return await self.run.result()


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "p.db")


@pytest.mark.parametrize("retry_failed", [False, True])
@pytest.mark.parametrize("how", ["by its name", "by an alias"])
async def test_where_it_is_damaged(kept: Kept, how: str, retry_failed: bool) -> None:
    alias = Task("end", prompt="end {{ it }} {{ b }}", depends_on=["b"], aliases={"it": "a"})
    await kept.begin([A, B, END if how == "by its name" else alias], stop_at=WHOLE)
    kept.tamper("a")
    result = await kept.resume(retry_failed=retry_failed)
    assert kept.prompts == (["a", WHOLE] if retry_failed else [])
    assert result["end"].status is (TaskStatus.COMPLETED if retry_failed else TaskStatus.PENDING)


async def test_where_both_are(kept: Kept) -> None:
    await kept.begin([A, B, END])
    kept.tamper("a", "end")
    assert (await kept.resume()).status is RunStatus.COMPLETED
    assert kept.prompts == ["a", WHOLE]


@pytest.mark.parametrize("retry_failed", [False, True])
async def test_where_a_second_resume_goes_on_with_it(kept: Kept, retry_failed: bool) -> None:
    await kept.begin([A, B, END], stop_at=WHOLE)
    kept.tamper("a")
    assert (await kept.resume(stop_at="a")).status is RunStatus.INTERRUPTED
    assert (await kept.resume(retry_failed=retry_failed)).status is RunStatus.COMPLETED
    assert kept.prompts == ["a", "a", WHOLE]


async def test_where_it_failed_softly_and_is_tried_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "p.db", ["a", "end  <b >"])
    await kept.begin([Task("a", prompt="a", failure_mode="soft"), B, END])
    assert (await kept.resume()).status is RunStatus.COMPLETED
    assert kept.prompts == ["a", "end <a> <b >"]


@pytest.mark.parametrize("retry_failed", [False, True])
async def test_where_a_planner_adds_who_names_it(kept: Kept, retry_failed: bool) -> None:
    await kept.begin([A, B, Task("plan", prompt="plan", depends_on=["b"], adds_tasks=True)], stop_at="plan")
    kept.tamper("a")
    result = await kept.resume(retry_failed=retry_failed)
    assert result["more"].status is (TaskStatus.COMPLETED if retry_failed else TaskStatus.PENDING)
    assert ("more <a> <b <a>>" in kept.prompts) == retry_failed


async def test_where_a_part_names_a_partner_that_is_no_neighbour(kept: Kept) -> None:
    draft = Task("draft", prompt="write {{ item }}", for_each="source")
    mid = Task("mid", prompt="mid {{ draft }}", for_each="source", depends_on=["draft"])
    late = Task("late", prompt="late {{ draft }} {{ mid }}", for_each="source", depends_on=["mid", "other"])
    other = Task("other", prompt="other", depends_on=["mid"])
    await kept.begin([Task("source", prompt="source"), draft, mid, other, late], stop_at="other")
    kept.tamper("draft.2")
    assert (await kept.resume()).status is RunStatus.COMPLETED
    late_ones = {f"late <write {one}> <mid <write {one}>>" for one in "xy"}
    assert {prompt for prompt in kept.prompts if prompt.startswith("late")} == late_ones


@pytest.mark.parametrize("needs", ["a", "b"])
@pytest.mark.parametrize("retry_failed", [False, True])
async def test_where_the_task_waits_for_a_person_who_answers_at_once(
    tmp_path: Path, needs: str, retry_failed: bool
) -> None:
    """Also where it depends on what is done again itself."""
    path, prompts = tmp_path / "p.db", list[str]()

    async def answer(prompt: str) -> str:
        prompts.append(prompt)
        if prompt == "a":
            await anyio.wait_all_tasks_blocked()
        return f"<{prompt} {await ask('which?')}>" if prompt.startswith("end") else f"<{prompt}>"

    async def person(_question: OpenQuestion) -> str:
        return "this"

    dag = DAG([A, B, Task("end", prompt="end {{ a }}", depends_on=[needs])])
    async with SQLiteStore(path) as store:
        await ParallelRunner(answer, store=store).run(dag, "r")
    kept = Kept(path)
    kept.tamper("a")
    prompts.clear()
    async with SQLiteStore(path, mode="existing") as store:
        runner = ParallelRunner(answer, store=store, on_question=person, clock=QuickClock())
        result = await runner.resume("r", retry_failed=retry_failed)
    assert prompts == (["a", "end <a>"] if retry_failed else [])
    assert (result.status is RunStatus.COMPLETED) == retry_failed
