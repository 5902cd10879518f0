"""Questions that a callback in the process of the run answers, does not, or hangs on."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import anyio
import pytest

from plait import DAG, OpenQuestion, ParallelRunner, RunStatus, Task, TaskStatus
from plait.backends import ask
from plait.errors import AnswerConflict
from plait.json_form import JsonValue
from plait.persistence import Store
from plait.workflows import Decision, RecordedRun
from tests.support.fakes import QuickClock
from tests.support.late import HOLDING, LATE, Held, asking


async def test_a_callback_answers_beside_all_else(store: Store) -> None:
    questions: list[OpenQuestion] = []

    async def answer(question: OpenQuestion) -> str:
        assert (await store.list_tasks(question.run_id))[0].question == "Go?", "it is stored before anybody is asked"
        questions.append(question)
        return "yes"

    result = await ParallelRunner(asking(), store=store, on_question=answer).run(LATE)
    assert (result.status, result.text["b"], [one.text for one in questions]) == (
        RunStatus.COMPLETED,
        "so yes",
        ["Go?"],
    )
    assert '"by":"callback"' in ((await store.list_tasks(result.run_id))[0].answers or "")


async def _fails(_question: OpenQuestion) -> JsonValue:
    raise ValueError("no idea")


async def _knows_nothing(_question: OpenQuestion) -> JsonValue:
    return None


async def _does_not_fit(_question: OpenQuestion) -> JsonValue:
    return {"not": "a text"}


async def _is_cancelled_elsewhere(_question: OpenQuestion) -> JsonValue:
    answer: asyncio.Future[JsonValue] = asyncio.get_running_loop().create_future()
    answer.cancel()  # as where the person's connection is gone
    return await answer


@pytest.mark.parametrize("callback", [_fails, _knows_nothing, _does_not_fit, _is_cancelled_elsewhere])
async def test_a_callback_that_gives_no_answer_leaves_the_question_to_others(store: Store, callback: Any) -> None:
    runner = ParallelRunner(asking(), store=store, on_question=callback)
    result = await runner.run(LATE)
    assert (result.status, result["c"].status) == (RunStatus.WAITING_INPUT, TaskStatus.COMPLETED)
    again = await runner.resume(result.run_id, answers={"a": "yes"})
    assert (again.status, again.text["b"]) == (RunStatus.COMPLETED, "so yes")


async def test_where_a_callback_failed_is_logged_for_who_wrote_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="plait"):
        await ParallelRunner(asking(), on_question=_fails).run(LATE)
    assert "in _fails" in caplog.text and "no idea" in caplog.text


@pytest.mark.parametrize("how", ["stop", "cancel"])
async def test_a_callback_that_hangs_ends_with_the_run(store: Store, how: str) -> None:
    called = anyio.Event()

    async def hang(_question: OpenQuestion) -> str:
        called.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with ParallelRunner(asking(), store=store, on_question=hang).start(LATE) as run:
        await called.wait()
        getattr(run, how)()
        result = await run.result()
    wanted = (
        (RunStatus.WAITING_INPUT, TaskStatus.WAITING_INPUT)
        if how == "stop"
        else (RunStatus.CANCELLED, TaskStatus.CANCELLED)
    )
    assert (result.status, result["a"].status) == wanted
    if how == "stop":
        assert (await ParallelRunner(asking(), store=store).resume(run.run_id, answers={"a": "yes"})).text[
            "b"
        ] == "so yes"


class NoMoreQuestions:
    """Once `hold` has ended, nobody wants to know what `a` asks."""

    kind = "no more questions"

    def settings(self) -> dict[str, JsonValue]:
        return {}

    def backends(self) -> tuple[str | None, ...]:
        return ()

    def decide(self, run: RecordedRun) -> Decision:
        return Decision(cancel=("a",) if run.ended == "hold" else ())


async def test_a_callback_that_hangs_is_let_go_when_a_policy_cancels_the_task(store: Store) -> None:
    work = Held()

    async def hang(_question: OpenQuestion) -> str:
        work.release()
        await anyio.sleep_forever()
        raise AssertionError

    with anyio.fail_after(60):
        result = await ParallelRunner(work, store=store, on_question=hang).run(HOLDING, policy=NoMoreQuestions())
    assert (result.status, result["a"].status) == (RunStatus.COMPLETED, TaskStatus.CANCELLED)


@pytest.mark.parametrize("default", ["later", None])
async def test_a_callback_that_hangs_is_let_go_at_the_deadline(store: Store, default: str | None) -> None:
    ended: list[str] = []
    called = anyio.Event()

    class Patient(QuickClock):
        async def sleep(self, seconds: float) -> None:
            await called.wait()
            await super().sleep(seconds)

    async def hang(_question: OpenQuestion) -> str:
        called.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.append("let go")
        raise AssertionError

    runner = ParallelRunner(asking(default=default, deadline=60), store=store, on_question=hang, clock=Patient())
    with anyio.fail_after(60):
        result = await runner.run(LATE)
    assert ended == ["let go"]
    status, kind = (RunStatus.COMPLETED, None) if default else (RunStatus.FAILED, "timeout")
    assert (result.status, result["a"].error_kind) == (status, kind)


@pytest.mark.parametrize("live", [False, True])
async def test_an_answer_to_an_earlier_question_is_not_one_to_the_next(store: Store, live: bool) -> None:
    async def clean(_prompt: str) -> str:
        answers = [await ask(f"Delete {what}?", schema={"type": "boolean"}) for what in ("staging", "production")]
        return str(answers)

    asked = {"staging": anyio.Event(), "production": anyio.Event()}

    async def on_question(question: OpenQuestion) -> None:
        asked[question.text[7:-1]].set()
        if live:
            await anyio.sleep_forever()

    runner = ParallelRunner(clean, store=store, on_question=on_question)
    async with runner.start(DAG([Task("a", "x")])) as run:
        await asked["staging"].wait()
        (seen,) = await runner.runs.questions(run.run_id)
        if not live:
            await run.result()
        assert await runner.runs.answer(run.run_id, "a", True, attempt=seen.attempt)
        if not live:
            await runner.resume(run.run_id)
        with anyio.fail_after(60):
            await asked["production"].wait()
        with pytest.raises(AnswerConflict, match=r"attempt 1 .* was answered; attempt 2 asks 'Delete production\?'"):
            await runner.runs.answer(run.run_id, "a", True, attempt=seen.attempt)
        run.stop()
    assert [one.question for one in await runner.runs.questions(run.run_id)] == ["Delete production?"]


async def test_ask_works_in_tasks_and_in_no_callback() -> None:
    said: list[str] = []

    async def work(_prompt: str) -> str:
        return str(await ask("which?"))

    async def callback(_question: OpenQuestion) -> str:
        with pytest.raises(RuntimeError, match=r"ask\(\) works only inside a task that a runner runs") as caught:
            await ask("and which?")
        said.append(str(caught.value))
        return "this"

    result = await ParallelRunner(work, on_question=callback).run(DAG([Task("t", prompt="t")]))
    assert (result.text["t"], len(said)) == ("this", 1)


async def test_a_callback_of_a_run_within_a_task_may_hand_the_question_on(store: Store) -> None:
    asked: list[str] = []

    async def inner(_prompt: str) -> str:
        return f"painted {await ask('colour?')}"

    async def hand_on(question: OpenQuestion) -> JsonValue:
        return await ask(question.text)

    async def outer(_prompt: str) -> str:
        result = await ParallelRunner(inner, on_question=hand_on).run(DAG([Task("i", prompt="i")]))
        return result.text["i"]

    async def person(question: OpenQuestion) -> str:
        asked.append(question.text)
        return "blue"

    result = await ParallelRunner(outer, store=store, on_question=person).run(DAG([Task("o", prompt="o")]))
    assert (result.text["o"], asked) == ("painted blue", ["colour?"])
