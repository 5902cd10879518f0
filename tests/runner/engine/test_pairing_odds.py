"""Tasks that pair up, and what may come between: cancels, failures, planners, damage, a store that is away."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from plait import DAG, GrowthLimits, ParallelRunner, RunStatus, Task, TaskStatus
from plait.backends.backend_protocol import ConversationRequest
from plait.errors import StoreError
from plait.persistence import Batch, MemoryStore, MessageRecord, SQLiteStore, Store
from plait.results import ResumeAction
from plait.workflows import Decision, RecordedRun
from tests.support.fakes import Talker
from tests.support.growth import Scripted, listed, plan, spec, talker
from tests.support.processes.command import plait_here
from tests.support.stores.database import attempts_of
from tests.support.stores.faulty_store import FaultyStore

SOURCE = Task("source", prompt="source")
DRAFT = Task("draft", prompt="write {{ item }}", for_each="source")
REVIEW = Task("review", prompt="judge {{ draft }} of {{ item }}", depends_on=["draft"], for_each="source")
END = Task("end", prompt="end {{ draft }} {{ review }}", depends_on=["review"])
LIST = {"source": listed(["a", "b", "c"])}
DRAFTS = '["<write a>", "<write b>", "<write c>"]'


def tamper(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        assert connection.execute(statement).rowcount == 1


async def test_an_alias_of_ones_own_stands_for_the_partner_too() -> None:
    aliases = {"one": "draft", "many": ["draft", "other"], "draft": "other"}
    review = replace(REVIEW, prompt="{{ one }} {{ many }} {{ draft }}", depends_on=["draft", "other"], aliases=aliases)
    dag = DAG([SOURCE, Task("other", prompt="other"), DRAFT, review])
    result = await ParallelRunner(talker(LIST)).run(dag)
    assert result.text["review.2"] == '<<write b> ["<write b>", "<other>"] <other>>'


async def test_an_alias_that_the_prompt_does_not_use_stands_for_the_partner_too() -> None:
    last = Task("last", prompt="{{ review }}", depends_on=["review"], for_each="source", aliases={"unused": "draft"})
    result = await ParallelRunner(talker(LIST)).run(DAG([SOURCE, DRAFT, REVIEW, last]))
    assert result.text["last.1"] == "<<judge <write a> of a>>"


@pytest.mark.parametrize("mode", ["soft", "skip"])
async def test_what_waits_for_one_that_fails_softly_has_what_that_one_waited_for(mode: str) -> None:
    """The review is one too many, and fails before the drafts are done; the end names these as well."""
    review = replace(REVIEW, failure_mode=mode)  # type: ignore[arg-type]
    runner = ParallelRunner(talker(LIST), growth=GrowthLimits(max_tasks=7))
    result = await runner.run(DAG([SOURCE, DRAFT, review, END]))
    assert "max_tasks" in (result["review"].error or "")
    assert result.text["end"] == f"<end {DRAFTS} >"


async def test_so_it_does_where_the_run_is_resumed_meanwhile(store: Store) -> None:
    async def answer(prompt: str) -> object:
        if prompt == "write b" and runs:
            runs.pop().stop()
            await anyio.sleep_forever()
        return ["a", "b", "c"] if prompt == "source" else f"<{prompt}>"

    dag = DAG([SOURCE, DRAFT, replace(REVIEW, failure_mode="soft"), END])
    async with ParallelRunner(answer, store=store, concurrency=1, growth=GrowthLimits(max_tasks=7)).start(
        dag, "r"
    ) as run:
        runs = [run]
    result = await ParallelRunner(answer, store=store, growth=GrowthLimits(max_tasks=7)).resume("r")
    assert result["review"].status is TaskStatus.FAILED
    assert result.text["end"] == f"<end {DRAFTS} >"


@pytest.mark.parametrize("cancelled", ["draft", "draft.3"])
async def test_what_pairs_up_with_a_cancelled_task_is_cancelled(cancelled: str) -> None:
    """Also where it is not unfolded yet, because it waits for something else."""
    cancelled_it = anyio.Event()

    async def answer(prompt: str) -> object:
        if prompt == "other":  # holds one of two places, so that the third draft is still pending
            await cancelled_it.wait()
        return ["a", "b", "c"] if prompt == "source" else f"<{prompt}>"

    def decide(view: RecordedRun) -> Decision | None:
        if view.ended == "draft.1":
            cancelled_it.set()
        return Decision(cancel=(cancelled,)) if view.ended == "draft.1" else None

    other = Task("other", prompt="other", weight=9)
    late = Task("late", prompt="{{ draft }}", depends_on=["draft", "other"], for_each="source")
    dag = DAG([other, SOURCE, DRAFT, late, replace(END, depends_on=["late"], prompt="end")])
    with anyio.fail_after(60):
        result = await ParallelRunner(answer, concurrency=2).run(dag, policy=Scripted(decide))
    assert {result[name].status for name in ("draft", "late", "end")} == {TaskStatus.CANCELLED}
    assert result.status is RunStatus.COMPLETED


async def test_a_planner_may_name_what_lies_behind_a_pair(kept: Store | None) -> None:
    specs = plan(spec("more", prompt="{{ draft }} {{ review }}", depends_on=["review"]))
    planner = Task("plan", prompt="plan", depends_on=["review"], adds_tasks=True)
    result = await ParallelRunner(talker({**LIST, "plan": specs}), store=kept).run(
        DAG([SOURCE, DRAFT, REVIEW, planner])
    )
    assert result.text["more"].startswith(f"<{DRAFTS} ")


def test_what_comes_before_a_pair_is_no_result_of_the_run(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(
        "def work(prompt: str) -> object:\n    return ['a', 'b'] if prompt == 'source' else prompt.upper()\n"
    )
    (tmp_path / "plan.yaml").write_text(
        "backends: {work: {kind: function, call: 'work.py:work'}}\n"
        "tasks:\n"
        "  - {id: source, prompt: source}\n"
        "  - {id: draft, prompt: 'write {{ item }}', for_each: source}\n"
        "  - {id: review, prompt: 'judge {{ draft }}', for_each: source, depends_on: draft}\n"
    )
    told = [plait_here(tmp_path, *words).out for words in (("run", "plan.yaml", "-q"), ("resume", "last", "-q"))]
    assert told == ['["JUDGE WRITE A","JUDGE WRITE B"]\n'] * 2


@pytest.mark.parametrize("now", [["a"], ["x", "y"], ["a", "b", "c"]])
async def test_a_list_that_has_changed_pairs_up_with_nothing(tmp_path: Path, now: list[str]) -> None:
    """The source is damaged and asked again, when one of the two is unfolded and the other is not."""
    path, found = tmp_path / "p.db", [["a", "b"], now]

    async def answer(prompt: str) -> object:
        if prompt == "other" and runs:
            runs.pop().stop()
            await anyio.sleep_forever()
        return found.pop(0) if prompt == "source" else f"<{prompt}>"

    late = Task("late", prompt="{{ draft }}", depends_on=["draft", "other"], for_each="source")
    dag = DAG([SOURCE, DRAFT, Task("other", prompt="other", depends_on=["draft"]), late])
    async with SQLiteStore(path) as store, ParallelRunner(answer, store=store).start(dag, "r") as run:
        runs = [run]
    tamper(path, attempts_of("source", "text = 'tampered'"))
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(answer, store=store).resume("r", retry_failed=True)
    says = "task 'late': continues the parts of 'draft', which were made from another list: the result of 'source'"
    assert (result["late"].error or "").startswith(says)


async def test_a_conversation_is_kept_for_one_that_is_not_unfolded_yet() -> None:
    """The store goes away before it is; then what was said is in memory, or nowhere."""

    class Away(FaultyStore):
        down = False

        async def write(self, batch: Batch) -> None:
            self._refuse()
            await super().write(batch)

        async def list_messages(self, run_id: str, task_id: str) -> tuple[MessageRecord, ...]:
            self._refuse()
            return await super().list_messages(run_id, task_id)

        def _refuse(self) -> None:
            if self.down:
                raise StoreError("away")

    def answer(prompt: str, _opening: ConversationRequest) -> object:
        store.down = store.down or prompt == "other"
        return listed(["a", "b"]) if prompt == "source" else f"<{prompt}>"

    store, backend = Away(MemoryStore()), Talker(answer)  # type: ignore[arg-type]
    polish = Task("polish", prompt="better", continues="draft", for_each="source", depends_on=["other"])
    dag = DAG([SOURCE, DRAFT, Task("other", prompt="other", depends_on=["draft"]), polish])
    result = await ParallelRunner(backend, store=store).run(dag)
    assert (result["polish"].data, result.status) == (["<better>", "<better>"], RunStatus.COMPLETED)
    assert len([one for one in backend.requests if len(one.history) == 2]) == 2


async def test_a_partner_that_failed_as_a_whole_has_no_parts(store: Store) -> None:
    """It was too wide for the run; resumed with more room, the other one begins each conversation afresh."""

    def answer(prompt: str, _opening: ConversationRequest) -> object:
        if prompt == "other" and runs:
            runs.pop().stop()
        return listed(["a", "b", "c"]) if prompt == "source" else f"<{prompt}>"

    backend = Talker(answer)  # type: ignore[arg-type]
    polish = Task("polish", prompt="{{ draft }}.", continues="draft", for_each="source", depends_on=["other"])
    other = Task("other", prompt="other", depends_on=["draft"])
    dag = DAG([SOURCE, replace(DRAFT, failure_mode="soft"), other, polish])
    async with ParallelRunner(backend, store=store, growth=GrowthLimits(max_tasks=5)).start(dag, "r") as run:
        runs = [run]
    result = await ParallelRunner(backend, store=store).resume("r")
    assert (result["draft"].status, result["polish"].data) == (TaskStatus.FAILED, ["<.>"] * 3)
    assert [one.history for one in backend.requests[-3:]] == [(), (), ()]


async def test_a_failed_part_and_its_partner_run_again(store: Store) -> None:
    fails = [True]

    async def answer(prompt: str) -> object:
        if prompt == "write b" and fails:
            raise ValueError(fails.pop())
        return ["a", "b", "c"] if prompt == "source" else f"<{prompt}>"

    result = await ParallelRunner(answer, store=store).run(DAG([SOURCE, DRAFT, REVIEW, END]), "r")
    assert (result.status, result["review.2"].status) == (RunStatus.FAILED, TaskStatus.PENDING)
    result = await ParallelRunner(answer, store=store).resume("r", retry_failed=True)
    assert (result.status, result.reused) == (RunStatus.COMPLETED, 5)
    assert result.text["review.2"] == "<judge <write b> of b>"


async def test_of_two_that_continue_a_part_each_branches_off(store: Store) -> None:
    """Also where only one of the two is unfolded yet: the other one finds the conversation as the part has left it."""
    backend = talker({"source": listed(["a"])})
    first = Task("first", prompt="first", continues="draft", for_each="source")
    other = Task("other", prompt="other", depends_on=["first"])
    second = Task("second", prompt="second", continues="draft", for_each="source", depends_on=["other"])
    result = await ParallelRunner(backend, store=store).run(DAG([SOURCE, DRAFT, first, other, second]))
    assert result.status is RunStatus.COMPLETED
    mine = result["draft.1"].session_id
    assert {result[name].session_id != mine for name in ("first.1", "second.1")} == {True}
    opened = dict(zip(backend.prompts, backend.requests, strict=True))
    assert [opened[name].fork_of for name in ("first", "second")] == [mine, mine]


async def test_the_preview_knows_that_pairs_do_not_wait(store: Store) -> None:
    async def answer(prompt: str) -> object:
        if prompt == "other" and runs:
            runs.pop().stop()
            await anyio.sleep_forever()
        if prompt == "write b":
            raise ValueError(prompt)
        return ["a", "b", "c"] if prompt == "source" else f"<{prompt}>"

    late = Task("late", prompt="{{ draft }}", depends_on=["draft", "other"], for_each="source")
    other = Task("other", prompt="other", depends_on=["source"], weight=0)
    async with ParallelRunner(answer, store=store, concurrency=1).start(DAG([SOURCE, DRAFT, other, late]), "r") as run:
        runs = [run]
    runner = ParallelRunner(answer, store=store)
    assert (await runner.runs.preview("r")).tasks["late"].action is ResumeAction.START
    result = await runner.resume("r")
    assert [result[f"late.{number}"].status is TaskStatus.COMPLETED for number in (1, 2, 3)] == [True, False, True]
