"""Resume: from the store alone; what is done is kept, what is not is run; every other case has one clear answer."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from backends import BackendError, ErrorKind, Message
from persistence import Batch, Conflict, MemoryStore, RunClaimed, SQLiteStore, Store, StoreError
from runner import (
    DAG,
    BackendMissing,
    FailureMode,
    ParallelRunner,
    PlaitError,
    Retry,
    RunExists,
    RunNotFound,
    RunNotResumable,
    RunOwned,
    RunStatus,
    StoreRequired,
    Task,
    TaskStatus,
    TurnNotStored,
)
from runner.owner import claim_for_this_process, forget
from tests.support.fakes import FaultyStore, Talker


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "memory":
        yield MemoryStore()
        return
    async with SQLiteStore(tmp_path / "plait.db") as sqlite_store:
        yield sqlite_store


DIAMOND = DAG(
    [
        Task("a", prompt="a"),
        Task("b", prompt="b {{ a }}", depends_on=["a"]),
        Task("c", prompt="c {{ a }}", depends_on=["a"]),
        Task("d", prompt="d {{ b }} {{ c }} {{ who }}", depends_on=["b", "c"]),
    ],
    name="diamond",
    inputs={"who": "Ada"},
)


async def stopped_after(store: Store, dag: DAG, done: int, run_id: str = "r") -> None:
    """A run of `dag` that was left with `done` tasks completed and others under way."""
    count, hanging = 0, anyio.Event()

    async def body(prompt: str) -> str:
        nonlocal count
        count += 1
        if count > done:
            hanging.set()
            await anyio.sleep_forever()
        return f"<{prompt}>"

    async with ParallelRunner(body, store=store).start(dag, run_id) as run:
        await hanging.wait()
        run.stop()


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


async def test_resume_of_a_complete_run_runs_nothing(store: Store) -> None:
    backend = Talker()
    first = await ParallelRunner(backend, store=store).run(DIAMOND)
    again = await ParallelRunner(Talker(), store=store).resume(first.run_id)
    assert (again.status, again.text, again.reused) == (RunStatus.COMPLETED, first.text, 4)
    assert again.usage == first.usage


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
    dag = DAG([Task("a"), Task("b"), odd, Task("more", continues="odd")], name="ö", inputs={"i": {"j": 1}})
    await stopped_after(store, DAG([Task("x")]), 0, "other")
    both = {"default": Talker(), "deep": Talker()}
    runner = ParallelRunner(backends=both, store=store)
    run_id = (await runner.run(dag)).run_id
    record = await store.get_run(run_id)
    assert record is not None
    from runner.translate import dag_of

    stored = dag_of(record, await store.list_tasks(run_id))
    assert (stored.name, stored.inputs) == ("ö", {"i": {"j": 1}})
    assert [replace(t, depends_on=list(t.depends_on)) for t in stored] == [
        replace(t, depends_on=list(t.depends_on)) for t in dag
    ]
    assert both["deep"].prompts[0].startswith('[1, "ü"] ["re: ", "re: "] re: ')


async def test_failed_tasks_are_kept_unless_asked_for(store: Store) -> None:
    dag = DAG([Task("a", prompt="a"), Task("bad", prompt="bad", depends_on=["a"]), Task("z", depends_on=["bad"])])
    no = BackendError(ErrorKind.REFUSED, "no")
    first = await ParallelRunner(Talker(lambda p, _: no if p == "bad" else p), store=store).run(dag, "r")
    assert first.status is RunStatus.FAILED
    untouched = Talker()
    kept = await ParallelRunner(untouched, store=store).resume("r")
    assert (kept.status, kept["bad"].error, kept.blocked, untouched.prompts) == (RunStatus.FAILED, "no", ("z",), [])
    backend = Talker()
    again = await ParallelRunner(backend, store=store).resume("r", retry_failed=True)
    assert (again.status, backend.prompts) == (RunStatus.COMPLETED, ["bad", ""])
    assert (again["bad"].attempts, again["a"].reused) == (2, True)
    record = await store.get_run("r")
    assert record is not None and record.status == "completed"
    attempts = await store.list_attempts("r", "bad")
    assert [(a.attempt, a.status) for a in attempts] == [(1, "failed"), (2, "completed")]


async def test_a_failure_beside_unfinished_work_is_kept_while_the_rest_runs(store: Store) -> None:
    dag = DAG([Task("bad", prompt="bad", weight=9), Task("slow", prompt="slow"), Task("z", depends_on=["bad"])])
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
    with pytest.raises(RunNotResumable, match="was cancelled for good; start a new run"):
        await runner.resume("gone")
    await stopped_after(store, DAG([Task("a", backend="default")]), 0, "named")
    with pytest.raises(BackendMissing, match=r"no backend named 'default' .*this runner has: fast, slow"):
        await ParallelRunner(backends={"fast": Talker(), "slow": Talker()}, store=store).resume("named")
    record = await store.get_run("named")
    assert record is not None and record.owner is None, "a refused resume claims nothing"


async def test_a_store_that_cannot_be_claimed_is_an_error_not_a_run(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    backend = Talker()
    with pytest.raises(StoreError, match="planted"):
        await ParallelRunner(backend, store=FaultyStore(store, lambda _: "raise")).resume("r")
    assert backend.prompts == []
    assert (await ParallelRunner(backend, store=store).resume("r")).status is RunStatus.COMPLETED


async def test_two_resumes_at_once_one_runs_one_is_refused(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    executed: list[str] = []
    outcomes: list[str] = []

    async def body(prompt: str) -> str:
        executed.append(prompt)
        await anyio.lowlevel.checkpoint()
        return prompt

    async def resume() -> None:
        try:
            outcomes.append((await ParallelRunner(body, store=store).resume("r")).status.value)
        except RunOwned as error:
            outcomes.append("owned" if "run r" in str(error) and "process" in str(error) else str(error))

    async with anyio.create_task_group() as tg:
        for _ in range(5):
            tg.start_soon(resume)
    assert sorted(outcomes) == ["completed", *["owned"] * 4]
    assert len(executed) == len(set(executed)) == 3


async def claimed_by(store: Store, **changes: object) -> None:
    """Leave run "r" claimed by an owner that differs from this process in `changes`."""
    await stopped_after(store, DIAMOND, 1)
    record = await store.get_run("r")
    assert record is not None
    import random
    import time

    owner = claim_for_this_process(random.Random(), "2026-01-01T00:00:00.000Z")
    forget(owner)
    expires = changes.pop("expires", time.time() + 100)
    claim = RunClaimed("2026-01-01T00:00:00.000Z", replace(owner, **changes), expires)  # type: ignore[arg-type]
    await store.write(Batch("r", record.epoch, record.last_seq + 1, (claim,)))


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, True),  # this process, but nobody here runs it
        ({"pid": 1, "process_started": ""}, False),
        ({"pid": 1, "process_started": "another"}, True),  # the pid was used again
        ({"pid": 4_190_000}, True),  # gone
        ({"boot_id": "another boot"}, True),
        ({"host": "another host"}, False),
        ({"host": "another host", "expires": 1.0}, True),  # its lease ran out
        ({"pid": 1, "process_started": "", "expires": 1.0}, True),
    ],
)
async def test_who_may_take_over(changes: dict, free: bool) -> None:
    store = MemoryStore()
    await claimed_by(store, **changes)
    runner = ParallelRunner(Talker(), store=store)
    if free:
        assert (await runner.resume("r")).status is RunStatus.COMPLETED
        return
    with pytest.raises(RunOwned, match=r"is being run by process .* since 2026-01-01T00:00:00.000Z"):
        await runner.resume("r")


CRASHING = """
import os, signal, sys, anyio
from persistence import SQLiteStore
from runner import DAG, ParallelRunner, Task

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


async def test_a_conversation_is_continued_after_a_restart(store: Store) -> None:
    x, y = Task("x", prompt="one"), Task("y", prompt="two", continues="x")
    dag = DAG([x, y, Task("z", prompt="three", continues="y")])
    hanging = anyio.Event()

    class Hanging(Talker):
        def open(self, opening):
            if len(self.openings) == 1:
                hanging.set()
            return super().open(opening)

    def answer(prompt, _opening):
        return f"re: {prompt}"

    first = Hanging(answer)
    async with ParallelRunner(first, store=store, concurrency=1).start(dag, "r") as run:
        async for event in run.events():
            if event.kind == "task_completed":
                run.stop()
    backend = Talker()
    backend.made = 100
    result = await ParallelRunner(backend, store=store).resume("r")
    assert result.status is RunStatus.COMPLETED
    history = [m.content for m in backend.openings[-1].history]
    assert history == ["one", "re: one", "two", "re: two"]
    assert backend.openings[-1].session_id == "session-1" and backend.openings[-1].resume


async def test_a_person_goes_on_with_any_conversation(store: Store) -> None:
    dag = DAG([Task("x", prompt="one"), Task("y", prompt="two", continues="x")])
    run_id = (await ParallelRunner(Talker(), store=store).run(dag)).run_id
    backend = Talker()
    runner = ParallelRunner(backend, store=store)
    assert (await runner.continue_task(run_id, "y", "and now?")).text == "re: and now?"
    assert (await runner.continue_task(run_id, "y", "again")).text == "re: again"
    assert [m.content for m in backend.openings[0].history] == ["one", "re: one", "two", "re: two"]
    assert [m.content for m in backend.openings[1].history][-2:] == ["and now?", "re: and now?"]
    assert backend.openings[0].resume and backend.openings[0].session_id == "session-1"
    stored = await store.list_messages(run_id, "y")
    assert [(m.attempt, m.role, m.content) for m in stored[2:]] == [
        (0, "user", "and now?"),
        (0, "assistant", "re: and now?"),
        (0, "user", "again"),
        (0, "assistant", "re: again"),
    ]
    record = await store.get_run(run_id)
    assert record is not None and (record.status, record.owner) == ("completed", None)
    result = await runner.resume(run_id)
    assert result["y"].text == "re: two", "the result stays as it was"


async def test_what_a_person_added_stays_out_of_conversations_of_the_run(store: Store) -> None:
    dag = DAG([Task("x", prompt="one"), Task("y", prompt="two", continues="x")])
    first = Talker()
    async with ParallelRunner(first, store=store).start(dag, "r") as run:
        async for event in run.events():
            if event.kind == "task_completed":
                run.stop()
    await ParallelRunner(Talker(), store=store).continue_task("r", "x", "by the way")
    backend = Talker()
    await ParallelRunner(backend, store=store).resume("r")
    assert [m.content for m in backend.openings[0].history] == ["one", "re: one"]


async def test_answers_to_what_cannot_be_continued(store: Store) -> None:
    await stopped_after(store, DIAMOND, 1)
    runner = ParallelRunner(Talker(), store=store)
    with pytest.raises(PlaitError, match="has no task 'e'"):
        await runner.continue_task("r", "e", "hello")
    with pytest.raises(PlaitError, match="task 'd' of run r is pending and has no conversation"):
        await runner.continue_task("r", "d", "hello")
    with pytest.raises(RunNotFound):
        await runner.continue_task("nope", "a", "hello")
    with pytest.raises(PlaitError, match="functions never have one"):
        await runner.continue_task("r", "a", "hello")
    await runner.run(DAG([Task("a", prompt="a")]), "t")
    failing = ParallelRunner(Talker(lambda *_: BackendError(ErrorKind.AUTH, "no key")), store=store)
    with pytest.raises(BackendError, match="no key"):
        await failing.continue_task("t", "a", "hello")
    assert len(await store.list_messages("t", "a")) == 2
    faulty = FaultyStore(store, lambda n: "raise" if n > 1 else None)
    with pytest.raises(TurnNotStored) as caught:
        await ParallelRunner(Talker(), store=faulty).continue_task("t", "a", "hello")
    assert caught.value.text == "re: hello"
    assert (await runner.resume("r")).status is RunStatus.COMPLETED


def damage(path: Path) -> None:
    """Change task a's stored result behind plait's back."""
    with sqlite3.connect(path) as db:
        (table,) = [r[0] for r in db.execute("select name from sqlite_master where name in ('tasks', 'results')")][:1]
        column = "text" if "text" in [c[1] for c in db.execute(f"pragma table_info({table})")] else "result"
        db.execute(f"update {table} set {column} = 'tampered' where task_id = 'a'")
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


def test_messages_are_plain_values() -> None:
    assert Message("user", "x") == Message("user", "x")


@pytest.mark.parametrize("native", [False, True])
async def test_a_resume_cancelled_while_it_claims_leaves_the_run_to_others(native: bool) -> None:
    inner = MemoryStore()
    await stopped_after(inner, DIAMOND, 1)
    claiming, go_on = anyio.Event(), anyio.Event()

    class Slow(FaultyStore):
        async def write(self, batch: Batch) -> None:
            await super().write(batch)
            if self.writes == 1:
                claiming.set()
                await go_on.wait()

    runner = ParallelRunner(Talker(), store=Slow(inner, lambda _: None))
    async with anyio.create_task_group() as group:
        if native:
            tasks: list[asyncio.Task] = []

            async def body() -> None:
                tasks.append(asyncio.current_task())
                await runner.resume("r")

            group.start_soon(body)
            await claiming.wait()
            tasks[0].cancel()
        else:
            group.start_soon(runner.resume, "r")
            await claiming.wait()
            group.cancel_scope.cancel()
    record = await inner.get_run("r")
    assert record is not None
    assert record.owner is None
    assert (await ParallelRunner(Talker(), store=inner).resume("r")).status is RunStatus.COMPLETED


async def test_a_change_that_cannot_be_stored_costs_itself_and_nothing_else() -> None:
    class Picky(FaultyStore):
        async def write(self, batch: Batch) -> None:
            if any(getattr(change, "content", "") == "poison" for change in batch.changes):
                raise Conflict("cannot keep this")
            await super().write(batch)

    inner = MemoryStore()
    dag = DAG([Task("a", prompt="a"), Task("b", prompt="poison", depends_on=["a"]), Task("c", depends_on=["b"])])
    result = await ParallelRunner(Talker(), store=Picky(inner, lambda _: None)).run(dag)
    assert [(one.lost, one.until is not None) for one in result.degraded] == [(1, True)]
    record = await inner.get_run(result.run_id)
    assert record is not None
    assert (record.status, record.counts) == ("completed", {"completed": 3})


async def test_a_taken_id_is_refused_also_when_the_store_fails_at_first() -> None:
    inner = MemoryStore()
    await ParallelRunner(Talker(), store=inner).run(DIAMOND, "taken")
    store = FaultyStore(inner, lambda n: "raise" if n == 1 else None)
    with pytest.raises(RunExists):
        await ParallelRunner(Talker(), store=store).run(DIAMOND, "taken")


async def test_a_long_chain_of_conversations_is_read_back(store: Store) -> None:
    dag = DAG([Task(f"t{i}", prompt=str(i), continues=f"t{i - 1}" if i else None) for i in range(1100)])
    run_id = (await ParallelRunner(Talker(lambda p, _: p), store=store).run(dag)).run_id
    backend = Talker()
    await ParallelRunner(backend, store=store).continue_task(run_id, "t1099", "hello")
    assert len(backend.openings[0].history) == 2200


async def test_a_completed_run_with_a_damaged_result_does_not_count_as_completed(tmp_path: Path) -> None:
    path = tmp_path / "plait.db"
    async with SQLiteStore(path) as store:
        await ParallelRunner(Talker(), store=store).run(DIAMOND, "r")
    damage(path)
    async with SQLiteStore(path, mode="existing") as store:
        result = await ParallelRunner(Talker(), store=store).resume("r")
    assert (result.status, result.error) == (RunStatus.FAILED, "the stored results of a are damaged")
