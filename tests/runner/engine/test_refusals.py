"""Changes that the store refuses for good: what is stored in their place, what dependents do, how the run ends."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, RunResult, RunStatus, Task, ask, events
from plait.backends.backend_protocol import Reply
from plait.dialogue import Question
from plait.errors import BackendError, Conflict, ErrorKind, StoreError
from plait.events import (
    Event,
    PolicyDecided,
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


CHAIN = DAG([Task("a", "a"), Task("b", "b {{ a }}", ["a"])])


async def test_a_refused_result_fails_its_task_and_stops_the_run() -> None:
    store, backend = Refusing(end_of("a")), Talker()
    async with ParallelRunner(backend, store=store).start(CHAIN) as run:
        told = [event async for event in run.events()]
        result = await run.result()
    assert result.status is RunStatus.INTERRUPTED
    assert result.error is not None and result.error.endswith(f"so the run was stopped: {REASON}")
    assert await stored_run(store.inner, result) == ("running", False)
    assert await stored_statuses(store.inner, result) == {"a": "failed", "b": "pending"}
    assert not any(isinstance(event, events.TaskCompleted) for event in told)
    [failed] = [event for event in told if isinstance(event, events.TaskFailed)]
    assert failed.error == r"the store refused the end of the attempt: a value cannot be stored: no \u65e5"
    assert failed.usage.output_tokens == len("re: a")
    assert isinstance(told[-1], events.RunInterrupted) and told[-1].error == result.error
    again = await ParallelRunner(backend, store=store.inner).resume(result.run_id)
    assert (again.status, again["a"].error_kind, again.blocked) == (RunStatus.FAILED, "not_stored", ("b",))
    assert backend.prompts == ["a"], "nothing is paid for twice"
    retried = await ParallelRunner(backend, store=store.inner).resume(result.run_id, retry_failed=True)
    assert (retried.status, retried.text["b"]) == (RunStatus.COMPLETED, "re: b re: a")


@pytest.mark.parametrize("mode", [FailureMode.SOFT, FailureMode.SKIP])
async def test_the_dependents_of_a_refused_result_follow_its_failure_mode(mode: FailureMode) -> None:
    store, backend = Refusing(end_of("a")), Talker()
    dag = DAG([Task("a", "a", failure_mode=mode), Task("b", "b", ["a"])])
    result = await ParallelRunner(backend, store=store).run(dag)
    again = await ParallelRunner(backend, store=store).resume(result.run_id)
    assert again.status is RunStatus.FAILED
    assert await stored_statuses(store.inner, again) == {"a": "failed", "b": "completed"}
    assert backend.prompts == ["a", "b"]


async def test_what_a_resume_does_after_a_refusal_is_what_is_not_stored() -> None:
    refused = anyio.Event()
    calls: list[str] = []

    async def work(prompt: str) -> str:
        calls.append(prompt)
        if prompt == "going":
            await refused.wait()
        return prompt

    store = Refusing(end_of("a"))
    dag = DAG([Task("first", "first"), Task("a", "a", ["first"]), Task("going", "going")])
    result = await ParallelRunner(work, store=store).run(dag)
    assert await stored_statuses(store.inner, result) == {"first": "completed", "a": "failed", "going": "running"}
    refused.set()
    again = await ParallelRunner(work, store=store, clock=QuickClock()).resume(result.run_id)
    assert (again.status, again.failed, again.reused) == (RunStatus.FAILED, ("a",), 1)
    assert sorted(calls) == ["a", "first", "going", "going"]


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
    result = await ParallelRunner(backend, store=store, clock=QuickClock()).run(DAG([Task("a", "a")]))
    [stored] = await store.list_tasks(result.run_id)
    assert (stored.status, stored.error_kind) == ("failed", "not_stored")


async def test_a_task_that_can_neither_complete_nor_fail_leaves_the_run_to_be_resumed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Refusing(lambda one: isinstance(one, TaskCompleted | TaskFailed) and one.task_id == "a")
    backend = Talker()
    with caplog.at_level(logging.ERROR, logger="plait"):
        result = await ParallelRunner(backend, store=store).run(CHAIN)
    assert (result.status, result.lost > 0, result.status_is_stored) == (RunStatus.INTERRUPTED, True, False)
    assert "change_not_stored" in caplog.text
    assert await stored_run(store.inner, result) == ("running", False)
    again = await ParallelRunner(backend, store=store.inner, clock=QuickClock()).resume(result.run_id)
    assert (again.status, backend.prompts) == (RunStatus.COMPLETED, ["a", "a", "b re: a"])


@pytest.mark.parametrize("kind", [SessionOpened, PolicyDecided, TasksAdded, TaskAnswered, TaskStarted])
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

    runner = ParallelRunner(backend, store=store, on_question=answer, clock=QuickClock())
    result = await runner.run(DAG([Task("a", "a"), Task("b", "b", ["a"])]), policy=policy)
    assert result.status is RunStatus.INTERRUPTED
    assert sum(one.lost for one in result.degraded) > 0
    assert await stored_run(store.inner, result) == ("running", False)
    store.refuses = lambda _: False
    again = await ParallelRunner(backend, store=store, on_question=answer).resume(result.run_id, policy=policy)
    assert again.status is RunStatus.COMPLETED
    assert await stored_run(store.inner, result) == ("completed", False)
    assert asked is (kind is TaskAnswered)


async def test_a_refusal_during_an_outage_ends_it_and_the_run(caplog: pytest.LogCaptureFixture) -> None:
    """During the outage the dependent has started: nothing could say that the result would be refused."""
    store = Refusing(end_of("a"))
    prompts: list[str] = []

    async def work(prompt: str) -> str:
        prompts.append(prompt)
        store.away = prompt == "a"
        return prompt

    dag = DAG([Task("a", "a"), Task("b", "b", ["a"]), Task("c", "c", ["b"])])
    result = await ParallelRunner(work, store=store).run(dag)
    assert (result.status, prompts) == (RunStatus.INTERRUPTED, ["a", "b", "c"])
    assert await stored_statuses(store.inner, result) == {"a": "failed", "b": "pending", "c": "pending"}
    assert [(one.error, one.until is None) for one in result.degraded] == [("away", False), (REASON, False)]


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
    dag = DAG([Task("c", "harmless \0"), Task("a", "poison", ["c"]), Task("b", "b", ["a"])])
    async with SQLiteStore(path) as store:
        result = await ParallelRunner(Talker(), store=store).run(dag)
        assert await stored_statuses(store, result) == {"c": "completed", "a": "failed", "b": "pending"}
        assert await stored_run(store, result) == ("running", False)
    assert "no poison here" in (result.error or "")


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
        assert await stored_statuses(store, result) == {"a": "failed", "b": "pending"}
    assert "too big" in (result.error or "")
