"""Answers to questions of stored runs: who may give them, who comes first, and what a resume makes of them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from plait import DAG, FailureMode, ParallelRunner, PlaitError, RunResult, RunStatus, Task, TaskStatus
from plait.backends import ask
from plait.backends.backend_protocol import ConversationRequest, Reply
from plait.dialogue import Question
from plait.errors import AnswerConflict, RunNotResumable
from plait.events import TaskStarted, TaskWaiting
from plait.persistence import MemoryStore, Note, SQLiteStore, Store
from plait.results import ResumeAction
from tests.support.fakes import QuickClock, Talker
from tests.support.late import Held
from tests.support.processes.command import environment
from tests.support.processes.warm import Warm

LATE = DAG([Task("a", "late"), Task("b", "so {{ a }}", depends_on=["a"])])


class Still(QuickClock):
    """A clock on which time passes only when the test says so."""

    async def sleep(self, _seconds: float) -> None:
        await anyio.sleep_forever()


def asks(**how: Any) -> Any:
    async def work(prompt: str) -> Any:
        return await ask("Go?", **how) if prompt == "late" else prompt

    return work


async def waiting(store: Store, dag: DAG = LATE, clock: Still | None = None, **how: Any) -> RunResult:
    result = await ParallelRunner(asks(**how), store=store, clock=clock).run(dag)
    assert result.status is RunStatus.WAITING_INPUT
    return result


async def test_an_answer_left_behind_is_taken_by_the_next_resume(store: Store) -> None:
    run_id = (await waiting(store)).run_id
    other = ParallelRunner(store=store)  # which has no backend, and needs none
    assert await other.runs.answer(run_id, "a", "yes") is True
    assert await other.runs.questions(run_id) == []
    with pytest.raises(AnswerConflict, match="the last question was answered by person"):
        await other.runs.answer(run_id, "a", "no")
    preview = await other.runs.preview(run_id)
    assert (preview.tasks["a"].action, preview.possibly_billed_twice) == (ResumeAction.START_OVER, 0)
    assert preview.tasks["a"].reason == "the question is answered, and the task's code runs again from the start"
    result = await ParallelRunner(asks(), store=store).resume(run_id)
    assert (result.text["b"], result.resume_summary and result.resume_summary.repeated) == ("so yes", 0)


async def test_a_resume_without_an_answer_stores_nothing(store: Store) -> None:
    dag = DAG([Task("first", "x"), *LATE.tasks])
    run_id = (await waiting(store, dag)).run_id
    record, history = await store.get_run(run_id), await store.list_events(run_id)
    for _ in range(2):
        async with ParallelRunner(asks(), store=store).start_resume(run_id) as run:
            assert [event async for event in run.events()] == []
            result = await run.result()
        assert (result.status, result.waiting) == (RunStatus.WAITING_INPUT, ("a",))
        assert (result.text["first"], result.resume_summary and result.resume_summary.reused) == ("x", 1)
        assert await store.get_run(run_id) == record
    assert await store.list_events(run_id) == history
    result = await ParallelRunner(asks(), store=store).resume(run_id, answers={"a": "yes"})
    assert (result.status, result.text["b"]) == (RunStatus.COMPLETED, "so yes")


async def test_a_resume_with_someone_to_ask_asks_again(store: Store) -> None:
    run_id = (await waiting(store)).run_id

    async def person(_question: object) -> str:
        return "no"

    result = await ParallelRunner(asks(), store=store, on_question=person).resume(run_id)
    assert (result.status, result.text["b"]) == (RunStatus.COMPLETED, "so no")


@pytest.mark.parametrize("default", ["later", None])
async def test_a_deadline_passes_while_no_process_is_alive(store: Store, default: str | None) -> None:
    clock = Still()
    run_id = (await waiting(store, clock=clock, default=default, deadline=60)).run_id
    runner = ParallelRunner(asks(), store=store, clock=clock)
    before = await runner.runs.preview(run_id)
    clock.now += 61
    after = await runner.runs.preview(run_id)
    said = (
        "so the default answer is used, and the task's code runs again from the start"
        if default
        else "no answer by the"
    )
    assert said in after.tasks["a"].reason
    for call in (runner.runs.answer(run_id, "a", "yes"), runner.resume(run_id, answers={"a": "yes"})):
        became = "the default answer was used" if default else "the task failed"
        with pytest.raises(AnswerConflict, match=rf"task 'a' of run {run_id} had to be answered by 2027-.*Z; {became}"):
            await call
    for how in ("done", "fail"):
        with pytest.raises(AnswerConflict, match=f"task 'a' of run {run_id} had to be answered by"):
            await runner.runs.settle(run_id, "a", how, "x")
    result = await runner.resume(run_id)
    wanted = ResumeAction.FAIL if default is None else ResumeAction.START_OVER
    assert (before.tasks["a"].action, after.tasks["a"].action) == (ResumeAction.ASK, wanted)
    if default is None:
        assert (result.status, result["a"].error_kind) == (RunStatus.FAILED, "timeout")
        assert result["a"].error == "no answer by the deadline: Go?"
    else:
        assert (result.status, result.text["b"]) == (RunStatus.COMPLETED, "so later")
        assert '"by":"default"' in ((await store.list_tasks(run_id))[0].answers or "")


@pytest.mark.parametrize(("mode", "status"), [("soft", "failed"), ("skip", "completed")])
async def test_an_unanswered_task_fails_as_its_failure_mode_says(store: Store, mode: str, status: str) -> None:
    clock = Still()
    dag = DAG([Task("a", "late", failure_mode=FailureMode(mode)), Task("b", "so {{ a }}", depends_on=["a"])])
    run_id = (await waiting(store, dag, clock, deadline=60)).run_id
    clock.now += 61
    result = await ParallelRunner(asks(), store=store, clock=clock).resume(run_id)
    assert (result.status.value, result.text["b"]) == (status, "so ")


async def test_a_task_that_failed_unanswered_asks_again_when_retried(store: Store) -> None:
    clock = Still()
    run_id = (await waiting(store, clock=clock, deadline=60)).run_id
    clock.now += 61
    runner = ParallelRunner(asks(deadline=60), store=store, clock=clock)
    assert (await runner.resume(run_id)).status is RunStatus.FAILED
    assert (await runner.resume(run_id, retry_failed=True)).status is RunStatus.WAITING_INPUT
    assert (await runner.resume(run_id, answers={"a": "yes"})).text["b"] == "so yes"


async def test_answered_in_time_is_in_time_however_late_the_run_goes_on(store: Store) -> None:
    clock = Still()
    run_id = (await waiting(store, clock=clock, default="later", deadline=60)).run_id
    clock.now += 59
    await ParallelRunner(store=store, clock=clock).runs.answer(run_id, "a", "yes")
    clock.now += 1000
    assert (await ParallelRunner(asks(), store=store, clock=clock).resume(run_id)).text["b"] == "so yes"


def note(value: Any, at: str = "2026-01-01T00:00:00.000Z", attempt: int = 1) -> Note:
    """As another process leaves it for an owner that may be about to die."""
    return Note("answer", at, "a", json.dumps({"attempt": attempt, "value": value, "nonce": str(value)}))


async def test_the_first_note_that_fits_counts(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    run_id = (await waiting(store, schema={"type": "integer"})).run_id
    for value in ("three", 4, 5):
        await store.send(run_id, note(value))
    runner = ParallelRunner(asks(schema={"type": "integer"}), store=store)
    with caplog.at_level(logging.WARNING):
        assert await runner.runs.questions(run_id) == []
    (refused,) = [cast("dict[str, str]", record.msg) for record in caplog.records]
    assert (refused["event"], refused["run"], refused["task"]) == ("answer_refused", run_id, "a")
    assert '"three" is not of type "integer"' in refused["error"]
    for call in (runner.runs.answer(run_id, "a", 6), runner.resume(run_id, answers={"a": 6})):
        with pytest.raises(AnswerConflict, match="has an earlier answer; this one was not used"):
            await call
    with pytest.raises(AnswerConflict, match="has an earlier answer"):
        await runner.runs.settle(run_id, "a", "done", "6")
    assert (await runner.runs.preview(run_id)).tasks["a"].action is ResumeAction.START_OVER
    assert (await runner.resume(run_id)).text["b"] == "so 4"


async def test_a_note_that_came_too_late_or_for_another_question_does_not_count(store: Store) -> None:
    clock = Still()
    run_id = (await waiting(store, clock=clock, default="later", deadline=60)).run_id
    await store.send(run_id, note("late", "2099-01-01T00:00:00.000Z"))
    await store.send(run_id, note("other", attempt=2))
    clock.now += 61
    assert (await ParallelRunner(asks(), store=store, clock=clock).resume(run_id)).text["b"] == "so later"


@pytest.mark.parametrize("default", ["later", None])
async def test_a_note_sent_at_the_deadline_counts_before_the_default(store: Store, default: str | None) -> None:
    clock = Still()
    run_id = (await waiting(store, clock=clock, default=default, deadline=60)).run_id
    runner = ParallelRunner(asks(), store=store, clock=clock)
    (question,) = await runner.runs.questions(run_id)
    await store.send(run_id, note("yes", (question.asks and question.asks.deadline_at) or ""))
    clock.now += 1000
    assert await runner.runs.questions(run_id) == []
    assert (await runner.runs.preview(run_id)).tasks["a"].action is ResumeAction.START_OVER
    refused = f"the question of task 'a' of run {run_id} has an earlier answer; this one was not used"
    for call in (
        runner.runs.answer(run_id, "a", "no"),
        runner.resume(run_id, answers={"a": "no"}),
        runner.runs.settle(run_id, "a", "done", "no"),
    ):
        with pytest.raises(AnswerConflict, match=refused):
            await call
    assert (await runner.resume(run_id)).text["b"] == "so yes"
    assert '"by":"person"' in ((await store.list_tasks(run_id))[0].answers or "")


@pytest.mark.parametrize(("default", "said"), [(False, "so false"), (0, "so 0")])
async def test_a_default_may_be_false_or_zero(store: Store, default: object, said: str) -> None:
    clock, schema = Still(), {"type": ["boolean", "integer"]}
    run_id = (await waiting(store, clock=clock, default=default, schema=schema, deadline=60)).run_id
    clock.now += 61
    runner = ParallelRunner(asks(schema=schema), store=store, clock=clock)
    with pytest.raises(AnswerConflict, match="the default answer was used"):
        await runner.runs.answer(run_id, "a", True)
    assert (await runner.resume(run_id)).text["b"].lower() == said


async def test_a_resume_answers_before_the_deadline_whatever_the_default(store: Store) -> None:
    run_id = (await waiting(store, clock=Still(), default="later", deadline=60)).run_id
    result = await ParallelRunner(asks(), store=store, clock=Still()).resume(run_id, answers={"a": "yes"})
    assert result.text["b"] == "so yes"
    assert '"by":"person"' in ((await store.list_tasks(run_id))[0].answers or "")


async def test_a_task_fails_unanswered_while_another_one_goes_on_waiting(store: Store) -> None:
    async def work(prompt: str) -> Any:
        return await ask("Go?", deadline=60 if prompt == "soon" else None)

    clock = Still()
    runner = ParallelRunner(work, store=store, clock=clock)
    run_id = (await runner.run(DAG([Task("a", "soon"), Task("b", "whenever")]))).run_id
    clock.now += 61
    result = await ParallelRunner(work, store=store, clock=clock).resume(run_id)
    assert (result["a"].status, result.waiting) == (TaskStatus.FAILED, ("b",))
    assert [task.status for task in await store.list_tasks(run_id)] == ["failed", "waiting_input"]


async def test_two_answer_at_once_and_one_of_them_is_first(store: Store) -> None:
    run_id = (await waiting(store)).run_id
    outcomes: dict[str, bool | AnswerConflict] = {}

    async def answer(value: str) -> None:
        try:
            outcomes[value] = await ParallelRunner(store=store).runs.answer(run_id, "a", value)
        except AnswerConflict as error:
            outcomes[value] = error

    async with anyio.create_task_group() as both:
        both.start_soon(answer, "red")
        both.start_soon(answer, "blue")
    (winner,) = [value for value, outcome in outcomes.items() if outcome is True]
    assert isinstance(outcomes[{"red": "blue", "blue": "red"}[winner]], AnswerConflict)
    assert (await ParallelRunner(asks(), store=store).resume(run_id)).text["b"] == f"so {winner}"


ANSWER = """
import sys, anyio
from plait.persistence import SQLiteStore
from plait import ParallelRunner
from plait.errors import AnswerConflict

async def main(path, value):
    async with SQLiteStore(path, mode="existing") as store:
        run_id = (await store.list_runs(1))[0].run_id
        print("ready", flush=True)
        sys.stdin.readline()
        try:
            print(await ParallelRunner(store=store).runs.answer(run_id, "a", value))
        except AnswerConflict:
            print("conflict")

anyio.run(main, *sys.argv[1:])
"""


async def test_two_processes_answer_at_once_and_one_of_them_is_first(tmp_path: Path) -> None:
    path = tmp_path / "runs.db"
    async with SQLiteStore(path) as store:
        run_id = (await waiting(store)).run_id
        racers = [
            Warm(
                [sys.executable, "-c", ANSWER, str(path), value],
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for value in ("red", "blue")
        ]
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        said = dict(
            zip(("red", "blue"), [racer.communicate("go\n", timeout=60)[0].strip() for racer in racers], strict=True)
        )
        assert sorted(said.values()) == ["True", "conflict"]
        (winner,) = [value for value, word in said.items() if word == "True"]
        assert (await ParallelRunner(asks(), store=store).resume(run_id)).text["b"] == f"so {winner}"


async def test_a_run_is_cancelled_while_it_waits(store: Store) -> None:
    run_id = (await waiting(store)).run_id
    runner = ParallelRunner(asks(), store=store)
    assert await runner.runs.cancel(run_id) is RunStatus.CANCELLED
    assert await runner.runs.questions(run_id) == []
    with pytest.raises(AnswerConflict, match="is cancelled and has no open question"):
        await runner.runs.answer(run_id, "a", "yes")
    with pytest.raises(AnswerConflict, match="is cancelled and has no open question"):
        await runner.resume(run_id, answers={"a": "yes"})
    with pytest.raises(RunNotResumable):
        await runner.resume(run_id)
    assert (await store.list_tasks(run_id))[0].status == TaskStatus.CANCELLED


async def test_many_questions_are_answered_in_any_order(store: Store) -> None:
    dag = DAG([Task(f"t{n}", "late") for n in range(5)])
    run_id = (await waiting(store, dag)).run_id
    runner = ParallelRunner(asks(), store=store)
    assert [one.task_id for one in await runner.runs.questions(run_id)] == ["t0", "t1", "t2", "t3", "t4"]
    await runner.runs.answer(run_id, "t3", "three")
    result = await runner.resume(run_id, answers={"t1": "one", "t4": "four"})
    assert (result.status, result.waiting, dict(result.text)) == (
        RunStatus.WAITING_INPUT,
        ("t0", "t2"),
        {"t1": "one", "t3": "three", "t4": "four"},
    )


async def test_one_wrong_answer_among_several_changes_nothing(store: Store) -> None:
    run_id = (await waiting(store, DAG([Task("a", "late"), Task("b", "late")]))).run_id
    before = await store.get_run(run_id)
    with pytest.raises(PlaitError, match="must be text, not 3"):
        await ParallelRunner(asks(), store=store).resume(run_id, answers={"a": "yes", "b": 3})
    assert await store.get_run(run_id) == before


async def test_a_person_is_told_how_to_settle_a_task_that_asked_nothing() -> None:
    """One marked at_most_once whose process ended waits for a person, but not for an answer."""
    store = MemoryStore()
    called = anyio.Event()

    async def pay(_prompt: str) -> str:
        called.set()
        await anyio.sleep_forever()
        return "paid"

    runner = ParallelRunner(pay, store=store)
    async with runner.start(DAG([Task("pay", "x", at_most_once=True)])) as run:
        await called.wait()
        run.stop()
    (waits,) = await runner.runs.questions(run.run_id)
    assert (waits.task_id, waits.asks) == ("pay", None)
    with pytest.raises(
        PlaitError, match="has no question of its own: settle the task with --done TEXT, --again or --fail"
    ):
        await runner.runs.answer(run.run_id, "pay", "yes")


async def test_the_same_holds_for_a_conversation(store: Store) -> None:
    """Default and late answers of replies that ask, told by the preview and acted on."""
    clock = Still()

    def answer(prompt: str, request: Any) -> str | Reply:
        if prompt != "late":
            return f"re: {prompt}"
        return Reply("Go?", session_id=request.session_id, question=Question("Go?", default="later", deadline=60))

    talker = Talker(answer)
    runner = ParallelRunner(talker, store=store, clock=clock)
    run_id = (await runner.run(LATE)).run_id
    clock.now += 61
    step = (await runner.runs.preview(run_id)).tasks["a"]
    reason = "no answer by the deadline, so the default answer is used"
    assert (step.action, step.possibly_billed_twice, step.reason) == (ResumeAction.CONTINUE, False, reason)
    result = await runner.resume(run_id)
    assert (result.text["a"], talker.prompts) == ("re: later", ["late", "later", "so re: later"])


@pytest.mark.parametrize("way", ["reply", "call"])
async def test_a_question_answered_while_the_resume_runs_continues_as_it_was_asked(store: Store, way: str) -> None:
    """A question in a reply is answered in the conversation; code that asks runs again, and returns from `ask`."""
    work = Held()

    async def code(prompt: str) -> Any:
        return await work(prompt)

    def reply(prompt: str, _: ConversationRequest) -> str | Reply:
        return Reply("Go?", question=Question("Go?"), session_id="s") if prompt == "late" else f"re: {prompt}"

    talker, holding = Talker(reply), {"talker": Talker(reply), "code": code}
    asked = Task("a", "late", backend="talker" if way == "reply" else "code")
    dag = DAG([asked, Task("hold", "hold", backend="code")])
    async with ParallelRunner(backends=holding, store=store).start(dag, "r") as run:
        async for event in run.events():
            if isinstance(event, TaskWaiting):
                run.stop()
    runner = ParallelRunner(backends={"talker": talker, "code": code}, store=store)
    async with runner.start_resume("r") as run:
        async for event in run.events():
            if isinstance(event, TaskStarted) and event.task_id == "hold":
                assert await runner.runs.answer("r", "a", "yes")
                work.release()
        result = await run.result()
    assert result.text == {"a": "re: yes" if way == "reply" else "yes", "hold": "hold"}
    history = [[message.content for message in request.history] for request in talker.requests]
    assert (talker.prompts, history) == ((["yes"], [["late", "Go?"]]) if way == "reply" else ([], []))
