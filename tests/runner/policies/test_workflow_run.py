"""Workflows and follow-ups on the real engine: in memory, in SQLite, and through SIGKILL between the steps."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from plait import DAG, ParallelRunner, Retry, RunStatus, Step, Task, TaskStatus, Workflow
from plait.backends import ConversationRequest, OpenAIBackend
from plait.errors import BackendError, ErrorKind, RunNotFound, WorkflowEnded
from plait.persistence import SQLiteStore, Store
from plait.workflows import FollowUps, Interaction, load_progress
from tests.support.fakes import Talker
from tests.support.processes import warm
from tests.support.processes.reviewing import review_once

FLOW = Workflow(
    [
        Step("look", "Look at {{ what }}.", on_error="retry", max_tries=2),
        Step("think", "Think of {{ look }}", on_error="go_on", continues=True),
        Step("say", "Say {{ look }}, {{ think }}"),
    ],
    name="flow",
)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[Store]:
    async with SQLiteStore(tmp_path / "runs.db") as store:
        yield store


def failing(*task_ids: str) -> Talker:
    def answer(prompt: str, request: ConversationRequest) -> str | Exception:
        task_id = request.idempotency_key.rpartition(":")[2]
        return BackendError(ErrorKind.REFUSED, "no luck") if task_id in task_ids else f"<{task_id}>"

    return Talker(answer)


async def test_a_workflow_is_run_step_by_step(store: Store) -> None:
    backend = failing("look.1")
    result = await ParallelRunner(backend, store=store).run(FLOW.dag({"what": "it"}), "r", policy=FLOW)
    assert result.status is RunStatus.COMPLETED
    assert [(task.id, task.status) for task in result.tasks.values()] == [
        ("look.1", TaskStatus.SKIPPED),
        ("look.2", TaskStatus.COMPLETED),
        ("think.1", TaskStatus.COMPLETED),
        ("say.1", TaskStatus.COMPLETED),
    ]
    assert backend.prompts == ["Look at it.", "Look at it.", "Think of <look.2>", "Say <look.2>, <think.1>"]
    assert [message.content for message in backend.requests[2].history] == ["Look at it.", "<look.2>"]
    session = await load_progress(store, "r")
    assert session.status is RunStatus.COMPLETED
    assert FLOW.is_complete(session)
    assert session.interactions[:2] == (
        Interaction("look", "error", error="no luck"),
        Interaction("look", "ok", "<look.2>", number=2),
    )
    with pytest.raises(WorkflowEnded):
        FLOW.next_step(session)


async def test_without_a_store_it_is_the_same() -> None:
    result = await ParallelRunner(failing("think.1")).run(FLOW.dag({"what": "it"}), policy=FLOW)
    assert result.status is RunStatus.COMPLETED
    assert result.text["say.1"] == "<say.1>"


async def test_a_failed_session_can_have_another_try(store: Store) -> None:
    first = failing("look.1", "look.2")
    result = await ParallelRunner(first, store=store).run(FLOW.dag({"what": "it"}), "r", policy=FLOW)
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert "step 'look' failed 2 times (max_tries): no luck" in result.error
    assert not FLOW.is_complete(await load_progress(store, "r"))
    second = failing()
    result = await ParallelRunner(second, store=store).resume("r", retry_failed=True)
    assert result.status is RunStatus.COMPLETED
    assert second.prompts == ["Look at it.", "Think of <look.2>", "Say <look.2>, <think.1>"]


def without_its_key(monkeypatch: pytest.MonkeyPatch) -> OpenAIBackend:
    monkeypatch.delenv("A_KEY", raising=False)
    return OpenAIBackend("m", api_key_env="A_KEY", base_url="https://api.openai.com/v1")


async def test_no_try_is_spent_on_a_backend_whose_key_is_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    missing, retry = without_its_key(monkeypatch), Retry(attempts=5, on=frozenset(ErrorKind))
    flow = Workflow([Step("look", "Look.", on_error="retry", max_tries=3, retry=retry), Step("say", "Say {{ look }}")])
    result = await ParallelRunner(missing, store=store).run(flow.dag(), "r", policy=flow)
    [look] = result.tasks.values()
    assert (look.id, look.attempts, look.error_kind) == ("look.1", 1, "unavailable")
    assert result.status is RunStatus.FAILED
    assert result.error is not None
    assert "step 'look' failed: no key: set A_KEY, or name a server" in result.error
    again = await ParallelRunner(failing(), store=store).resume("r", retry_failed=True)
    assert again.status is RunStatus.COMPLETED
    assert list(again.text.values()) == ["<look.2>", "<say.1>"]


async def test_it_goes_on_without_a_step_that_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"missing": without_its_key(monkeypatch), "here": failing()}
    flow = Workflow(
        [Step("look", "Look.", backend="missing", on_error="go_on"), Step("say", "Say {{ look }}", backend="here")]
    )
    result = await ParallelRunner(backends=backends).run(flow.dag(), policy=flow)
    assert (result.status, result.text) == (RunStatus.COMPLETED, {"say.1": "<say.1>"})


async def test_follow_ups_are_run_and_stored(store: Store) -> None:
    dag = DAG([Task("build", "Build.", metadata={"role": "coder"}), Task("ship", "Ship.", ["build"])])
    result = await ParallelRunner(failing(), store=store).run(dag, "r", policy=FollowUps())
    assert result.status is RunStatus.COMPLETED
    assert list(result.tasks) == ["build", "ship", "build.reviewer", "build.tester"]
    assert [task.task_id for task in await store.list_tasks("r")] == list(result.tasks)


async def test_a_run_that_a_person_left_goes_on_with_its_follow_ups(store: Store) -> None:
    dag = DAG([Task("build", "Build.", metadata={"role": "coder"})])
    asked: list[str] = []

    async def model(prompt: str) -> str:
        asked.append(prompt.split(maxsplit=1)[0])
        if len(asked) == 2:
            run.stop()
            await anyio.sleep_forever()
        return "done"

    runner = ParallelRunner(model, store=store)
    async with runner.start(dag, "r", policy=FollowUps()) as run:
        assert (await run.result()).status is RunStatus.INTERRUPTED
    assert (await runner.resume("r")).status is RunStatus.COMPLETED
    assert asked == ["Build.", "Review", "Review", "Test"]


async def test_a_session_of_no_run_is_an_error(store: Store) -> None:
    with pytest.raises(RunNotFound, match="no run 'r'"):
        await load_progress(store, "r")


async def test_an_interaction_under_way_has_no_status_yet(store: Store) -> None:
    asked = anyio.Event()

    async def model(_: str) -> str:
        asked.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with ParallelRunner(model, store=store).start(FLOW.dag({"what": "it"}), "r", policy=FLOW) as run:
        await asked.wait()
        session = await load_progress(store, "r")
        assert session.interactions == (Interaction("look"),)
        assert FLOW.next_step(session) == FLOW.steps()[0]
        run.stop()


WHOLE = ["execute_review.1", "execute_review.2", "finalize.1"]
KILLS = [
    *[("attempt.after_call", n) for n in (1, 2)],  # answered, and not stored: these are asked again
    *[("txn.before_commit", n) for n in range(2, 7)],
    *[("txn.after_commit", n) for n in range(2, 7)],
    *[("attempt.before_call", n) for n in (2, 3)],
]


async def test_a_sigkill_between_steps_loses_nothing_and_asks_nothing_twice(tmp_path: Path) -> None:
    limiter = anyio.CapacityLimiter(2)
    landed: list[tuple[str, int]] = []

    async def check(boundary: str, count: int) -> None:
        database, ledger = (tmp_path / f"{boundary}-{count}.{kind}" for kind in ("db", "ledger"))
        ledger.touch()
        words = [sys.executable, "-m", "tests.support.processes.reviewing", database, ledger, boundary, str(count)]
        async with limiter:
            killed = await anyio.to_thread.run_sync(partial(warm.run, words, timeout=60))
        before = Counter(ledger.read_text().split())
        if killed.returncode == -signal.SIGKILL:
            landed.append((boundary, count))
        result = await review_once(database, ledger)
        assert result.status is RunStatus.COMPLETED, (boundary, count)
        assert list(result.tasks) == WHOLE, (boundary, count)
        assert result.text["finalize.1"] == "In short: - no brakes"
        after = Counter(ledger.read_text().split())
        again = [task_id for task_id in after if after[task_id] > 1]
        # What was under way when the process died, at most, and nothing once its end was committed.
        assert len(again) <= 1, (boundary, count, after)
        assert set(again) <= set(before), (boundary, count)
        if boundary == "attempt.after_call":
            assert again == [WHOLE[count]]  # the first one raised instead
        if boundary == "attempt.before_call":
            assert again == []

    async with anyio.create_task_group() as group:
        for boundary, count in KILLS:
            group.start_soon(check, boundary, count)
    assert {boundary for boundary, _ in landed} == {boundary for boundary, _ in KILLS}
    assert len(landed) >= len(KILLS) - 2, landed
