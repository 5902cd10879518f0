"""Policies: asked once about each end, in order, and once at rest; what they decide is stored with what they saw."""

from __future__ import annotations

import logging
import re
from typing import Any

import anyio
import pytest

from plait import DAG, GrowthLimits, ParallelRunner, RunStatus, Task, TaskStatus, events
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Question
from plait.errors import BackendError, ErrorKind
from plait.persistence import MemoryStore, Store
from plait.workflows import Decision, RecordedRun
from tests.support.fakes import QuickClock, Talker
from tests.support.growth import Recording, Scripted, by_end, plan, spec, talker, tasks

CHAIN = DAG([Task("a", "a"), Task("b", "b", ["a"]), Task("c", "c", ["b"])])


async def test_it_is_asked_about_each_end_in_order_and_once_at_rest(kept: Store | None) -> None:
    policy = Scripted()
    result = await ParallelRunner(talker(), store=kept).run(CHAIN, policy=policy)
    assert (result.status, policy.asked) == (RunStatus.COMPLETED, ["a", "b", "c", None])


async def test_failed_and_skipped_tasks_have_ended_too(kept: Store | None) -> None:
    policy = Scripted()
    backend = talker({"a": ValueError("no"), "s": ValueError("no")})
    dag = DAG([*CHAIN.tasks, Task("s", "s", ["x"], failure_mode="skip"), Task("x", "x")])
    result = await ParallelRunner(backend, store=kept, concurrency=1).run(dag, policy=policy)
    assert (result.status, policy.asked) == (RunStatus.FAILED, ["a", "x", "s", None])


async def test_a_retry_is_no_end() -> None:
    policy = Scripted()
    backend = talker({"a": [BackendError(ErrorKind.TRANSIENT, "once"), "good"]})
    dag = DAG([Task("a", "a")])
    result = await ParallelRunner(backend, clock=QuickClock()).run(dag, policy=policy)
    assert (result["a"].attempts, policy.asked) == (2, ["a", None])


async def test_it_sees_the_run_as_it_stands(kept: Store | None) -> None:
    seen: list[Any] = []

    def rule(run: RecordedRun) -> None:
        seen.append((run.ended, [(task.id, run.result(task.id).status.value) for task in run.tasks]))
        if run.ended is not None:
            assert run.result(run.ended).text == f"<{run.ended}>"
        with pytest.raises(KeyError):
            run.result("nobody")

    await ParallelRunner(talker(), store=kept).run(CHAIN, policy=Scripted(rule))
    assert seen[0] == ("a", [("a", "completed"), ("b", "pending"), ("c", "pending")])
    assert seen[3] == (None, [("a", "completed"), ("b", "completed"), ("c", "completed")])


async def test_it_adds_tasks_and_keeps_its_state(kept: Store | None) -> None:
    def rule(run: RecordedRun) -> Decision:
        rounds = run.state or 0
        assert isinstance(rounds, int)
        if run.ended is not None or rounds == 2:
            return Decision(state=rounds)
        return Decision(add=tasks(f"r{rounds}", depends_on=["c"]), state=rounds + 1)

    policy = Scripted(rule)
    result = await ParallelRunner(talker(), store=kept).run(CHAIN, policy=policy)
    assert list(result.tasks) == ["a", "b", "c", "r0", "r1"]
    assert policy.asked == ["a", "b", "c", None, "r0", None, "r1", None]


async def test_at_rest_it_is_asked_until_it_adds_nothing_that_runs(kept: Store | None) -> None:
    """What it added came to its end without any backend being called."""
    lists = tuple(Task(f"m{n}", "m", for_each="empty") for n in range(2))
    policy = Scripted(lambda run: Decision(add=lists[len(run.tasks) - 1 :][:1]) if run.ended is None else None)

    async def empty(_prompt: str) -> object:
        return []

    result = await ParallelRunner(empty, store=kept).run(DAG([Task("empty", "e")]), policy=policy)
    assert policy.asked == ["empty", None, "m0", None, "m1", None]
    assert [task.status for task in result.tasks.values()] == [TaskStatus.COMPLETED] * 3


async def test_what_it_cancels_takes_its_cone_along(kept: Store | None) -> None:
    dag = DAG([*CHAIN.tasks, Task("d", "d", ["a"])])
    backend = talker()
    policy = Scripted(by_end({"a": Decision(cancel=("b", "a"))}))
    result = await ParallelRunner(backend, store=kept).run(dag, policy=policy)
    cancelled = TaskStatus.CANCELLED
    assert [task.status for task in result.tasks.values()] == [
        TaskStatus.COMPLETED,
        cancelled,
        cancelled,
        TaskStatus.COMPLETED,
    ]
    assert (result.status, backend.prompts, policy.asked) == (RunStatus.COMPLETED, ["a", "d"], ["a", "d", None])


async def test_it_cancels_parts_lists_and_retries(kept: Store | None) -> None:
    """A part that waits for its place, the list that waits for its parts, and a task between two attempts."""
    dag = DAG(
        [Task("l", "l"), Task("m", "m{{ item }}", for_each="l"), Task("u", "u", ["m"]), Task("slow", "slow", ["l"])]
    )
    policy = Scripted(by_end({"m.1": Decision(cancel=("m.2", "m", "slow"))}))
    backend = talker({"l": Reply("", [1, 2]), "slow": [BackendError(ErrorKind.TRANSIENT, "once"), "late"]})
    result = await ParallelRunner(backend, store=kept, concurrency=1, clock=QuickClock()).run(dag, policy=policy)
    assert [task.id for task in result.tasks.values() if task.status is TaskStatus.CANCELLED] == [
        "m",
        "u",
        "slow",
        "m.2",
    ]
    assert result.status is RunStatus.COMPLETED


@pytest.mark.parametrize("end", [RunStatus.COMPLETED, RunStatus.FAILED])
async def test_it_ends_the_run(kept: Store | None, end: Any) -> None:
    hanging = anyio.Event()

    async def work(prompt: str) -> str:
        if prompt == "hangs":
            hanging.set()
            await anyio.sleep_forever()
        await hanging.wait()
        return prompt

    dag = DAG([Task("hangs", "hangs"), *CHAIN.tasks])
    policy = Scripted(by_end({"b": Decision(end=end, error="enough\ud800")}))
    result = await ParallelRunner(work, store=kept).run(dag, policy=policy)
    statuses = [task.status.value for task in result.tasks.values()]
    left = "cancelled" if end is RunStatus.COMPLETED else "pending"  # a failed run can be reopened
    assert statuses == [left, "completed", "completed", left]
    assert (result.status, result.error) == (end, "enough\ufffd" if end is RunStatus.FAILED else None)
    assert policy.asked == ["a", "b"]
    assert not result.degraded
    if kept is not None:
        record = await kept.get_run(result.run_id)
        assert record is not None
        assert (record.status, record.error) == (end.value, result.error)


async def test_it_may_call_a_run_completed_in_which_a_task_failed() -> None:
    policy = Scripted(by_end({None: Decision(end=RunStatus.COMPLETED)}))
    result = await ParallelRunner(talker({"a": ValueError("no")})).run(DAG([Task("a", "a")]), policy=policy)
    assert (result.status, result["a"].status) == (RunStatus.COMPLETED, TaskStatus.FAILED)


def _raise(_run: RecordedRun) -> Decision:
    raise RuntimeError("confused")


WRONG: dict[str, tuple[Any, str]] = {
    "it raises": (_raise, "RuntimeError: confused"),
    "nothing decided": (lambda _: 5, "returned int, not a Decision"),
    "id taken": (lambda _: Decision(add=tasks("a")), "adds tasks that cannot be added: .*'a' is used twice"),
    "cycle": (lambda _: Decision(add=(Task("x", "x", ["y"]), Task("y", "y", ["x"]))), "wait for each other"),
    "unknown backend": (lambda _: Decision(add=tasks("x", backend="gtp")), "no backend named 'gtp'"),
    "too many": (lambda _: Decision(add=tasks(*map(str, range(9)))), "max_tasks"),
    "no task": (lambda _: Decision(add=("x",)), "AttributeError"),  # type: ignore[arg-type]
    "odd id": (lambda _: Decision(add=(Task(["x"], "x"),)), "TypeError"),  # type: ignore[arg-type]
    "odd dependency": (lambda _: Decision(add=(Task("x", "x", [["a"]]), Task("y", "y"))), "TypeError"),  # type: ignore[list-item]
    "odd backend": (lambda _: Decision(add=(Task("x", "x", backend=["a"]),)), "TypeError"),  # type: ignore[arg-type]
    "unknown task": (lambda _: Decision(cancel=("x",)), "cancels task 'x', which is not in the run"),
    "large state": (lambda _: Decision(state="x" * 70_000), "state has .* characters"),
    "no JSON": (lambda _: Decision(state={1, 2}), "JSON"),  # type: ignore[arg-type]
    "NaN": (lambda _: Decision(state=float("nan")), "JSON"),
    "odd end": (lambda _: Decision(end=RunStatus.CANCELLED), "Decision.end is"),  # type: ignore[arg-type]
    "end as text": (lambda _: Decision(end="completed"), "Decision.end is 'completed'; give RunStatus"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("why", WRONG)
async def test_one_that_is_wrong_fails_the_run(kept: Store | None, why: str) -> None:
    rule, says = WRONG[why]
    policy = Scripted(lambda run: rule(run) if run.ended == "b" else Decision(state="kept"))
    dag = DAG([*CHAIN.tasks, Task("d", "d", ["b"])])
    result = await ParallelRunner(talker(), store=kept, growth=GrowthLimits(max_tasks=8)).run(dag, policy=policy)
    statuses = [task.status.value for task in result.tasks.values()]
    assert (result.status, statuses) == (RunStatus.FAILED, ["completed", "completed", "pending", "pending"])
    assert re.search(f"policy 'scripted' failed when task 'b' had ended: .*{says}", result.error or "")
    assert not result.degraded
    assert policy.asked == ["a", "b"]
    if kept is not None:
        record = await kept.get_run(result.run_id)
        assert record is not None
        assert '"kept"' in (record.policy_state or "")


async def test_where_it_failed_is_logged_for_who_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="plait"):
        await ParallelRunner(talker()).run(CHAIN, policy=Scripted(_raise))
    assert "in _raise" in caplog.text


async def test_what_waits_for_a_cancelled_task_is_not_added() -> None:
    """It would never run, and nobody would notice."""
    decisions = {"a": Decision(cancel=("b",)), None: Decision(add=tasks("late", depends_on=["c"]))}
    result = await ParallelRunner(talker()).run(CHAIN, policy=Scripted(by_end(decisions)))
    assert result.status is RunStatus.FAILED
    assert "depends on 'c', which was cancelled" in (result.error or "")


async def test_a_decision_is_stored_with_the_end_that_it_is_about() -> None:
    store = Recording(MemoryStore())
    decisions = {"a": Decision(add=tasks("x"), cancel=("b",), state=1)}
    await ParallelRunner(talker(), store=store).run(CHAIN, policy=Scripted(by_end(decisions)))
    cancelled = ["TaskCancelled", "TaskCancelled"]
    wanted = ["TaskCompleted", "TasksAdded", *cancelled, "PolicyDecided", "TaskStarted"]
    assert store.batch_of("TasksAdded") == wanted


async def test_what_it_decided_is_told() -> None:
    async with ParallelRunner(talker()).start(CHAIN, policy=Scripted(by_end({"a": Decision(state=[1])}))) as run:
        told = [event async for event in run.events()]
    assert [event.state for event in told if isinstance(event, events.PolicyDecided)] == [[1]] * 4


async def test_planners_and_a_policy_do_not_get_in_each_others_way(kept: Store | None) -> None:
    backend = talker({"p": plan(spec("x"))})
    policy = Scripted(by_end({"p": Decision(add=(Task("y", "y {{ x }}", ["x"]),))}))
    result = await ParallelRunner(backend, store=kept).run(DAG([Task("p", "p", adds_tasks=True)]), policy=policy)
    assert (result.status, list(result.tasks)) == (RunStatus.COMPLETED, ["p", "x", "y"])
    assert policy.asked == ["p", "x", "y", None]


def asks(prompt: str, request: ConversationRequest) -> str | Reply:
    waits = prompt == "w" and request.answer is None
    return Reply("?", question=Question("how?")) if waits else f"<{prompt}>"


async def test_while_a_task_waits_for_a_person_nothing_is_at_rest(store: Store) -> None:
    policy = Scripted()
    dag = DAG([Task("w", "w"), Task("a", "a")])
    first = await ParallelRunner(Talker(asks), store=store).run(dag, policy=policy)
    assert (first.status, policy.asked) == (RunStatus.WAITING_INPUT, ["a"])
    policy = Scripted()
    result = await ParallelRunner(Talker(asks), store=store).resume(first.run_id, answers={"w": "so"}, policy=policy)
    assert (result.status, policy.asked) == (RunStatus.COMPLETED, ["w", None])


async def test_a_waiting_task_that_it_cancels_is_not_answered_any_more(kept: Store | None) -> None:
    answered = anyio.Event()

    async def on_question(_question: object) -> str:
        await answered.wait()
        return "too late"

    def rule(run: RecordedRun) -> Decision | None:
        if run.ended == "b":
            answered.set()
        return Decision(cancel=("w",)) if run.ended == "a" else None

    backend, policy = Talker(asks), Scripted(rule)
    dag = DAG([Task("w", "w", weight=9), *CHAIN.tasks[:2]])
    result = await ParallelRunner(backend, store=kept, on_question=on_question, concurrency=1).run(dag, policy=policy)
    assert (result.status, result["w"].status) == (RunStatus.COMPLETED, TaskStatus.CANCELLED)
    assert backend.prompts == ["w", "a", "b"]
