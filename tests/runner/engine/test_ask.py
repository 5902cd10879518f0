"""`ask` in the functions of tasks: answers, schemas, several questions, and what runs again."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from plait import DAG, ParallelRunner, PlaitError, Retry, RunResult, RunStatus, Task, TaskStatus
from plait.backends import ask
from plait.errors import AnswerConflict, BackendError, ErrorKind
from plait.persistence import Store

ONE = DAG([Task("a", "begin", retry=Retry(attempts=1))])


def asked(result: RunResult, task_id: str = "a") -> str | None:
    assert (result.status, result[task_id].status) == (RunStatus.WAITING_INPUT, TaskStatus.WAITING_INPUT)
    return result[task_id].question


async def test_a_function_asks_twice_and_its_code_runs_again_each_time(store: Store) -> None:
    calls: list[str] = []

    async def order(prompt: str) -> str:
        calls.append(prompt)
        where = await ask("Where to?")
        many = await ask("How many?", schema={"type": "integer"})
        return f"{many} to {where}"

    dag = DAG([Task("a", "order"), Task("b", "so: {{ a }}", depends_on=["a"]), Task("c", "beside")])

    async def work(prompt: str) -> str:
        return await order(prompt) if prompt == "order" else prompt

    runner = ParallelRunner(work, store=store)
    first = await runner.run(dag)
    assert (asked(first), first.text["c"], first["b"].status) == ("Where to?", "beside", TaskStatus.PENDING)
    second = await ParallelRunner(work, store=store).resume(first.run_id, answers={"a": "Rome"})
    assert asked(second) == "How many?"
    last = await runner.resume(first.run_id, answers={"a": 3})
    assert (last.status, last.text["b"], last["a"].attempts) == (RunStatus.COMPLETED, "so: 3 to Rome", 3)
    assert calls == ["order"] * 3
    attempts = await store.list_attempts(first.run_id, "a")
    assert [one.status for one in attempts] == ["asked", "asked", "completed"]
    said = [one.content for one in await store.list_messages(first.run_id, "a")]
    assert said == ["order", "3 to Rome"]


async def test_answers_follow_the_texts_of_the_questions(store: Store) -> None:
    """Code that asks something else than before gets no answer that was meant for another question."""
    wanted = ["first", "second"]

    async def work(_prompt: str) -> list[Any]:
        return [await ask(text) for text in wanted]

    runner = ParallelRunner(work, store=store)
    run_id = (await runner.run(ONE)).run_id
    await runner.resume(run_id, answers={"a": "1"})
    wanted[0] = "other"
    assert asked(await runner.resume(run_id, answers={"a": "2"})) == "other"
    assert asked(await runner.resume(run_id, answers={"a": "3"})) == "second"
    result = await runner.resume(run_id, answers={"a": "4"})
    assert result["a"].data == ["3", "4"]


async def test_the_same_question_twice_has_two_answers(store: Store) -> None:
    async def work(_prompt: str) -> list[Any]:
        return [await ask("Next?"), await ask("Next?")]

    runner = ParallelRunner(work, store=store)
    run_id = (await runner.run(ONE)).run_id
    await runner.resume(run_id, answers={"a": "1"})
    assert (await runner.resume(run_id, answers={"a": "2"}))["a"].data == ["1", "2"]


@pytest.mark.parametrize("askers", [1, 2])
async def test_a_question_is_asked_from_within_a_task_group(store: Store, askers: int) -> None:
    async def work(_prompt: str) -> list[Any]:
        answers: list[Any] = []

        async def one(number: int) -> None:
            answers.append(await ask(f"{number}?"))

        async with anyio.create_task_group() as group:
            for number in range(askers):
                group.start_soon(one, number)
        return answers

    runner = ParallelRunner(work, store=store)
    result = await runner.run(ONE)
    given: list[str] = []
    while result.status is RunStatus.WAITING_INPUT:
        given.append(f"to {asked(result)}")
        result = await runner.resume(result.run_id, answers={"a": given[-1]})
    assert (result["a"].data, len(given)) == (given, askers)


async def test_no_except_of_the_task_swallows_its_question() -> None:
    async def work(_prompt: str) -> Any:
        try:
            return await ask("Really?")
        except Exception:
            return "nobody"

    result = await ParallelRunner(work).run(ONE)
    assert (result.status, asked(result)) == (RunStatus.WAITING_INPUT, "Really?")


async def test_ask_outside_of_a_task_is_refused() -> None:
    with pytest.raises(RuntimeError, match="works only inside a task that a runner runs"):
        await ask("Anybody?")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"text": ""}, "no text"),
        ({"text": "half \ud800"}, "cannot be stored"),
        ({"text": "x", "deadline": -1}, "a deadline of -1"),
        ({"text": "x", "deadline": float("nan")}, "a deadline of nan"),
        ({"text": "x", "default": 3}, "must be text, not 3"),
        ({"text": "x", "default": "no", "schema": {"type": "integer"}}, "does not fit the question"),
        ({"text": "x", "schema": {"type": "sometimes"}}, "is not a valid JSON Schema"),
        ({"text": "x", "schema": {"const": "\ud800"}}, "cannot be stored"),
        ({"text": "x", "schema": 5}, "cannot be used"),
    ],
)
async def test_a_question_that_makes_no_sense_fails_its_task_at_once(wrong: dict[str, Any], why: str) -> None:
    """Nobody could ever answer it, or it could not be written down."""

    async def work(_prompt: str) -> Any:
        return await ask(**wrong)

    result = await ParallelRunner(work).run(ONE)
    assert (result.status, why in (result["a"].error or "")) == (RunStatus.FAILED, True), result["a"].error


@pytest.mark.parametrize(
    ("schema", "value", "why"),
    [
        (None, 3, "must be text, not 3"),
        ({"type": "integer"}, "three", "does not fit the question 'How\\?'"),
        ({"type": "number"}, float("nan"), "cannot be stored as JSON"),
        ({}, {1, 2}, "cannot be stored as JSON"),
    ],
)
async def test_a_value_that_does_not_fit_is_refused_and_the_question_stays(
    store: Store, schema: dict[str, Any] | None, value: Any, why: str
) -> None:
    async def work(_prompt: str) -> Any:
        return await ask("How?", schema=schema)

    runner = ParallelRunner(work, store=store)
    run_id = (await runner.run(ONE)).run_id
    with pytest.raises(PlaitError, match=why):
        await runner.resume(run_id, answers={"a": value})
    with pytest.raises(PlaitError, match=why):
        await runner.runs.answer(run_id, "a", value)
    assert [one.question for one in await runner.runs.questions(run_id)] == ["How?"]


async def test_an_answer_is_kept_as_json_that_every_store_can_hold(store: Store) -> None:
    async def work(_prompt: str) -> Any:
        return await ask("What?", schema={})

    runner = ParallelRunner(work, store=store)
    run_id = (await runner.run(ONE)).run_id
    value: Any = {"pair": (1, 2), "half": "\ud800"}
    assert await runner.runs.answer(run_id, "a", value) is True
    assert (await runner.resume(run_id))["a"].data == {"pair": [1, 2], "half": "\ufffd"}


async def test_an_answered_attempt_that_fails_is_tried_again_with_the_answer(store: Store) -> None:
    tries: list[Any] = []

    async def work(_prompt: str) -> Any:
        tries.append(await ask("Go?"))
        if len(tries) < 3:
            raise BackendError(ErrorKind.TRANSIENT, "not yet")
        return "gone"

    dag = DAG([Task("a", "x", retry=Retry(attempts=3, base_delay=0.0, max_delay=0.0))])
    runner = ParallelRunner(work, store=store)
    result = await runner.resume((await runner.run(dag)).run_id, answers={"a": "yes"})
    assert (result.text["a"], tries, result["a"].attempts) == ("gone", ["yes"] * 3, 4)


async def test_a_task_that_must_not_run_twice_cannot_ask_from_its_code(store: Store) -> None:
    async def work(_prompt: str) -> Any:
        return await ask("Pay?")

    result = await ParallelRunner(work, store=store).run(DAG([Task("a", "x", at_most_once=True)]))
    assert (result.status, "call ask() in an earlier task" in (result["a"].error or "")) == (RunStatus.FAILED, True)


async def test_who_answers_what_is_not_asked_is_told_so(store: Store) -> None:
    async def work(prompt: str) -> Any:
        return await ask("Go?") if prompt == "ask" else prompt

    runner = ParallelRunner(work, store=store)
    run_id = (await runner.run(DAG([Task("asks", "ask"), Task("told", "b")]))).run_id
    with pytest.raises(PlaitError, match="no task 'aks'; did you mean 'asks'"):
        await runner.resume(run_id, answers={"aks": "yes"})
    with pytest.raises(AnswerConflict, match="is completed and has no open question"):
        await runner.runs.answer(run_id, "told", "yes")
    await runner.resume(run_id, answers={"asks": "yes"})
    with pytest.raises(AnswerConflict, match="the last question was answered by person"):
        await runner.resume(run_id, answers={"asks": "no"})
