"""Resume: from the store alone; what is done is kept, what is not is run; every other case has one clear answer."""

from __future__ import annotations

import re
import sqlite3
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, PersonBackend, Retry, RunStatus, Task, TaskStatus, events
from plait.backends import Reply, Usage
from plait.errors import (
    BackendError,
    BackendMissing,
    Conflict,
    ErrorKind,
    RunNotFound,
    RunNotResumable,
    StoreError,
    StoreRequired,
)
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store
from plait.runner.client import create_run
from plait.runner.client.runs import Runs, load_progress
from plait.runner.engine.inbox import AnswerNote, answer_note
from plait.runner.engine.run_options import RunOptions
from plait.runner.state.stored_run import decode_dag
from tests.contracts.store.samples import whole
from tests.support.fakes import QuickClock, Talker
from tests.support.stopped import DIAMOND, stopped_after
from tests.support.stores.database import attempts_of
from tests.support.stores.faulty_store import FaultyStore


@pytest.mark.parametrize("done", [0, 1, 2, 3])
async def test_resume_runs_only_what_is_left(store: Store, done: int) -> None:
    await stopped_after(store, DIAMOND, done)
    backend = Talker(lambda prompt, _: f"<{prompt}>")
    result = await ParallelRunner(backend, store=store).resume("r")
    assert result.status is RunStatus.COMPLETED
    assert len(backend.prompts) == 4 - done
    assert result.reused == done
    assert result["d"].text == "<d <b <a>> <c <a>> Ada>"
    assert result.degraded == ()


async def test_a_resume_reads_the_run_and_its_inbox_once_before_it_claims_the_run(store: Store) -> None:
    await stopped_after(store, DIAMOND, 2)
    calls: list[str] = []
    await ParallelRunner(Talker(), store=FaultyStore(store, lambda method, _: calls.append(method))).resume("r")
    before = calls[: calls.index("write")]
    assert {name: before.count(name) for name in ("get_run", "list_tasks", "list_notes")} == {
        "get_run": 1,
        "list_tasks": 1,
        "list_notes": 1,
    }


async def test_a_conversation_that_several_tasks_continue_is_read_for_all_at_once(store: Store) -> None:
    """After a look whether it is damaged."""
    dag = DAG([Task("a", "a"), *(Task(name, name, continues="a") for name in "bcd")])
    await stopped_after(store, dag, 1)
    calls: list[str] = []
    await ParallelRunner(Talker(), store=FaultyStore(store, lambda method, _: calls.append(method))).resume("r")
    assert calls[: calls.index("write")].count("list_messages") == 2


async def test_an_answer_that_comes_while_the_backends_are_opened_is_used(store: Store) -> None:
    asks = DAG([Task("a", prompt="Which one?")])
    options = RunOptions(PersonBackend(), store=store)
    await ParallelRunner(PersonBackend(), store=store).run(asks, "r")

    @asynccontextmanager
    async def answering(*_: object) -> AsyncGenerator[RunOptions]:
        await store.send("r", answer_note(AnswerNote("a", 1, "this", "2026-01-01T00:00:00.000Z", "n")))
        yield options

    runs = Runs(options, answering)
    async with runs.open(await runs.read("r")) as (run, _), run:
        pass
    assert [(task.status, task.text) for task in await store.list_tasks("r")] == [("completed", "this")]


async def test_a_resume_reports_the_state_that_it_found(store: Store) -> None:
    await stopped_after(store, DIAMOND, 2)
    async with ParallelRunner(Talker(), store=store).start_resume("r") as run:
        first, *_ = [event async for event in run.events()]
    assert isinstance(first, events.RunResumed)
    assert (first.run_id, first.previous, first.reused) == ("r", RunStatus.RUNNING, 2)


async def test_resume_of_a_complete_run_runs_nothing(store: Store) -> None:
    backend = Talker()
    first = await ParallelRunner(backend, store=store).run(DIAMOND)
    again = await ParallelRunner(Talker(), store=store).resume(first.run_id)
    assert (again.status, again.text, again.reused) == (RunStatus.COMPLETED, first.text, 4)
    assert again.usage == first.usage


async def test_a_runs_usage_is_that_of_all_its_attempts(store: Store) -> None:
    spent = Usage(100, 10, 0.25)
    broken = BackendError(ErrorKind.TRANSIENT, "cut", usage=spent)
    dag = DAG([Task("a", prompt="a", retry=Retry(3, 0.0)), Task("b", prompt="b", retry=Retry(1), depends_on=["a"])])
    failing = Talker(lambda prompt, _: broken if prompt == "b" or len(failing.prompts) < 3 else Reply("a", usage=spent))
    runner = ParallelRunner(failing, store=store)
    first = await runner.run(dag, run_id="r")
    assert (first["a"].attempts, first["a"].usage, first.usage) == (3, spent, Usage(400, 40, 1.0))
    assert (await runner.resume("r")).usage == first.usage
    again = await ParallelRunner(Talker(lambda *_: Reply("b", usage=spent)), store=store).resume("r", retry_failed=True)
    record = await store.get_run("r")
    assert record is not None
    assert again.status is RunStatus.COMPLETED
    assert again.usage == Usage(500, 50, 1.25) == record.usage


async def test_everything_of_a_task_survives(store: Store) -> None:
    odd = Task(
        "odd",
        prompt="{{ item.x }} {{ those }} {{ one }}",
        depends_on=["a", "b"],
        failure_mode=FailureMode.SOFT,
        retry=Retry(5, 0.5, 7.0, frozenset({"timeout"})),
        timeout=3.5,
        output_schema={"type": "object"},
        weight=2.5,
        item={"x": [1, "ü"]},
        aliases={"those": ["a", "b"], "one": "a"},
        metadata={"k": None},
        backend="deep",
    )
    dag = DAG(
        [Task("a", "a"), Task("b", "b"), odd, Task("more", "more", continues="odd")], name="ö", inputs={"i": {"j": 1}}
    )
    await stopped_after(store, DAG([Task("x", "x")]), 0, "other")
    both = {"default": Talker(), "deep": Talker()}
    runner = ParallelRunner(backends=both, store=store)
    run_id = (await runner.run(dag)).run_id
    record = await store.get_run(run_id)
    assert record is not None
    stored = decode_dag(record, await store.list_tasks(run_id))
    assert (stored.name, stored.inputs) == ("ö", {"i": {"j": 1}})
    assert [replace(t, depends_on=list(t.depends_on)) for t in stored] == [
        replace(t, depends_on=list(t.depends_on)) for t in dag
    ]
    assert both["deep"].prompts[0].startswith('[1, "ü"] ["re: a", "re: b"] re: a')


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (1, "a development version of plait (format 1); this plait reads format 100 only. Start a new run"),
        (2, "a development version of plait (format 2); this plait reads format 100 only. Start a new run"),
        (None, "a development version of plait (no format); this plait reads format 100 only. Start a new run"),
        (101, "a newer plait (format 101); this plait reads format 100 only. Upgrade plait"),
    ],
)
async def test_a_run_that_is_stored_in_another_format_is_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, found: int | None, said: str
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr(create_run, "SETTINGS_FORMAT", found)
        await stopped_after(store, DIAMOND, 1)
    before, backend = await whole(store, "r"), Talker()
    runner = ParallelRunner(backend, store=store)
    refused = re.escape(f"run 'r' was stored by {said}") + "$"
    for call in (runner.resume, runner.runs.preview, partial(runner.runs.continue_task, task_id="a", message="more")):
        with pytest.raises(StoreError, match=refused):
            await call("r")
    with pytest.raises(StoreError, match=refused):
        await load_progress(store, "r")
    assert (await whole(store, "r"), backend.prompts) == (before, [])


async def test_failed_tasks_are_kept_unless_asked_for(store: Store) -> None:
    dag = DAG([Task("a", prompt="a"), Task("bad", prompt="bad", depends_on=["a"]), Task("z", "z", depends_on=["bad"])])
    no = BackendError(ErrorKind.REFUSED, "no")
    first = await ParallelRunner(Talker(lambda p, _: no if p == "bad" else p), store=store).run(dag, "r")
    assert first.status is RunStatus.FAILED
    untouched = Talker()
    kept = await ParallelRunner(untouched, store=store).resume("r")
    assert (kept.status, kept["bad"].error, kept.blocked, untouched.prompts) == (RunStatus.FAILED, "no", ("z",), [])
    backend = Talker()
    again = await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert (again.status, backend.prompts) == (RunStatus.COMPLETED, ["bad", "z"])
    assert (again["bad"].attempts, again["a"].reused) == (2, True)
    record = await store.get_run("r")
    assert record is not None and record.status == "completed"
    attempts = await store.list_attempts("r", "bad")
    assert [(a.attempt, a.status) for a in attempts] == [(1, "failed"), (2, "completed")]


async def test_a_failure_beside_unfinished_work_is_kept_while_the_rest_runs(store: Store) -> None:
    dag = DAG([Task("bad", prompt="bad", weight=9), Task("slow", prompt="slow"), Task("z", "z", depends_on=["bad"])])
    hanging = anyio.Event()

    async def body(prompt: str) -> str:
        if prompt == "bad":
            raise BackendError(ErrorKind.AUTH, "no key")
        hanging.set()
        await anyio.sleep_forever()
        return ""

    async with ParallelRunner(body, store=store).start(dag, "r") as run:
        async for event in run.events():
            if event.kind == "task_failed":
                await hanging.wait()
                run.stop()
    backend = Talker()
    result = await ParallelRunner(backend, store=store).resume("r")
    assert (result.status, backend.prompts, result["bad"].error) == (RunStatus.FAILED, ["slow"], "no key")


async def test_answers_to_what_cannot_be_resumed(store: Store) -> None:
    runner = ParallelRunner(Talker(), store=store)
    with pytest.raises(RunNotFound, match="no run 'nope'"):
        await runner.resume("nope")
    with pytest.raises(StoreRequired):
        await ParallelRunner(Talker()).resume("r")
    async with runner.start(DIAMOND, "gone") as run:
        run.cancel()
    with pytest.raises(RunNotResumable, match="was cancelled and cannot be resumed; start a new run"):
        await runner.resume("gone")
    await stopped_after(store, DAG([Task("a", backend="default")]), 0, "named")
    with pytest.raises(BackendMissing, match=r"no backend named 'default' .*this runner has: fast, slow"):
        await ParallelRunner(backends={"fast": Talker(), "slow": Talker()}, store=store).resume("named")
    record = await store.get_run("named")
    assert record is not None and record.owner is None, "a refused resume claims nothing"


CRASHING = """
import os, signal, sys, anyio
from plait.persistence import SQLiteStore
from plait import DAG, ParallelRunner, Task

async def body(prompt):
    if prompt == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return prompt.upper()

async def main():
    a, b = Task("a", prompt="one"), Task("b", prompt="die", depends_on=["a"])
    dag = DAG([a, b, Task("c", prompt="x {{ b }}", depends_on=["b"])])
    async with SQLiteStore(sys.argv[1]) as store:
        await ParallelRunner(body, store=store).run(dag, "r")

anyio.run(main)
"""


async def test_a_task_under_way_at_a_sigkill_runs_again_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "plait.db"
    killed = subprocess.run([sys.executable, "-c", CRASHING, str(path)], check=False)
    assert killed.returncode == -9
    backend = Talker()
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(backend, store=store).resume("r")
        assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["die", "x re: die"])
        assert [(a.attempt, a.status) for a in await store.list_attempts("r", "b")] == [
            (1, "interrupted"),
            (2, "completed"),
        ]
    assert (result["a"].text, result["b"].attempts) == ("ONE", 2)


async def test_a_run_whose_process_died_before_the_end_was_stored_ends(store: Store) -> None:
    class Cut(FaultyStore):
        async def write(self, batch: Batch) -> None:
            if any(isinstance(change, events.RunCompleted) for change in batch.events):
                raise StoreError("planted")
            await super().write(batch)

    await ParallelRunner(Talker(), store=Cut(store), clock=QuickClock()).run(DIAMOND, "r")
    record = await store.get_run("r")
    assert record is not None and (record.status, record.counts) == ("running", {"completed": 4})
    backend = Talker()
    result = await ParallelRunner(backend, store=store).resume("r")
    record = await store.get_run("r")
    assert record is not None
    assert (result.status, record.status, backend.prompts) == (RunStatus.COMPLETED, "completed", [])


def damage(path: Path) -> None:
    """Change task a's stored result behind plait's back."""
    with sqlite3.connect(path) as db:
        db.execute(attempts_of("a", "text = 'tampered'"))
    db.close()


async def test_a_damaged_result_is_never_handed_on(tmp_path: Path) -> None:
    path = tmp_path / "plait.db"
    async with SQLiteStore(path) as store:
        await stopped_after(store, DIAMOND, 1)
    damage(path)
    async with SQLiteStore(path, mode="existing") as store:
        backend = Talker()
        result = await ParallelRunner(backend, store=store).resume("r")
    assert (result["a"].status, result["a"].error_kind, backend.prompts) == (TaskStatus.FAILED, "damaged", [])
    assert result.blocked == ("b", "c", "d")


async def test_a_prompt_that_cannot_be_stored_fails_its_task_and_nothing_else() -> None:
    class Picky(FaultyStore):
        async def write(self, batch: Batch) -> None:
            told = {getattr(one, name, "") for one in batch.events for name in ("content", "turn")}
            if "poison" in told:
                raise Conflict("cannot keep this")
            await super().write(batch)

    inner = MemoryStore()
    dag = DAG([Task("a", prompt="a"), Task("b", prompt="poison", depends_on=["a"]), Task("c", "c", depends_on=["b"])])
    result = await ParallelRunner(Talker(), store=Picky(inner)).run(dag)
    assert (result.degraded, result.failed, result.blocked) == ((), ("b",), ("c",))
    assert result["b"].error == "the store refused the end of the attempt: cannot keep this"
    record = await inner.get_run(result.run_id)
    assert record is not None
    assert (record.status, record.counts) == ("failed", {"completed": 1, "failed": 1, "pending": 1})


async def test_a_completed_run_with_a_damaged_result_does_not_count_as_completed(tmp_path: Path) -> None:
    path = tmp_path / "plait.db"
    async with SQLiteStore(path) as store:
        await ParallelRunner(Talker(), store=store).run(DIAMOND, "r")
    damage(path)
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(Talker(), store=store).resume("r")
        assert result.status is RunStatus.FAILED
        assert result.error == "the stored results of a are damaged; resume with retry_failed to run the tasks again"
        backend = Talker()
        mended = await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
        assert (mended.status, mended["a"].text, backend.prompts) == (RunStatus.COMPLETED, "re: a", ["a"])
        again = await ParallelRunner(backend, store=store).resume("r")
    assert (again.status, again["a"].text, again["a"].attempts) == (RunStatus.COMPLETED, "re: a", 2)


async def test_what_depends_on_a_task_that_is_tried_again_is_not_run_again_itself(store: Store) -> None:
    dag = DAG(
        [
            Task("a", prompt="a", failure_mode=FailureMode.SOFT),
            Task("b", prompt="b {{ a }}", depends_on=["a"]),
            Task("c", prompt="c {{ b }}", depends_on=["b"]),
        ]
    )
    refused = BackendError(ErrorKind.REFUSED, "no")
    first = await ParallelRunner(Talker(lambda p, _: refused if p == "a" else p), store=store).run(dag, "r")
    assert (first.failed, first["b"].status) == (("a",), TaskStatus.COMPLETED)
    backend = Talker()
    result = await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert (result.status, backend.prompts) == (RunStatus.COMPLETED, ["a"])


async def test_a_resume_needs_no_backend_of_a_completed_task(store: Store) -> None:
    async def fails(_prompt: str) -> str:
        raise BackendError(ErrorKind.INVALID_REQUEST, "no")

    dag = DAG([Task("a", "a", backend="old"), Task("b", "b", ["a"], backend="new", retry=Retry(attempts=1))])
    run = await ParallelRunner(backends={"old": Talker(), "new": fails}, store=store).run(dag)
    assert run.status is RunStatus.FAILED
    result = await ParallelRunner(backends={"new": Talker()}, store=store).resume(run.run_id, retry_failed=True)
    assert (result.status, result["a"].reused) == (RunStatus.COMPLETED, True)
