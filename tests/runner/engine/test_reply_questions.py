"""Replies that ask: the answer is the next thing said in the same conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager

import pytest

from plait import DAG, FailureMode, OpenQuestion, ParallelRunner, PlaitError, Retry, RunStatus, Task, TaskStatus
from plait.backends import ask
from plait.backends.backend_protocol import Conversation, ConversationRequest, Reply
from plait.dialogue import Answer, Message, Question
from plait.errors import BackendError, ErrorKind
from plait.json_form import JsonValue
from plait.persistence import Store
from plait.usage import Usage
from tests.support.fakes import QuickClock, Talker, failing

TALK = DAG(
    [
        Task("before", "hello"),
        Task("a", "a: {{ before }}", continues="before"),
        Task("later", "later", continues="a"),
        Task("beside", "beside"),
    ]
)


def asks(prompt: str, request: ConversationRequest) -> str | Reply:
    """Asks twice in the conversation of task `a`."""
    if prompt.startswith("a: "):
        return Reply("Where to?", session_id=request.session_id, question=Question("Where to?"))
    if prompt == "Rome":
        question = Question("How many?", schema={"type": "integer"})
        return Reply("Well. How many?", session_id=request.session_id, question=question, usage=Usage(5, 7, 0.25))
    return f"re: {prompt}"


CONVERSATION = [
    ("user", "hello"),
    ("assistant", "re: hello"),
    ("user", "a: re: hello"),
    ("assistant", "Where to?"),
    ("user", "Rome"),
    ("assistant", "Well. How many?"),
    ("user", "3"),
    ("assistant", "re: 3"),
]


def words(messages: tuple[Message, ...]) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in messages]


async def told(store: Store, run_id: str, task_id: str = "a") -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in await store.list_messages(run_id, task_id)]


@pytest.mark.parametrize("own_ids", [False, True])
async def test_the_answer_goes_on_with_the_same_conversation(store: Store, own_ids: bool) -> None:
    """Each time in another runner, as in another process."""
    talker = Talker(asks, own_ids=own_ids)
    first = await ParallelRunner(talker, store=store).run(TALK)
    assert (first.status, first["a"].question, first.text["beside"]) == (
        RunStatus.WAITING_INPUT,
        "Where to?",
        "re: beside",
    )
    second = await ParallelRunner(talker, store=store).resume(first.run_id, answers={"a": "Rome"})
    assert (second.status, second["a"].question) == (RunStatus.WAITING_INPUT, "How many?")
    last = await ParallelRunner(talker, store=store).resume(first.run_id, answers={"a": 3})
    assert (last.status, last.text["a"], last.text["later"]) == (RunStatus.COMPLETED, "re: 3", "re: later")
    by_prompt = dict(zip(talker.prompts, talker.requests, strict=True))
    assert talker.prompts == ["hello", "beside", "a: re: hello", "Rome", "3", "later"]
    session = first["before"].session_id
    for prompt, said, answer in (("Rome", 4, Answer("Rome")), ("3", 6, Answer(3)), ("later", 8, None)):
        request = by_prompt[prompt]
        assert (request.session_id, request.resume, request.answer) == (session, True, answer)
        assert words(request.history) == CONVERSATION[:said]
    assert await told(store, first.run_id) == CONVERSATION[2:]
    attempts = await store.list_attempts(first.run_id, "a")
    assert [(one.status, one.usage.output_tokens) for one in attempts] == [("asked", 0), ("asked", 7), ("completed", 5)]


async def test_a_conversation_is_whole_in_memory_and_for_a_person_who_goes_on_with_it(store: Store) -> None:
    talker = Talker(asks)
    values: Iterator[JsonValue] = iter(["Rome", 3])

    async def answers(_question: OpenQuestion) -> JsonValue:
        return next(values)

    for runner in (ParallelRunner(talker, on_question=answers), ParallelRunner(talker, store=store)):
        result = await runner.run(TALK)
        if result.status is RunStatus.WAITING_INPUT:
            await runner.resume(result.run_id, answers={"a": "Rome"})
            result = await runner.resume(result.run_id, answers={"a": 3})
        assert result.status is RunStatus.COMPLETED
        assert words(talker.requests[-1].history) == CONVERSATION
        values = iter(["Rome", 3])
    await ParallelRunner(talker, store=store).runs.continue_task(result.run_id, "a", "And now?")
    assert words(talker.requests[-1].history) == CONVERSATION


async def test_nobody_speaks_in_a_conversation_that_waits_for_an_answer(store: Store) -> None:
    runner = ParallelRunner(Talker(asks), store=store)
    run_id = (await runner.run(TALK)).run_id
    with pytest.raises(PlaitError, match="waits for an answer to its question"):
        await runner.runs.continue_task(run_id, "a", "Hm.")


async def test_a_failed_attempt_says_the_answer_again(store: Store) -> None:
    flaky = failing(BackendError(ErrorKind.TRANSIENT, "not now"), 1, then=asks)
    talker = Talker(flaky)
    retry = Retry(attempts=4, base_delay=0.0, max_delay=0.0)
    runner = ParallelRunner(talker, store=store, clock=QuickClock())
    run_id = (await runner.run(DAG([Task("a", "a: x", retry=retry)]))).run_id
    await runner.resume(run_id, answers={"a": "Rome"})
    result = await runner.resume(run_id, answers={"a": 3})
    assert result.text["a"] == "re: 3"
    assert talker.prompts == ["a: x", "a: x", "Rome", "Rome", "3", "3"]
    assert (
        words(talker.requests[3].history)
        == words(talker.requests[2].history)
        == [
            ("user", "a: x"),
            ("assistant", "Where to?"),
        ]
    )


class Both(Talker):
    """Also calls `ask`, in the turn with the prompt `Rome`."""

    @asynccontextmanager
    async def open(self, request: ConversationRequest) -> AsyncGenerator[Conversation]:  # type: ignore[override]
        async with super().open(request) as talk:
            yield _Both(self, request, talk)


class _Both:
    def __init__(self, backend: Talker, request: ConversationRequest, talk: Conversation) -> None:
        self.session_id = request.session_id
        self._backend, self._talk = backend, talk

    async def send(self, prompt: str) -> Reply:
        if prompt != "Rome":
            return await self._talk.send(prompt)
        self._backend.prompts.append(prompt)
        return Reply(f"{await ask('Sure?')}, {prompt}", session_id=self.session_id)


async def test_nothing_is_asked_of_a_person_who_goes_on_with_a_conversation(store: Store) -> None:
    runner = ParallelRunner(Both(), store=store)
    run_id = (await runner.run(DAG([Task("a", "x")]))).run_id
    with pytest.raises(PlaitError, match=r"the backend asks 'Sure\?' instead of answering"):
        await runner.runs.continue_task(run_id, "a", "Rome")
    assert (await runner.runs.continue_task(run_id, "a", "Oslo")).text == "re: Oslo"
    assert await told(store, run_id) == [
        ("user", "x"),
        ("assistant", "re: x"),
        ("user", "Oslo"),
        ("assistant", "re: Oslo"),
    ]


async def test_a_conversation_that_asks_in_both_ways_takes_each_answer_where_it_belongs(store: Store) -> None:
    """A reply asks; the turn that says the answer calls `ask`, and so is had again: with the same answer."""

    async def callback(question: OpenQuestion) -> str:
        return "Rome" if question.text == "Where to?" else "yes"

    dag = DAG([Task("a", "a: x")])
    live = Both(asks)
    assert (await ParallelRunner(live, on_question=callback).run(dag)).text["a"] == "yes, Rome"
    stored = Both(asks)
    runner = ParallelRunner(stored, store=store)
    run_id = (await runner.run(dag)).run_id
    assert (await runner.resume(run_id, answers={"a": "Rome"}))["a"].question == "Sure?"
    result = await runner.resume(run_id, answers={"a": "yes"})
    assert (result.text["a"], live.prompts, stored.prompts) == (
        "yes, Rome",
        ["a: x", "Rome", "Rome"],
        ["a: x", "Rome", "Rome"],
    )
    expected = [("user", "a: x"), ("assistant", "Where to?"), ("user", "Rome"), ("assistant", "yes, Rome")]
    assert await told(store, run_id) == expected


async def test_a_question_of_both_ways_may_be_answered_while_a_later_process_runs_the_run(store: Store) -> None:
    async def yes(_question: OpenQuestion) -> str:
        return "yes"

    talker = Both(asks)
    run_id = (await ParallelRunner(talker, store=store).run(DAG([Task("a", "a: x")]))).run_id
    await ParallelRunner(talker, store=store).resume(run_id, answers={"a": "Rome"})
    result = await ParallelRunner(talker, store=store, on_question=yes).resume(run_id)
    assert (result.text["a"], talker.prompts) == ("yes, Rome", ["a: x", "Rome", "Rome"])


async def test_a_person_may_give_the_result_instead_of_an_answer(store: Store) -> None:
    talker = Talker(asks)
    runner = ParallelRunner(talker, store=store)
    run_id = (await runner.run(TALK)).run_id
    with pytest.raises(PlaitError, match=r"asks 'Where to\?', and would ask again after --again; answer the question"):
        await runner.runs.settle(run_id, "a", "again")
    await runner.runs.settle(run_id, "a", "done", "I went there myself.")
    result = await runner.resume(run_id)
    assert (result.status, result.text["a"]) == (RunStatus.COMPLETED, "I went there myself.")
    assert words(talker.requests[-1].history) == [*CONVERSATION[:4], ("assistant", "I went there myself.")]


@pytest.mark.parametrize(
    ("mode", "status", "ran"), [("hard", "failed", False), ("soft", "failed", True), ("skip", "completed", True)]
)
async def test_a_person_may_give_the_task_up(store: Store, mode: str, status: str, ran: bool) -> None:
    dag = DAG([Task("a", "a: x", failure_mode=FailureMode(mode)), Task("b", "b{{ a }}", depends_on=["a"])])
    runner = ParallelRunner(Talker(asks), store=store)
    run_id = (await runner.run(dag)).run_id
    await runner.runs.settle(run_id, "a", "fail", "no journey")
    result = await runner.resume(run_id)
    assert (result.status.value, result["a"].error_kind) == (status, "declared_failed")
    assert (result["b"].status is TaskStatus.COMPLETED) is ran


async def test_a_task_that_must_not_happen_twice_may_ask_in_its_conversation(store: Store) -> None:
    talker = Talker(asks)
    runner = ParallelRunner(talker, store=store)
    run_id = (await runner.run(DAG([Task("a", "a: x", at_most_once=True)]))).run_id
    await runner.resume(run_id, answers={"a": "Rome"})
    result = await runner.resume(run_id, answers={"a": 3})
    assert (result.text["a"], talker.prompts) == ("re: 3", ["a: x", "Rome", "3"])
