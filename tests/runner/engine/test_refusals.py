"""Changes that the store refuses for good: what is stored in their place, what dependents do, how the run ends."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, RunResult, RunStatus, Task, TaskStatus, ask, events
from plait.backends.backend_protocol import Reply
from plait.dialogue import Question
from plait.errors import BackendError, Conflict, ErrorKind, StoreError
from plait.events import (
    Event,
    PolicyDecided,
    RunEnded,
    SessionOpened,
    TaskAnswered,
    TaskCompleted,
    TaskFailed,
    TaskRetried,
    TasksAdded,
    TaskStarted,
    TaskWaiting,
)
from plait.persistence import Batch, MemoryStore, SQLiteStore, Store, sqlite_file
from plait.runner.domain.policy import RecordedRun
from plait.workflows import Decision
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import Scripted, by_end, tasks
from tests.support.stores.faulty_store import FaultyStore

REASON = "a value cannot be stored: no 日"


class Refusing(FaultyStore):
    """Refuses every batch with a change for which `refuses` is true."""

    def __init__(self, refuses: Callable[[Event], bool]) -> None:
        super().__init__(MemoryStore())
        self.refuses = refuses
        self.away = False

    async def write(self, batch: Batch) -> None:
        if self.away:
            raise StoreError("away")
        if any(map(self.refuses, batch.events)):
            raise Conflict(REASON)
        await super().write(batch)


def end_of(task_id: str) -> Callable[[Event], bool]:
    return lambda change: isinstance(change, TaskCompleted) and change.task_id == task_id


async def stored_statuses(store: Store, result: RunResult) -> dict[str, str]:
    return {task.task_id: task.status for task in await store.list_tasks(result.run_id)}


async def stored_run(store: Store, result: RunResult) -> tuple[str, bool]:
    """The stored status of the run, and whether it has an owner."""
    record = await store.get_run(result.run_id)
    assert record is not None
    return record.status, record.owner is not None


CHAIN = DAG([Task("a", "a"), Task("b", "b {{ a }}", ["a"]), Task("other", "other")])


async def test_a_refused_result_is_a_failed_task_and_its_dependents_stay_blocked() -> None:
    store, backend = Refusing(end_of("a")), Talker()
    async with ParallelRunner(backend, store=store).start(CHAIN) as run:
        told = [event async for event in run.events()]
        result = await run.result()
    assert (result.status, result["a"].status, result.blocked) == (RunStatus.FAILED, TaskStatus.FAILED, ("b",))
    assert (result["a"].error_kind, result["a"].text) == ("not_stored", "")
    assert result["a"].error == r"the store refused the end of the attempt: a value cannot be stored: no \u65e5"
    assert result["a"].usage.output_tokens == len("re: a")
    assert await stored_run(store.inner, result) == ("failed", False)
    assert await stored_statuses(store.inner, result) == {"a": "failed", "b": "pending", "other": "completed"}
    assert sorted(backend.prompts) == ["a", "other"]
    assert [event.task_id for event in told if isinstance(event, events.TaskCompleted)] == ["other"]
    assert [event.task_id for event in told if isinstance(event, events.TaskFailed)] == ["a"]
    assert sorted(event.task_id for event in told if isinstance(event, events.TaskStarted)) == ["a", "other"]
    assert sum(isinstance(event, events.RunEnded) for event in told) == 1
    assert (result.degraded, result.reused, result.resume_summary) == ((), 0, None)
    again = await ParallelRunner(backend, store=store.inner).resume(result.run_id, retry_failed=True)
    assert (again.status, again.text["b"]) == (RunStatus.COMPLETED, "re: b re: a")


@pytest.mark.parametrize(
    ("mode", "status", "stored"),
    [
        (FailureMode.SOFT, RunStatus.FAILED, {"a": "failed", "b": "completed"}),
        (FailureMode.SKIP, RunStatus.COMPLETED, {"a": "skipped", "b": "completed"}),
    ],
)
async def test_the_dependents_of_a_refused_result_follow_its_failure_mode(
    mode: FailureMode, status: RunStatus, stored: dict[str, str]
) -> None:
    store, backend = Refusing(end_of("a")), Talker()
    dag = DAG([Task("a", "a", failure_mode=mode), Task("b", "b", ["a"])])
    result = await ParallelRunner(backend, store=store).run(dag)
    assert result.status is status
    assert await stored_statuses(store.inner, result) == stored
    assert await stored_run(store.inner, result) == (status.value, False)
    assert backend.prompts == ["a", "b"]


async def test_attempts_under_way_at_a_refusal_end_and_are_stored() -> None:
    refused, calls = anyio.Event(), list[str]()

    async def work(prompt: str) -> str:
        calls.append(prompt)
        if prompt != "a":
            await refused.wait()
        return prompt

    class Telling(Refusing):
        async def write(self, batch: Batch) -> None:
            if any(isinstance(one, TaskFailed) for one in batch.events):
                refused.set()
            await super().write(batch)

    store = Telling(end_of("a"))
    dag = DAG([Task("a", "a"), *(Task(f"t{i}", str(i)) for i in range(20))])
    result = await ParallelRunner(work, store=store, concurrency=4).run(dag)
    assert (result.status, result.failed) == (RunStatus.FAILED, ("a",))
    assert sorted(calls) == sorted(["a", *map(str, range(20))])
    assert len(result.text) == 20


async def test_no_refused_list_is_expanded_and_no_refused_plan_grows_the_run() -> None:
    refused = {"listed", "planned"}
    store = Refusing(lambda change: isinstance(change, TaskCompleted) and change.task_id in refused)

    def answer(prompt: str, _request: object) -> Reply:
        if prompt == "planned":
            return Reply(prompt, tasks=({"id": "new", "prompt": "new"},))
        return Reply(prompt, ["x", "y"] if prompt == "listed" else None)

    dag = DAG(
        [
            Task("listed", "listed", output_schema={"type": "array"}),
            Task("each", "{{ item }}", ["listed"], for_each="listed"),
            Task("planned", "planned"),
        ]
    )
    backend = Talker(answer)
    result = await ParallelRunner(backend, store=store).run(dag)
    assert await stored_statuses(store.inner, result) == {"listed": "failed", "each": "pending", "planned": "failed"}
    assert (result.failed, sorted(backend.prompts)) == (("listed", "planned"), ["listed", "planned"])
    refused.clear()
    again = await ParallelRunner(backend, store=store).resume(result.run_id, retry_failed=True)
    assert (again.status, sorted(backend.prompts[4:])) == (RunStatus.COMPLETED, ["new", "x", "y"])


async def test_a_policy_is_asked_about_the_failure_and_not_about_the_refused_result() -> None:
    asked: list[TaskStatus] = []

    def rule(run: RecordedRun) -> Decision | None:
        if run.ended is None:
            return None
        asked.append(run.result(run.ended).status)
        return Decision(add=tasks("added")) if asked[-1] is TaskStatus.COMPLETED else None

    store = Refusing(end_of("a"))
    result = await ParallelRunner(Talker(), store=store).run(DAG([Task("a", "a")]), policy=Scripted(rule))
    assert (result.status, asked) == (RunStatus.FAILED, [TaskStatus.COMPLETED, TaskStatus.FAILED])
    assert await stored_statuses(store.inner, result) == {"a": "failed"}


def retrying(prompt: str, _request: object) -> BackendError:
    return BackendError(ErrorKind.TRANSIENT, prompt)


def asking(prompt: str, _request: object) -> Reply:
    return Reply(prompt, question=Question("which?"))


@pytest.mark.parametrize(
    ("kind", "backend"),
    [(TaskRetried, Talker(retrying)), (TaskFailed, Talker(retrying)), (TaskWaiting, Talker(asking))],
)
async def test_a_refused_failure_retry_or_question_is_a_failure_with_the_reason_of_the_store(
    kind: type, backend: Talker
) -> None:
    store = Refusing(lambda one: isinstance(one, kind) and getattr(one, "error_kind", "") != "not_stored")
    result = await ParallelRunner(backend, store=store, clock=QuickClock()).run(DAG([Task("a", "a"), Task("b", "b")]))
    assert {one.error_kind for one in result.tasks.values()} == {"not_stored"}
    assert await stored_statuses(store.inner, result) == {"a": "failed", "b": "failed"}
    assert await stored_run(store.inner, result) == ("failed", False)


async def test_a_task_that_can_neither_complete_nor_fail_leaves_the_run_to_be_resumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Refusing(lambda one: isinstance(one, TaskCompleted | TaskFailed) and one.task_id == "a")
    backend = Talker()
    with caplog.at_level(logging.ERROR, logger="plait"):
        async with ParallelRunner(backend, store=store).start(CHAIN) as run:
            told = [event async for event in run.events()]
            result = await run.result()
    assert (result.status, [one.lost for one in result.degraded]) == (RunStatus.INTERRUPTED, [1])
    assert result.error is not None and result.error.endswith(f"so its end is not stored: {REASON}")
    assert isinstance(told[-1], events.RunInterrupted) and told[-1].error == result.error
    assert "change_not_stored" in caplog.text
    assert await stored_run(store.inner, result) == ("running", False)
    assert sorted(backend.prompts) == ["a", "other"]
    again = await ParallelRunner(backend, store=store.inner).resume(result.run_id)
    assert (again.status, backend.prompts.count("a"), backend.prompts.count("other")) == (RunStatus.COMPLETED, 2, 1)


async def test_a_refused_start_calls_no_backend() -> None:
    store = Refusing(lambda one: isinstance(one, TaskStarted) and one.task_id == "b")
    backend = Talker()
    result = await ParallelRunner(backend, store=store).run(CHAIN)
    assert (result.status, [one.lost for one in result.degraded]) == (RunStatus.INTERRUPTED, [1])
    assert await stored_run(store.inner, result) == ("running", False)
    assert "b re: a" not in backend.prompts
    again = await ParallelRunner(backend, store=store.inner).resume(result.run_id)
    assert (again.status, sorted(backend.prompts)) == (RunStatus.COMPLETED, ["a", "b re: a", "other"])


@pytest.mark.parametrize("kind", [SessionOpened, PolicyDecided, TasksAdded, TaskAnswered])
async def test_the_end_of_a_run_is_not_stored_while_any_change_of_it_is_lost(kind: type) -> None:
    store = Refusing(lambda change: isinstance(change, kind))
    asked = False

    async def work(prompt: str) -> str:
        if prompt == "a" and kind is TaskAnswered:
            await ask("which?")
        return prompt

    backend = Talker(own_ids=True) if kind is SessionOpened else work
    policy = Scripted(by_end({"a": Decision(add=tasks("added"))})) if kind in {PolicyDecided, TasksAdded} else None
    if kind in {PolicyDecided, TasksAdded}:  # else the head of the decision, the completion, fails
        store.refuses = lambda change: isinstance(change, kind | TaskFailed)

    async def answer(_question: object) -> str | None:
        nonlocal asked
        asked = True
        return "this"

    runner = ParallelRunner(backend, store=store, on_question=answer)
    result = await runner.run(DAG([Task("a", "a"), Task("b", "b", ["a"])]), policy=policy)
    assert result.status is RunStatus.INTERRUPTED
    assert sum(one.lost for one in result.degraded) > 0
    assert await stored_run(store.inner, result) == ("running", False)
    store.refuses = lambda _: False
    again = await ParallelRunner(backend, store=store, on_question=answer).resume(result.run_id, policy=policy)
    assert again.status is RunStatus.COMPLETED
    assert await stored_run(store.inner, result) == ("completed", False)
    assert asked is (kind is TaskAnswered)


@pytest.mark.parametrize("mode", [FailureMode.HARD, FailureMode.SOFT])
async def test_a_result_refused_after_an_outage_fails_and_what_was_done_with_it_is_kept(mode: FailureMode) -> None:
    """During the outage the dependent has started: nothing could say that the result would be refused."""
    store = Refusing(end_of("a"))
    prompts: list[str] = []

    async def work(prompt: str) -> str:
        prompts.append(prompt)
        store.away = prompt == "a"
        return prompt

    dag = DAG([Task("a", "a", failure_mode=mode), Task("b", "b", ["a"]), Task("c", "c", ["b"])])
    result = await ParallelRunner(work, store=store).run(dag)
    assert (result.status, result.failed, prompts) == (RunStatus.FAILED, ("a",), ["a", "b", "c"])
    assert await stored_statuses(store.inner, result) == {"a": "failed", "b": "completed", "c": "completed"}
    assert await stored_run(store.inner, result) == ("failed", False)
    assert [(one.error, one.lost) for one in result.degraded] == [("away", 0)]


async def test_a_store_that_goes_away_after_a_refusal_leaves_the_run_to_be_resumed() -> None:
    class GoesAway(Refusing):
        async def list_tasks(self, run_id: str, only: str | range | None = None):  # type: ignore[no-untyped-def]
            raise StoreError("away")

    store, backend = GoesAway(end_of("a")), Talker()
    async with ParallelRunner(backend, store=store).start(CHAIN) as run:
        told = [event async for event in run.events()]
        result = await run.result()
    assert (result.status, result.error) == (RunStatus.INTERRUPTED, "away")
    assert isinstance(told[-1], events.RunInterrupted)
    again = await ParallelRunner(backend, store=store.inner).resume(result.run_id)
    assert (again.status, again.failed) == (RunStatus.FAILED, ("a",))


async def test_a_run_that_is_stopped_or_cancelled_with_a_refusal_ends_as_it_was_told_to() -> None:
    for how, status, stored in [
        ("stop", RunStatus.INTERRUPTED, ("running", False)),
        ("cancel", RunStatus.CANCELLED, ("cancelled", False)),
    ]:
        ends = anyio.Event()

        async def work(prompt: str, ends: anyio.Event = ends) -> str:
            if prompt == "other":
                await ends.wait()
            return prompt

        store = Refusing(end_of("a"))
        async with ParallelRunner(work, store=store, cancel_grace=0).start(CHAIN) as run:
            async for event in run.events():
                if isinstance(event, events.TaskFailed):
                    getattr(run, how)()
            result = await run.result()
        assert (result.status, result["a"].status) == (status, TaskStatus.FAILED)
        assert await stored_run(store.inner, result) == stored


async def test_a_resume_with_a_refusal_counts_what_it_ran_as_its_own() -> None:
    store = Refusing(end_of("a"))
    runner = ParallelRunner(Talker(), store=store)
    first = await runner.run(CHAIN)
    store.refuses = end_of("b")
    again = await runner.resume(first.run_id, retry_failed=True)
    assert (again.status, again.failed) == (RunStatus.FAILED, ("b",))
    assert [name for name, task in again.tasks.items() if task.reused] == ["other"]
    assert again.resume_summary is not None
    assert (again.resume_summary.reused, again.resume_summary.ran) == (1, 2)


async def test_strict_makes_a_refusal_fatal() -> None:
    store = Refusing(end_of("a"))
    with pytest.raises(Conflict, match="a value cannot be stored"):
        await ParallelRunner(Talker(), store=store, strict=True).run(CHAIN)


TRIGGER = """
CREATE TRIGGER no_poison BEFORE INSERT ON attempts WHEN NEW.text LIKE '%poison%'
BEGIN SELECT RAISE(ABORT, 'no poison here'); END
"""


async def test_a_trigger_in_the_database_fails_the_task_whose_result_it_refuses(tmp_path: Path) -> None:
    path = tmp_path / "plait.db"
    async with SQLiteStore(path):
        pass
    with sqlite3.connect(path) as connection:
        connection.execute(TRIGGER)
    connection.close()
    dag = DAG([Task("a", "poison"), Task("b", "b", ["a"]), Task("c", "harmless \0")])
    async with SQLiteStore(path) as store:
        result = await ParallelRunner(Talker(), store=store).run(dag)
        assert await stored_statuses(store, result) == {"a": "failed", "b": "pending", "c": "completed"}
        assert await stored_run(store, result) == ("failed", False)
    assert "no poison here" in (result["a"].error or "")


async def test_a_result_beyond_the_size_of_a_value_fails_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite_file._connect

    def limited(*args):  # type: ignore[no-untyped-def]
        made = connect(*args)
        made.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 500_000)
        return made

    monkeypatch.setattr(sqlite_file, "_connect", limited)

    async def work(prompt: str) -> str:
        return "x" * (600_000 if prompt == "a" else 10)

    async with SQLiteStore(tmp_path / "plait.db") as store:
        result = await ParallelRunner(work, store=store).run(CHAIN)
        assert await stored_statuses(store, result) == {"a": "failed", "b": "pending", "other": "completed"}
    assert "too big" in (result["a"].error or "")


async def test_the_end_of_the_run_is_the_last_change_also_after_a_refusal() -> None:
    store = Refusing(end_of("a"))
    written: list[Event] = []

    class Noting(FaultyStore):
        async def write(self, batch: Batch) -> None:
            await super().write(batch)
            written.extend(batch.events)

    await ParallelRunner(Talker(), store=Noting(store)).run(CHAIN)
    assert isinstance(written[-1], RunEnded)
    assert sum(isinstance(change, RunEnded) for change in written) == 1
